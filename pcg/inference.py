"""Inference: the type of a node's result from its operands' types. The only place where types are decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from shardwright.pcg.attrs import Attr, Attrs, get, integer, integers
from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.factors import Signature, dispatched, parse_choice, parts_of
from shardwright.pcg.layout import C, Layout, Layouts, P, R, check_layouts, format_layouts
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.node import OPAQUE, RECEIVED, Node
from shardwright.pcg.optable import ROWS, Row
from shardwright.pcg.parallel import PARTITION, SEND, applicable, step
from shardwright.pcg.types import ITEM_BYTES, TensorType, is_float


def required_layouts(signature: Signature, choice: str, num_operands: int, row: Row) -> tuple[Layouts, Layout]:
    """The operand layouts that a split choice asks for along one axis, and the result's layout."""
    if choice in ("R", "C"):
        layout = R if choice == "R" else C
        return (layout,) * num_operands, layout
    if choice.startswith("P") and choice[1:].replace(",", "").isdigit():
        partial = tuple(int(i) for i in choice[1:].split(","))
        if partial not in row.linear_in:
            raise LayoutError(f"{row.name} is not jointly linear in operands {partial}; choose from {row.linear_in}")
        return tuple(P if i in partial else C for i in range(num_operands)), P
    if (sent := dispatched(choice)) is not None:
        return _dispatch_layouts(signature, *sent, row)
    name, blocks = parse_choice(choice)
    factor = signature.index(name)
    if factor is None or signature.factors[factor].role == "fixed":
        splittable = [f.name for f in signature.factors if f.role != "fixed"]
        raise LayoutError(f"{row.name} cannot be split along {choice!r}; choose R, C or one of {splittable}")
    if blocks == 1:
        return signature.split_layouts(factor)
    if name == row.offset or row.random:
        raise LayoutError(f"{row.name} needs consecutive parts along {name!r}; split it without blocks")
    return signature.refined(factor, blocks).split_layouts(factor)


def _dispatch_layouts(signature: Signature, named: str, rows: str, row: Row) -> tuple[Layouts, Layout]:
    """Rows are split along one factor, and what they name along another: each is sent to what it names, and back."""
    if rows not in row_factors(signature, row) or named not in named_factors(signature, row):
        good = [f"{e}>{t}" for e in named_factors(signature, row) for t in row_factors(signature, row)]
        raise LayoutError(f"{row.name} cannot be split by {f'{named}>{rows}'!r}; it can by {good or 'no dispatch'}")
    factors = signature.index(named), signature.index(rows)
    (held, _), (split, result) = (signature.split_layouts(f) for f in factors if f is not None)
    return tuple(mine if theirs == C else theirs for mine, theirs in zip(split, held, strict=True)), result


def named_factors(signature: Signature, row: Row) -> list[str]:
    """What the rows of operands that can be sent name: factors that are a dimension of what is not sent."""
    dims = {signature.operands[operand][dim] for operand, dim in row.indexes.values()} if row.sends else set()
    return [f.name for i, f in enumerate(signature.factors) if (i,) in dims and f.role == "sum"]


def row_factors(signature: Signature, row: Row) -> list[str]:
    """The factors that count rows of all operands that can be sent and of the result, each a dimension of its own."""
    sent = [signature.operands[i] for i in row.sends]
    mine = [i for i, f in enumerate(signature.factors) if f.role == "map" and (i,) in signature.result]
    return [signature.factors[i].name for i in mine if sent and all((i,) in dims for dims in sent)]


def offered(
    row: Row, signature: Signature, blocks: Callable[[int], Iterable[int]]
) -> Iterator[tuple[str, Layouts, Layout]]:
    """Every way to run an operator along one axis: the choice, the operand layouts that it asks for, the result's.

    Factors come whole, then split within each number of equal blocks that `blocks` has for their size.
    """
    factors = [f for f in signature.factors if f.role != "fixed" and f.size > 1]
    choices = ["R", "C", *("P" + ",".join(map(str, s)) for s in row.linear_in), *(f.name for f in factors)]
    choices += [f"{f.name}/{n}" for f in factors for n in blocks(f.size) if 1 < n < f.size and f.size % n == 0]
    for choice in choices:
        with suppress(LayoutError):
            yield choice, *required_layouts(signature, choice, len(signature.operands), row)


def infer(node: Node, operands: Sequence[TensorType], mesh: Mesh) -> TensorType:
    """The type of a node's result from its operands' types: the only place where types are decided."""
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
    op: str, attrs_: tuple[tuple[str, Attr], ...], split: tuple[str, ...], operands: tuple[TensorType, ...], mesh: Mesh
) -> TensorType:
    """The type of an operator's result. Equal operators of repeated blocks are inferred once."""
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
    if (factor := signature.indivisible(split, mesh.sizes)) is not None:
        axes = [
            f"{a}={n}"
            for a, n, choice in zip(mesh.names, mesh.sizes, split, strict=True)
            if factor.name in (name for name, _ in parts_of(choice))
        ]
        raise LayoutError(
            f"factor {factor.name!r} has size {factor.size}, not divisible by {', '.join(axes)}; split another"
        )
    layouts: list[Layout] = []
    for axis, choice in enumerate(split):
        required, result = required_layouts(signature, choice, len(operands), row)
        if dispatched(choice) and mesh.names[axis] == TIME:
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
    check_layouts(signature.result_shape, tuple(layouts), mesh, "its result")
    return TensorType(signature.result_shape, dtype, tuple(layouts), grad)


def _check_partial(axis: str, choice: str, row: Row, dtypes: list[str], dtype: str, attrs: Mapping[str, Attr]) -> None:
    """Partial sums are of numbers, and are not rounded to integers."""
    if dtype == "bool":
        raise LayoutError(f"split {choice!r} on axis {axis!r} would give partial sums of bools; choose another")
    if choice in _partial_choices(row.linear_in) and choice not in _partial_choices(row.partial_sets(dtypes, attrs)):
        raise LayoutError(
            f"{row.name} from {', '.join(dtypes)} to {dtype} is not linear, so split {choice!r} "
            f"on axis {axis!r} is wrong; reduce the operands first"
        )


def _partial_choices(sets: tuple[tuple[int, ...], ...]) -> list[str]:
    return ["P" + ",".join(map(str, s)) for s in sets]


def fits(operand: TensorType, axis: int, need: Layout) -> bool:
    """Whether an operand may be read as `need`. Without a gradient, R and C are the same thing."""
    have = operand.layouts[axis]
    return have == need or (not operand.grad and {have.kind, need.kind} == {"R", "C"})


def _special_type(node: Node, operands: Sequence[TensorType], mesh: Mesh) -> TensorType:
    """Of what has no row: leaves, opaque operators, parallel operators."""
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
    return TensorType(shape, dtype, layouts, bool(get(attrs, "grad")))


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
    """An operator without a row runs on whole tensors; its result type was recorded at capture."""
    for position, operand in enumerate(operands):
        if any(x.kind != "R" for x in operand.layouts):
            target = get(attrs, "target")
            raise LayoutError(f"{target} has no row in the op table, so operand {position} must be R, got {operand}")
    shape, dtype = integers(attrs, "shape"), str(get(attrs, "dtype"))
    grad = is_float(dtype) and any(t.grad for t in operands)
    return TensorType(shape, dtype, (R,) * len(mesh), grad)
