"""Fingerprint arithmetic: every operator of the rules on elements that are tuples of residues.

A chain of primes p > q > r, each twice the next and one, holds one real number x as (x mod p, x mod q, x mod r). Sums
and products act on each part. The exponential takes part i + 1 into part i, so that exp(x + y) = exp(x) · exp(y) holds
exactly, except for the last part of its result, which has no next part to take an exponential of. That part is a
function without laws of the part before, so that equal arguments still give equal results. The logarithm takes part i
into part i + 1; its first part is without laws likewise. (Wu et al., Mirage, 2024, verify exponentials with a pair of
fields.)

Arrays have a leading batch axis, of terms or of devices, before the tensor's own dimensions. An index tensor has one
part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from shardwright.pcg.errors import GraphError
from shardwright.substitutions.generator.modular import Array, Ring, ring

Parts = tuple[Array, ...]
CHAINS = ((2029439, 1014719, 507359), (2297759, 1148879, 574439))
"""Cunningham chains; every prime but the last is 7 modulo 8."""


@dataclass(frozen=True)
class Constant:
    """A real attribute (an ε, a scale), as its residues."""

    parts: tuple[int, ...]


RealAttribute = Constant | int | float
_REALS = ("eps", "scale", "label_smoothing")


class Field:
    """The arithmetic of one chain of primes."""

    def __init__(self, chain: Sequence[int] = CHAINS[0]) -> None:
        self.rings: tuple[Ring, ...] = tuple(ring(p) for p in chain)

    def random(self, rng: np.random.Generator, shape: Sequence[int], parts: int = 1) -> Parts:
        """Return a batch of one random tensor without zeros."""
        return tuple(rng.integers(1, r.p, (1, *shape), np.int64) for r in self.rings[:parts])

    def constant(self, rng: np.random.Generator) -> Constant:
        """Return a random real attribute."""
        return Constant(tuple(int(rng.integers(1, r.p)) for r in self.rings))

    def number(self, value: RealAttribute, part: int) -> int:
        """Return a real attribute in one ring."""
        if isinstance(value, Constant):
            return value.parts[part]
        fraction = Fraction(value).limit_denominator(10**6)
        return self.rings[part].number(fraction.numerator, fraction.denominator)

    def numbers(self, attrs: Mapping[str, Any], part: int) -> dict[str, Any]:
        """Return the attributes, with real ones in one ring."""
        return {
            key: self.number(value, part) if key in _REALS and value is not None else value
            for key, value in attrs.items()
        }

    def evaluate(self, op: str, operands: Sequence[Parts], attrs: Mapping[str, Any]) -> Parts:
        """Return the operator's result on a batch. Raises `KeyError` for an operator without stand-in."""
        return OPERATORS[op](self, *operands, **attrs)


ResidueOperator = Callable[..., Parts]


def _each(function: Callable[..., Array]) -> ResidueOperator:
    """Return an operator that acts on each part: function(ring, *arrays, **attrs), real attributes in that ring."""

    def operator(field: Field, *operands: Parts, **attrs: Any) -> Parts:
        known = min(map(len, operands))
        return tuple(
            function(field.rings[i], *(x[i] for x in operands), **(field.numbers(attrs, i) if attrs else {}))
            for i in range(known)
        )

    return operator


def _moved(function: Callable[..., Array]) -> ResidueOperator:
    """Return an operator that only moves elements, of index tensors too."""
    return _each(lambda ring, *arrays, **attrs: function(*arrays, **attrs))


def aligned(*arrays: Array) -> list[Array]:
    """Return the arrays with dimensions aligned at the end, as broadcasting does; the batch axis stays first."""
    rank = max(x.ndim for x in arrays)
    return [x.reshape(x.shape[:1] + (1,) * (rank - x.ndim) + x.shape[1:]) for x in arrays]


# ---- pointwise ----


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[Ring, Array, Array], Array]:
    return lambda ring, x, y: ring.reduce(function(*aligned(x, y)))


_add, _sub, _mul = map(_binary, (np.add, np.subtract, np.multiply))


def _div(ring: Ring, x: Array, y: Array) -> Array:
    return _mul(ring, x, ring.inverse(y))


def _neg(ring: Ring, x: Array) -> Array:
    return ring.reduce(-x)


def _exp(field: Field, x: Parts) -> Parts:
    parts = [field.rings[i].exponential(part) for i, part in enumerate(x[1:])]
    last = len(x) - 1
    return (*parts, field.rings[last].positive(parts[-1] if parts else x[0], 1))


def _log(field: Field, x: Parts) -> Parts:
    below = [r.logarithm(part) for r, part in zip(field.rings, x[:-1], strict=False)]
    return (field.rings[0].hashed(x[0], 2), *below)


