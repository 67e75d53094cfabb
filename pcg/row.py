"""The rows of the op table, and rules that rows share: dtypes of results, attributes on a device.

A row holds all that importer, inference, rules, prover, search, cost and lowering know of an operator: its factor
string, its reference semantics in NumPy, the torch expression of a lowered program, and its facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from shardwright.pcg.attrs import Attr, Attrs
from shardwright.pcg.factors import Shape, Signature, resolve
from shardwright.pcg.types import ITEM_BYTES, is_float, promote

Autocast = Literal["", "low", "wide", "widest"]
FactorRule = str | Callable[[Sequence[Shape], Attrs], tuple[str, Mapping[str, int]]]


@dataclass(frozen=True, slots=True)
class LocalShapes:
    """Global and local shapes around one operator, from which a device's attributes follow.

    `senders`: how many devices, this one included, send it their part of an operand, such as rows for its experts.
    """

    operands: tuple[Shape, ...]
    result: Shape
    local_operands: tuple[Shape, ...]
    local_result: Shape
    senders: float = 1

    @classmethod
    def whole(cls, signature: Signature) -> LocalShapes:
        """Return the shapes of an operator that one device runs by itself."""
        operands = tuple(map(signature.shape_of, signature.operands))
        return cls(operands, signature.result_shape, operands, signature.result_shape)


def keep_attrs(attrs: Attrs, shapes: LocalShapes) -> Attrs:
    """Return the attributes unchanged: most operators do the same on every device."""
    return attrs


def local_result_shape(attrs: Attrs, shapes: LocalShapes) -> Attrs:
    """Return the attributes with the device's result shape, for operators that have it as `shape`."""
    return {**attrs, "shape": shapes.local_result}


class Product(NamedTuple):
    """`batch` products of matrices [m, k] · [k, n], the second of which are the operand `matrix`."""

    matrix: int
    batch: int
    m: float
    n: int
    k: int


