"""Work: one kernel on one device; and the kernels of an operator's forward and backward pass.

Everything follows from the op table's rows. A contraction's factor string gives its matrix multiplication: factors of

    both operands and the result                  the batch
    the first operand (or a window) and the result    m
    the second operand and the result                 n
    both operands, or the second (a kernel), only     k

and its backward is one multiplication per operand that needs a gradient, [m, n]·[n, k] and [n, m]·[m, k]. The row of an
operator with several products lists them. Everything else that an operator does is a pass over its operands, its result
and the values that its backward kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from math import prod
from typing import Literal, get_args

from shardwright.pcg.analysis import Written
from shardwright.pcg.attrs import Attrs
from shardwright.pcg.factors import Signature
from shardwright.pcg.foreign import parsed
from shardwright.pcg.optable import LocalShapes, Row
from shardwright.pcg.ring import ITS_OWN, Used
from shardwright.pcg.row import BESIDE, Product
from shardwright.pcg.types import ITEM_BYTES, TensorType, is_float

WorkKind = Literal["matmul", "attention", "conv", "pointwise", "reduction", "lookup", "random", "copy", "view"]
"""Kinds of work, by the limits of its kernels. A `view` has no kernel: it costs its dispatch."""
WORK_KINDS: tuple[WorkKind, ...] = get_args(WorkKind)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one kernel on one device.

    Attributes:
        shape: of a matmul or convolution (batch, m, n, k), a convolution as the multiplication that it is; of attention
            (batch · heads, queries, keys, head_dim); else (elements of the largest tensor,).
        flops: multiplications and additions that are carried out, each counted as one.
        num_bytes: read from memory and written to it.
        dtype: of the operands, by the graph's names.
        causal: attention that leaves out keys after the query.
        backward: a kernel that only a backward pass has: attention's, which recomputes the scores, and those of the two
            gradients of a convolution. A matrix multiplication's gradients are matrix multiplications like others.
    """

    kind: WorkKind
    shape: tuple[int, ...]
    flops: float
    num_bytes: float
    dtype: str
    causal: bool = False
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Timed(Work):
    """Work that no formula describes, with the seconds that it took on a `device` of some kind."""

    device: str = field(kw_only=True)
    seconds: float = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Passes:
    """The kernels of an operator's forward and of its backward pass, in order.

    `gradients` is the share of the float operands that get a gradient. Attention computes all gradients at once.
    `groups` is the number of groups of rows in a grouped product; each has its own matrix, and a host may loop over
    them.
    """

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    gradients: float = 1.0
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Local:
    """A device's part of an operator.

    Attributes:
        row: None for an operator that the table does not have: it counts as a pass over its operands and its result.
        signature: of the logical operator, with `extents` for the sizes of its factors on the device.
        operands: types with local shapes; `grad` says which need a gradient.
        result: type with its local shape; without `grad` there is no backward.
        drawn: elements that a random operator draws.
        written: how the operator is written in code: see `pcg.analysis.written`.
        senders: devices that send it rows (`LocalShapes`).
        step: from each of its positions to the next, along the factor that the row counts (`Row.spaced`).
        used: what it uses of what senders, itself included, send it.
    """

    row: Row | None
    attrs: Attrs
    signature: Signature | None
    extents: tuple[int, ...]
    operands: tuple[TensorType, ...]
    result: TensorType
    drawn: int
    written: Written = ""
    senders: float = 1
    step: int = 1
    used: Used = ITS_OWN

    @property
    def dtype(self) -> str:
        floats = [t.dtype for t in (*self.operands, self.result) if is_float(t.dtype)]
        return floats[-1] if floats else "float32"

    @property
    def shapes(self) -> LocalShapes:
        """The logical shapes and this device's."""
        assert self.signature is not None
        whole = LocalShapes.whole(self.signature)
        mine = tuple(t.shape for t in self.operands)
        return replace(whole, local_operands=mine, local_result=self.result.shape, senders=self.senders)

    @property
    def trained(self) -> tuple[TensorType, ...]:
        """The operands that get a gradient."""
        return tuple(t for t in self.operands if t.grad) if self.result.grad else ()


def passes(part: Local) -> Passes:
    """Return the kernels of an operator on one device."""
    passes = _passes(part)
    if part.row is not None and part.row.contraction and part.row.passes > 1:
        return passes
    num_floats = sum(is_float(t.dtype) for t in part.operands)
    return replace(passes, gradients=len(part.trained) / num_floats if num_floats else 0.0, groups=_groups(part))


