"""A test of whether a rewrite can pay, before layouts are chosen for it: by work, and by what cannot be split.

A leaf gets cheaper in one of two ways. Either it has less to do: then its operators take less time where the devices
share each of them evenly. Or it can be split where it could not before: then less data is in operators that hold a
dimension whole. That helps only where the leaf loses time, which it spends on sending activations or on uneven work. A
rewrite that does neither is not costed.
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
    """A judge of the steps that can pay on meshes of as many devices and microbatches as this builder's."""

    def __init__(self, flat: ProblemBuilder) -> None:
        self.flat = flat
        self._work_s: dict[Graph, float] = {}

    def pays(self, before: Graph, after: Graph, *, loses: bool) -> bool:
        """Return whether a step can pay; `loses`: whether the leaf loses time before it."""
        less_work = self.work_s(after) < _LESS * self.work_s(before)
        return less_work or (loses and held(after) < _LESS * held(before))

    def loses(self, problem: Problem, solution: Solution) -> bool:
        """Return whether moves of activations and uneven work take a notable part of a leaf's time."""
        choices = solution.choices
        work_s = sum(
            float(problem.time_s[v].value[choices[v]]) for (kind, _), v in problem.index.items() if kind != "storage"
        )
        moved_s = sum(
            float(table.value[choices[i], choices[j]])
            for (i, j), table in problem.edges.items()
            if (i, j) not in problem.overlapped
        )
        return work_s + moved_s - self.work_s(problem.graph) > _NOTABLE * work_s

    def work_s(self, graph: Graph) -> float:
        """Return the seconds of the graph's operators, each split along the dimension along which it is fastest."""
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
    """Return the elements that operators with whole dimensions read, each counted as often as these are long."""
    constants, elements = constant_nodes(graph), 0
    for node in graph.nodes:
        if node.is_leaf or node.row is None or node.name in constants:
            continue
        if (whole := prod(f.size for f in graph.signature(node).factors if f.role == "fixed")) > 1:
            elements += whole * sum(graph.types[name].num_elements for name in node.inputs)
    return elements


def flat(mesh: Mesh) -> Mesh:
    """Return a mesh with all devices along one axis, and as many microbatches."""
    devices = prod(mesh.device_sizes)
    return Mesh.of(x=devices) if TIME not in mesh.names else Mesh((TIME, "x"), (mesh.num_microbatches, devices))