def _sigmoid(field: Field, x: Parts) -> Parts:
    """Return 1 / (1 + exp(-x))."""
    return _each(lambda ring, e: ring.inverse(ring.reduce(e + 1)))(field, _exp(field, _each(_neg)(field, x)))


def _tanh(field: Field, x: Parts) -> Parts:
    """Return 2 / (1 + exp(-2x)) - 1."""
    s = _sigmoid(field, _each(_add)(field, x, x))
    return _each(lambda ring, part: ring.reduce(2 * part - 1))(field, s)


def _silu(field: Field, x: Parts) -> Parts:
    return _each(_mul)(field, x, _sigmoid(field, x))


def _gelu(ring: Ring, x: Array, approximate: str = "none") -> Array:
    """Return x (1 + f(x)) / 2 with a fixed odd f."""
    return ring.reduce(ring.reduce(x * (1 + ring.odd(x, 3 if approximate == "none" else 4))) * ring.number(1, 2))


# ---- reductions and norms ----


def _after_batch(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d + 1 for d in dims)


def _sum(ring: Ring, x: Array, dims: Sequence[int], keepdim: bool) -> Array:
    return ring.reduce(x.sum(_after_batch(dims), keepdims=keepdim))


def _mean(ring: Ring, x: Array, dims: Sequence[int]) -> Array:
    count = int(np.prod([x.shape[d + 1] for d in dims]))
    return ring.reduce(_sum(ring, x, dims, True) * ring.number(1, count))


def _softmax(field: Field, x: Parts, dim: int) -> Parts:
    return _each(lambda ring, e: _div(ring, e, _sum(ring, e, (dim,), True)))(field, _exp(field, x))


def _log_softmax(field: Field, x: Parts, dim: int) -> Parts:
    total = _each(_sum)(field, _exp(field, x), dims=(dim,), keepdim=True)
    return _each(_sub)(field, x, _log(field, total))


def _trailing(x: Array, normalized_dims: int) -> range:
    return range(x.ndim - 1 - normalized_dims, x.ndim - 1)


def _rms_norm(ring: Ring, x: Array, *affine: Array, normalized_dims: int, eps: int) -> Array:
    """Return x / sqrt(mean(x²) + ε), then times and plus the affine operands."""
    square = _mean(ring, ring.reduce(x * x), _trailing(x, normalized_dims))
    y = _div(ring, x, ring.root(ring.reduce(square + eps)))
    for op, operand in zip((_mul, _add), affine, strict=False):
        y = op(ring, y, operand)
    return y


def _layer_norm(ring: Ring, x: Array, *affine: Array, normalized_dims: int, eps: int) -> Array:
    centred = ring.reduce(x - _mean(ring, x, _trailing(x, normalized_dims)))
    return _rms_norm(ring, centred, *affine, normalized_dims=normalized_dims, eps=eps)


# ---- contractions ----


def _linear(ring: Ring, x: Array, w: Array) -> Array:
    y = ring.matmul(x.reshape(x.shape[0], -1, x.shape[-1]), w.swapaxes(1, 2))
    return y.reshape(len(y), *x.shape[1:-1], w.shape[1])


def _matmul(ring: Ring, x: Array, y: Array) -> Array:
    if min(x.ndim, y.ndim) < 3:
        raise GraphError(f"matmul of ranks {x.ndim - 1} and {y.ndim - 1}; the IR has none of vectors")
    return ring.matmul(*aligned(x, y))


