"""Whether a rewrite can pay, before layouts are chosen for it: what it does to the work, and to what cannot be split.

A leaf gets cheaper in one of two ways. It has less to do; then its operators take less time where the devices share
each of them evenly. Or it can be split where it could not; then less data is in operators that hold a dimension whole,
which helps only where the leaf loses something: time in which it sends activations, or works unevenly. What does
neither is not costed.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from shardwright.pcg.analysis import constant_nodes, written
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.search.choices.problem import Problem, Solution
from shardwright.search.exact.building import ProblemBuilder

_LESS = 1 - 1e-9
_NOTABLE = 1e-3


class Promise:
    """Says which steps can pay on meshes of as many devices, in as many microbatches, as this builder's."""

    def __init__(self, flat: ProblemBuilder) -> None:
        self.flat = flat
        self._work_s: dict[Graph, float] = {}

    def pays(self, before: Graph, after: Graph, *, loses: bool) -> bool:
        """Whether a step can; `loses`: whether the leaf loses anything before."""
        less_work = self.work_s(after) < _LESS * self.work_s(before)
        return less_work or (loses and held(after) < _LESS * held(before))

    def loses(self, problem: Problem, solution: Solution) -> bool:
        """Whether moves of activations and what is not evenly shared take a notable part of a leaf's time."""
        choices = solution.choices
        work_s = sum(
            float(problem.time_s[v].value[choices[v]]) for (kind, _), v in problem.index.items() if kind != "storage"
        )
        moved_s = sum(
            float(table.value[choices[i], choices[j]])
            for (i, j), table in problem.edges.items()
            if (i, j) not in problem.beside
        )
        return work_s + moved_s - self.work_s(problem.graph) > _NOTABLE * work_s

    def work_s(self, graph: Graph) -> float:
        """What its operators take, each of them split along that dimension along which it is fastest."""
        if graph not in self._work_s:
            constants = constant_nodes(graph)
            self._work_s[graph] = sum(
                self.flat.fastest_s(node, graph, written(graph, node))
                for node in graph.nodes
                if not node.is_leaf and node.name not in constants
            )
        return self._work_s[graph]


@lru_cache(maxsize=4096)
def held(graph: Graph) -> int:
    """Elements that operators read which hold a dimension whole, each counted as often as that is long."""
    constants, found = constant_nodes(graph), 0
    for node in graph.nodes:
        if node.is_leaf or node.row is None or node.name in constants:
            continue
        if (whole := prod(f.size for f in graph.signature(node).factors if f.role == "fixed")) > 1:
            found += whole * sum(graph.types[name].num_elements for name in node.inputs)
    return found


def flat(mesh: Mesh) -> Mesh:
    """A mesh with all devices along one axis, and as many microbatches."""
    devices = prod(mesh.device_sizes)
    return Mesh.of(x=devices) if TIME not in mesh.names else Mesh((TIME, "x"), (mesh.num_microbatches, devices))
