"""torchrun's options, as `shardwright run` takes them, and the ranks that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from shardwright.cli.options import Command, together
from shardwright.pcg.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.cost.clusters.cluster import Cluster

SHOWN: Mapping[str, tuple[str, str]] = {
    "nnodes": ("MIN:MAX", "Machines: a number, or the fewest and the most, between which the run shrinks and grows."),
    "nproc-per-node": ("NUMBER", "Ranks on each machine; by default those of --plan or --cluster."),
    "max-restarts": ("NUMBER", "Start all ranks again, so many times, after one has failed."),
    "rdzv-backend": ("BACKEND", "How machines find each other: static, or c10d, by which their number may change."),
    "rdzv-endpoint": ("HOST:PORT", "The machine where they meet."),
    "rdzv-id": ("ID", "The run's name, where several meet at one machine."),
    "node-rank": ("NUMBER", "This machine's number, with the static backend."),
    "master-addr": ("HOST", "The host of rank 0, with the static backend."),
    "master-port": ("PORT", "Its port."),
    "log-dir": ("FOLDER", "Where --redirects and --tee write."),
}
"""The options that `shardwright run --help` shows: the form of their values, and what they are."""
HIDDEN = (
    "rdzv-conf", "monitor-interval", "start-method", "event-log-handler", "role", "redirects", "tee",
    "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "local-addr", "logs-specs",
    "numa-binding", "signals-to-handle", "shutdown-timeout",
)  # fmt: skip
"""Further options with a value."""
FLAGS = ("standalone", "virtual-local-rank", "module")
"""Options without a value."""
SHORT = {"redirects": "-r", "tee": "-t", "module": "-m"}
MEETING = ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "node-rank", "master-addr", "master-port")
"""Options that say where machines meet; without any, the ranks of one machine meet by themselves."""
_OURS = {"signals-to-handle": "SIGINT,SIGHUP,SIGQUIT", "master-port": "29500"}
"""Defaults of ours. Other signals go to the ranks (`elastic`). torchrun's own default port is none."""


def torchrun_options(command: Command) -> Command:
    """Add torchrun's options, as one mapping `torchrun` of the texts that are given, by name."""
    made = {_variable(name): _option(name) for name in (*SHOWN, *HIDDEN, *FLAGS)}
    return together(command, "torchrun", **made)


def _variable(name: str) -> str:
    return f"torchrun_{name.replace('-', '_')}"


def _option(name: str):  # noqa: ANN202 - a decorator of click's
    spellings = dict.fromkeys((*filter(None, [SHORT.get(name)]), f"--{name}", f"--{name.replace('-', '_')}"))
    if name in FLAGS:
        return click.option(*spellings, _variable(name), is_flag=True, hidden=True)
    form, text = SHOWN.get(name, (None, None))
    return click.option(*spellings, _variable(name), metavar=form, help=text, hidden=name not in SHOWN)


@dataclass(frozen=True)
class Start:
    """The ranks that a run starts.

    Attributes:
        nodes: the numbers of machines that the run may have.
        per_node: the number of ranks on each.
        words: torchrun's arguments before the program.
        is_sized: whether the options say how many ranks there are.
    """

    nodes: range
    per_node: int
    words: Sequence[str]
    is_sized: bool = False

    @classmethod
    def local(cls, num_ranks: int) -> Start:
        """Return so many ranks of this machine."""
        return start_of({"nproc-per-node": str(num_ranks)}, None)

    @property
    def worlds(self) -> list[int]:
        """The numbers of ranks that the run may have, the fewest first."""
        return [num_nodes * self.per_node for num_nodes in self.nodes]


def given(options: Mapping[str, object]) -> dict[str, str]:
    """Return the texts of options that were given, by torchrun's names; a flag's is ""."""
    names = {_variable(name): name for name in (*SHOWN, *HIDDEN, *FLAGS)}
    return {
        names[key]: "" if value is True else str(value) for key, value in options.items() if value not in (None, False)
    }


def start_of(options: Mapping[str, str], cluster: Cluster | None) -> Start:
    """Return the ranks that torchrun's options ask for; `cluster` says what they leave open.

    Raises `ShardwrightError` where an option's value cannot be used.
    """
    nodes = _nodes(options.get("nnodes", "1"))
    is_sized = bool({"nnodes", "nproc-per-node"} & options.keys())
    per_node = _per_node(options.get("nproc-per-node"), nodes, cluster)
    meets = any(name in options for name in MEETING)
    if len(nodes) > 1 and options.get("rdzv-backend", "static") == "static":
        raise ShardwrightError(
            f"--nnodes {options['nnodes']}: machines whose number changes meet by --rdzv-backend c10d --rdzv-endpoint "
            "HOST:PORT; give both, or one number"
        )
    if nodes[-1] > 1 and not meets:
        raise ShardwrightError(
            f"--nnodes {options['nnodes']}: say where the machines meet, by --rdzv-backend c10d --rdzv-endpoint "
            "HOST:PORT, or by --node-rank NUMBER --master-addr HOST"
        )
    if not options.get("max-restarts", "0").isdecimal():
        raise ShardwrightError(f"--max-restarts {options['max-restarts']!r}: expected a whole number")
    words = {**_OURS, **options, "nproc-per-node": str(per_node)}
    if not meets:
        words["standalone"] = ""
    flags = {"module"}  # which belongs to the program
    texts = [
        f"--{name}={text}" if text or name not in FLAGS else f"--{name}"
        for name, text in words.items()
        if name not in flags
    ]
    return Start(nodes, per_node, texts, is_sized)


def _nodes(text: str) -> range:
    fewest, _, most = text.partition(":")
    most = most or fewest
    if not (fewest.isdecimal() and most.isdecimal() and 0 < int(fewest) <= int(most)):
        raise ShardwrightError(f"--nnodes {text!r}: expected a number of machines, or the fewest and the most as 1:4")
    return range(int(fewest), int(most) + 1)


def _per_node(text: str | None, nodes: range, cluster: Cluster | None) -> int:
    if text is None:
        return max(1, cluster.num_devices // nodes[-1]) if cluster is not None else 1
    if text.isdecimal() and int(text):
        return int(text)
    from torch.distributed.run import determine_local_world_size

    try:
        return max(1, determine_local_world_size(text if not text.isdecimal() else "none"))
    except ValueError:
        raise ShardwrightError(
            f"--nproc-per-node {text!r}: expected a number of ranks, or gpu, cpu or auto on a machine that has them"
        ) from None
