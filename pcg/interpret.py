"""The reference interpreter: the meaning of a graph, on one device and on every device of its mesh.

`run_serial` computes the logical value of every node with the rows' NumPy semantics; the parallel operators are the
identity. `run_devices` computes each device's arrays, exchanging data only where a parallel operator says so.
`denote` and `scatter` lead from one to the other, and a well-typed graph satisfies, for every node n,

    denote(run_devices(graph, leaves)[n], graph.types[n], graph.mesh) = run_serial(graph, leaves)[n]

The code is clear, not fast: tests, the falsifier and counterexamples are judged by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.pcg.choice import step_along
from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.factors import Shape
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.layout import Layouts, R, S, check_layouts
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE
from shardwright.pcg.types import TensorType, is_float

Array = np.ndarray[Any, np.dtype[Any]]
Coordinate = tuple[int, ...]


def run_serial(graph: Graph, leaves: Mapping[str, Array]) -> dict[str, Array]:
    """Return the logical value of every node, by name; `leaves` maps the names of leaf nodes to arrays.

    Layouts and splits play no part. Raises `GraphError` for a leaf that is missing or of another
    shape or kind than its type, and for an opaque operator.
    """
    values: dict[str, Array] = {}
    for node in graph.nodes:
        if node.is_leaf:
            values[node.name] = _leaf_value(node, graph.types[node.name], leaves)
        elif node.is_parallel:
            values[node.name] = values[node.inputs[0]]
        else:
            operands = [values[name] for name in node.inputs]
            values[node.name] = _apply(node, operands, dict(node.attrs), graph.types[node.name].shape, "")
    return values


def run_devices(graph: Graph, leaves: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Return the arrays that devices hold, by node: one array per rank, in rank order.

    `leaves` are logical arrays; each device gets its part under the leaf's layouts. Raises as `run_serial` does.
    """
    values: dict[str, list[Array]] = {}
    for node in graph.nodes:
        result = graph.types[node.name]
        if node.is_leaf:
            values[node.name] = scatter(_leaf_value(node, result, leaves), result.layouts, graph.mesh)
        elif node.is_parallel:
            operand, axis = node.inputs[0], graph.mesh.index(str(node.attr("axis")))
            values[node.name] = exchange(node.op, axis, values[operand], graph.types[operand], result, graph.mesh)
        else:
            values[node.name] = _on_devices(graph, node, [values[name] for name in node.inputs])
    return values


def _on_devices(graph: Graph, node: Node, operands: Sequence[Sequence[Array]]) -> list[Array]:
    """Run an operator on every device, on the parts that each holds of its operands.

    A choice that sends rows runs as its composition: rows are gathered, and partial sums reduced to slices.
    """
    mesh, result, types = graph.mesh, graph.types[node.name], [graph.types[name] for name in node.inputs]
    held_by_operand = [list(parts) for parts in operands]
    sending = [(axis, choice) for axis, choice in enumerate(node.split) if choice.sends]
    inside = {axis: choice.inner.layouts(graph.signature(node), ROWS[node.op]) for axis, choice in sending}
    for axis, _ in reversed(sending):  # the innermost shard first
        for i, need in enumerate(inside[axis][0]):
            if types[i].layouts[axis].is_shard and not need.is_shard:
                after = types[i].along(axis, R)
                held_by_operand[i], types[i] = exchange(COMBINE, axis, held_by_operand[i], types[i], after, mesh), after
    kind = result
    for axis, (_, made) in inside.items():
        kind = kind.along(axis, made)
    parts = [
        _apply(node, [held[rank] for held in held_by_operand], attrs, kind.local_shape(mesh), f" on rank {rank}")
        for rank, attrs in enumerate(attrs_by_rank(graph, node))
    ]
    for axis in inside:
        if kind.layouts[axis] != result.layouts[axis]:
            whole, after = kind.along(axis, R), kind.along(axis, result.layouts[axis])
            parts = exchange(REDUCE, axis, parts, kind, whole, mesh)
            parts, kind = exchange(PARTITION, axis, parts, whole, after, mesh), after
    return parts


def scatter(array: Array, layouts: Layouts, mesh: Mesh, seed: int = 0) -> list[Array]:
    """Return one array per rank that together denote `array`; along a `P` axis the summands are drawn from `seed`.

    Raises `LayoutError` if an array of this shape cannot have these layouts, or is of bools and `P`.
    """
    array = np.asarray(array)
    order = check_layouts(array.shape, layouts, mesh)
    summands: dict[Coordinate, Array] = {(): array}
    partial = [axis for axis, layout in enumerate(layouts) if layout.kind == "P"]
    rng = np.random.default_rng(seed)
    for axis in partial:
        summands = {
            (*key, digit): part
            for key, whole in summands.items()
            for digit, part in enumerate(_summands(whole, mesh.sizes[axis], rng))
        }
    parts: list[Array] = []
    for coordinate in mesh.coordinates():
        part = summands[tuple(coordinate[axis] for axis in partial)]
        for axis, dim, blocks in order:
            part = _take(part, dim, blocks, mesh.sizes[axis], coordinate[axis])
        parts.append(part)
    return parts


