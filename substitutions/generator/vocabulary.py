"""The operators that are enumerated: their attributes on operands of given types, and the types of their results.

A type is a tensor's symbolic dimensions and, for an index tensor, the extent into which it indexes. Attributes are
printed in the rule language (`dim=len(b)`). Real attributes (`eps`, `scale`, …) and the strides of a convolution are
names that stand alone, so that a rule holds for all of them. A mean is a sum times a scalar variable, as the importer
writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.generator.symbolicdims import minus, plus, times

_MAX_RANK = 4
"""The most dimensions that a reshape makes."""
SymbolicDims = tuple[str, ...]
Attributes = tuple[tuple[str, Expression], ...]


class SymbolicType(NamedTuple):
    """Symbolic dimensions; `into` is the extent that an index tensor's values stay below."""

    dims: SymbolicDims
    into: str = ""


class RowUse(NamedTuple):
    """A row with its attributes, on operands of certain types. `number` is its own in an enumeration."""

    op: str
    attrs: Attributes
    result: SymbolicType
    number: int = -1


@dataclass(frozen=True)
class Reach:
    """The limits that a context sets to structural operators.

    cuts     dimension -> the (start, stop) that slices take of it
    splits   dimension -> the pairs of factors that a reshape splits it into, major first
    extents  the dimensions that results may have
    """

    cuts: Mapping[str, tuple[tuple[str, str], ...]]
    splits: Mapping[str, tuple[tuple[str, str], ...]]
    extents: frozenset[str]


Use = tuple[Attributes, SymbolicType]
"""A use of a row: its attributes, and the type of its result."""


@dataclass(frozen=True)
class RowWay:
    """A way of applying a row: the number of operands, and its uses on operands of given types.

    With `indices`, operands may be index tensors.
    """

    name: str
    arity: int
    uses_of: Callable[[Sequence[SymbolicType], Reach], Iterable[Use]]
    indices: bool = False

    def uses(self, types: Sequence[SymbolicType], reach: Reach) -> Iterator[RowUse]:
        if self.indices or not any(t.into for t in types):
            yield from (RowUse(self.name, *use) for use in self.uses_of(types, reach))


def attributes(**attrs: str) -> Attributes:
    """Return attributes from texts, in the order of terms."""
    return tuple((key, expression(attrs[key])) for key in sorted(attrs))


def position(dims: SymbolicDims, index: int) -> str:
    """Return the rule language's name of dimension `index`: `len(b)` after a splice `*b`."""
    splices = [f"len({d[1:]})" for d in dims[:index] if d.startswith("*")]
    plain = index - len(splices)
    return " + ".join([*splices, *([str(plain)] if plain or not splices else [])])


def plain(dims: SymbolicDims) -> list[int]:
    """Return the dimensions that are no splices."""
    return [i for i, d in enumerate(dims) if not d.startswith("*")]


# ---- pointwise ----


def pointwise(name: str, **attrs: str) -> RowWay:
    """Return a function of each element."""
    return RowWay(name, 1, lambda types, reach: [(attributes(**attrs), types[0])])


def broadcast(long: SymbolicDims, short: SymbolicDims) -> SymbolicDims | None:
    """Return the result's dims, `short` being aligned at the end of `long` as NumPy broadcasts; None if they clash."""
    if len(short) > len(long):
        return None
    lead, tail = long[: len(long) - len(short)], long[len(long) - len(short) :]
    if any(a != b and "1" not in (a, b) for a, b in zip(tail, short, strict=True)):
        return None
    return lead + tuple(b if a == "1" else a for a, b in zip(tail, short, strict=True))