def _conv2d(
    ring: Ring, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Array:
    x = np.pad(x, [(0, 0)] * 3 + [(n, n) for n in padding])
    reach = [d * (k - 1) + 1 for k, d in zip(w.shape[-2:], dilation, strict=True)]
    v = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(3, 4))
    v = v[:, :, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    n, b, _, height, width, kh, kw = v.shape
    v = v.reshape(n, b, groups, -1, height, width, kh, kw).transpose(0, 2, 1, 4, 5, 3, 6, 7)
    w = w.reshape(w.shape[0], groups, w.shape[1] // groups, -1)
    y = ring.matmul(v.reshape(n, groups, b * height * width, -1), w.swapaxes(2, 3))
    return (
        y.reshape(len(y), groups, b, height, width, -1)
        .transpose(0, 2, 1, 5, 3, 4)
        .reshape(len(y), b, -1, height, width)
    )


def _scores(ring: Ring, q: Array, k: Array, scale: int | None) -> Array:
    """Return q kᵀ · scale, by default over the root of the size of a head."""
    factor = int(ring.inverse(ring.root(np.array(q.shape[-1])))) if scale is None else scale
    return ring.reduce(ring.matmul(q, k.swapaxes(-1, -2)) * factor)


def _sdpa(field: Field, q: Parts, k: Parts, v: Parts, *mask: Parts, causal: bool, scale: RealAttribute | None) -> Parts:
    """Return softmax(q kᵀ · scale + mask) v; query heads share key heads in equal groups."""
    if min(q[0].ndim, k[0].ndim, v[0].ndim) < 4:
        raise GraphError("sdpa needs a dimension of heads")
    repeat = q[0].shape[-3] // k[0].shape[-3]
    keys, values = (tuple(np.repeat(part, repeat, -3) for part in parts) for parts in (k, v))
    scores = _each(_scores)(field, q, keys, scale=scale)
    for m in mask:
        scores = _each(_add)(field, scores, m)
    weights = _exp(field, scores)
    if causal:
        weights = tuple(map(np.tril, weights))
    shares = _each(lambda ring, e: _div(ring, e, ring.reduce(e.sum(-1, keepdims=True))))(field, weights)
    return _each(Ring.matmul)(field, shares, values)


# ---- lookups ----


def _batched(w: Array, index: Array) -> tuple[Array, Array, Array]:
    """Return table and index of one batch size, and the batch's own positions."""
    n = max(len(w), len(index))
    w, index = (x if len(x) == n else np.broadcast_to(x, (n, *x.shape[1:])) for x in (w, index))
    return w, index, np.arange(n).reshape(-1, *(1,) * (index.ndim - 1))


def _embedding(field: Field, w: Parts, index: Parts, padding_idx: object = None, offset: int = 0) -> Parts:
    """Return rows of w; indices outside this table's rows give zeros."""

    def part(ring: Ring, w: Array) -> Array:
        w, at, batch = _batched(w, index[0] - offset)
        inside = (at >= 0) & (at < w.shape[1])
        return np.where(inside[..., None], w[batch, np.clip(at, 0, w.shape[1] - 1)], 0)

    return _each(part)(field, w)


def _gather(field: Field, x: Parts, index: Parts, dim: int) -> Parts:
    def part(ring: Ring, x: Array) -> Array:
        x, at, _ = _batched(x, index[0])
        cut = tuple(slice(None) if i in (0, dim + 1) else slice(n) for i, n in enumerate(at.shape))
        return np.take_along_axis(x[cut], at, dim + 1)

    return _each(part)(field, x)


def _cross_entropy_sum(
    field: Field, logits: Parts, target: Parts, ignore_index: object, label_smoothing: RealAttribute
) -> Parts:
    """Return Σ log Σ exp(x) - (1 - s) x[target] - s mean(x); no target is the ignored one."""
    dim = 1 if target[0].ndim > 1 else 0
    logp = _log_softmax(field, logits, dim)
    picked = _gather(field, logp, (np.expand_dims(target[0], dim + 1),), dim)

    def loss(ring: Ring, one: Array, every: Array, label_smoothing: int) -> Array:
        mean = _mean(ring, every, (dim,))
        lost = ring.reduce(-(1 - label_smoothing) * one) - ring.reduce(label_smoothing * mean)
        return ring.reduce(lost.reshape(len(lost), -1).sum(1))

    return _each(loss)(field, picked, logp, label_smoothing=label_smoothing)


# ---- movement ----


def _slice(x: Array, dim: int, start: int, stop: int, step: int) -> Array:
    return x[(slice(None),) * (dim + 1) + (slice(start, stop, step),)]


def _concat(*arrays: Array, dim: int) -> Array:
    n = max(map(len, arrays))
    return np.concatenate([np.broadcast_to(x, (n, *x.shape[1:])) for x in arrays], dim + 1)


OPERATORS: Mapping[str, ResidueOperator] = {
    "add": _each(_add),
    "sub": _each(_sub),
    "mul": _each(_mul),
    "div": _each(_div),
    "neg": _each(_neg),
    "abs": _each(Ring.absolute),
    "relu": _each(Ring.relu),
    "sqrt": _each(Ring.root),
    "rsqrt": _each(lambda ring, x: ring.inverse(ring.root(x))),
    "reciprocal": _each(Ring.inverse),
    "exp": _exp,
    "log": _log,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "silu": _silu,
    "gelu": _each(_gelu),
    "sum": _each(_sum),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "layer_norm": _each(_layer_norm),
    "rms_norm": _each(_rms_norm),
    "linear": _each(_linear),
    "matmul": _each(_matmul),
    "conv2d": _each(_conv2d),
    "sdpa": _sdpa,
    "embedding": _embedding,
    "gather": _gather,
    "cross_entropy_sum": _cross_entropy_sum,
    "reshape": _moved(lambda x, shape: x.reshape(len(x), *shape)),
    "permute": _moved(lambda x, dims: x.transpose(0, *_after_batch(dims))),
    "slice": _moved(_slice),
    "concat": _moved(_concat),
}
"""The operators that fingerprints know: f(field, *operands, **attrs). Dimensions count without the batch axis."""
