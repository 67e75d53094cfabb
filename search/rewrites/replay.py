"""The rewrites of a plan, done again on the captured graph, which proves the origin of the plan's graph.

A plan names a rewritten part by the values at which it starts and ends, and by the rules applied to it, one after the
other. Only certified rules are applied, each only where it matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.plan import Rewrite
from shardwright.search.rewrites.splits import LeafPart, between, transplanted
from shardwright.substitutions.apply import apply
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.match import places


def degrees(mesh: Mesh) -> tuple[int, ...]:
    """Return the numbers of devices that axes of the mesh can divide something among: a rule's parameters."""
    products = {1}
    for size in mesh.device_sizes:
        products |= {size * d for d in products}
    return tuple(sorted(products - {1}))


def replay(graph: Graph, rewrites: Sequence[Rewrite], rules: Mapping[str, Equation], mesh: Mesh) -> Graph:
    """Return the graph after the rewrites of a plan on this mesh.

    Raises `PlanError` where a step does not apply or its rule is not certified.
    """
    if not rewrites:
        return graph
    done, taken = list[tuple[LeafPart, Graph]](), set[str]()
    for rewrite in rewrites:
        part = _part(graph, rewrite)
        if not taken.isdisjoint(part.operators):
            raise PlanError(f"rewrite of {rewrite.end!r}: another one has operators of it; make the plan again")
        taken |= part.operators
        done.append((part, _rewritten(part.graph, rewrite, rules, degrees(mesh))))
    return transplanted(graph, done).graph.validate()


def _part(graph: Graph, rewrite: Rewrite) -> LeafPart:
    starts, ends = rewrite.start.split(), rewrite.end.split()
    known = graph.by_name.keys() >= {*starts, *ends}
    part = between(graph, starts, ends) if known and ends else None
    if part is None:
        where = f"{rewrite.start!r} .. {rewrite.end!r}"
        raise PlanError(f"rewrite of {where}: the model has no such part; make the plan again")
    return part


def _rewritten(graph: Graph, rewrite: Rewrite, rules: Mapping[str, Equation], parameters: Sequence[int]) -> Graph:
    for name, number in rewrite.steps:
        if name not in rules:
            raise PlanError(f"rewrite of {rewrite.end!r}: rule {name!r} is not certified here; make the plan again")
        matches = places(rules[name], graph, parameters)
        if number >= len(matches):
            raise PlanError(
                f"rewrite of {rewrite.end!r}: rule {name!r} has no match number {number}; make the plan again"
            )
        graph = apply(rules[name], graph, matches[number])
    return graph
