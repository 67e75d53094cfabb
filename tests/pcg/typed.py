"""Small typed graphs for tests: leaves led into any layout, and one operator applied under a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shardwright.pcg.choice import indivisible
from shardwright.pcg.graph import Graph, Node, leaf, make_attrs
from shardwright.pcg.interpret import Array
from shardwright.pcg.layout import Layouts, shard_order
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.offers import parse_choices
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import is_float
from tests.samples import Sample

AXES = ("dp", "tp", "pp")


def make_mesh(*sizes: int) -> Mesh:
    return Mesh(AXES[: len(sizes)], sizes)


@dataclass(frozen=True)
class Case:
    """A graph whose last node is the operator under test, and arrays for its leaves."""

    graph: Graph
    leaves: Mapping[str, Array]

    @property
    def result(self) -> str:
        return self.graph.nodes[-1].name


def operand_in(name: str, array: Array, layouts: Layouts, mesh: Mesh, seed: int = 0) -> tuple[list[Node], Array]:
    """Nodes whose last one denotes `array` in `layouts`, and the array for their one leaf, %`name`_leaf.

    Partial sums come from a leaf of summands, sharded along leading dimensions and summed over them.
    """
    partial = [axis for axis, layout in enumerate(layouts) if layout.kind == "P"]
    counts = tuple(mesh.sizes[axis] for axis in partial)
    value, stored, rng = array, ["R"] * len(mesh), np.random.default_rng(seed)
    if partial:
        flat = rng.integers(-9, 9, (prod(counts), *array.shape)).astype(array.dtype)
        flat[-1] = array - flat[:-1].sum(0)
        value = flat.reshape(*counts, *array.shape)
        for position, axis in enumerate(partial):
            stored[axis] = f"S({position})"
    first = leaf(f"{name}_leaf", "parameter", value.shape, str(value.dtype), name, grad=is_float(str(value.dtype)))
    attrs = {**dict(first.attrs), "layouts": tuple(stored)}
    nodes = [Node(first.name, first.op, (), make_attrs(**attrs))]
    if partial:
        split = parse_choices([f"d{partial.index(axis)}" if axis in partial else "R" for axis in range(len(mesh))])
        summed = make_attrs(dims=tuple(range(len(partial))), keepdim=False)
        nodes.append(Node(f"{name}_sum", "sum", (nodes[-1].name,), summed, split))
    order = shard_order(array.shape, layouts, mesh.sizes)
    assert not isinstance(order, str), order
    for axis, dim, _ in order:
        move = make_attrs(axis=mesh.names[axis], dim=dim, blocks=layouts[axis].blocks)
        nodes.append(Node(f"{name}_{mesh.names[axis]}", "partition", (nodes[-1].name,), move))
    for axis, layout in enumerate(layouts):
        if layout.kind == "C":
            move = make_attrs(axis=mesh.names[axis])
            nodes.append(Node(f"{name}_{mesh.names[axis]}", "replicate", (nodes[-1].name,), move))
    return nodes, value


def split_case(op: str, sample: Sample, split: Sequence[str], mesh: Mesh, seed: int = 0) -> Case:
    """`op` on the sample's operands, each led into the layouts that `split` asks for."""
    row, arrays = ROWS[op], sample.arrays(seed)
    signature = row.signature(sample.shapes, sample.attrs)
    required = [choice.layouts(signature, row)[0] for choice in parse_choices(split)]
    nodes: list[Node] = []
    operands: list[str] = []
    leaves: dict[str, Array] = {}
    for i, array in enumerate(arrays):
        steps, leaves[f"x{i}_leaf"] = operand_in(f"x{i}", array, tuple(layouts[i] for layouts in required), mesh, seed)
        nodes += steps
        operands.append(steps[-1].name)
    nodes.append(Node("y", op, tuple(operands), make_attrs(**sample.attrs), parse_choices(split)))
    return Case(Graph(tuple(nodes), (), mesh), leaves)


def possible(op: str, sample: Sample, split: Sequence[str], mesh: Mesh) -> bool:
    """Whether operands and result of these shapes can have the layouts that the split asks for."""
    row = ROWS[op]
    signature = row.signature(sample.shapes, sample.attrs)
    choices = parse_choices(split)
    if indivisible(signature, choices, mesh.sizes):
        return False
    required = [choice.layouts(signature, row) for choice in choices]
    shapes = [*sample.shapes, signature.result_shape]
    for i, shape in enumerate(shapes):
        layouts = tuple([*operands, result][i] for operands, result in required)
        if isinstance(shard_order(shape, layouts, mesh.sizes), str):
            return False
    return True


def choices(op: str, sample: Sample) -> list[str]:
    """Every split choice that the row offers for this sample: R, C, the factors, the sets of partial operands."""
    row = ROWS[op]
    signature = row.signature(sample.shapes, sample.attrs)
    factors = [f.name for f in signature.factors if f.role != "fixed"]
    partial = row.partial_sets(sample.dtypes, sample.attrs)
    return ["R", "C", *factors, *("P" + ",".join(map(str, s)) for s in partial)]


def leaf_node(name: str, shape: tuple[int, ...], dtype: str = "float32", layouts: Layouts = ()) -> Node:
    """A parameter; it has a gradient if it is of floats."""
    return leaf(name, "parameter", shape, dtype, name, grad=is_float(dtype), layouts=layouts)
