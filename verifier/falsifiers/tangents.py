"""Derivatives of graphs by differences in float64, along a direction of their leaves.

The operand of `detach` and padding rows of a table stop gradients, so they keep their values at the point. Derivatives
along all directions determine gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardwright.pcg.graph import Graph, Node, leaf
from shardwright.pcg.interpret import Array, run_serial

STEP = 1e-5
_RELATIVE, _ABSOLUTE = 1e-4, 1e-6
_KINK = 1e-2


@dataclass(frozen=True)
class Tangent:
    """A derivative, element by element; it exists where it is the same from both sides.

    scale   the greatest value near the point, by which the rounding of differences scales
    """

    slope: Array
    exists: Array
    scale: float

    def agrees(self, other: Tangent) -> bool:
        """Return whether two derivatives are equal wherever both exist."""
        if self.slope.shape != other.slope.shape:
            return False
        where = self.exists & other.exists
        atol = _ABSOLUTE * max(1.0, self.scale, other.scale)
        return bool(np.allclose(self.slope[where], other.slope[where], rtol=_RELATIVE, atol=atol))


def tangents(graph: Graph, leaves: Mapping[str, Array], direction: Mapping[str, Array]) -> dict[str, Tangent]:
    """Return the derivative of every node of a serial graph at these leaves, along a direction of some of them."""
    with np.errstate(all="ignore"):
        at = run_serial(graph, leaves)
        held, still = _held(graph, leaves, at)
        after, before = (_moved(held, {**leaves, **still}, direction, step) for step in (STEP, -STEP))
        return {node.name: _tangent(*(np.asarray(v[node.name], float) for v in (before, at, after)))
                for node in graph.nodes}  # fmt: skip


def _moved(
    graph: Graph, leaves: Mapping[str, Array], direction: Mapping[str, Array], step: float
) -> Mapping[str, Array]:
    return run_serial(graph, {**leaves, **{name: leaves[name] + step * u for name, u in direction.items()}})


def _tangent(before: Array, at: Array, after: Array) -> Tangent:
    one, other = (at - before) / STEP, (after - at) / STEP
    slope = (after - before) / (2 * STEP)
    exists = np.isfinite(slope) & (np.abs(one - other) <= _KINK * (1 + np.abs(slope)))
    return Tangent(slope, exists, float(np.abs(at[exists]).max(initial=0.0)))


def _held(graph: Graph, leaves: Mapping[str, Array], at: Mapping[str, Array]) -> tuple[Graph, dict[str, Array]]:
    """Return the graph with nodes that stop gradients replaced by leaves, and the values of these leaves."""
    nodes, still = list[Node](), dict[str, Array]()

    def hold(name: str, value: Array, dtype: str) -> Node:
        still[name] = value
        nodes.append(leaf(name, "input", value.shape, dtype, name))
        return nodes[-1]

    for node in graph.nodes:
        padding = dict(node.attrs).get("padding_idx")
        if node.op == "detach":
            hold(node.name, at[node.name], "float64")
        elif padding is not None:
            moving = Node(f"{node.name}_moving", node.op, node.inputs, node.attrs)
            is_padding = np.broadcast_to((at[node.inputs[1]] == padding)[..., None], at[node.name].shape)
            mask = hold(f"{node.name}_padding", is_padding.copy(), "bool")
            whole = hold(f"{node.name}_still", at[node.name], "float64")
            nodes += [moving, Node(node.name, "where", (mask.name, whole.name, moving.name))]
        else:
            nodes.append(node)
    return Graph(tuple(nodes), graph.outputs).validate(), still