def _groups(part: Local) -> int:
    """Return the number of groups in a product: of factors outside it, as in `matmul_shape`, those of the matrices."""
    if part.row is None or part.signature is None:
        return 1
    if part.row.products is not None:
        return sum(product.batch for product in part.row.products(part.shapes))
    if not part.row.uncounted:
        return 1
    second = {f for dim in part.signature.operands[1] for f in dim}
    names = [factor.name for factor in part.signature.factors]
    return prod(part.extents[f] for f in second if names[f] in part.row.uncounted)


def _passes(part: Local) -> Passes:
    row = part.row
    if "call" in part.attrs:
        return _foreign(part)
    if row is None:
        return _elementwise(part, "pointwise", 1.0)
    if row.products is not None:
        return _products(part)
    if row.contraction:
        return _attention(part) if row.passes > 1 else _contraction(part)
    if row.view and part.written != "copy":
        return Passes((_view(part),), _moved_back(part))
    if row.view:
        return Passes((_work(part, "copy", 2 * part.result.num_bytes),), _moved_back(part))
    if row.lookup:
        return _lookup(part)
    if row.random:
        return _random(part)
    if row.scratch:
        return _with_scratch(part)
    return _elementwise(part, _kind(part), row.flops_per_element)


# ------------------------------------------------------------------------------------------------------- contractions


