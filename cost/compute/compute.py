"""Time of work on one device: measured kernels where there are any of its kind, else a roofline that knows shapes.

    time = max(FLOPs / (peak · efficiency), bytes / bandwidth) + the least time of a kernel

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009). The effects of shapes
on a device whose number of multiprocessors is known:

    tiles       a matrix product is cut into tiles; the part of a tile outside the matrix is computed too. The
                library takes the fastest tile of `_TILES`
    occupancy   fewer tiles than multiprocessors leave some idle, unless sums are long: libraries then give several of
                them a part of one tile's sum ("split-K", NVIDIA, CUTLASS, "Efficient GEMM in CUDA"), as in gradients of
                weights, which sum over all tokens or pixels. Adding the parts up is not counted. More tiles than
                multiprocessors go on without steps: whole waves made predictions of real runs worse, since libraries
                split the last wave's tiles
    alignment   rows of a matrix that do not begin at multiples of 16 bytes: NVIDIA, "Matrix Multiplication Background
                User's Guide", section 2.3; half the rate is assumed
    attention   has efficiencies of its own; a causal mask still computes whole blocks of keys on the diagonal

The host's dispatch is hidden behind the device's work where kernels run beside the host (GPUs), else added to it.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from shardwright.cost.clusters.device import Device
from shardwright.cost.compute.kernels import KernelTable
from shardwright.cost.compute.work import Passes, Timed, Work
from shardwright.pcg.types import ITEM_BYTES

_TILES = ((128, 256), (256, 128), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the result that one multiprocessor computes at a time (CUTLASS's default threadblock shapes)."""
_REUSE = 128 * 256 / (128 + 256)
"""Products per loaded element of the largest tile; the rate of a smaller tile is in proportion to its own."""
_TILE_DEPTH = 32
_SPLIT_DEPTH = 1024
"""The least part of a sum that a multiprocessor gets where several share a tile; assumed."""
_ATTENTION_BLOCK = 128  # queries of a block in FlashAttention-2's kernels
_ALIGNED_BYTES = 16
_UNALIGNED_RATE = 0.5
_RATE_BYTES = {"fp8": 1, "tf32": 4}
"""Bytes of an element, for work at the rate of a precision that no value is stored in."""


class Compute:
    """Times of work on `device`, cached by work."""

    def __init__(self, device: Device) -> None:
        self.device = device
        launched = device.kind == "cuda"
        self._table = KernelTable(device.kernels, self.bounds, launched=launched) if device.kernels else None
        self._known: dict[Work, float] = {}

    def work_s(self, work: Work) -> float:
        """Return the seconds of one kernel on the device, without its dispatch.

        Raises:
            ClusterError: the device has no rate for the work's dtype.
        """
        if work not in self._known:
            self._known[work] = self._work_s(work)
        return self._known[work]

    def passes_s(self, op: str, passes: Passes, *, launched: bool = True) -> tuple[float, float]:
        """Return the seconds of an operator's forward and backward pass, dispatch included.

        An operator that is not `launched` is part of another's kernel.
        """
        dispatch_s = self.dispatch_s(op, passes) if launched else (0.0, 0.0)
        paces = self.device.paces.get(op, (1.0, 1.0))
        works = (passes.forward, passes.backward)
        forward_s, backward_s = (self._pass_s(*pass_, launched) for pass_ in zip(works, paces, dispatch_s, strict=True))
        return forward_s, backward_s

    def dispatch_s(self, op: str, passes: Passes) -> tuple[float, float]:
        """Return the host's seconds for an operator's passes: as measured, else `op_overhead_s` for each kernel.

        Backward was measured with gradients of all operands. If only some operands get one, it takes that share:
        operators of two operands take 0.4 to 0.7 of their time for one gradient. An operator that loops over groups was
        measured with one.
        """
        if op not in self.device.operators:
            each_s = self.device.op_overhead_s
            return len(passes.forward) * each_s, len(passes.backward) * each_s
        forward_s, backward_s = self.device.operators[op]
        return forward_s * passes.groups, backward_s * passes.gradients * passes.groups

    def _pass_s(self, works: tuple[Work, ...], pace: float, dispatch_s: float, launched: bool) -> float:
        if not works:
            return 0.0
        if not launched:
            return sum(max(0.0, pace * self.work_s(work) - self.device.kernel_s) for work in works)
        work_s = pace * sum(map(self.work_s, works))
        return max(dispatch_s, work_s) if self.device.kind == "cuda" else dispatch_s + work_s

    def _work_s(self, work: Work) -> float:
        if work.kind == "view":
            return 0.0
        if isinstance(work, Timed) and work.device == self.device.kind:
            return work.seconds
        measured_s = self._table.seconds(work) if self._table is not None and all(work.shape) else None
        if measured_s is not None:
            return measured_s
        compute_s = work.flops / self._rate(work) if work.flops else 0.0  # a product of nothing has no rate
        return max(compute_s, self.bounds(work)[1]) + self.device.kernel_s

    def bounds(self, work: Work) -> tuple[float, float]:
        """Return the seconds of the work's arithmetic at the peak, and of its bytes."""
        return work.flops / self._peak(work), work.num_bytes / self.device.memory_bytes_per_s

    def _peak(self, work: Work) -> float:
        if work.kind in ("matmul", "conv", "attention"):
            return self.device.peak_flops_per_s(work.dtype)
        return self.device.vector_flops_per_s or self.device.peak_flops_per_s("fp32")

    def _rate(self, work: Work) -> float:
        """Return the FLOP per second that the work's shape lets the device reach."""
        device, peak = self.device, self._peak(work)
        if work.kind == "attention":
            efficiency = device.attention_backward_efficiency if work.backward else device.attention_efficiency
            return peak * efficiency * attention_share(work, device.num_units)
        if work.kind in ("matmul", "conv"):
            return peak * device.matmul_efficiency * matmul_share(work.shape, work.dtype, device.num_units)
        return peak


@lru_cache(maxsize=8)
def compute_on(device: Device) -> Compute:
    """Return the cached `Compute` of a device, so that predictions reuse the times that a search asked for."""
    return Compute(device)


def matmul_share(shape: tuple[int, ...], dtype: str, num_units: int) -> float:
    """Return the share of a large product's rate that (batch, m, n, k) reaches on `num_units` multiprocessors."""
    if not num_units:
        return 1.0
    batch, m, n, k = shape
    depth = ceil(k / _TILE_DEPTH) * _TILE_DEPTH
    parts, best = max(1.0, depth / _SPLIT_DEPTH), 0.0
    for rows, columns in _TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        useful = batch * m * n / (tiles * rows * columns)
        rate = rows * columns / (rows + columns) / _REUSE
        best = max(best, useful * rate * min(1.0, tiles * parts / num_units))
    item = ITEM_BYTES.get(dtype) or _RATE_BYTES.get(dtype, 2)
    aligned = all(extent * item % _ALIGNED_BYTES == 0 for extent in (n, k))
    return best * k / depth * (1.0 if aligned else _UNALIGNED_RATE)


def attention_share(work: Work, num_units: int) -> float:
    """Return the share of the rate of long, many-headed attention that this work reaches."""
    heads, queries, keys, _ = work.shape
    blocks = heads * ceil(queries / _ATTENTION_BLOCK)
    occupancy = min(1.0, blocks / num_units) if num_units else 1.0
    if not work.causal:
        return occupancy
    return occupancy * (keys + 1) / (keys + min(keys, _ATTENTION_BLOCK))
