"""Shardwright: compile a PyTorch model into the best parallel training program that can be proven right.

Users import this package. It holds the public interface and the command line, and sees every folder; the six folders
of the compiler appear in it as `shardwright.pcg`, `shardwright.substitutions`, `shardwright.verifier`,
`shardwright.search`, `shardwright.cost` and `shardwright.lowering`.

    api            the public functions: `plan`, `compile` and more
    options        the options of `plan` and `compile`: a caller's words, and their value
    searching      the search over precisions, encodings and padding
    planning       what a plan, searched or given, is made of and proven by
    programs       a compiled model's programs, one for each shape and mode
    kept           captures, and programs of other shapes, in the cache folder for later runs
    loading        batches of a data set, of which each rank reads its own rows; `buckets`: lengths to pad them to
    saving         checkpoints of a whole run: `save` and `load`
    exporting      weights as safetensors; `whole`: in the model itself
    stopping       signals that ask a run to make room
    plans          folders of plans, one for each number of ranks
    muon           `Muon`: each matrix is orthogonalized on one rank
    planned        the compiled models that have a plan
    checking       one eager step of the model beside the captured graph
    ranks          agreement of the ranks of one run
    asking         why not another strategy, and what if the cluster or the batch changed
    generation     generates and proves rules on all cores; `resuming`: goes on where it stopped
    judging        judges rules on all cores; `workers`: worker processes for long lists of tasks
    overheads      calls of the lowering that calibration times
    cli/, reports/, view/
                   commands; reports on plans; the page
    integrations/  adapters for the training loops of other libraries
    __main__       `python -m shardwright`

Importing it is cheap: torch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shardwright.pcg.versions import newer_than_tested
from shardwright.search.collector import collector_paused

if TYPE_CHECKING:
    from shardwright.api import compile as compile
    from shardwright.api import plan as plan
    from shardwright.asking import what_if as what_if
    from shardwright.asking import why_not as why_not
    from shardwright.buckets import bucket as bucket
    from shardwright.cost.clusters.cluster import Cluster as Cluster
    from shardwright.cost.clusters.topology import Level as Level
    from shardwright.exporting import export as export
    from shardwright.loading import Loader as Loader
    from shardwright.lowering.random.exact import seed_exactly as seed_exactly
    from shardwright.lowering.runtime.host_states import on_host as on_host
    from shardwright.lowering.store.weights import WeightFiles as WeightFiles
    from shardwright.muon import Muon as Muon
    from shardwright.pcg.capture.fake import fake as fake
    from shardwright.pcg.errors import ShardwrightError as ShardwrightError
    from shardwright.saving import Saving as Saving
    from shardwright.saving import load as load
    from shardwright.saving import save as save
    from shardwright.search.plan import Plan as Plan
    from shardwright.stopping import StopSignals as StopSignals

__version__ = "0.1.0"

# The public names and the module that defines each; one line here and one above per new name.
_EXPORTS = {
    "Cluster": "shardwright.cost.clusters.cluster",
    "Level": "shardwright.cost.clusters.topology",
    "Loader": "shardwright.loading",
    "Muon": "shardwright.muon",
    "Plan": "shardwright.search.plan",
    "Saving": "shardwright.saving",
    "ShardwrightError": "shardwright.pcg.errors",
    "StopSignals": "shardwright.stopping",
    "WeightFiles": "shardwright.lowering.store.weights",
    "bucket": "shardwright.buckets",
    "compile": "shardwright.api",
    "export": "shardwright.exporting",
    "fake": "shardwright.pcg.capture.fake",
    "load": "shardwright.saving",
    "on_host": "shardwright.lowering.runtime.host_states",
    "plan": "shardwright.api",
    "save": "shardwright.saving",
    "seed_exactly": "shardwright.lowering.random.exact",
    "what_if": "shardwright.asking",
    "why_not": "shardwright.asking",
}

__all__ = [
    "Cluster",
    "Level",
    "Loader",
    "Muon",
    "Plan",
    "Saving",
    "ShardwrightError",
    "StopSignals",
    "WeightFiles",
    "__version__",
    "bucket",
    "compile",
    "export",
    "fake",
    "load",
    "on_host",
    "plan",
    "save",
    "seed_exactly",
    "what_if",
    "why_not",
]


def __getattr__(name: str) -> object:
    """Load a public name from its defining module on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with collector_paused():  # a third of the time
            value = getattr(import_module(_EXPORTS[name]), name)
    except ImportError as error:
        if newer := newer_than_tested():
            error.add_note(newer)
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