def matmul_shape(signature: Signature, extents: Sequence[int], uncounted: Sequence[str]) -> tuple[int, int, int, int]:
    """Return (batch, m, n, k) of the matrix multiplication that a contraction of two operands is."""
    first, second = ({f for dim in dims for f in dim} for dims in signature.operands[:2])
    result = {f for dim in signature.result for f in dim}
    batch, m, n, k, groups = 1, 1, 1, 1, 1
    for f, extent in enumerate(extents):
        if signature.factors[f].name in uncounted:
            groups *= extent if f in second else 1  # one multiplication per group, each with its part of the rows
        elif f in result:
            batch, m, n = (
                (batch * extent, m, n) if f in first and f in second
                else (batch, m, n * extent) if f in second
                else (batch, m * extent, n)
            )  # fmt: skip
        else:
            k *= extent
    return batch * groups, max(1, m // groups), n, k


def _contraction(part: Local) -> Passes:
    assert part.row is not None
    assert part.signature is not None
    batch, m, n, k = matmul_shape(part.signature, part.extents, part.row.uncounted)
    kind: WorkKind = "conv" if _has_windows(part.signature) else "matmul"
    num_bytes = _bytes(part.operands) + part.result.num_bytes
    flops = 2.0 * batch * m * n * k

    def multiply(*shape: int, backward: bool = False) -> Work:
        return Work(kind, shape, flops, num_bytes, part.dtype, backward=backward and kind == "conv")

    backward = [(batch, m, k, n), (batch, k, n, m)]
    trained = [t.grad and part.result.grad for t in part.operands[:2]]
    return Passes(
        (multiply(batch, m, n, k),),
        tuple(multiply(*shape, backward=True) for shape, grad in zip(backward, trained, strict=True) if grad),
    )


def _products(part: Local) -> Passes:
    """Return several products of rows that are sorted before and restored after, and a pass over the values between.

    Backward has as many products for the matrices. It has one for the rows of each product but the first, whose rows
    are the first operand's. Kernels for gradients of operands come first, in the order of the operands, as in other
    contractions.
    """
    row = part.row
    assert row is not None
    assert row.products is not None
    products, item = tuple(row.products(part.shapes)), ITEM_BYTES[part.operands[0].dtype]
    passed = 2.0 * row.beside_bytes("inside", part.shapes, part.operands[0].dtype) + part.result.num_bytes
    between = _work(part, "copy", passed)

    def multiply(x: Product, m: float, n: float, k: float) -> Work:
        num_bytes = item * x.batch * (x.m * (x.n + x.k) + x.n * x.k)
        sizes = (x.batch, *(max(1, round(size)) for size in (m, n, k)))
        return Work("matmul", sizes, 2.0 * x.batch * x.m * x.n * x.k, num_bytes, part.operands[0].dtype)

    forward = tuple(multiply(x, x.m, x.n, x.k) for x in products)
    into_rows = [multiply(x, x.m, x.k, x.n) for x in products]
    into = {0: into_rows[0], **{x.matrix: multiply(x, x.k, x.n, x.m) for x in products}}
    trained = [i for i, t in enumerate(part.operands) if t.grad and part.result.grad]
    backward = (*(into.get(i, between) for i in trained), *into_rows[1:], between)
    return Passes((*forward, between), backward if trained else ())


def _has_windows(signature: Signature) -> bool:
    """Return whether a dimension of the result is in no operand: the places of a convolution's kernel."""
    seen = {f for dims in signature.operands for dim in dims for f in dim}
    return any(f not in seen for dim in signature.result for f in dim)


def _attention(part: Local) -> Passes:
    """Return fused attention: the backward computes the scores again, five multiplications instead of two.

    Where causal queries are split, the device with the last queries sees the most keys, and all others wait for it.
    Where keys travel, the parts of devices that are `used` are one kernel each, and what they give is merged. If
    neighbouring positions lie on other devices, each of these parts has half of the pairs, on every device. Under a
    band no part has more than its share of the pairs of the band.
    Source: Dao et al., "FlashAttention" (2022), section 3.1 and appendix B.
    """
    q, k = part.operands[0].shape, part.operands[1].shape
    shape = (prod(q[:-2]), q[-2], k[-2], q[-1])
    rounds, senders, offset = part.used.parts, round(part.senders), part.shapes.operands[0][-2] // part.step - q[-2]
    shift = k[-2] if part.step == 1 else 0
    causal = bool(part.attrs.get("causal", False))
    mask = _bytes(part.operands[3:]) // senders  # its columns, for the keys of one part
    num_bytes = _bytes(part.operands[:3]) + mask + part.result.num_bytes
    gradient_bytes = num_bytes + part.result.num_bytes + _bytes(part.trained)
    forward, backward = list[Work](), list[Work]()
    for number in range(senders - rounds, senders):
        seen = _seen(q[-2], k[-2], offset - number * shift) if causal else q[-2] * k[-2]
        seen = min(seen, part.used.pairs / rounds) if part.used.pairs else seen
        flops = 2.0 * shape[0] * seen * (q[-1] + part.operands[2].shape[-1])
        work = Work("attention", shape, flops, num_bytes, part.dtype, causal and (senders == 1 or seen < q[-2] * k[-2]))
        forward.append(work)
        backward.append(replace(work, flops=2.5 * flops, num_bytes=gradient_bytes, backward=True))
    merges, sums = (rounds - 1) * [_merge(part.result)], (rounds - 1) * [*map(_merge, part.operands[:3])]
    return Passes((*forward, *merges), (*backward, *sums) if part.trained else (), groups=rounds)


def _merge(kind: TensorType) -> Work:
    """Return the work of adding a value to another in place, in fp32."""
    return Work("pointwise", (kind.num_elements,), float(kind.num_elements), 12.0 * kind.num_elements, "float32")


def _seen(queries: int, keys: int, offset: int) -> int:
    """Return the number of pairs of a query and a key that it sees: query i sees keys up to i + `offset`."""
    full = max(0, min(queries, keys - offset))
    return full * offset + full * (full + 1) // 2 + (queries - full) * keys


# --------------------------------------------------------------------------------------------------------- everything


def _kind(part: Local) -> WorkKind:
    """Return "pointwise" if all factors are in the result and none is fixed, else "reduction"."""
    assert part.signature is not None
    alone = all(f.role == "map" for f in part.signature.factors)
    return "pointwise" if alone else "reduction"


def _elementwise(part: Local, kind: WorkKind, flops_per_element: float) -> Passes:
    """Return a pass forward, and backward one kernel, or one per operand if the operator is pointwise."""
    forward = _work(part, kind, _bytes(part.operands) + part.result.num_bytes, flops_per_element)
    if part.trained and _passes_gradient_on(part):
        return Passes(() if part.written == "fused" else (forward,), _moved_back(part))
    saved, gradient = _saved_bytes(part), part.result.num_bytes
    if kind == "pointwise":
        per_operand = saved / max(1, len(part.operands))
        kernels = [_work(part, kind, gradient + per_operand + t.num_bytes, flops_per_element) for t in part.trained]
        return _both(part, forward, *kernels, *_broadcast_sums(part))
    return _both(part, forward, _work(part, kind, gradient + saved + _bytes(part.trained), flops_per_element))


def _passes_gradient_on(part: Local) -> bool:
    """Return whether gradients are views of the result's: linear, nothing kept, no dimension needed whole."""
    row, signature = part.row, part.signature
    if row is None or signature is None or row.saves or tuple(range(len(part.operands))) not in row.linear_in:
        return False
    same = all(t.dtype == part.result.dtype for t in part.operands)
    return same and all(f.role != "fixed" for f in signature.factors)


def _moved_back(part: Local) -> tuple[Work, ...]:
    """Return the backward of an operator that only moves elements: a view, a pass (larger operand) or a sum."""
    works: list[Work] = []
    if part.written == "part":
        return (_work(part, "copy", 2 * part.result.num_bytes),) if part.trained else ()
    for t in part.trained:
        if part.row is not None and part.row.view and t.num_elements > part.result.num_elements:
            works.append(_work(part, "copy", t.num_bytes + 2 * part.result.num_bytes))  # zeros, then one part
        elif t.num_elements >= part.result.num_elements or not _is_broadcast(part, t):
            works.append(_view(part))
    return (*works, *_broadcast_sums(part))


def _broadcast_sums(part: Local) -> tuple[Work, ...]:
    """Return the sums that are the gradients of broadcast operands."""
    gradient = part.result.num_bytes
    return tuple(_work(part, "reduction", gradient + t.num_bytes) for t in part.trained if _is_broadcast(part, t))


def _is_broadcast(part: Local, operand: TensorType) -> bool:
    """Return whether a factor of the result is not in an operand, as in an addition of a bias or an expansion."""
    if part.signature is None:
        return False
    dims = part.signature.operands[part.operands.index(operand)]
    mine = {f for dim in dims for f in dim}
    return any(
        f not in mine and part.extents[f] > 1 and part.signature.factors[f].role == "map"
        for dim in part.signature.result for f in dim
    )  # fmt: skip


def _lookup(part: Local) -> Passes:
    """Return a kernel that reads only the rows it returns; the table's gradient is zeros to which rows are added."""
    index = _bytes(part.operands[1:])
    returned = part.result.num_bytes
    forward = _work(part, "lookup", min(part.operands[0].num_bytes, returned) + returned + index)
    return _both(part, forward, _work(part, "lookup", part.operands[0].num_bytes + 3 * returned + index))


def _random(part: Local) -> Passes:
    """Return the draw of a mask, one byte an element, of the part or the whole, and the pass that applies it."""
    assert part.row is not None
    drawn, local = part.drawn, part.result.num_elements
    moved = _bytes(part.operands) + part.result.num_bytes
    draw = Work("random", (drawn,), part.row.flops_per_element * drawn, drawn + local + moved, part.dtype)
    return _both(part, draw, _work(part, "pointwise", moved + local))


def _with_scratch(part: Local) -> Passes:
    """Return the kernels of a loss that picks from log-probabilities.

    Backward fills the gradient of the log-probabilities with zeros and writes the operand's. They run in fp32: autocast
    requires it, and models that run in 16 bits widen their logits themselves. Narrower operands are cast.
    """
    operand = part.operands[0]
    wide, narrow = 4.0 * operand.num_elements, operand.num_bytes
    cast = (_work(part, "copy", narrow + wide),) if narrow < wide else ()
    forward = (*cast, _work(part, "reduction", 2 * wide, part.row.flops_per_element if part.row else 1.0))
    if not operand.grad:
        return Passes(forward)
    return Passes(forward, (_work(part, "copy", wide), _work(part, "reduction", 3 * wide), *cast))


def _both(part: Local, forward: Work, *backward: Work) -> Passes:
    """Return a forward kernel, and backward's kernels if an operand gets a gradient."""
    return Passes((forward,), backward if part.trained else ())


def _view(part: Local) -> Work:
    return Work("view", (part.result.num_elements,), 0.0, 0.0, part.dtype)


def _foreign(part: Local) -> Passes:
    """Return the work of a foreign call, all with its first result: as torch counted it, its backward twice forward.

    Products that torch counted are taken for one with sides of equal length.
    """
    if part.attrs["result"] != 0:
        return Passes()
    call = parsed(str(part.attrs["call"]))
    num_bytes = _bytes((*part.operands, part.result))
    share = part.result.num_elements / max(prod(call.results[0].held[0]), 1)  # of the batch, if it is row by row

    def work(passes: int) -> Work:
        times = passes * share
        side = max(1, round((call.flops / 2) ** (1 / 3)))
        work = Work("matmul", (1, side, side, side), 0.0, passes * num_bytes, part.dtype)
        work = work if call.flops else _work(part, "pointwise", passes * num_bytes)
        work = replace(work, flops=times * call.flops or passes * work.flops)
        return Timed(*astuple(work), device=call.device, seconds=times * call.seconds) if call.seconds else work

    return Passes((work(1),), (work(2),) if part.result.grad else ())


def _work(part: Local, kind: WorkKind, num_bytes: float, flops_per_element: float = 1.0) -> Work:
    largest = max((t.num_elements for t in (*part.operands, part.result)), default=1)
    if kind == "lookup":
        largest = part.result.num_elements
    return Work(kind, (largest,), 0.0 if kind == "copy" else flops_per_element * largest, num_bytes, part.dtype)


def _bytes(tensors: Sequence[TensorType]) -> float:
    return float(sum(t.num_bytes for t in tensors))


def _saved_bytes(part: Local) -> float:
    """Return the bytes kept by forward that backward reads."""
    saves = part.row.saves if part.row is not None else (*range(len(part.operands)), "result")
    total = 0.0
    for item in saves:
        if item == "result":
            total += part.result.num_bytes
        elif part.row is not None and item in BESIDE:
            total += part.row.beside_bytes(item, part.shapes, part.dtype)
        elif int(item) < len(part.operands):
            total += part.operands[int(item)].num_bytes
    return total
