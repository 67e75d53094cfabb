"""Gradients of placement rules, checked numerically.

The backward pass of a parallel graph is made of the adjoints of its operators: on every device the local operator's
own, which is differentiated numerically here, and for the four parallel operators one of the four in dual layouts. What
arrives at the leaves must denote the gradient of the serial graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.interpret import Array, attrs_by_rank, denote, exchange, run_devices, scatter
from shardwright.pcg.layout import Layouts
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import ADJOINT
from shardwright.pcg.types import TensorType
from shardwright.substitutions.equations import Equation
from shardwright.verifier.falsifiers.devices import Devices

_STEP = 1e-5


def gradient_difference(rule: Equation, mesh: Mesh, seed: int = 0) -> str | None:
    """How a gradient of some side differs from the serial one; None where all agree."""
    devices = Devices(mesh, np.random.default_rng(seed))
    (pair,) = devices.add(rule)[:1]
    graph = Graph(tuple(devices.nodes), (("left", pair[0]), ("right", pair[1])), mesh)
    data = {name: _smooth(array, seed) for name, array in devices.data.items()}
    kind = graph.types[pair[0]]
    dy = np.random.default_rng(seed + 1).standard_normal(kind.shape)
    serial = graph.erased()
    expected = _gradients(serial, data, dict(serial.outputs)["left"], dy)
    for side, root in graph.outputs:
        found = _gradients(graph, data, root, dy)
        for name, want in expected.items():
            if not np.allclose(found[name], want, rtol=1e-4, atol=1e-4):
                return f"on {mesh}: the gradient of {name} is wrong on the {side} of {rule.equation}"
    return None


def _smooth(array: Array, seed: int) -> Array:
    """Real numbers, away from kinks."""
    if array.dtype.kind != "f":
        return array
    return array / 2 + np.random.default_rng(seed + array.size).uniform(0.1, 0.4, array.shape)


def _gradients(graph: Graph, data: Mapping[str, Array], root: str, dy: Array) -> dict[str, Array]:
    """The logical gradient of every leaf, as the devices have it in the dual of its layouts."""
    held = run_devices(graph, data)
    back: dict[str, list[Array]] = {root: scatter(dy, _dual(graph.types[root].layouts), graph.mesh)}
    for node in reversed(graph.nodes):
        if node.name not in back or node.is_leaf:
            continue
        for name, parts in _backward(graph, node, held, back[node.name]):
            known = back.get(name)
            back[name] = parts if known is None else [a + b for a, b in zip(known, parts, strict=True)]
    return {
        leaf.name: denote(back[leaf.name], _gradient_type(graph.types[leaf.name]), graph.mesh)
        if leaf.name in back
        else np.zeros(graph.types[leaf.name].shape)
        for leaf in graph.leaves("parameter")
    }


def _dual(layouts: Layouts) -> Layouts:
    return tuple(x.dual for x in layouts)


def _gradient_type(kind: TensorType) -> TensorType:
    return TensorType(kind.shape, kind.dtype, _dual(kind.layouts), False)


def _backward(
    graph: Graph, node: Node, held: Mapping[str, Sequence[Array]], dy: Sequence[Array]
) -> list[tuple[str, list[Array]]]:
    """What every operand's gradient gets from this operator, on every device."""
    if node.is_parallel:
        return [(node.inputs[0], _adjoint_step(graph, node, dy))]
    attrs = attrs_by_rank(graph, node)
    found: list[tuple[str, list[Array]]] = []
    for position, name in enumerate(node.inputs):
        if graph.types[name].grad:
            ranks = range(graph.mesh.num_devices)
            parts = [_vjp(node.op, [held[i][r] for i in node.inputs], attrs[r], position, dy[r]) for r in ranks]
            found.append((name, parts))
    return found


def _adjoint_step(graph: Graph, node: Node, dy: Sequence[Array]) -> list[Array]:
    """The adjoint parallel operator, on what the devices hold of the gradient."""
    before, after = (_gradient_type(graph.types[name]) for name in (node.name, node.inputs[0]))
    return exchange(ADJOINT[node.op], graph.mesh.index(str(node.attr("axis"))), dy, before, after, graph.mesh)


def _vjp(op: str, operands: Sequence[Array], attrs: Mapping[str, Any], position: int, dy: Array) -> Array:
    """The local gradient of one operand, by central differences."""

    def value(x: Array) -> float:
        with np.errstate(all="ignore"):
            return float(np.sum(dy * ROWS[op].numpy(*operands[:position], x, *operands[position + 1 :], **attrs)))

    x = operands[position]
    gradient = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[at] = _STEP
        gradient[at] = (value(x + step) - value(x - step)) / (2 * _STEP)
    return gradient
