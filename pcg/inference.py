"""Inference: the type of a node's result from its operands' types. The only place where types are decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from shardwright.pcg.attrs import Attr, Attrs, get, integer, integers
from shardwright.pcg.choice import Choice, Choices, axes_along, indivisible, uneven
from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.factors import Shape
from shardwright.pcg.layout import Layout, Layouts, P, R, check_layouts, format_layouts, in_chunks
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.node import OPAQUE, PADDED_FROM, PAIRS, RECEIVED, Node
from shardwright.pcg.optable import ROWS, Row
from shardwright.pcg.parallel import PARTITION, SEND, applicable, step
from shardwright.pcg.types import COMPLEX, ITEM_BYTES, TensorType, is_float


def infer(node: Node, operands: Sequence[TensorType], mesh: Mesh) -> TensorType:
    """Return the type of a node's result from its operands' types; only this function decides types."""
    try:
        if node.is_leaf or node.is_parallel or node.op in (OPAQUE, SEND):
            return _special_type(node, operands, mesh)
        try:
            return _row_type(node.op, node.attrs, node.split, tuple(operands), mesh)
        except TypeError:  # an attribute that cannot be hashed
            return _row_type.__wrapped__(node.op, node.attrs, node.split, tuple(operands), mesh)
    except GraphError as error:
        raise type(error)(f"{node}: {error}") from error


@lru_cache(maxsize=65536)
def _row_type(
    op: str,
    attrs_: tuple[tuple[str, Attr], ...],
    split: Choices,
    operands: tuple[TensorType, ...],
    mesh: Mesh,
) -> TensorType:
    """Return the type of an operator's result. Equal operators of repeated blocks are inferred once."""
    row, attrs = ROWS[op], dict(attrs_)
    try:
        signature = row.signature([t.shape for t in operands], attrs)
        dtype = row.result_dtype([t.dtype for t in operands], attrs)
    except GraphError:
        raise
    except KeyError as error:
        raise GraphError(f"attribute {error} is missing; there are {sorted(attrs)}") from error
    except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        shapes = [list(t.shape) for t in operands]
        raise GraphError(f"operands of shapes {shapes} and attributes {attrs} do not fit: {error}") from error
    grad = is_float(dtype) and row.differentiable and any(t.grad for t in operands)
    if len(split) != len(mesh):
        raise LayoutError(f"{len(split)} split choices for the {len(mesh)} axes of {mesh}; give one per axis")
    if (factor := indivisible(signature, split, mesh.sizes)) is not None:
        axes = [f"{mesh.names[axis]}={mesh.sizes[axis]}" for axis in axes_along(split, factor.name)]
        single = any(factor.name in choice.single for choice in split) and len(axes) > 1
        why = "can be divided along one axis only, got" if single else f"has size {factor.size}, not divisible by"
        raise LayoutError(f"factor {factor.name!r} {why} {', '.join(axes)}; split another")
    layouts: list[Layout] = []
    for axis, choice in enumerate(split):
        required, result = choice.layouts(signature, row)
        if choice.sends and mesh.names[axis] == TIME:
            raise LayoutError(f"split {choice!r} on axis {TIME!r}: microbatches send each other nothing; split another")
        for position, (need, operand) in enumerate(zip(required, operands, strict=True)):
            if not fits(operand, axis, need):
                raise LayoutError(
                    f"split {choice!r} on axis {mesh.names[axis]!r} needs operand {position} as {need}, "
                    f"got {operand.layouts[axis]}; insert the parallel operator that leads there"
                )
        if result == P:
            _check_partial(mesh.names[axis], choice, row, [t.dtype for t in operands], dtype, attrs)
        layouts.append(result)
    if (factor := uneven(row, signature, split, mesh.sizes)) is not None:
        raise LayoutError(
            f"{row.name} counts positions along {factor.name!r}, and split ({', '.join(split)}) gives a device some "
            "that are not evenly spaced; choose no blocks, or as many as a device gets positions"
        )
    check_layouts(signature.result_shape, tuple(layouts), mesh, "its result")
    return TensorType(signature.result_shape, dtype, tuple(layouts), grad)


def _check_partial(
    axis: str, choice: Choice, row: Row, dtypes: list[str], dtype: str, attrs: Mapping[str, Attr]
) -> None:
    """Raise a `LayoutError` for partial sums of bools, or partial sums that are rounded to integers."""
    if dtype == "bool":
        raise LayoutError(f"split {choice!r} on axis {axis!r} would give partial sums of bools; choose another")
    if choice.partial and choice.partial not in row.partial_sets(dtypes, attrs):
        raise LayoutError(
            f"{row.name} from {', '.join(dtypes)} to {dtype} is not linear, so split {choice!r} "
            f"on axis {axis!r} is wrong; reduce the operands first"
        )


