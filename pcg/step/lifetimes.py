"""Lifetimes of the gathered whole of a sharded parameter: reading them from graphs, and changing them.

A lifetime is expressed by the order of `combine` and `replicate` over time, and by the `combine`'s attribute `keep`;
see `parameters.py`. All four mean the same value; only the last nodes on a parameter's way to its readers change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from shardwright.pcg.choice import COPIED, WHOLE
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.mesh import TIME
from shardwright.pcg.node import make_attrs
from shardwright.pcg.parallel import COMBINE, REPLICATE
from shardwright.pcg.step.parameters import KEEP, Lifetime, Slices, find_parameters

Zero = Literal["zero-1", "zero-2", "kept", "zero-3"]
"""The lifetime of a parameter that is stored in slices.

zero-1    gathered once a step, whole gradients accumulated and scattered once
zero-2    gathered once a step, gradients scattered in each microbatch
kept      gathered in each microbatch, and kept from forward to its backward
zero-3    gathered in each microbatch, and again for backward
"""
ZEROS: tuple[Zero, ...] = ("zero-1", "zero-2", "kept", "zero-3")
_KEEPS: Mapping[Zero, Lifetime | None] = {"zero-1": None, "zero-2": "step", "kept": "microbatch", "zero-3": None}


def with_lifetimes(graph: Graph, lifetimes: Mapping[str, Zero]) -> Graph:
    """Return the graph with these lifetimes of parameters, by the names of their leaves; re-typed.

    With one microbatch, "zero-1" and "zero-2" are "kept". A parameter that is not gathered as a whole stays as it is;
    so does a parameter that is read in the same way for all microbatches, as that is "zero-1" anyway.

    Raises:
        PlanError: no parameter of that name, or no such lifetime.
    """
    parameters = {node.name for node in graph.leaves("parameter")}
    for leaf, zero in lifetimes.items():
        if leaf not in parameters:
            raise PlanError(f"{leaf!r} is no parameter of the graph; give the name of a leaf, as {min(parameters)!r}")
        if zero not in ZEROS:
            raise PlanError(f"{leaf}: {zero!r} is no lifetime of a parameter; choose one of {list(ZEROS)}")
    known = list(_ways(graph, lifetimes))
    ways = {way[-1].name: list(_rebuilt(graph, way, zero)) for way, zero in known}
    old = {node.name for way, _ in known for node in way}
    ends = {last: made[-1].name for last, made in ways.items()}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in ways:
            nodes += ways[node.name]
        elif node.name not in old:
            if not ends.keys().isdisjoint(node.inputs):
                node = replace(node, inputs=tuple([ends.get(name, name) for name in node.inputs]))
            nodes.append(node)
    outputs = tuple((key, ends.get(name, name)) for key, name in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs).validated_beside(graph)


def _ways(graph: Graph, lifetimes: Mapping[str, Zero]) -> Iterator[tuple[Sequence[Node], Zero]]:
    """Yield the nodes of each gathered parameter from storage to where its readers part."""
    results = {name for _, name in graph.outputs}
    for leaf, zero in lifetimes.items():
        way, name = list[Node](), leaf
        while name not in results and len(readers := set(graph.users[name])) == 1:
            node = graph.by_name[readers.pop()]
            if not (node.is_parallel or node.op == "cast"):
                break
            way.append(node)
            name = node.name
        timed = graph.mesh.num_microbatches == 1 or any(_is_over_time(node) for node in way)
        if timed and any(node.op == COMBINE for node in way):
            yield way, zero


def _is_over_time(node: Node) -> bool:
    return node.op == REPLICATE and node.attr("axis") == TIME


def _rebuilt(graph: Graph, way: Sequence[Node], zero: Zero) -> Iterator[Node]:
    """Yield the same steps with the step over time first or last."""
    steps = [node for node in way if not _is_over_time(node)]
    over_time = [node for node in way if _is_over_time(node)]
    once = zero == "zero-1" and bool(over_time)
    keep = "microbatch" if zero == "zero-1" and not once else _KEEPS[zero]
    operand, copied = way[0].inputs[0], False
    for node in [*steps, *over_time] if once else [*over_time, *steps]:
        attrs, split = dict(node.attrs), node.split
        copied |= _is_over_time(node)
        if node.op == COMBINE:
            attrs = {key: value for key, value in attrs.items() if key != KEEP} | ({KEEP: keep} if keep else {})
        elif over_time and not node.is_parallel:
            time = graph.mesh.index(TIME)
            split = (*split[:time], COPIED if copied else WHOLE, *split[time + 1 :])
        name = f"{operand}.{node.op}_{attrs['axis']}" if node.is_parallel else node.name
        yield Node(name, node.op, (operand,), make_attrs(**attrs), split, node.source)
        operand = name


def lifetimes(graph: Graph) -> dict[str, Zero]:
    """Return the lifetime of each parameter that is gathered, by the names of leaves."""
    parameters = find_parameters(graph).by_leaf
    return {leaf: lifetime_of(p.slices) for leaf, p in parameters.items() if p.slices is not None}


def lifetime_of(slices: Slices) -> Zero:
    """Return the lifetime of a parameter with these slices."""
    if slices.lifetime == "step":
        return "zero-1" if slices.summed else "zero-2"
    return "kept" if slices.lifetime == "microbatch" else "zero-3"
