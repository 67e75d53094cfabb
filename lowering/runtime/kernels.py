"""The `rt` namespace of lowered programs: functions beyond torch's that the op table's expressions need.

Everything here works on one rank's part of its operands, and autograd differentiates it.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.profiler import record_function
from torch.nn import functional as F

from shardwright.lowering.private import AutogradContext, FakeTensor
from shardwright.lowering.random.exact import Draw
from shardwright.lowering.random.philox import Slice, keep_mask
from shardwright.lowering.ranks.movement import MeshAxis, seen
from shardwright.lowering.runtime import attention, layers
from shardwright.lowering.runtime.dispatch import To, dispatch

# pyright: reportIncompatibleMethodOverride=false


mark = record_function
"""A context manager that names a line of a marked program for a profiler."""


class Shard:
    """The place of a rank's part in a logical tensor of `shape`: slices as (axis, dim, blocks), outermost first."""

    def __init__(self, shape: Sequence[int], *steps: tuple[MeshAxis, int, int]) -> None:
        self.shape = tuple(shape)
        self.steps = steps

    def take(self, whole: Tensor) -> Tensor:
        """Return the rank's part in memory of its own, so that the whole tensor can be freed."""
        for axis, dim, blocks in self.steps:
            whole = seen(whole, axis, dim, blocks)
        return whole.clone(memory_format=torch.contiguous_format)

    def cuts(self) -> list[list[Slice]]:
        """Return, for each dimension, the slices that lead to the rank's part, outermost first."""
        return [
            [Slice(axis.size, axis.rank, n) for axis, dim, n in self.steps if dim == d] for d in range(len(self.shape))
        ]


def embedding(weight: Tensor, index: Tensor, padding_idx: int | None, offset: int | None) -> Tensor:
    """Return rows of `weight`. With an `offset`, it holds rows [offset, offset + len) of the table; others give zeros.

    `padding_idx` counts in the whole table; its row gets no gradient.
    """
    if offset is None:
        return F.embedding(index, weight, padding_idx)
    local = index - offset
    outside = (local < 0) | (local >= weight.shape[0])
    own = None if padding_idx is None or not 0 <= padding_idx - offset < weight.shape[0] else padding_idx - offset
    rows = F.embedding(local.masked_fill_(outside, 0), weight, own)
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


def pick(x: Tensor, index: Tensor, offset: int | None) -> Tensor:
    """Return `x[..., index]`; with an `offset`, `x` holds entries [offset, offset + len), and others give zeros."""
    local = index if offset is None else index - offset
    outside = (local < 0) | (local >= x.shape[-1])
    lead = torch.broadcast_shapes(x.shape[:-1], local.shape)
    at = local.masked_fill(outside, 0).expand(lead).unsqueeze(-1)
    return x.expand(*lead, x.shape[-1]).gather(-1, at).squeeze(-1).masked_fill(outside, 0)


def index(x: Tensor, indices: Sequence[Tensor], dim: int) -> Tensor:
    """Return `x` indexed by integer tensors on neighbouring dimensions from `dim`."""
    return x[(builtins.slice(None),) * dim + tuple(indices)]