def denote(arrays: Sequence[Array], value: TensorType, mesh: Mesh) -> Array:
    """Return the logical array that `arrays`, one per rank, hold in the layouts of `value`.

    `R`, `C`: any device's copy, which must agree; `S`: the concatenation, blocks and outer shards respected; `P`: the
    sum. Raises `LayoutError` if a shape is not the local one or copies differ by more than rounding.
    """
    expected = value.local_shape(mesh)
    if len(arrays) != mesh.num_members:
        raise LayoutError(f"denote: {len(arrays)} arrays for the {mesh.num_members} devices of {mesh}")
    for rank, array in enumerate(arrays):
        if array.shape != expected:
            raise LayoutError(f"denote: rank {rank} holds {list(array.shape)}, expected {list(expected)} of {value}")
    grid = dict(zip(mesh.coordinates(), arrays, strict=True))
    for axis, layout in enumerate(value.layouts):
        if layout.kind in "RC":
            grid = _along(grid, axis, _agreed(f"denote: {value} is {layout} on axis {mesh.names[axis]!r}"))
    for axis, dim, blocks in reversed(check_layouts(value.shape, value.layouts, mesh)):
        grid = _along(grid, axis, _joined(dim, blocks))
    for axis, layout in enumerate(value.layouts):
        if layout.kind == "P":
            grid = _along(grid, axis, _sum)
    (result,) = grid.values()
    return result


# ---- one device ----


def _leaf_value(node: Node, value: TensorType, leaves: Mapping[str, Array]) -> Array:
    if node.name not in leaves:
        raise GraphError(f"{node}: no array for this leaf; `leaves` has {sorted(leaves)}")
    array = np.asarray(leaves[node.name])
    if array.shape != value.shape:
        raise GraphError(f"{node}: expected an array of shape {list(value.shape)}, got {list(array.shape)}")
    expected = "f" if is_float(value.dtype) else "b" if value.dtype == "bool" else "iu"
    if array.dtype.kind not in expected:
        raise GraphError(f"{node}: expected an array of {value.dtype} or its kind, got {array.dtype}")
    return array


def _apply(node: Node, operands: Sequence[Array], attrs: Mapping[str, Any], shape: Shape, where: str) -> Array:
    """Run an operator in NumPy; the result must have the inferred shape."""
    if node.op == OPAQUE:
        target = node.attr("target")
        raise GraphError(
            f"{node}: {target} has no row in the op table and cannot be interpreted; add a row to pcg/rows"
        )
    with np.errstate(all="ignore"):
        result = np.asarray(ROWS[node.op].numpy(*operands, **attrs))
    if result.shape != shape:
        raise GraphError(f"{node}: computes shape {list(result.shape)}{where}, inference says {list(shape)}")
    return result


def attrs_by_rank(graph: Graph, node: Node) -> list[Mapping[str, Any]]:
    """Return the node's attributes on every device: localized, with the device's offset or its shard of a draw."""
    if node.op == OPAQUE:
        return [dict(node.attrs)] * graph.mesh.num_members
    row, mesh, result = ROWS[node.op], graph.mesh, graph.types[node.name]
    local = graph.local_attrs(node)
    by_rank: list[Mapping[str, Any]] = []
    for coordinate in mesh.coordinates():
        rank_attrs: dict[str, Any] = dict(local)
        if row.offset is not None:
            rank_attrs["offset"] = rank_attrs.get("offset", 0) + _first(graph, node, row.offset, coordinate)
        if row.spaced and (step := step_along(node.split, mesh.sizes, row.offset)) > 1:
            rank_attrs["step"] = step
        if row.random:
            rank_attrs |= {"shape": result.shape, "shard": shard_indices(result, mesh, coordinate)}
        by_rank.append(rank_attrs)
    return by_rank


def _first(graph: Graph, node: Node, factor: str, coordinate: Coordinate) -> int:
    """Return where the device's part begins along a factor that is a dimension of some operand, or of the result."""
    signature = graph.signature(node)
    index, tensors = signature.index(factor), (*signature.operands, signature.result)
    for name, dims in zip((*node.inputs, node.name), tensors, strict=True):
        if (index,) in dims:
            mine = _indices(graph.types[name], dims.index((index,)), graph.mesh, coordinate)
            return int(mine[0]) if len(mine) else 0
    raise GraphError(f"{node}: no operand, nor the result, has factor {factor!r} as a dimension of its own")