def _binary(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    """Yield the use of a function of two elements, with broadcasting."""
    (x, _), (y, _) = types
    dims = broadcast(x, y) if len(x) >= len(y) else broadcast(y, x)
    if dims is not None:
        yield (), SymbolicType(dims)


# ---- contractions ----


def _linear(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    (x, _), (w, _) = types
    if x and len(w) == 2 and x[-1] == w[1] and len(plain(w)) == 2:
        yield (), SymbolicType((*x[:-1], w[0]))


def _matmul(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    """Yield a product's use, also with a splice before one dimension: the re-check finds that it may not be empty."""
    (x, _), (y, _) = types
    fits = len(x) >= 2 and len(plain(y[-2:])) == 2 and x[-1] == y[-2]
    if fits and (len(y) == 2 or (x[:-2] == y[:-2] and len(plain(x[-2:])) == 2)):
        yield (), SymbolicType((*x[:-1], y[-1]))


def _conv2d(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    """Yield the use with free strides, padding and dilation; `y` and `x` are the result's spatial sizes, only here."""
    (x, _), (w, _) = types
    if len(x) == len(w) == 4 and x[1] == w[1] and x[2:] == ("h", "w") and w[2:] == ("p", "q"):
        attrs = attributes(stride="stride", padding="padding", dilation="dilation", groups="1")
        yield attrs, SymbolicType((x[0], w[0], "y", "x"))


def _sdpa(causal: str) -> RowWay:
    def uses(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
        q, k, v = (t.dims for t in types)
        plains = all(len(d) >= 3 and len(plain(d[-2:])) == 2 for d in (q, k, v))
        if plains and q[:-2] == k[:-2] == v[:-2] and q[-1] == k[-1] and k[-2] == v[-2]:
            yield attributes(causal=causal, scale="scale"), SymbolicType((*q[:-1], v[-1]))

    return RowWay("sdpa", 3, uses)


# ---- reductions and norms ----


def _sum(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    x = types[0].dims
    for i in plain(x):
        yield attributes(dims=f"({position(x, i)},)", keepdim="False"), SymbolicType(x[:i] + x[i + 1 :])


def _sum_keep(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    x = types[0].dims
    if _ends_plain(x):
        yield attributes(dims=f"({position(x, len(x) - 1)},)", keepdim="True"), SymbolicType((*x[:-1], "1"))


def _ends_plain(dims: SymbolicDims) -> bool:
    """Return whether the last dimension is neither a splice nor of size 1."""
    return bool(plain(dims[-1:])) and dims[-1] != "1"


def _along(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    """Yield the uses of an operator along each plain dimension."""
    x = types[0].dims
    yield from ((attributes(dim=position(x, i)), types[0]) for i in plain(x) if x[i] != "1")


def _norm(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    """Yield the use of a norm over the last dimension, with up to two affine operands."""
    x = types[0].dims
    if _ends_plain(x) and all(t.dims == x[-1:] for t in types[1:]):
        yield attributes(eps="eps", normalized_dims="1"), types[0]


def _cross_entropy(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    (logits, _), target = types
    if len(plain(logits)) == len(logits) == 2 and target == SymbolicType(logits[:1], logits[1]):
        yield attributes(ignore_index="ignore", label_smoothing="smoothing"), SymbolicType(())


# ---- lookups ----


def _embedding(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    (w, _), (ids, into) = types
    if len(plain(w)) == len(w) == 2 and into == w[0] and not types[0].into:
        yield attributes(padding_idx="padding"), SymbolicType((*ids, w[1]))


# ---- movement ----


def _transpose(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    """Yield the swaps of two neighbouring plain dimensions."""
    x = types[0].dims
    for i in range(len(x) - 1):
        if len(plain(x[i : i + 2])) == 2:
            order = [*range(i), i + 1, i, *range(i + 2, len(x))]
            result = SymbolicType(tuple(x[j] for j in order), types[0].into)
            yield attributes(dims=f"({', '.join(_places(x, order))},)"), result


def _places(dims: SymbolicDims, order: Sequence[int]) -> list[str]:
    return [f"*iota({dims[i].replace('*', 'len(')}))" if dims[i].startswith("*") else position(dims, i) for i in order]


def _reshaped(x: SymbolicType, dims: SymbolicDims) -> Use:
    return attributes(shape=f"({', '.join(dims)},)"), SymbolicType(dims, x.into)


def _merge(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    """Yield the merges of two neighbouring plain dimensions."""
    x = types[0].dims
    for i in range(len(x) - 1):
        if len(plain(x[i : i + 2])) == 2:
            merged = times(x[i], x[i + 1])
            if merged in reach.extents:
                yield _reshaped(types[0], (*x[:i], merged, *x[i + 2 :]))


def _split(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    """Yield the splits of a dimension into two."""
    x = types[0].dims
    for i in plain(x) if len(x) < _MAX_RANK else ():
        for major, minor in reach.splits.get(x[i], ()):
            yield _reshaped(types[0], (*x[:i], major, minor, *x[i + 1 :]))


def _slice(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    x = types[0].dims
    for i in plain(x):
        for start, stop in reach.cuts.get(x[i], ()):
            attrs = attributes(dim=position(x, i), start=start, stop=stop, step="1")
            yield attrs, SymbolicType((*x[:i], minus(stop, start), *x[i + 1 :]), types[0].into)


def _concat(types: Sequence[SymbolicType], reach: Reach) -> Iterator[Use]:
    (x, into), (y, other) = types
    if len(x) != len(y) or into != other:
        return
    for i in plain(x):
        if len(plain(y[i : i + 1])) == 1 and x[:i] == y[:i] and x[i + 1 :] == y[i + 1 :]:
            joined = plus(x[i], y[i])
            if joined in reach.extents:
                yield attributes(dim=position(x, i)), SymbolicType((*x[:i], joined, *x[i + 1 :]), into)


VOCABULARY: Mapping[str, RowWay] = {
    **{name: pointwise(name) for name in ("neg", "relu", "exp", "sigmoid", "tanh", "silu")},
    "gelu": pointwise("gelu", approximate="'none'"),
    **{name: RowWay(name, 2, _binary) for name in ("add", "sub", "mul", "div")},
    "linear": RowWay("linear", 2, _linear),
    "matmul": RowWay("matmul", 2, _matmul),
    "conv2d": RowWay("conv2d", 2, _conv2d),
    "sdpa": _sdpa("False"),
    "causal_sdpa": _sdpa("True"),
    "sum": RowWay("sum", 1, _sum),
    "sum_keep": RowWay("sum", 1, _sum_keep),
    **{name: RowWay(name, 1, _along) for name in ("softmax", "log_softmax")},
    "layer_norm": RowWay("layer_norm", 1, _norm),
    "layer_norm_scaled": RowWay("layer_norm", 2, _norm),
    "layer_norm_affine": RowWay("layer_norm", 3, _norm),
    "rms_norm": RowWay("rms_norm", 1, _norm),
    "rms_norm_scaled": RowWay("rms_norm", 2, _norm),
    "cross_entropy": RowWay("cross_entropy_sum", 2, _cross_entropy, indices=True),
    "embedding": RowWay("embedding", 2, _embedding, indices=True),
    "transpose": RowWay("permute", 1, _transpose, indices=True),
    "merge": RowWay("reshape", 1, _merge, indices=True),
    "split": RowWay("reshape", 1, _split, indices=True),
    "slice": RowWay("slice", 1, _slice, indices=True),
    "concat": RowWay("concat", 2, _concat, indices=True),
}
"""Every way of applying a row, by the name that contexts use."""
