"""Which steps can pay, and which rules no search needs to try."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.rewrites.leaves import expand
from shardwright.search.rewrites.promise import Promise, flat, held
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.catalogue import CATALOGUE, NO_GAIN, SEARCHED
from shardwright.verifier.falsifiers.instances import instances, right_graph
from tests.search.graphs import cluster, every_choice

_INSTANCES = 12


def may_gain(rule: Equation) -> bool:
    """Whether a rule can make anything cheaper, as far as its own operators say.

    What an operator takes grows with what it reads and makes. So nothing is gained where the right side has an operator
    of its kind for each on the left, which reads and makes as much, and holds no less whole. Sums alone are another
    matter: a product takes over the one that is right behind it.
    """
    if {term.op for term in rule.operators} == {"add"}:
        return True
    drawn = ((left, right_graph(rule, left, match)[0]) for left, match in instances(rule, random.Random(0), _INSTANCES))
    return not all(_does_as_much(right, left) and held(right) >= held(left) for left, right in drawn)


def _does_as_much(graph: Graph, other: Graph) -> bool:
    mine, others = _works(graph), _works(other)
    for op, works in others.items():
        for work in works:
            found = next((w for w in mine[op] if _covers(w, work)), None)
            if found is None:
                return False
            mine[op].remove(found)
    return True


def _covers(mine: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(mine) == len(other) and all(a >= b for a, b in zip(mine, other, strict=True))


def _works(graph: Graph) -> defaultdict[str, list[tuple[int, ...]]]:
    """By operator, elements of the result and of the operands, the largest first."""
    found, size = defaultdict[str, list[tuple[int, ...]]](list), {k: t.num_elements for k, t in graph.types.items()}
    for node in graph.nodes:
        if not node.is_leaf:
            found[node.op].append((size[node.name], *sorted((size[i] for i in node.inputs), reverse=True)))
    return defaultdict(list, {op: sorted(works, reverse=True) for op, works in found.items()})


def test_rules_that_can_gain_nothing_are_not_searched() -> None:
    found = {name for name in (*SEARCHED, *NO_GAIN) if not may_gain(CATALOGUE[name])}
    assert found == set(NO_GAIN)
    assert not found.intersection(SEARCHED)


def step(graph: Graph, rule: str, degrees: Sequence[int] = ()) -> Graph:
    return next(found.graph for found in expand(graph, [CATALOGUE[rule]], degrees))


def scaled(tokens: int) -> Graph:
    """A product that is scaled, and a softmax of it."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, tokens, 4), "float32", "x", grad=True)
    y = b.leaf("y", "input", (8, 4, tokens), "float32", "y", grad=True)
    c = b.op("full", shape=(), value=0.5, dtype="float32")
    return b.graph([("out", b.op("softmax", b.op("mul", b.op("matmul", x, y), c), dim=2))])


def test_a_step_pays_by_less_work_or_where_something_is_lost_by_less_that_stays_whole() -> None:
    promise = Promise(ProblemBuilder(cluster(2), flat(Mesh.of(x=2)), every_choice))
    graph = scaled(64)
    moved = step(graph, "matmul_of_scaled")
    assert promise.work_s(moved) < promise.work_s(graph)
    assert promise.pays(graph, moved, loses=False)
    assert not promise.pays(moved, graph, loses=True)
    parts = step(graph, "softmax_in_parts", [2])
    assert promise.work_s(parts) > promise.work_s(graph)
    assert held(parts) < held(graph) == 64 * 8 * 64 * 64
    assert promise.pays(graph, parts, loses=True)
    assert not promise.pays(graph, parts, loses=False)


def test_a_flat_mesh_has_all_devices_along_one_axis() -> None:
    assert flat(Mesh.of(x=2, y=4)) == Mesh.of(x=8)
    assert flat(Mesh(("mb", "x", "y"), (3, 2, 4))) == Mesh(("mb", "x"), (3, 8))
