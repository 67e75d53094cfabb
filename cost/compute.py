"""Time of operators on one device: a roofline.

    time = max(FLOPs / (peak · efficiency), bytes / bandwidth) + overhead

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009). Shapes that a device
handles badly (tiles, waves, attention) are later work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.device import Device

Amount = TypeVar("Amount", float, NDArray[np.float64])
"""One number, or a numpy array with one number per candidate."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Times of operators on `device`."""

    device: Device

    def time_s(self, flops: Amount, num_bytes: Amount, dtype: str) -> Amount:
        """Seconds of one operator, launch included.

        Args:
            flops: multiplications and additions, each counted as one.
            num_bytes: bytes read and written.
            dtype: what it computes in: a precision ("bf16") or a dtype name of the graph ("bfloat16").

        Raises:
            ClusterError: the device has no rate for `dtype`.
        """
        rate = self.device.peak_flops_per_s(dtype) * self.device.matmul_efficiency
        compute_s, memory_s = flops / rate, num_bytes / self.device.memory_bytes_per_s
        return _maximum(compute_s, memory_s) + self.device.op_overhead_s


def _maximum(a: Amount, b: Amount) -> Amount:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)
