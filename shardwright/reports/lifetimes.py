"""Gathered weights, the names of their lifetimes, and the number of times that a collective runs in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.lifetimes import ZEROS, Zero, lifetime_of
from shardwright.pcg.step.parameters import Parameter
from shardwright.reports.again import names_of

_NAMES: dict[Zero, str] = {"zero-1": "ZeRO-1", "zero-2": "ZeRO-2", "kept": "ZeRO-3 (kept)", "zero-3": "ZeRO-3"}
_WORDS: dict[Zero, str] = {
    "zero-1": "gathered once a step; whole gradients are accumulated and reduce-scattered once a step",
    "zero-2": "gathered once a step; gradients are reduce-scattered in each microbatch",
    "kept": "gathered in each microbatch and kept for its backward; gradients are reduce-scattered in each microbatch",
    "zero-3": "gathered in each microbatch, and again for its backward; gradients are reduce-scattered in each "
    "microbatch",
}  # fmt: skip
_OF_ONE: dict[Zero, str] = {
    "kept": "gathered once and kept for backward; gradients are reduce-scattered in backward",
    "zero-3": "gathered, and again for backward; gradients are reduce-scattered in backward",
}


@dataclass(frozen=True, slots=True)
class Gathered:
    """Weights that are stored in slices along an axis and gathered for use, all with the same lifetime.

    copies   axes along which every slice exists more than once (hybrid sharding)
    where    the blocks of the model that they lie in
    stored_bytes, gathered_bytes   of the slices on a device, and of all whole weights at once
    """

    zero: Zero
    axis: str
    copies: tuple[str, ...]
    where: str
    count: int
    stored_bytes: float
    gathered_bytes: float


def gathered_weights(graph: Graph, parameters: Mapping[str, Parameter]) -> tuple[Gathered, ...]:
    """Return the gathered weights by lifetime and axes, in the order of the model. `parameters`: by leaf."""
    groups: dict[tuple[Zero, str, tuple[str, ...]], list[Parameter]] = defaultdict(list)
    for parameter in parameters.values():
        if parameter.slices is not None:
            groups[lifetime_of(parameter.slices), parameter.slices.axis, _copies(graph, parameter.leaf)].append(
                parameter
            )
    return tuple(
        Gathered(
            *key,
            names_of(p.module or str(graph.by_name[p.leaf].attr("target")) for p in group),
            len(group),
            sum(graph.types[p.leaf].local_bytes(graph.mesh) for p in group),
            sum(p.used_bytes for p in group),
        )
        for key, group in groups.items()
    )


def _copies(graph: Graph, leaf: str) -> tuple[str, ...]:
    layouts = zip(graph.mesh.names, graph.mesh.device_sizes, graph.types[leaf].layouts, strict=True)
    return tuple(name for name, size, x in layouts if size > 1 and not x.is_shard)


def lifetime_name(zero: Zero, mesh: Mesh) -> str:
    """Return the name of a lifetime: `ZeRO-3`; a weight kept for the only microbatch's backward is ZeRO-2."""
    return _NAMES["zero-2" if zero == "kept" and mesh.num_microbatches == 1 else zero]


def lifetime_words(zero: Zero, mesh: Mesh) -> str:
    """Return when such a weight is gathered, and when its gradient is scattered, in words."""
    return _WORDS[zero] if mesh.num_microbatches > 1 else _OF_ONE.get(zero, _OF_ONE["kept"])


def lifetime_names(zeros: Iterable[Zero], mesh: Mesh) -> str:
    """Return the distinct names, `ZeRO-1, ZeRO-3`, the shortest lifetime last; "" for none."""
    present = set(zeros)
    return ", ".join(dict.fromkeys(lifetime_name(zero, mesh) for zero in ZEROS if zero in present))


def how_often(count: int, mesh: Mesh) -> str:
    """Return how often a collective runs in a step, in words: `in each microbatch, and again in backward`."""
    many = mesh.num_microbatches
    if many == 1:
        return ", again in backward" if count > 1 else ""
    if count == 1:
        return " once a step"
    return " in each microbatch" + (", again in its backward" if count > many else "")
