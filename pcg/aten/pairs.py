"""A complex value as a pair of real ones, and as one tensor of both.

unpacked(x)  ──▶  Pair(x[..., 0], x[..., 1])        packed(pair)  ──▶  x, or both parts in a last dimension
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwright.pcg.aten.structure import reshape, select
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError


@dataclass(frozen=True, slots=True)
class Pair:
    """The names of the real and of the imaginary part of a complex value; of the tensor of both, if it is known."""

    real: str
    imag: str
    whole: str = field(default="", compare=False)


Value = Pair | str


def pair_of(b: GraphBuilder, value: Any) -> Pair:
    """Return a value, real or complex, as a pair."""
    if isinstance(value, Pair):
        return value
    if isinstance(value, str):
        return Pair(value, b.op("full", shape=b.shape(value), value=0.0, dtype=b.types[value].dtype))
    raise GraphError(f"expected a tensor, got {value!r}")


def packed(b: GraphBuilder, x: Pair) -> str:
    """Return both parts in a last dimension."""
    if x.whole:
        return x.whole
    if (terms := _terms(b, x)) is not None:
        old, term = terms
        real, imag = (reshape(b, part, (*b.shape(part), 1)) for part in (term.real, term.imag))
        is_real = b.op("eq", b.op("arange", start=0, stop=2, step=1, dtype="int64"), 0)
        return b.op("add", old.whole, b.op("where", is_real, real, imag))  # unlike `concat`, it keeps partial sums
    parts = (reshape(b, part, (*b.shape(part), 1)) for part in (x.real, x.imag))
    return b.op("concat", *parts, dim=len(b.shape(x.real)))


def _terms(b: GraphBuilder, x: Pair) -> tuple[Pair, Pair] | None:
    """Return both terms of a sum whose first term is a buffer, so that it is added to as one tensor, as others are."""
    real, imag = b.nodes[x.real], b.nodes[x.imag]
    if (real.op, imag.op) != ("add", "add"):
        return None
    part = real.inputs[0]
    while b.nodes[part].op in ("slice", "reshape"):
        part = b.nodes[part].inputs[0]
    own = unpacked(b, part) if b.nodes[part].op == "buffer" and b.nodes[part].is_complex else None
    if own is None or (own.real, own.imag) != (real.inputs[0], imag.inputs[0]):
        return None
    return own, Pair(real.inputs[1], imag.inputs[1])


def unpacked(b: GraphBuilder, x: str) -> Pair:
    """Return the parts in a last dimension as a pair."""
    return Pair(*(select(b, x, -1, part) for part in (0, 1)), whole=x)