BESIDE: Mapping[int | str, int] = {"mask": 1, "index": 8, "inside": 0, "log_sum": 0}
"""The memory of its own that an operator keeps, with the bytes for each element of its result.

`Row.inside` counts; of a log-sum-exp there is one number for each row of the result, in fp32 or wider.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """The facts of one operator.

    factors       factor string, or a function of (operand shapes, attrs) that gives one and the sizes it leaves open
    numpy         reference semantics: f(*arrays, **attrs) -> array
    torch         the expression of a lowered program: `{0}`, `{1}` are operands, `{name}` attributes, `{*}` all
    dtype         the result's dtype from the operands' dtypes and attrs; None: promote the operands
    numbers       operands of which one may be a Python number in the torch expression
    with_number   the torch expression with a Python number `{1}`, if it differs
    free          a value for each attribute on which no shape depends
    indexes       per operand of indices: the operand and its dimension that they point into; dimension -1 is the one
                  that the attribute `dim` names, or the last where there is no such attribute
    linear_in     sets of operands in which the operator is jointly linear: those may be `P` together, giving `P`
    localize      the attributes on one device
    offset        a factor whose split makes the local operator need the device's `offset` along it
    offset_at     the operand and its dimension that this factor is, where `factors` is a function; None: it is there
                  the dimension in which the result differs from the last operand
    spaced        with `offset`: a device's part of it may be evenly spaced; the local operator is then told the `step`
                  from each position to the next
    sends         operands whose rows may be sent to the device with the part of `offset` that they name; `torch`
                  is then a call with more arguments, which say where they are sent
    travels       operands of which devices may send each other their parts: the result over all parts is merged from
                  those over each. `torch` is then a call with one more argument, the axis that they travel along
    random        draws from the generator; the local operator draws the global mask and takes its `shard`
    view          moves no data
    passes_on     gives its operand itself if there is nothing to do
    fresh         its result is memory of its own that no backward reads: partial sums may be summed up in place
    moves         its result is elements of its operands, from places that no value decides; so are its gradients
    commutative   its operands can be exchanged
    differentiable  gradients go through it to its operands of floats
    rounds        does not give integers for integers
    saves         kept for backward: operand indices, "result", or memory beside them: `BESIDE`
    inside        the number of elements, in the dtype of its first operand, that it keeps `inside`
    joint         all of `saves` is kept, whichever operand gets a gradient
    contraction   multiply-adds over the iteration space: 2 FLOPs a point and pass (else `flops_per_element` each)
    uncounted     factors that a contraction does not iterate over
    products      the products that a contraction is made of, where it is not one over all its factors
    lookup        picks entries of its first operand by indices: its work is what it returns, not the table
    autocast      the dtype of its float operands in mixed precision: "low": 16 bits; "wide": at least fp32; "widest":
                  the widest of them; "": unchanged, the result is as wide as the widest (`pcg.precision`)
    scratch       forward writes a tensor of its first operand's shape in fp32, which backward reads
    """

    name: str
    factors: FactorRule
    numpy: Callable[..., np.ndarray]
    torch: str
    dtype: Callable[[Sequence[str], Attrs], str] | None = None
    numbers: tuple[int, ...] = ()
    with_number: str = ""
    free: Mapping[str, Attr] = field(default_factory=dict)
    indexes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    linear_in: tuple[tuple[int, ...], ...] = ()
    localize: Callable[[Attrs, LocalShapes], Attrs] = keep_attrs
    offset: str | None = None
    offset_at: tuple[int, int] | None = None
    spaced: bool = False
    sends: tuple[int, ...] = ()
    travels: tuple[int, ...] = ()
    random: bool = False
    view: bool = False
    passes_on: bool = False
    fresh: bool = False
    moves: bool = False
    commutative: bool = False
    differentiable: bool = True
    rounds: bool = False
    saves: tuple[int | str, ...] = ()
    joint: bool = False
    contraction: bool = False
    uncounted: tuple[str, ...] = ()
    products: Callable[[LocalShapes], Iterable[Product]] | None = None
    inside: Callable[[LocalShapes], float] | None = None
    lookup: bool = False
    scratch: bool = False
    autocast: Autocast = ""
    passes: int = 1
    flops_per_element: float = 1.0
    doc: str = ""

    @property
    def pointwise(self) -> bool:
        """Return whether it acts on each element of its operands alone, with broadcasting, in all shapes."""
        return isinstance(self.factors, str) and not set(self.factors) - set(". ,->")

    @property
    def aliases(self) -> bool:
        """Return whether its result may be its operand's own memory."""
        return self.view or self.passes_on

    @property
    def fresh_gradients(self) -> bool:
        """Return whether each operand's gradient is memory of its own, computed from values kept for backward."""
        return self.differentiable and bool(self.saves)

    def signature(self, shapes: Sequence[Shape], attrs: Attrs) -> Signature:
        """Return the factor string resolved for operands of these shapes; raise a `GraphError` if they do not fit."""
        if isinstance(self.factors, str):
            return resolve(self.factors, shapes)
        text, sizes = self.factors(shapes, attrs)
        return resolve(text, shapes, sizes)

    def partial_sets(self, dtypes: Sequence[str], attrs: Attrs) -> tuple[tuple[int, ...], ...]:
        """Return the sets of `linear_in` that hold for operands of these dtypes.

        Partial sums are of numbers, and rounding to integers is not linear: a cast from float to integer has no set.
        """
        result = self.result_dtype(dtypes, attrs)
        return tuple(s for s in self.linear_in if all(_linear_into(dtypes[i], result) for i in s))

    def result_dtype(self, dtypes: Sequence[str], attrs: Attrs) -> str:
        return self.dtype(dtypes, attrs) if self.dtype else promote(*dtypes)

    def beside_bytes(self, item: int | str, shapes: LocalShapes, dtype: str) -> float:
        """Return the bytes of an item of `saves`, if it is kept beside operands and result, computing in that dtype."""
        if item == "inside" and self.inside is not None:
            return ITEM_BYTES[dtype] * self.inside(shapes)
        if item == "log_sum":
            return max(ITEM_BYTES["float32"], ITEM_BYTES[dtype]) * float(prod(shapes.local_result[:-1]))
        return BESIDE.get(item, 0) * float(prod(shapes.local_result))

    def flops(self, signature: Signature) -> float:
        """Return the floating-point operations of the forward pass over the logical tensors."""
        if self.products is not None:
            shapes = LocalShapes.whole(signature)
            return sum(2.0 * x.batch * x.m * x.n * x.k for x in self.products(shapes))
        if self.contraction:
            return 2.0 * self.passes * prod(f.size for f in signature.factors if f.name not in self.uncounted)
        if self.view:
            return 0.0
        if self.lookup:
            return float(prod(signature.result_shape))
        largest = max((prod(f.size for f in signature.factors if f.role != "fixed"), prod(signature.result_shape)))
        return self.flops_per_element * largest


def _linear_into(operand: str, result: str) -> bool:
    return "bool" not in (operand, result) and (is_float(result) or not is_float(operand))


def numpy_dtype(name: str) -> str:
    """Return the dtype in which NumPy stands in for `name`: it has no bfloat16."""
    return "float32" if name == "bfloat16" else name


def no_grad_dtype(name: str) -> Callable[[Sequence[str], Attrs], str]:
    """Return a dtype rule for operators that always give `name`."""
    return lambda dtypes, attrs: name


def attr_dtype(dtypes: Sequence[str], attrs: Attrs) -> str:
    """Return the result's dtype for operators that carry it as the attribute `dtype`."""
    return str(attrs["dtype"])


def first_dtype(dtypes: Sequence[str], attrs: Attrs) -> str:
    """Return the result's dtype for operators that keep the dtype of their first operand."""
    return dtypes[0]


def float_dtype(dtypes: Sequence[str], attrs: Attrs) -> str:
    """Return the result's dtype; integers become float32, as in true division and transcendental functions."""
    dtype = promote(*dtypes)
    return dtype if is_float(dtype) else "float32"


def count_dtype(dtypes: Sequence[str], attrs: Attrs) -> str:
    """Return the result's dtype; sums of booleans and small integers count in int64."""
    dtype = promote(*dtypes)
    return dtype if is_float(dtype) else "int64"
