"""The contexts of placement rules."""

from __future__ import annotations

from typing import Any

from shardwright.substitutions.generator.context import placed

_CONV = "conv2d(stride=stride, padding=padding, dilation=dilation, groups=1)"
_NORM = "(eps=eps, normalized_dims=1)"
_CUT = "slice(dim=0, start=0, stop=o, step=1)"
_REST = "slice(dim=0, start=o, stop=2 * o, step=1)"
_LOSS = "cross_entropy_sum(ignore_index=ignore, label_smoothing=smoothing)"
_SUMS = "sum(dims=(0,), keepdim=False) sum(dims=(1,), keepdim=False)"
_TRANSPOSED = "permute(dims=(1, 0))"
_IMAGE: dict[str, Any] = {
    "whole": ("h", "w", "p", "q"), "sizes": {"h": 41, "w": 47, "p": 7, "q": 11},
    "small": {"h": 9, "w": 10, "p": 2, "q": 3}, "parts": 1,
}  # fmt: skip

ONE_AXIS = (
    placed("dense", "x: m i, y: m i, w: o i, c", f"linear add mul relu tanh {_TRANSPOSED} softmax(dim=1) {_SUMS}"),
    placed("bias", "x: m i, w: o i, v: o i, z: o", "linear add sub mul neg relu concat(dim=0)"),
    placed("chain", "x: m i, w: h i, v: o h", f"linear matmul relu {_TRANSPOSED} softmax(dim=0)"),
    placed("batched", "x: b m k, y: b k n, c",
           "matmul mul relu softmax(dim=2) permute(dims=(0, 2, 1)) sum(dims=(0,), keepdim=False)"),
    placed("heads", "x: m (h d), y: m h d, w: (h d) i",
           "reshape(shape=(m, h, d)) reshape(shape=(m, h * d)) reshape(shape=(m * h, d)) permute(dims=(1, 0, 2))"
           " add relu linear sum(dims=(1,), keepdim=False)"),
    placed("layer_norm", "x: m i, g: i, c: i", f"layer_norm{_NORM} add relu {_TRANSPOSED}", parts=1),
    placed("rms_norm", "x: b m i, g: i, w: o i, y: b m i", f"rms_norm{_NORM} linear add mul silu"),
    placed("lookup", "w: v h, t: n -> v, u: o h, g: h",
           f"embedding(padding_idx=pad) linear add mul relu rms_norm{_NORM}"),
    placed("loss", "x: m v, t: m -> v, y: m v, c", f"{_LOSS} add mul relu softmax(dim=1)"),
    placed("image", "x: b i h w, k: o i p q, z: b i h w",
           f"{_CONV} add relu concat(dim=1) sum(dims=(0,), keepdim=False)", **_IMAGE),
    placed("attention", "q: h n d, k: h s d, v: h s e, c",
           "sdpa(causal=False, scale=scale) mul relu permute(dims=(1, 0, 2)) softmax(dim=2)"),
    placed("pieces", "x: m i, w: (q o) i, y: m i, z: m j",
           f"linear add relu {_CUT} {_REST} concat(dim=0) concat(dim=1)"),
    placed("sequence", "x: b m i, w: o i, z: o, u: b m o", f"linear add mul relu softmax(dim=2) {_SUMS}"),
    placed("flatten", "x: b m i, w: o i, u: (b m) i",
           "linear add relu reshape(shape=(b * m, i)) reshape(shape=(b, m, i)) reshape(shape=(b * m, o))"
           " reshape(shape=(b, m, o)) softmax(dim=1)"),
    placed("projection", "x: m i, w: (h d) i, v: o (h d)",
           "linear reshape(shape=(m, h, d)) reshape(shape=(m, h * d)) permute(dims=(1, 0, 2)) relu"),
    placed("grouped", "q: (h r) n d, k: h s d, v: h s e",
           "sdpa(causal=True, scale=scale) add permute(dims=(1, 0, 2)) relu"),
    placed("gated", "x: m i, w: h i, v: h i, u: m h", f"linear mul add sub silu {_TRANSPOSED}"),
    placed("statistics", "x: m i, y: m i, c",
           f"sum(dims=(0,), keepdim=True) sum(dims=(1,), keepdim=True) {_SUMS} mul sub exp"),
    placed("tokens", "w: v h, t: b n -> v, u: o h, p: n h",
           "embedding(padding_idx=pad) linear add relu softmax(dim=2)"),
    placed("objective", "x: m i, w: v i, t: m -> v, c", f"{_LOSS} linear mul relu add"),
    placed("product", "x: m k, y: k n, z: k n, c", f"matmul mul add {_TRANSPOSED} tanh concat(dim=1)"),
    placed("fused", "x: m i, w: (q o) i, z: (q o)",
           "linear add slice(dim=1, start=0, stop=o, step=1) slice(dim=1, start=o, stop=2 * o, step=1)"
           f" {_CUT} {_REST} mul"),
    placed("bias_of_channels", "x: b i h w, k: o i p q, z: o 1 1, y: i 1 1", f"{_CONV} add mul relu", **_IMAGE),
    placed("attention_batched", "q: b h n d, k: b h s d, v: b h s e, c",
           "sdpa(causal=False, scale=scale) add mul permute(dims=(0, 2, 1, 3))", sizes={"b": 5}),
    placed("scores", "q: h n d, k: h d s, p: n s, v: h s e",
           "matmul add softmax(dim=2) permute(dims=(1, 0, 2)) permute(dims=(0, 2, 1))"),
    placed("affine", "x: m i, g: i, c: i, r: m 1", f"mul add sub relu sum(dims=(1,), keepdim=True) {_TRANSPOSED}"),
    placed("blocks", "x: b (h d), y: b h d, g: d, c: (h d)",
           "reshape(shape=(b, h, d)) reshape(shape=(b, h * d)) add mul tanh softmax(dim=2)"
           " sum(dims=(2,), keepdim=False)"),
    placed("pairs", "x: m i, y: m i, w: o i, v: o i", f"linear concat(dim=0) concat(dim=1) mul tanh {_TRANSPOSED}"),
)  # fmt: skip

