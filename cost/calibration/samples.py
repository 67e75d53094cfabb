"""One small application of each operator of the op table, to be timed: shapes of its operands and its attributes.

Rows whose factor string says all get theirs from it; `SAMPLES` holds the others. Those that are never trained, or that
nothing dispatches alone, have none: their cost is the device's `op_overhead_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.pcg.attrs import Attr
from shardwright.pcg.optable import ROWS, Row

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Operands of an operator by shape, those at `indices` int64 zeros, `masks` bools, the others float32."""

    operands: tuple[Shape, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    indices: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()


_X, _IMAGE, _HEADS = (4, 4), (2, 4, 4, 4), (2, 2, 4, 4)
_WINDOW = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
LOOPS = ("grouped_mm",)
"""Loops on the host in fp32, in which dispatch is timed; one kernel in 16 bits on a GPU."""
_UNTRAINED = ("floor_divide", "bitwise_and", "bitwise_or")  # not on trained floats
SAMPLES: dict[str, Sample] = {
    "gelu": Sample((_X,), {"approximate": "none"}),
    "cast": Sample((_X,), {"dtype": "float64"}),
    "where": Sample((_X, _X, _X), masks=(0,)),
    "reshape": Sample((_X,), {"shape": (16,)}),
    "permute": Sample((_X,), {"dims": (1, 0)}),
    "expand": Sample((_X,), {"shape": (3, 4, 4)}),
    "slice": Sample((_X,), {"dim": 1, "start": 0, "stop": 2, "step": 1}),
    "concat": Sample((_X, _X), {"dim": 0}),
    "sum": Sample((_X,), {"dims": (1,), "keepdim": False}),
    "amax": Sample((_X,), {"dims": (1,), "keepdim": False}),
    "softmax": Sample((_X,), {"dim": 1}),
    "log_softmax": Sample((_X,), {"dim": 1}),
    "cumsum": Sample((_X,), {"dim": 1, "dtype": "float32"}),
    "sort_values": Sample((_X,), {"dim": 1, "descending": True}),
    "topk_values": Sample((_X,), {"dim": 1, "k": 2}),
    "linear": Sample(((2, 4, 4), _X)),
    "matmul": Sample((_HEADS, _HEADS)),
    "conv2d": Sample(
        ((1, 1, 1, 1),) * 2, {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    ),
    "grouped_mm": Sample((_X, (4, 4, 4), (4,)), indices=(2,)),  # of four groups
    "layer_norm": Sample((_X, (4,), (4,)), {"normalized_dims": 1, "eps": 1e-5}),
    "rms_norm": Sample((_X, (4,)), {"normalized_dims": 1, "eps": 1e-5}),
    "sdpa": Sample((_HEADS, _HEADS, _HEADS), {"causal": True, "scale": None}),
    "max_pool2d": Sample((_IMAGE,), _WINDOW),
    "avg_pool2d": Sample((_IMAGE,), _WINDOW),
    "adaptive_avg_pool2d": Sample((_IMAGE,), {"size": (1, 1)}),
    "dropout": Sample((_X,), {"p": 0.1, "shard": None}),
    "cross_entropy_sum": Sample((_X, (4,)), {"ignore_index": -100, "label_smoothing": 0.0}, indices=(1,)),
    "embedding": Sample((_X, _X), {"padding_idx": None, "offset": None}, indices=(1,)),
    "pick": Sample((_X, (4,)), {"offset": None}, indices=(1,)),
    "index": Sample((_X, (4,)), {"dim": 0}, indices=(1,)),
    "gather": Sample((_X, _X), {"dim": 1}, indices=(1,)),
    "embedding_bag": Sample((_X, (4,), (2,)), {"mode": "sum"}, indices=(1, 2)),
}  # fmt: skip


def sample_of(row: Row) -> Sample | None:
    """How to time an operator; None where it has no sample."""
    if row.name in SAMPLES:
        return SAMPLES[row.name]
    if row.factors in ("... -> ...", "..., ... -> ...") and not row.view and row.name not in _UNTRAINED:
        return Sample((_X,) * (str(row.factors).count(",") + 1))
    return None


def samples() -> dict[str, Sample]:
    """The sample of every operator that has one."""
    found = {name: sample_of(row) for name, row in ROWS.items()}
    return {name: sample for name, sample in found.items() if sample is not None}
