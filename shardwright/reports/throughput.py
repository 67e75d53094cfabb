"""A step in the field's words: tokens per second and device, model FLOPs utilization, days for 10¹² tokens.

Model FLOPs are those of matrix products, convolutions and attention, forward and backward, of the whole model.
Recomputation does not count, and attention counts all keys of each query, causal or not. This is PaLM's definition
(Chowdhery et al. 2022, appendix B), which most published figures follow.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.prediction import Prediction
from shardwright.pcg.graph import Graph
from shardwright.pcg.types import is_float
from shardwright.reports.units import percent
from shardwright.search.plan import Plan
from shardwright.search.request.spaces import batch_size, token_shapes

_TRAINED_TOKENS = 1e12


class ModelWork(NamedTuple):
    """The work of a step of a model, whatever the plan.

    `flops`: forward and backward. `dtype`: of the operands of most of them. `num_tokens`: of the batch; None where it
    looks up no token ids, and then `num_examples` counts.
    """

    flops: float
    dtype: str
    num_tokens: int | None
    num_examples: int


class Throughput(NamedTuple):
    """Rates of a device. `utilization`: model FLOPs over all devices' peak; None for a model without FLOPs."""

    utilization: float | None
    peak_flops_per_s: float
    dtype: str
    tokens_per_s: float | None
    examples_per_s: float
    days: float | None

    @property
    def line(self) -> str:
        """The rates in a line: `3,512 tokens/s/device, 41 % MFU (of 989 TFLOP/s in bfloat16), 5.2 days for …`."""
        rate = (
            f"{_rate(self.examples_per_s)} examples/s/device"
            if self.tokens_per_s is None
            else f"{_rate(self.tokens_per_s)} tokens/s/device"
        )
        used = (
            f"{percent(self.utilization)} MFU (of {self.peak_flops_per_s / 1e12:.3g} TFLOP/s in {self.dtype})"
            if self.utilization is not None
            else ""
        )
        return ", ".join(
            filter(None, (rate, used, "" if self.days is None else f"{_rate(self.days)} days for 10¹² tokens"))
        )


def throughput(plan: Plan, prediction: Prediction | None = None) -> Throughput:
    """Return a plan's, or another prediction's, throughput. Rates are per device, idle devices included."""
    work, cluster = model_work(plan.graph), plan.cluster
    step_s = (prediction or plan.prediction).step_s
    num_devices = cluster.num_devices + (plan.idle.num_devices if plan.idle else 0)
    peak = _peak_flops_per_s(cluster, work.dtype)
    tokens = work.num_tokens
    return Throughput(
        utilization=work.flops / (step_s * peak * num_devices) if work.flops else None,
        peak_flops_per_s=peak,
        dtype=work.dtype,
        tokens_per_s=None if tokens is None else tokens / step_s / num_devices,
        examples_per_s=work.num_examples / step_s / num_devices,
        days=None if tokens is None else _TRAINED_TOKENS / tokens * step_s / 86400,
    )


def _peak_flops_per_s(cluster: Cluster, dtype: str) -> float:
    """Return the mean peak of all devices."""
    parts = [(part.num_devices, part.device) for part in cluster.parts] or [(1, cluster.device)]
    return sum(n * device.peak_flops_per_s(dtype) for n, device in parts) / sum(n for n, _ in parts)


@lru_cache(maxsize=8)
def model_work(graph: Graph) -> ModelWork:
    """Return the work of the serial graph that a plan's graph denotes."""
    serial, flops, dtypes = graph.erased(), 0.0, Counter[str]()
    for node in serial.nodes:
        if node.row is None or not node.row.contraction:
            continue
        operands = [serial.types[name] for name in node.inputs]
        forward = node.row.flops(serial.signature(node))
        trained = sum(kind.grad for kind in operands) if serial.types[node.name].grad else 0
        backward = min(trained, 2) if node.row.passes == 1 and node.row.products is None else 2 * (trained > 0)
        flops += forward * (1 + backward)
        dtypes[next((kind.dtype for kind in operands if is_float(kind.dtype)), "float32")] += round(forward)
    num_tokens = max(map(prod, token_shapes(serial)), default=None)
    return ModelWork(flops, max(dtypes, key=lambda x: dtypes[x], default="float32"), num_tokens, batch_size(serial))


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
