"""The operators that a calibration runs on one rank: small ones for dispatch, larger ones for kernels.

Each is written as a lowered program writes it, by its row's torch expression. A **kernel** probe has the work that the
cost model charges for it, by the same row, so that its measured time belongs to the very figures that it is compared
with. A **dispatch** probe is so small that its kernel takes next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardwright.cost.calibration.samples import IDLE, LOOPS, Probe, samples
from shardwright.pcg.attrs import Attr
from shardwright.pcg.optable import ROWS


def dispatch_probes(dtype: str, device: str = "cpu") -> list[Probe]:
    """Return one tiny probe of each operator that has a sample."""
    return [replace(probe, dtype=dtype) for op, probe in samples().items() if device == "cpu" or op not in LOOPS]


def pace_probes(sizes: Sizes, dtype: str) -> list[Probe]:
    """Return one probe, of a size common in networks, of each operator that works on elements or rows."""
    sampled = samples(sizes.side)
    return [
        replace(sampled[op], dtype=dtype) for op in sampled if not (ROWS[op].contraction or ROWS[op].view or op in IDLE)
    ]


COMMON = (
    "linear", "matmul", "layer_norm", "softmax", "gelu", "relu", "silu", "add", "mul", "where", "sum", "cast",
    "dropout", "embedding", "cross_entropy_sum", "slice", "reshape", "permute",
)  # fmt: skip
"""The operators that networks are made of. Alternating, they take longer to dispatch than each one in a loop."""


def common_probes(dtype: str) -> list[Probe]:
    """Return the dispatch probes of common operators, each twice, in an order that repeats none of them."""
    in_order = sorted(
        (probe for probe in dispatch_probes(dtype) if probe.op in COMMON), key=lambda p: COMMON.index(p.op)
    )
    return [*in_order, *in_order[::2], *in_order[1::2]]


def kernel_probes(sizes: Sizes, dtype: str) -> Iterator[Probe]:
    """Yield every kind of work at several sizes."""
    for batch, m, n, k in sizes.matmuls:
        if batch == 1:
            yield Probe("linear", ((m, k), (n, k)), dtype)
        else:
            yield Probe("matmul", ((batch, m, k), (batch, k, n)), dtype)
    for batch, channels, outputs, groups, image, kernel in sizes.convolutions:
        shapes = ((batch, channels, image, image), (outputs, channels // groups, kernel, kernel))
        padding = (kernel // 2, kernel // 2)
        yield Probe(
            "conv2d", shapes, dtype, {"stride": (1, 1), "padding": padding, "dilation": (1, 1), "groups": groups}
        )
    for heads, length, head_dim, causal in sizes.attentions:
        yield Probe(
            "sdpa", ((1, heads, length, head_dim),) * 3, dtype, {"causal": causal, "scale": None, "offset": None}
        )
    width = sizes.width
    rows = [(max(1, elements // width), width) for elements in sizes.elements]
    yield from (Probe("add", (shape, shape), dtype) for shape in rows)
    yield from (Probe("gelu", (shape,), dtype, {"approximate": "none"}) for shape in rows)
    yield from (Probe("sum", (shape,), dtype, {"dims": (0,), "keepdim": False}) for shape in rows)
    yield from (Probe("softmax", (shape,), dtype, {"dim": 1}) for shape in rows)
    norm: dict[str, Attr] = {"eps": 1e-5, "normalized_dims": 1}
    yield from (Probe("layer_norm", (shape, (width,), (width,)), dtype, norm) for shape in rows)
    table: dict[str, Attr] = {"padding_idx": None, "offset": None}
    yield from (Probe("embedding", ((1024, width), shape[:1]), dtype, table, indices=(1,)) for shape in rows)
    yield from (Probe("dropout", (shape,), dtype, {"p": 0.1, "draw": "rt.Draw()", "shard": None}) for shape in rows)
    yield from (Probe("reshape", (shape,), dtype, {"shape": (shape[0] * width,)}, copies=True) for shape in rows)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the kernels that are measured.

    matmuls         (batch, m, n, k)
    convolutions    (batch, channels, outputs, groups, pixels of a side of the image, of the kernel)
    attentions      (heads, length, head_dim, causal)
    elements        of pointwise operators, reductions, look-ups, random numbers, copies; in rows of `width`
    side            of the matrices on which all other operators of these kinds are compared with them
    """

    matmuls: tuple[tuple[int, int, int, int], ...]
    convolutions: tuple[tuple[int, int, int, int, int, int], ...]
    attentions: tuple[tuple[int, int, int, bool], ...]
    elements: tuple[int, ...]
    width: int
    side: int


def _images(
    batches: Sequence[int], channels: Sequence[tuple[int, int, int]], kernels: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int, int, int, int, int], ...]:
    """Return convolutions of all batches × (channels, outputs, groups) × (pixels of a side, of the kernel's side)."""
    return tuple((batch, *between, *sides) for batch in batches for between in channels for sides in kernels)


CPU_SIZES = Sizes(
    matmuls=(
        *product((1,), (8, 96, 512), (64, 256, 1024), (64, 256, 1024)), (1, 1024, 1024, 1024),
        *product((32,), (16, 64), (16, 64), (16, 64)), (32, 128, 128, 32),
    ),
    convolutions=(
        (8, 3, 16, 1, 48, 7), (8, 3, 64, 1, 32, 3),
        *_images(
            (2, 8), ((16, 16, 1), (64, 64, 1), (64, 64, 8), (64, 256, 1), (256, 64, 1), (48, 48, 48)),
            ((2, 1), (4, 3), (8, 1), (12, 3), (24, 1)),
        ),
    ),
    attentions=(*product((8, 32), (16, 64, 256), (16, 64), (False, True)), (8, 512, 64, True)),
    elements=tuple(2**octave for octave in range(12, 23)),
    width=64,
    side=128,
)  # fmt: skip
GPU_SIZES = Sizes(
    matmuls=(
        *product((1,), (128, 1024, 8192), (1024, 4096), (1024, 4096)), (1, 512, 512, 512), (1, 2048, 2048, 2048),
        (1, 8192, 8192, 8192), *product((64,), (512, 2048), (512, 2048), (64, 128)),
    ),
    convolutions=(
        (32, 3, 64, 1, 224, 7),
        *_images(
            (8, 32), ((64, 64, 1), (64, 256, 1), (256, 64, 1), (256, 256, 32), (512, 512, 1)),
            ((7, 3), (14, 1), (28, 3), (56, 1)),
        ),
    ),
    attentions=(*product((16, 64), (512, 2048), (64, 128), (False, True)), (32, 4096, 128, True)),
    elements=tuple(2**octave for octave in range(14, 28)),
    width=1024,
    side=4096,
)  # fmt: skip