_AB = ("a", "b")

TWO_AXES = (
    placed("two_axes", "x: m i, w: o i", f"linear add mul relu {_TRANSPOSED} {_SUMS}", axes=_AB),
    placed("two_axes_layers", "x: m i, w: h i, v: o h, u: m h", "linear add mul silu", axes=_AB),
    placed("two_axes_bias", "x: m i, w: o i, z: o, c", "linear add mul relu", axes=_AB),
    placed("two_axes_product", "x: m k, y: k n", f"matmul mul sub tanh {_TRANSPOSED} {_SUMS}", axes=_AB),
    placed("two_axes_batched", "x: n m k, y: n k o",
           "matmul mul relu softmax(dim=2) permute(dims=(0, 2, 1)) sum(dims=(0,), keepdim=False)", axes=_AB),
    placed("two_axes_elements", "x: m i, y: m i, c",
           f"add sub mul neg relu exp softmax(dim=1) {_TRANSPOSED} {_SUMS}", axes=_AB),
    placed("two_axes_sequence", "x: n m i, w: o i, g: i",
           f"linear add mul rms_norm{_NORM} sum(dims=(0,), keepdim=False)", axes=_AB),
    placed("two_axes_heads", "x: m (h d), y: m h d, w: (h d) i",
           "linear add relu reshape(shape=(m, h, d)) reshape(shape=(m, h * d)) permute(dims=(1, 0, 2))", axes=_AB),
    placed("two_axes_pieces", "x: m i, w: (q o) i, y: m i", f"linear add {_CUT} {_REST} concat(dim=0) concat(dim=1)",
           axes=_AB),
    placed("two_axes_lookup", "w: v h, t: n -> v, u: o h", "embedding(padding_idx=pad) linear add relu", axes=_AB),
)  # fmt: skip

PLACEMENT_CONTEXTS = (*ONE_AXIS, *TWO_AXES)
