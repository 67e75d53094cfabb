"""One small application of each operator of the op table, to be timed: shapes of its operands and its attributes.

Rows whose factor string says all get theirs from it; `_special` holds the others. Those that are never trained, or that
nothing dispatches alone, have none: their cost is the device's `op_overhead_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.pcg.attrs import Attr
from shardwright.pcg.factors import Shape
from shardwright.pcg.optable import ROWS, Row


@dataclass(frozen=True, slots=True)
class Sample:
    """Operands of an operator by shape, those at `indices` int64 zeros, `masks` bools, the others float32."""

    operands: tuple[Shape, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    indices: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()


_WINDOW = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
SMALL = 4
"""Of a side, where the kernel takes next to nothing."""
LOOPS = ("grouped_mm",)
"""Loops over groups on the host in fp32, in which dispatch is timed; one kernel in 16 bits on a GPU."""
IDLE = ("contiguous",)
"""Have nothing to do on samples, which are contiguous."""
_UNTRAINED = ("floor_divide", "bitwise_and", "bitwise_or")  # not on trained floats


def _special(n: int) -> dict[str, Sample]:
    """Operators whose factor string does not say all; sides are `n`."""
    x, heads = (n, n), (2, 2, n, n)
    image = (2, 8, max(4, n // 8), max(4, n // 8))
    return {
        "gelu": Sample((x,), {"approximate": "none"}),
        "cast": Sample((x,), {"dtype": "float64"}),
        "where": Sample((x, x, x), masks=(0,)),
        "reshape": Sample((x,), {"shape": (n * n,)}),
        "permute": Sample((x,), {"dims": (1, 0)}),
        "expand": Sample((x,), {"shape": (3, n, n)}),
        "slice": Sample((x,), {"dim": 1, "start": 0, "stop": n // 2, "step": 1}),
        "concat": Sample((x, x), {"dim": 0}),
        "sum": Sample((x,), {"dims": (1,), "keepdim": False}),
        "amax": Sample((x,), {"dims": (1,), "keepdim": False}),
        "softmax": Sample((x,), {"dim": 1}),
        "log_softmax": Sample((x,), {"dim": 1}),
        "cumsum": Sample((x,), {"dim": 1, "dtype": "float32"}),
        "sort_values": Sample((x,), {"dim": 1, "descending": True}),
        "topk_values": Sample((x,), {"dim": 1, "k": 2}),
        "linear": Sample(((2, n, n), x)),
        "matmul": Sample((heads, heads)),
        "conv2d": Sample(
            ((1, 1, 1, 1),) * 2, {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
        ),
        "grouped_mm": Sample((x, (4, n, n), (4,)), indices=(2,)),
        "layer_norm": Sample((x, (n,), (n,)), {"normalized_dims": 1, "eps": 1e-5}),
        "rms_norm": Sample((x, (n,)), {"normalized_dims": 1, "eps": 1e-5}),
        "sdpa": Sample((heads, heads, heads), {"causal": True, "scale": None}),
        "max_pool2d": Sample((image,), _WINDOW),
        "avg_pool2d": Sample((image,), _WINDOW),
        "adaptive_avg_pool2d": Sample((image,), {"size": (1, 1)}),
        "dropout": Sample((x,), {"p": 0.1, "draw": "rt.Draw()", "shard": None}),
        "cross_entropy_sum": Sample((x, (n,)), {"ignore_index": -100, "label_smoothing": 0.0}, indices=(1,)),
        "embedding": Sample((x, (n,)), {"padding_idx": None, "offset": None}, indices=(1,)),
        "pick": Sample((x, (n,)), {"offset": None}, indices=(1,)),
        "index": Sample((x, (n,)), {"dim": 0}, indices=(1,)),
        "gather": Sample((x, x), {"dim": 1}, indices=(1,)),
        "embedding_bag": Sample((x, (n,), (n // 2,)), {"mode": "sum"}, indices=(1, 2)),
    }  # fmt: skip


def sample_of(row: Row, side: int = SMALL) -> Sample | None:
    """How to time an operator; None where it has no sample."""
    if (special := _special(side).get(row.name)) is not None:
        return special
    if row.factors in ("... -> ...", "..., ... -> ...") and not row.view and row.name not in _UNTRAINED:
        return Sample(((side, side),) * (str(row.factors).count(",") + 1))
    return None


def samples(side: int = SMALL) -> dict[str, Sample]:
    """The sample of every operator that has one."""
    found = {name: sample_of(row, side) for name, row in ROWS.items()}
    return {name: sample for name, sample in found.items() if sample is not None}
