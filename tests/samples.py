"""Sample operands and attributes for every row of the op table.

`SAMPLES[row]` is a list of `Sample`s. Sizes are pairwise distinct within a sample, so that a test that mixes up two
dimensions fails, and divisible by 4 wherever the row's factor string lets them be split. `Sample.arrays(seed)` draws
the operands: float64 away from kinks and poles, int64 indices in range, bools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Rng = np.random.Generator
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """One operand: its logical shape, its dtype's name and how to draw it."""

    shape: Shape
    dtype: str
    make: Callable[[Rng, Shape], Array]


@dataclass(frozen=True)
class Sample:
    """One application of a row."""

    operands: tuple[Operand, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> list[Shape]:
        return [operand.shape for operand in self.operands]

    @property
    def dtypes(self) -> list[str]:
        return [operand.dtype for operand in self.operands]

    @property
    def differentiable(self) -> list[int]:
        return [i for i, operand in enumerate(self.operands) if operand.dtype == "float64"]

    def arrays(self, seed: int = 0) -> list[Array]:
        """The operands, drawn from `seed`."""
        rng = np.random.default_rng(seed)
        return [operand.make(rng, operand.shape).astype(operand.dtype) for operand in self.operands]


def real(*shape: int) -> Operand:
    """Normal values, none nearer to zero than 0.05."""

    def make(rng: Rng, shape: Shape) -> Array:
        x = rng.standard_normal(shape)
        return np.where(np.abs(x) < 0.05, 0.05 + np.abs(x), x)

    return Operand(shape, "float64", make)


def positive(*shape: int) -> Operand:
    """Values in [0.5, 2)."""
    return Operand(shape, "float64", lambda rng, shape: rng.uniform(0.5, 2.0, shape))


def share(*shape: int) -> Operand:
    """Values in [0.05, 0.95)."""
    return Operand(shape, "float64", lambda rng, shape: rng.uniform(0.05, 0.95, shape))


def spread(*shape: int) -> Operand:
    """Pairwise different values, at least 0.1 apart: no ties for sorts and maxima."""
    return Operand(
        shape, "float64", lambda rng, shape: (rng.permutation(int(np.prod(shape))) * 0.1 - 3.05).reshape(shape)
    )


def below(high: int, *shape: int) -> Operand:
    """Integers in [0, high)."""
    return Operand(shape, "int64", lambda rng, shape: rng.integers(0, high, shape))


def different(high: int, *shape: int) -> Operand:
    """Pairwise different integers in [0, high)."""
    return Operand(shape, "int64", lambda rng, shape: rng.permutation(high)[: int(np.prod(shape))].reshape(shape))


def nonzero(*shape: int) -> Operand:
    """Integers in [1, 9) of either sign."""
    return Operand(shape, "int64", lambda rng, shape: rng.integers(1, 9, shape) * rng.choice([-1, 1], shape))


def flags(*shape: int) -> Operand:
    """Booleans; the first of every row is true, so that no row is empty."""

    def make(rng: Rng, shape: Shape) -> Array:
        x = rng.random(shape) < 0.6
        if shape:
            x[..., 0] = True
        return x

    return Operand(shape, "bool", make)


def closed(*shape: int) -> Operand:
    """Booleans of which the first row has none that is true: a query that sees no key."""

    def make(rng: Rng, shape: Shape) -> Array:
        x = rng.random(shape) < 0.6
        x[..., 0] = True
        x[..., 0, :] = False
        return x

    return Operand(shape, "bool", make)


def ascending(last: int, num: int, *, first: int | None = None, dtype: str = "int64") -> Operand:
    """Non-decreasing integers that end at `last`, or, where `first` is given, begin at it and stay below `last`."""

    def make(rng: Rng, shape: Shape) -> Array:
        x = np.sort(rng.integers(0, last, shape))
        if first is None:
            x[-1] = last
        else:
            x[0] = first
        return x

    return Operand((num,), dtype, make)


def targets(num_classes: int, ignored: int, *shape: int) -> Operand:
    """Class ids, about a fifth of them `ignored`."""

    def make(rng: Rng, shape: Shape) -> Array:
        return np.where(rng.random(shape) < 0.2, ignored, rng.integers(0, num_classes, shape))

    return Operand(shape, "int64", make)


def sample(*operands: Operand, **attrs: Any) -> Sample:
    return Sample(operands, attrs)


def _unary(make: Callable[..., Operand], *names: str, **attrs: Any) -> dict[str, list[Sample]]:
    return {name: [sample(make(4, 8, 12), **attrs), sample(make(16), **attrs)] for name in names}


def _binary(left: Callable[..., Operand], right: Callable[..., Operand], *names: str) -> dict[str, list[Sample]]:
    return {
        name: [
            sample(left(4, 8, 12), right(4, 8, 12)),
            sample(left(4, 8, 12), right(12)),
            sample(left(8, 12), right(4, 1, 12)),
            sample(left(4, 8), right()),
            sample(left(), right(4, 8)),
        ]
        for name in names
    }


def _integers(*shape: int) -> Operand:
    return below(6, *shape)


POINTWISE: dict[str, list[Sample]] = {
    **_unary(real, "abs", "ceil", "cos", "erf", "exp", "floor", "neg", "reciprocal", "relu", "sigmoid", "sign", "silu"),
    **_unary(real, "sin", "softplus", "tanh", "detach", "expm1", "hardsigmoid", "hardswish", "mish", "round"),
    **_unary(positive, "digamma", "lgamma", "log", "log1p", "rsqrt", "sqrt"),
    **_unary(real, "i0e"),
    "erfinv": [sample(Operand((4, 8, 12), "float64", lambda rng, shape: rng.uniform(-0.9, 0.9, shape)))],
    **_unary(flags, "logical_not"),
    "gelu": [sample(real(4, 8, 12), approximate=kind) for kind in ("none", "tanh")],
    "cast": [
        sample(real(4, 8, 12), dtype="float32"),
        sample(flags(4, 8), dtype="float64"),
        sample(below(9, 4, 8), dtype="int32"),
    ],
    **_binary(real, real, "add", "sub", "mul", "div", "maximum", "minimum"),
    **_binary(positive, real, "pow"),
    **_binary(real, real, "atan2"),
    "binary_cross_entropy": [sample(share(4, 8, 12), share(4, 8, 12)), sample(share(16), share(16))],
    **_binary(nonzero, nonzero, "floor_divide", "remainder"),
    **_binary(_integers, _integers, "eq", "ne", "lt", "le", "gt", "ge"),
    **_binary(flags, flags, "bitwise_and", "bitwise_or"),
    "where": [
        sample(flags(4, 8, 12), real(4, 8, 12), real(4, 8, 12)),
        sample(flags(8, 1), real(4, 8, 12), real()),
        sample(flags(4, 1, 12), real(8, 12), real(12)),
    ],
}

STRUCTURAL: dict[str, list[Sample]] = {
    "reshape": [
        sample(real(4, 8, 12), shape=(32, 12)),
        sample(real(32, 12), shape=(4, 8, 12)),
        sample(real(4, 8, 96), shape=(4, 8, 12, 8)),
        sample(real(4, 1, 12), shape=(4, 12)),
        sample(real(4, 6, 10), shape=(4, 15, 4)),
    ],
    "permute": [sample(real(4, 8, 12), dims=(2, 0, 1)), sample(real(4, 8, 12, 16), dims=(0, 2, 1, 3))],
    "expand": [
        sample(real(4, 1, 12), shape=(4, 8, 12)),
        sample(real(8, 12), shape=(4, 8, 12)),
        sample(real(), shape=(4, 8)),
    ],
    "slice": [
        sample(real(4, 24, 12), dim=1, start=8, stop=16, step=1),
        sample(real(4, 24, 12), dim=1, start=3, stop=17, step=2),
        sample(real(4, 24, 12), dim=2, start=0, stop=11, step=1),
    ],
    "contiguous": [sample(real(4, 8, 12))],
    "concat": [
        sample(real(4, 8, 12), real(4, 8, 12), real(4, 8, 12), dim=1),
        sample(real(4, 8, 12), real(4, 5, 12), dim=1),
    ],
    "pad": [
        sample(real(4, 8, 12), pads=(0, 0, 1, 2, 0, 0), value=0.0),
        sample(real(4, 8, 12), pads=(0, 0, 3, 0, 0, 5), value=-1.5),
        sample(below(9, 4, 8), pads=(0, 0, 0, 1), value=-100),
    ],
    "flip": [sample(real(4, 8, 12), dims=(1,)), sample(real(4, 8, 12), dims=(0, 2))],
    "full": [
        sample(shape=(4, 8), value=2.5, dtype="float64"),
        sample(shape=(), value=-3, dtype="int64"),
        sample(shape=(8,), value=True, dtype="bool"),
        sample(shape=(4,), value=float("-inf"), dtype="float64"),
    ],
    "arange": [
        sample(start=0, stop=12, step=1, dtype="int64"),
        sample(start=3, stop=20, step=4, dtype="float64"),
    ],
}

REDUCTIONS: dict[str, list[Sample]] = {
    "sum": [
        sample(real(4, 8, 12), dims=(1,), keepdim=False),
        sample(real(4, 8, 12), dims=(0, 2), keepdim=True),
        sample(real(4, 8), dims=(0, 1), keepdim=False),
        sample(flags(4, 8), dims=(1,), keepdim=False),
    ],
    **{
        name: [sample(spread(4, 8, 12), dims=(1,), keepdim=False), sample(spread(4, 8, 12), dims=(0, 2), keepdim=True)]
        for name in ("amax", "amin")
    },
    **{
        name: [sample(flags(4, 8, 12), dims=(1,), keepdim=False), sample(flags(4, 8, 12), dims=(2,), keepdim=True)]
        for name in ("any", "all")
    },
    "argmax": [sample(spread(4, 8, 12), dims=(1,), keepdim=False), sample(spread(4, 8, 12), dims=(2,), keepdim=True)],
    **{name: [sample(real(4, 8, 12), dim=d) for d in (1, 2)] for name in ("softmax", "log_softmax")},
    "logcumsumexp": [sample(real(4, 8, 12), dim=d) for d in (1, 2)],
    "cumsum": [sample(real(4, 8, 12), dim=1, dtype="float64"), sample(flags(4, 8), dim=1, dtype="int64")],
    **{
        name: [sample(spread(4, 8, 12), dim=d, descending=down) for d, down in ((1, False), (2, True))]
        for name in ("sort_values", "sort_indices")
    },
    **{name: [sample(spread(4, 8, 12), k=3, dim=d) for d in (1, 2)] for name in ("topk_values", "topk_indices")},
    "histc": [
        sample(Operand((40,), "float64", lambda rng, shape: rng.integers(0, 6, shape) + 0.3), bins=7, low=0, high=6),
        sample(Operand((40,), "float32", lambda rng, shape: rng.integers(0, 7, shape)), bins=7, low=0, high=6),
    ],
}

CONTRACTIONS: dict[str, list[Sample]] = {
    "linear": [sample(real(4, 8, 12), real(16, 12)), sample(real(8, 12), real(16, 12)), sample(real(12), real(16, 12))],
    "matmul": [
        sample(real(8, 12), real(12, 16)),
        sample(real(4, 8, 12), real(4, 12, 16)),
        sample(real(4, 20, 8, 12), real(20, 12, 16)),
        sample(real(4, 1, 8, 12), real(4, 20, 12, 16)),
    ],
    "conv2d": [
        sample(real(4, 12, 7, 9), real(16, 12, 3, 2), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1),
        sample(real(4, 96, 7, 9), real(128, 12, 3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=8),
    ],
    "conv3d": [
        sample(
            real(4, 24, 4, 5, 3),
            real(16, 12, 3, 2, 1),
            stride=(2, 1, 1),
            padding=(1, 0, 1),
            dilation=(1, 2, 1),
            groups=2,
        ),
    ],
    "expert_linear": [
        sample(real(4, 8, 12), real(20, 12, 16), below(20, 4, 8), offset=0),
        sample(real(8, 1, 12), real(20, 12, 16), below(20, 8, 4), offset=0),
        sample(real(8, 12), real(20, 12, 16), below(24, 8), offset=0),
    ],
    "experts": [
        sample(
            real(4, 8, 12),
            below(20, 4, 8, 40),
            real(4, 8, 40),
            real(20, 12, 32),
            real(20, 16, 28),
            activation="silu",
            offset=0,
        ),
        sample(
            real(8, 12), below(20, 8, 4), real(8, 4), real(20, 12, 16), real(20, 16, 28), activation="gelu", offset=0
        ),
    ],
    "grouped_mm": [sample(real(24, 8), real(4, 8, 12), ascending(24, 4, dtype="int32"))],
}

INDEXING: dict[str, list[Sample]] = {
    "embedding": [
        sample(real(20, 16), below(20, 4, 8), padding_idx=None, offset=0),
        sample(real(20, 16), below(20, 12), padding_idx=None, offset=0),
    ],
    "pick": [
        sample(real(4, 8, 20), targets(20, -100, 4, 8), offset=0),
        sample(real(8, 20), targets(20, 25, 8), offset=0),
        sample(real(20), below(20), offset=0),
    ],
    "index": [
        sample(real(20, 16), below(20, 4, 8), dim=0),
        sample(real(4, 20, 28, 16), below(20, 8, 12), below(28, 8, 12), dim=1),
        sample(real(4, 20, 28), below(20, 8, 1), below(28, 12), dim=1),
        sample(real(20, 28), below(20, 4, 1, 1), below(28, 8, 1), dim=0),
    ],
    "gather": [sample(real(4, 8, 12), below(12, 4, 8, 3), dim=2), sample(real(4, 8, 12), below(8, 4, 20, 12), dim=1)],
    "index_put": [
        sample(real(20, 16), different(20, 8), real(8, 16)),
        sample(real(20), different(20, 8), real(8)),
    ],
    "scatter_sum": [
        sample(below(8, 16, 1), real(16, 12), dim=0, places=8),
        sample(below(8, 1, 16, 1), real(4, 16, 12), dim=1, places=8),
        sample(below(8, 4, 16), real(4, 16), dim=1, places=8),
    ],
    "scatter_max": [
        sample(below(8, 16, 1), spread(16, 12), dim=0, places=8),
        sample(below(8, 4, 16, 12), spread(4, 16, 12), dim=1, places=8),
    ],
    "scatter_put": [
        sample(real(24, 12), different(24, 16, 1), real(16, 12), dim=0),
        sample(real(4, 24), different(24, 1, 16), real(4, 16), dim=1),
    ],
    "embedding_bag": [
        sample(real(20, 16), below(20, 24), ascending(24, 8, first=0), mode=mode) for mode in ("sum", "mean")
    ],
}

NEURAL: dict[str, list[Sample]] = {
    "layer_norm": [
        sample(real(4, 8, 12), real(12), real(12), normalized_dims=1, eps=1e-5),
        sample(real(4, 8, 12), real(12), normalized_dims=1, eps=1e-5),
        sample(real(4, 8, 12), normalized_dims=2, eps=1e-3),
    ],
    "rms_norm": [
        sample(real(4, 8, 12), real(12), normalized_dims=1, eps=1e-6),
        sample(real(4, 8, 12), normalized_dims=1, eps=1e-3),
    ],
    "sdpa": [
        sample(real(4, 8, 12, 6), real(4, 8, 20, 6), real(4, 8, 20, 10), causal=False, scale=None),
        sample(real(4, 8, 12, 6), real(4, 8, 12, 6), real(4, 8, 12, 10), causal=True, scale=0.3),
        sample(real(8, 48, 16, 6), real(8, 4, 20, 6), real(8, 4, 20, 10), causal=False, scale=None),
        sample(real(8, 8, 12, 6), real(8, 4, 12, 6), real(8, 4, 12, 10), causal=True, scale=None),
        sample(real(4, 8, 12, 6), real(4, 8, 20, 6), real(4, 8, 20, 10), flags(4, 1, 12, 20), causal=False, scale=None),
        sample(
            real(4, 8, 12, 6), real(4, 8, 20, 6), real(4, 8, 20, 10), closed(4, 1, 12, 20), causal=False, scale=None
        ),
        sample(real(4, 8, 12, 6), real(4, 8, 20, 6), real(4, 8, 20, 10), real(8, 12, 20), causal=False, scale=0.5),
        sample(real(8, 48, 16, 6), real(8, 4, 20, 6), real(8, 4, 20, 10), real(1, 48, 1, 20), causal=False, scale=None),
    ],
    "max_pool2d": [sample(spread(4, 8, 9, 11), kernel=(3, 2), stride=(2, 1), padding=(1, 0))],
    "avg_pool2d": [sample(real(4, 8, 9, 11), kernel=(3, 2), stride=(2, 1), padding=(1, 0))],
    "adaptive_avg_pool2d": [sample(real(4, 8, 9, 10), size=(1, 1)), sample(real(4, 8, 9, 10), size=(3, 4))],
    "dropout": [sample(real(4, 8, 12), p=0.3, seed=1)],
    "cross_entropy_sum": [
        sample(real(8, 12), targets(12, -100, 8), ignore_index=-100, label_smoothing=0.0),
        sample(real(8, 12), targets(12, 3, 8), ignore_index=3, label_smoothing=0.1),
        sample(real(4, 20, 8), targets(20, -100, 4, 8), ignore_index=-100, label_smoothing=0.0),
        sample(real(12), below(12), ignore_index=-100, label_smoothing=0.0),
    ],
}

_WINDOW = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
IMAGES: dict[str, list[Sample]] = {
    "resample": [
        sample(real(4, 8, 5, 7), interpolation="linear", size=(11, 3), align=False, scales=None, antialias=False),
        sample(real(4, 8, 5), interpolation="linear", size=(9,), align=True, scales=None, antialias=False),
        sample(real(4, 8, 5, 7), interpolation="cubic", size=(8, 11), align=False, scales=(1.7, 1.7), antialias=False),
        sample(real(4, 8, 9, 7), interpolation="cubic", size=(4, 10), align=False, scales=None, antialias=True),
    ],
    "patches": [sample(real(4, 8, 7, 9), **_WINDOW)],
    "from_patches": [sample(real(4, 48, 28), size=(7, 9), **_WINDOW)],
}


def _layer(kind: str, layers: int, sides: int, result: int, *, biases: bool, batch_first: bool) -> Sample:
    """A recurrent layer of two hidden units on 4 sequences of 5 steps, three wide."""
    gates, states = {"lstm": (4, 2), "gru": (3, 1)}.get(kind, (1, 1))
    weights = [
        operand
        for layer in range(layers)
        for _ in range(sides)
        for operand in (real(gates * 2, 2 * sides if layer else 3), real(gates * 2, 2), *[real(gates * 2)] * 2 * biases)
    ]
    x, begin = real(4, 5, 3) if batch_first else real(5, 4, 3), [real(layers * sides, 4, 2)] * states
    attrs = {"layers": layers, "bidirectional": sides == 2, "biases": biases, "batch_first": batch_first}
    return sample(x, *begin, *weights, cell=kind, result=result, **attrs)


RECURRENT: dict[str, list[Sample]] = {
    "recurrent": [
        _layer("lstm", 1, 1, 0, biases=True, batch_first=True),
        _layer("lstm", 1, 1, 2, biases=False, batch_first=False),
        _layer("gru", 2, 1, 0, biases=False, batch_first=False),
        _layer("rnn_tanh", 1, 2, 0, biases=False, batch_first=True),
    ],
}

SPECTRA: dict[str, list[Sample]] = {
    "rfft": [sample(real(4, 8, 7), dims=(2,), norm=0), sample(real(6, 4, 8, 5), dims=(3, 0), norm=1)],
    "fft": [
        sample(real(4, 8, 7, 2), dims=(2,), norm=2, forward=True),
        sample(real(6, 4, 8, 2), dims=(0, 2), norm=1, forward=False),
    ],
    "irfft": [
        sample(real(4, 8, 5, 2), dims=(2,), norm=2, last=8),
        sample(real(6, 4, 3, 2), dims=(0, 2), norm=0, last=5),
    ],
}

SAMPLES: dict[str, list[Sample]] = {
    **POINTWISE,
    **STRUCTURAL,
    **REDUCTIONS,
    **CONTRACTIONS,
    **INDEXING,
    **NEURAL,
    **IMAGES,
    **RECURRENT,
    **SPECTRA,
}
