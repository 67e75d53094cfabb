"""The op table: one row per operator, the single source for importer, inference, rules, prover, cost and lowering.

A row holds the operator's factor string, its reference semantics in NumPy, the torch expression that a lowered program
uses, and what the cost model needs. Rows live in `pcg/rows/`, one file per topic; `ROWS` gathers them.
The four parallel operators and the leaves (`input`, `parameter`, …) are not rows: see `pcg/parallel.py`, `pcg/node.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar, overload

import numpy as np

from shardwright.pcg.attrs import Attr, Attrs
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape, Signature, resolve
from shardwright.pcg.types import is_float, promote

T = TypeVar("T")
FactorRule = str | Callable[[Sequence[Shape], Attrs], tuple[str, Mapping[str, int]]]


@dataclass(frozen=True, slots=True)
class LocalShapes:
    """Global and local shapes around one operator, from which a device's attributes follow."""

    operands: tuple[Shape, ...]
    result: Shape
    local_operands: tuple[Shape, ...]
    local_result: Shape


def keep_attrs(attrs: Attrs, shapes: LocalShapes) -> Attrs:
    """Most operators do the same on every device."""
    return attrs


def local_result_shape(attrs: Attrs, shapes: LocalShapes) -> Attrs:
    """For operators whose attribute `shape` is the shape of their result."""
    return {**attrs, "shape": shapes.local_result}


@dataclass(frozen=True, slots=True)
class Row:
    """One operator.

    factors       factor string, or a function of (operand shapes, attrs) that gives one and the sizes it leaves open
    numpy         reference semantics: f(*arrays, **attrs) -> array
    torch         the expression of a lowered program: `{0}`, `{1}` are operands, `{name}` attributes, `{*}` all
    dtype         the result's dtype from the operands' dtypes and attrs; None: promote the operands
    linear_in     sets of operands in which the operator is jointly linear: those may be `P` together, giving `P`
    localize      the attributes on one device
    offset        a factor whose split makes the local operator need the device's `offset` along it
    random        draws from the generator; the local operator draws the global mask and takes its `shard`
    view          moves no data
    saves         what backward keeps: operand indices, "result" or "mask" (one byte an element)
    joint         backward is one kernel that takes all of `saves`, whichever operand gets a gradient
    contraction   multiply-adds over the iteration space: 2 FLOPs a point and pass (else `flops_per_element` each)
    outside       factors that a contraction does not iterate over
    lookup        picks entries of its first operand by indices: its work is what it returns, not the table
    scratch       forward writes a tensor of its first operand's shape in fp32, which backward reads
    """

    name: str
    factors: FactorRule
    numpy: Callable[..., np.ndarray]
    torch: str
    dtype: Callable[[Sequence[str], Attrs], str] | None = None
    linear_in: tuple[tuple[int, ...], ...] = ()
    localize: Callable[[Attrs, LocalShapes], Attrs] = keep_attrs
    offset: str | None = None
    random: bool = False
    view: bool = False
    saves: tuple[int | str, ...] = ()
    joint: bool = False
    contraction: bool = False
    outside: tuple[str, ...] = ()
    lookup: bool = False
    scratch: bool = False
    passes: int = 1
    flops_per_element: float = 1.0
    doc: str = ""

    def signature(self, shapes: Sequence[Shape], attrs: Attrs) -> Signature:
        """The factor string resolved for operands of these shapes; `GraphError` where they do not fit."""
        if isinstance(self.factors, str):
            return resolve(self.factors, shapes)
        text, sizes = self.factors(shapes, attrs)
        return resolve(text, shapes, sizes)

    def partial_sets(self, dtypes: Sequence[str], attrs: Attrs) -> tuple[tuple[int, ...], ...]:
        """The sets of `linear_in` that hold for operands of these dtypes.

        Partial sums are of numbers, and rounding to integers is not linear: a cast from float to integer has no set.
        """
        result = self.result_dtype(dtypes, attrs)
        return tuple(s for s in self.linear_in if all(_linear_into(dtypes[i], result) for i in s))

    def result_dtype(self, dtypes: Sequence[str], attrs: Attrs) -> str:
        return self.dtype(dtypes, attrs) if self.dtype else promote(*dtypes)

    def flops(self, signature: Signature) -> float:
        """Floating-point operations of the forward pass over the logical tensors."""
        if self.contraction:
            return 2.0 * self.passes * prod(f.size for f in signature.factors if f.name not in self.outside)
        if self.view:
            return 0.0
        if self.lookup:
            return float(prod(signature.result_shape))
        largest = max((prod(f.size for f in signature.factors if f.role != "fixed"), prod(signature.result_shape)))
        return self.flops_per_element * largest


def _linear_into(operand: str, result: str) -> bool:
    return "bool" not in (operand, result) and (is_float(result) or not is_float(operand))


def numpy_dtype(name: str) -> str:
    """The dtype in which NumPy stands in for `name`: it has no bfloat16."""
    return "float32" if name == "bfloat16" else name


def no_grad_dtype(name: str) -> Callable[[Sequence[str], Attrs], str]:
    """A dtype rule for operators that always give `name`."""
    return lambda dtypes, attrs: name


def attr_dtype(dtypes: Sequence[str], attrs: Attrs) -> str:
    """A dtype rule for operators that carry it as the attribute `dtype`."""
    return str(attrs["dtype"])


def float_dtype(dtypes: Sequence[str], attrs: Attrs) -> str:
    """Integers become float32, as true division and the transcendental functions do."""
    dtype = promote(*dtypes)
    return dtype if is_float(dtype) else "float32"


def count_dtype(dtypes: Sequence[str], attrs: Attrs) -> str:
    """Sums of booleans and small integers count in int64."""
    dtype = promote(*dtypes)
    return dtype if is_float(dtype) else "int64"


class Table(Mapping[str, Row]):
    """The rows by name. Unknown names raise a `GraphError` that says what to do."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows: dict[str, Row] = {}
        for row in rows:
            if row.name in self._rows:
                raise GraphError(f"op table: two rows are called {row.name!r}")
            self._rows[row.name] = row

    def __getitem__(self, name: str) -> Row:
        if name not in self._rows:
            raise GraphError(f"operator {name!r} has no row in the op table; add one to pcg/rows or fix the name")
        return self._rows[name]

    @overload
    def get(self, key: str, /) -> Row | None: ...

    @overload
    def get(self, key: str, /, default: Row | T) -> Row | T: ...

    def get(self, key: str, /, default: Row | T | None = None) -> Row | T | None:
        """The row of that name, or `default`: leaves, parallel and opaque operators have none."""
        return self._rows.get(key, default)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _gather() -> Table:
    from shardwright.pcg.rows import contractions, indexing, neural, pointwise, reductions, structural

    modules = (pointwise, structural, reductions, contractions, indexing, neural)
    return Table([row for module in modules for row in module.ROWS])


ROWS: Table = _gather()

__all__ = [
    "ROWS",
    "Attr",
    "Attrs",
    "LocalShapes",
    "Row",
    "Table",
    "attr_dtype",
    "count_dtype",
    "float_dtype",
    "keep_attrs",
    "local_result_shape",
    "no_grad_dtype",
    "numpy_dtype",
]