def shard_indices(value: TensorType, mesh: Mesh, coordinate: Coordinate) -> tuple[Array, ...]:
    """Return the index by which NumPy takes the device's part of the logical tensor."""
    return np.ix_(*(_indices(value, dim, mesh, coordinate) for dim in range(len(value.shape))))


def _indices(value: TensorType, dim: int, mesh: Mesh, coordinate: Coordinate) -> Array:
    extent = value.shape[dim]
    alone = tuple(S(0, x.blocks) if x.is_shard and x.dim == dim else R for x in value.layouts)
    indices = np.arange(extent)
    for axis, _, blocks in check_layouts((extent,), alone, mesh):
        indices = _take(indices, 0, blocks, mesh.sizes[axis], coordinate[axis])
    return indices


# ---- all devices ----


def exchange(
    op: str, axis: int, arrays: Sequence[Array], before: TensorType, after: TensorType, mesh: Mesh
) -> list[Array]:
    """Run a parallel operator: the devices of each group along its axis cut, gather or sum their arrays."""
    grid = dict(zip(mesh.coordinates(), arrays, strict=True))
    if op == PARTITION:
        dim, blocks = _cut(after, axis, mesh)
        return [_take(part, dim, blocks, mesh.sizes[axis], at[axis]) for at, part in grid.items()]
    if op == COMBINE:
        dim, blocks = _cut(before, axis, mesh)
        groups = _along(grid, axis, _joined(dim, blocks))
    elif op == REDUCE:
        groups = _along(grid, axis, _sum)
    else:
        return list(arrays)
    return [groups[*at[:axis], 0, *at[axis + 1 :]] for at in grid]


def _cut(value: TensorType, axis: int, mesh: Mesh) -> tuple[int, int]:
    """Return dimension and number of local blocks of the slice that `axis` takes of `value`."""
    return next((dim, blocks) for at, dim, blocks in check_layouts(value.shape, value.layouts, mesh) if at == axis)


def _along(
    grid: Mapping[Coordinate, Array], axis: int, merge: Callable[[Sequence[Array]], Array]
) -> dict[Coordinate, Array]:
    """Merge every group along `axis` into one array, kept at coordinate 0 of that axis."""
    groups: dict[Coordinate, list[Array]] = {}
    for at, part in grid.items():
        groups.setdefault((*at[:axis], 0, *at[axis + 1 :]), []).append(part)
    return {at: merge(parts) for at, parts in groups.items()}


# ---- one group ----


def _take(array: Array, dim: int, blocks: int, size: int, digit: int) -> Array:
    """Return slice `digit` of `size` of each of the blocks of dimension `dim`."""
    lead, tail = array.shape[:dim], array.shape[dim + 1 :]
    split = array.reshape(*lead, blocks, size, array.shape[dim] // (blocks * size), *tail)
    return split[(slice(None),) * (dim + 1) + (digit,)].reshape(*lead, array.shape[dim] // size, *tail)


def _joined(dim: int, blocks: int) -> Callable[[Sequence[Array]], Array]:
    """Return the inverse of `_take`, which joins the parts of a group in the order of their digits."""

    def join(parts: Sequence[Array]) -> Array:
        shape = parts[0].shape
        lead, tail, extent = shape[:dim], shape[dim + 1 :], shape[dim]
        split = [part.reshape(*lead, blocks, extent // blocks, *tail) for part in parts]
        return np.concatenate(split, axis=dim + 1).reshape(*lead, extent * len(parts), *tail)

    return join


def _sum(parts: Sequence[Array]) -> Array:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _agreed(where: str) -> Callable[[Sequence[Array]], Array]:
    """Return a function that returns the copy that all devices of a group hold; copies may differ by rounding."""

    def agree(parts: Sequence[Array]) -> Array:
        first = parts[0]
        for digit, part in enumerate(parts[1:], 1):
            same = np.array_equal(first, part) or np.allclose(first, part, rtol=1e-6, atol=1e-12, equal_nan=True)
            if not same:
                raise LayoutError(f"{where}, but the copies at 0 and {digit} differ")
        return first

    return agree


def _summands(array: Array, size: int, rng: np.random.Generator) -> list[Array]:
    """Return `size` arrays that add up to `array`."""
    if array.dtype == bool:
        raise LayoutError("an array of bools cannot be a partial sum; cast it to a number first")
    if array.dtype.kind == "f":
        parts = [rng.standard_normal(array.shape).astype(array.dtype) for _ in range(size - 1)]
    else:
        parts = [rng.integers(0, 10, array.shape).astype(array.dtype) for _ in range(size - 1)]
    return [*parts, np.asarray(array - sum(parts)) if parts else array]