def fits(operand: TensorType, axis: int, need: Layout) -> bool:
    """Return whether an operand may be read as `need`. Without a gradient, R and C are the same."""
    have = operand.layouts[axis]
    return have == need or (not operand.grad and {have.kind, need.kind} == {"R", "C"})


def _special_type(node: Node, operands: Sequence[TensorType], mesh: Mesh) -> TensorType:
    """Return the type of a node without a row: a leaf, an opaque operator, a parallel operator."""
    attrs = dict(node.attrs)
    if node.split:
        raise GraphError(f"only operators with a row have a split, got {node.split}; leave it empty")
    if node.is_leaf:
        if operands:
            raise GraphError(f"a leaf has no operands, got {list(node.inputs)}")
        return _leaf_type(attrs, mesh, stored=node.op != RECEIVED)
    if node.op == OPAQUE:
        return _opaque_type(attrs, operands, mesh)
    if len(operands) != 1:
        raise GraphError(f"{node.op} takes one operand, got {len(operands)}")
    if node.op == SEND:
        return operands[0]
    return _parallel_type(node.op, {"blocks": 1, **attrs}, operands[0], mesh)


def _leaf_type(attrs: Attrs, mesh: Mesh, *, stored: bool) -> TensorType:
    shape, dtype, texts = integers(attrs, "shape"), get(attrs, "dtype"), get(attrs, "layouts")
    layouts = tuple(Layout.parse(str(text)) for text in (texts if isinstance(texts, tuple) else (texts,)))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise GraphError(f"dtype {dtype!r} is not one of {sorted(ITEM_BYTES)}")
    layouts = layouts or (R,) * len(mesh)
    check_layouts(shape, layouts, mesh)
    if stored and any(x.kind not in "RS" for x in layouts):
        raise LayoutError(f"a leaf is stored R or S, got ({format_layouts(layouts, mesh)})")
    if PADDED_FROM in attrs and not in_chunks(shape, integers(attrs, PADDED_FROM, len(shape)), layouts, mesh.sizes):
        raise LayoutError(
            f"shape {list(shape)} has padding ({attrs[PADDED_FROM]} in the model), and is stored as "
            f"({format_layouts(layouts, mesh)}), in which parts are not those of torch.chunk; store it along another"
        )
    if PAIRS in attrs:
        _check_pairs(get(attrs, PAIRS), shape, dtype, layouts, mesh)
    return TensorType(shape, dtype, layouts, bool(get(attrs, "grad")))


def _check_pairs(numbers: object, shape: Shape, dtype: str, layouts: Layouts, mesh: Mesh) -> None:
    """Raise unless a leaf of complex numbers has both parts of each in its last dimension, which lies whole."""
    if COMPLEX.get(str(numbers)) != dtype or shape[-1:] != (2,):
        raise GraphError(
            f"a leaf of {numbers} is held as pairs of {COMPLEX.get(str(numbers))}, got {dtype}{list(shape)}"
        )
    if any(x.is_shard and x.dim == len(shape) - 1 for x in layouts):
        raise LayoutError(
            f"complex numbers {list(shape[:-1])} are stored as ({format_layouts(layouts, mesh)}), which cuts real from "
            "imaginary parts; store them along another dimension, or whole"
        )


def _parallel_type(op: str, attrs: Attrs, operand: TensorType, mesh: Mesh) -> TensorType:
    axis = mesh.index(str(get(attrs, "axis")))
    dim, blocks = (integer(attrs, "dim"), integer(attrs, "blocks")) if op == PARTITION else (-1, 1)
    move = step(op, axis, operand.layouts[axis], dim, blocks)
    after = (*operand.layouts[:axis], move.after, *operand.layouts[axis + 1 :])
    check_layouts(operand.shape, after, mesh)
    if not applicable(operand.shape, operand.layouts, mesh.sizes, move):
        dim = move.after.dim if move.after.is_shard else move.before.dim
        raise LayoutError(
            f"another axis shards dimension {dim} inside this one ({format_layouts(operand.layouts, mesh)}); "
            "move the innermost axis first"
        )
    return TensorType(operand.shape, operand.dtype, after, operand.grad)


def _opaque_type(attrs: Attrs, operands: Sequence[TensorType], mesh: Mesh) -> TensorType:
    """Return the type of an opaque operator, recorded at capture; it runs on whole tensors."""
    for position, operand in enumerate(operands):
        if any(x.kind != "R" for x in operand.layouts):
            target = get(attrs, "target")
            raise LayoutError(f"{target} has no row in the op table, so operand {position} must be R, got {operand}")
    shape, dtype = integers(attrs, "shape"), str(get(attrs, "dtype"))
    grad = is_float(dtype) and any(t.grad for t in operands)
    return TensorType(shape, dtype, (R,) * len(mesh), grad)