def slice(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    """Return every `step`-th of the elements [start, stop) of one dimension."""
    return x[(builtins.slice(None),) * dim + (builtins.slice(start, stop, step),)]


def pad(x: Tensor, pads: Sequence[int], value: float) -> Tensor:
    """Pad `x`; `pads` lists the sizes before and after each dimension, from the first."""
    pairs = [pads[i : i + 2] for i in range(0, len(pads), 2)]
    return F.pad(x, [n for pair in reversed(pairs) for n in pair], value=value)


def layer_norm(eps: float, normalized_dims: int, x: Tensor, *affine: Tensor) -> Tensor:
    """Normalize the last `normalized_dims` dimensions; `affine` is nothing, a weight, or a weight and a bias."""
    return F.layer_norm(x, x.shape[-normalized_dims:], *affine, eps=eps)


def rms_norm(eps: float, normalized_dims: int, x: Tensor, *affine: Tensor) -> Tensor:
    """Normalize the last `normalized_dims` dimensions by their RMS; `affine` is nothing or a weight."""
    return F.rms_norm(x, x.shape[-normalized_dims:], *affine, eps=eps)


sdpa = attention.sdpa
resample, recurrent = layers.resample, layers.recurrent
scatter_sum, scatter_max, scatter_put = layers.scatter_sum, layers.scatter_max, layers.scatter_put
rfft, fft, irfft = layers.rfft, layers.fft, layers.irfft


def cross_entropy_sum(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """Return the sum, not the mean, of the losses of targets other than `ignore_index`."""
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)


_STRIDE = 16
"""The number of bytes that must divide the strides and addresses of `F.grouped_mm`'s operands."""


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of `x` [t, i], in groups that end at `ends`, each group by its own matrix of `w` [e, i, o].

    In a dry run `ends` has no data, and all groups have the same size.
    """
    is_dry = isinstance(ends, FakeTensor)
    counts = (x.shape[1], w.shape[2], x.storage_offset(), w.storage_offset())
    aligned = not any(count * x.itemsize % _STRIDE for count in counts)
    if x.dtype == torch.bfloat16 and aligned and (is_dry or (x.is_cuda and len(x))):
        return F.grouped_mm(x, w, offs=ends.to(torch.int32))
    even = (x.shape[0] * number // len(w) for number in range(1, len(w) + 1))
    return _GroupedProduct.apply(x, w, [0, *(even if is_dry else ends.tolist())])


class _GroupedProduct(Function):
    """Grouped products, each written into its part of the result; rows after the last group give zeros."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, w: Tensor, bounds: list[int]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.groups = [(number, a, b) for number, (a, b) in enumerate(pairwise(bounds)) if a < b]
        out = x.new_empty(len(x), w.shape[2])
        out[bounds[-1] :].zero_()
        for number, a, b in ctx.groups:
            torch.mm(x[a:b], w[number], out=out[a:b])
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        into_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        into_w = torch.zeros_like(w) if ctx.needs_input_grad[1] else None
        for number, a, b in ctx.groups:
            if into_x is not None:
                torch.mm(grad[a:b], w[number].t(), out=into_x[a:b])
            if into_w is not None:
                torch.mm(x[a:b].t(), grad[a:b], out=into_w[number])
        return into_x, into_w, None


_ACTIVATIONS = {
    "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu, "sigmoid": torch.sigmoid,
    "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


def expert_linear(x: Tensor, w: Tensor, index: Tensor, offset: int | None, *to: To) -> Tensor:
    """Multiply rows of `x` [..., i] by the matrices of `w` [e, i, o] that `index` [...] names: [..., o].

    With an `offset`, `w` holds experts [offset, offset + e). Rows of others give zeros, unless there are routes `to`.
    """
    lead = torch.broadcast_shapes(x.shape[:-1], index.shape)
    if to:
        rows, named = x.expand(*lead, x.shape[-1]).flatten(0, -2), index.expand(lead).reshape(-1, 1)
        y = dispatch(lambda index, x: expert_linear(x, w, index[:, 0], offset), to, named, rows)
        return y.view(*lead, w.shape[2])
    order, ends = by_expert(index.expand(lead), len(w), offset)
    places = torch.arange(x.shape[:-1].numel(), device=x.device).view(x.shape[:-1]).expand(lead).reshape(-1)
    y = grouped_mm(x.reshape(-1, x.shape[-1])[places[order]], w, ends)
    return _put_back(y, order, lead.numel()).view(*lead, w.shape[2])


def experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, offset: int | None, *to: To
) -> Tensor:
    """Return, for every token of `x` [..., i], the weighted sum of its experts' results: [..., o].

    A token's experts are `index` [..., k], with `weights` [..., k]. An expert computes activation(x `up` [e, i, f])
    `down` [e, f, o]; a gated one computes activation(first half) · second half before `down`. With an `offset`, the
    first expert here has that number. Other experts' results are left out, unless routes `to` their ranks are given.
    """
    lead, slots = torch.broadcast_shapes(x.shape[:-1], index.shape[:-1]), index.shape[-1]
    if to:
        rows = (t.expand(*lead, t.shape[-1]).flatten(0, -2) for t in (index, x, weights))
        y = dispatch(lambda index, x, weights: experts(x, index, weights, up, down, activation, offset), to, *rows)
        return y.view(*lead, down.shape[2])
    order, ends = by_expert(index.expand(*lead, slots), len(up), offset)
    tokens = x.expand(*lead, x.shape[-1]).reshape(-1, x.shape[-1])
    h = grouped_mm(tokens[order // slots], up, ends)
    act = _ACTIVATIONS[activation]
    if h.shape[-1] == down.shape[1]:
        h = act(h)
    else:
        gate, value = h.split(down.shape[1], -1)
        h = act(gate) * value
    y = grouped_mm(h, down, ends) * weights.expand(*lead, slots).reshape(-1)[order].unsqueeze(-1)
    if len(order) == lead.numel() * slots:
        return _put_back(y, order, len(order)).view(*lead, slots, y.shape[1]).sum(-2)
    return y.new_zeros(lead.numel(), y.shape[1]).index_add(0, order // slots, y).view(*lead, y.shape[1])


def by_expert(index: Tensor, num_experts: int, offset: int | None) -> tuple[Tensor, Tensor]:
    """Return the numbers of these experts' rows, grouped by expert, and the end of each group; others are left out.

    A dry run knows no indices, so it takes all rows.
    """
    flat = index.reshape(-1)
    if offset is not None:
        flat = flat - offset
        flat = flat.masked_fill_((flat < 0) | (flat >= num_experts), num_experts)
    ordered, order = flat.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(num_experts, device=flat.device), right=True)
    if offset is not None and not isinstance(ends, FakeTensor):
        order = order[: int(ends[-1])]
    return order, ends


def _put_back(rows: Tensor, order: Tensor, count: int) -> Tensor:
    """Return `count` rows: row `order[i]` is `rows[i]`, and missing rows are zero; `order` has no duplicates."""
    if len(order) < count:
        return rows.new_zeros(count, rows.shape[1]).index_copy(0, order, rows)
    places = torch.empty_like(order)
    places[order] = torch.arange(count, device=order.device)
    return rows[places]


class _Dropout(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return x.mul(mask).mul_(scale)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.aten.native_dropout_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


def dropout(x: Tensor, p: float, draw: Draw, shard: Shard | None) -> Tensor:
    """Apply dropout with the single process's mask; only the masks of draws by part depend on the slicing of `x`.

    With a seed, the rank computes its own shard of the mask. Without one, it draws the mask of the whole tensor from
    the default generator and keeps its shard. So masks and generator state are bitwise those of `native_dropout` in a
    single process. The mask is drawn in the order of the dimensions, in whatever order this rank stores `x`. A single
    process draws a tensor that it stores permuted in the order of memory; the graph contains this permutation
    (`pcg.capture.capture`).
    """
    if draw.seed is None and shard is None and x.is_contiguous():
        return torch.native_dropout(x, p, True)[0]
    if draw.seed is not None:
        return drop(x, p, draw, shard)
    return drop(x, p, ahead(x.shape if shard is None else shard.shape, p, draw, x.dtype, x.device), shard)


def ahead(shape: Sequence[int], p: float, draw: Draw, dtype: torch.dtype, device: torch.device) -> Tensor | Draw:
    """Draw the keep-mask of a contiguous tensor as `native_dropout` does; on a GPU the draw depends on the dtype.

    With a seed nothing is drawn ahead, and the draw itself is returned. It is not a draw by part, as several dropouts
    that share a mask may be sliced differently.
    """
    if draw.seed is not None:
        return replace(draw, by_part=False)
    if device.type == "cpu":
        return torch.empty(tuple(shape), dtype=torch.bool).bernoulli_(1 - p)
    return torch.native_dropout(torch.ones(tuple(shape), dtype=dtype, device=device), p, True)[1]


def drop(x: Tensor, p: float, drawn: Tensor | Draw, shard: Shard | None) -> Tensor:
    """Apply dropout by a mask of the whole tensor, or by a draw with a seed; `x` is the `shard` of that tensor."""
    return _Dropout.apply(x, own_mask(x, p, drawn, shard), 1 / (1 - p) if p < 1 else 0.0)


def own_mask(x: Tensor, p: float, drawn: Tensor | Draw, shard: Shard | None) -> Tensor:
    """Return the mask of this rank's part."""
    if isinstance(drawn, Tensor):
        return drawn if shard is None else shard.take(drawn)
    shape, cuts = (x.shape, None) if shard is None else (shard.shape, shard.cuts())
    assert drawn.seed is not None
    if drawn.by_part and not torch.compiler.is_compiling():  # compiled, `keep_mask` is one kernel as well
        return _part_mask(x, 1 - p, drawn, cuts or ())
    return keep_mask(shape, 1 - p, drawn.seed, drawn.number, x.device, cuts)


def _part_mask(x: Tensor, keep: float, drawn: Draw, cuts: Sequence[Sequence[Slice]]) -> Tensor:
    """Draw the mask of a part from torch's generator; it is the same on all ranks with this part, and each time."""
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    if isinstance(x, FakeTensor):
        return mask
    name = repr((drawn.seed, drawn.number, [[tuple(own) for own in dim] for dim in cuts]))
    state = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
    return mask.bernoulli_(keep, generator=torch.Generator(x.device).manual_seed(state))
