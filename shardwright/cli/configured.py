"""The plan of a transformers config: its captured model is kept, so that a second question builds no model.

config, batch, precision ──key──▶ a kept capture, or model ──capture──▶ ──best_of──▶ Plan
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Unpack

from shardwright.cli.models import Loaded, Request, load
from shardwright.cost.clusters.cluster import Cluster
from shardwright.kept import find_trace, keep_trace, trace_key
from shardwright.options import PlanOptions, PlanWords
from shardwright.pcg.step.precisions import PrecisionMode
from shardwright.planning import Traced, captured_for, certified_by
from shardwright.reports.facts import PlanFacts
from shardwright.search.tree.planner import Progress
from shardwright.searching import best_of, check_devices


def plan_of_config(request: Request, cluster: Cluster, progress: Progress, **options: Unpack[PlanWords]) -> PlanFacts:
    """Return the best plan of a config's model, as `shardwright.plan` finds it for the model itself, and its facts."""
    plan_request = PlanOptions.of(**options)
    check_devices(plan_request, cluster)
    model = _Model(request, plan_request, progress)
    best = best_of(model.traced, cluster, certified_by(plan_request.rules, progress), plan_request, progress)
    return PlanFacts(best.plan, best.programs)


class _Model:
    """The model that a request names, which is only built where no capture of it is kept."""

    def __init__(self, request: Request, options: PlanOptions, progress: Progress) -> None:
        self.request, self.asked, self.progress = request, options, progress

    def traced(self, precision: PrecisionMode | None) -> Traced:
        """Return the captured model, as it was kept or anew."""
        key = self._key(precision)
        traced = None if key is None else find_trace(key)
        if traced is None:
            traced = self._captured(precision)
            if key is not None:
                keep_trace(key, traced)
        return traced

    def _captured(self, precision: PrecisionMode | None) -> Traced:
        loaded, options = self._loaded, self.asked
        captured = captured_for(
            loaded.model, loaded.args, loaded.kwargs, options, self.progress, precision, options.statistics
        )
        return Traced(type(loaded.model).__name__, captured.graph, captured.precision, captured.per_microbatch)

    @cached_property
    def _loaded(self) -> Loaded:
        return load(self.request, fake=True)

    def _key(self, precision: PrecisionMode | None) -> str | None:
        """Return the name of the capture's file; None where the config cannot be read, which loading it explains."""
        plan_options, path = self.asked, Path(str(self.request.hf_config))
        try:
            config = path.read_bytes()
            library = _transformers()
        except (OSError, LookupError, PackageNotFoundError):
            return None
        options = precision, plan_options.statistics, plan_options.strict, sorted(plan_options.foreign.items())
        return trace_key((config, library, astuple(self.request)[2:], options))


def _transformers() -> Sequence[object]:
    """Return the version of transformers, with the sizes and times of its files: a model takes code from many of them.

    Finding the package does not import it. Raises `LookupError` where it is not there.
    """
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise LookupError("transformers")
    return version("transformers"), sorted(_listed(str(Path(spec.origin).parent)))


def _listed(folder: str) -> Iterator[tuple[str, int, int]]:
    """Yield path, size and time of each Python file in a folder; of thousands, `pathlib` takes three times as long."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _listed(entry.path)
            elif entry.name.endswith(".py"):
                facts = entry.stat()
                yield entry.path, facts.st_size, facts.st_mtime_ns
