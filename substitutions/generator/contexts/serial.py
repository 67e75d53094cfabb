"""The contexts of serial rules, by topic. Together they hold every operator of the vocabulary."""

from __future__ import annotations

from shardwright.substitutions.generator.context import RING, cut, serial

# ---- functions of elements ----

POINTWISE = (
    serial("arithmetic", "x: *b, y: *b, z: *b, c", RING),
    serial("scalars", "x: *b, y: *b, c, d", "add mul div neg", about="div"),
    serial("quotients", "x: *b, y: *b, z: *b", "add sub mul div neg", about="div"),
    serial("rows", "x: *b i, y: *b i, c: i, d", RING),
    serial("columns", "x: *b i, y: *b i, c: *b 1", RING),
    serial("relu", "x: *b, y: *b, c", f"{RING} relu", samples=4, about="relu"),
    serial("exponentials", "x: *b, y: *b, c", f"{RING} div exp", parts=3, about="exp"),
    serial("activations", "x: *b, y: *b", "sub mul neg relu gelu sigmoid tanh silu", parts=3),
)  # fmt: skip

# ---- linear layers, products of matrices, and convolutions ----

CONTRACTIONS = (
    serial("linear", "x: *b i, y: *b i, w: o i, v: o i, c", f"{RING} linear", about="linear"),
    serial("bias", "x: *b i, w: o i, c: o, d: i, g", "add mul neg linear", about="linear"),
    serial("layers", "x: *b i, w: h i, v: o h, u: h o, c", "add mul linear matmul relu gelu", about="linear matmul"),
    serial("products", "x: *b i, w: o i, v: i o, u: o o1", "linear matmul transpose neg"),
    serial("matmul", "x: *b m k, y: *b k n, z: *b k n, c", f"{RING} matmul transpose", about="matmul permute"),
    serial("matrices", "x: m k, y: k n, z: n p, c", "add mul matmul linear transpose", about="linear matmul"),
    serial("matmul_rows", "x: *b m k, y: *b k n, c: *b m 1, d: n, e: k", "add mul matmul", about="matmul"),
    serial("attention_products", "q: *b m d, k: *b n d, v: *b n e, c", "matmul transpose softmax mul neg", parts=2,
           about="matmul permute softmax"),
    serial("conv", "x: n c h w, y: n c h w, f: o c p q, g: o c p q, s", f"{RING} conv2d", about="conv2d"),
    serial("conv_outputs", "x: n c h w, f: o c p q, g: e c p q, s", "conv2d concat slice mul neg relu",
           cuts=cut("e + o", "0:o", "o:e + o"), extents="e + o", about="conv2d concat slice"),
    serial("conv_inputs", "x: n c h w, y: n e h w, f: o c p q, g: o e p q, s", "conv2d concat add mul neg",
           extents="c + e", about="conv2d concat"),
    serial("conv_batch", "x: n c h w, y: m c h w, f: o c p q, s", "conv2d concat slice mul neg relu",
           cuts=cut("n", "s0:t0"), extents="m + n, t0 - s0", about="conv2d concat slice"),
)  # fmt: skip

# ---- concatenations and slices around linear layers and products ----

FUSION = (
    serial("outputs", "x: *b i, v: o i, w: p i, c, d: o", "linear concat slice add mul neg",
           cuts=cut("o + p", "0:o", "o:o + p"), extents="o + p", about="linear concat slice"),
    serial("outputs_of_act", "x: *b i, v: o i, w: p i", "linear concat slice relu gelu neg",
           cuts=cut("o + p", "0:o", "o:o + p"), extents="o + p"),
    serial("inputs", "x: *b i, y: *b j, v: o i, w: o j, c", "linear concat add mul neg", extents="i + j",
           about="linear concat"),
    serial("slices_of_linear", "x: *b i, w: o i, c: o, d", "linear slice add mul neg", cuts=cut("o", "s:t"),
           extents="t - s", about="linear slice"),
    serial("batch_of_linear", "x: m i, y: n i, w: o i, c", "linear concat slice mul neg relu",
           cuts=cut("m + n", "0:m", "m:m + n"), extents="m + n", about="linear concat slice"),
    serial("slices_of_matmul", "x: *b m k, y: *b k n, c", "matmul slice mul neg",
           cuts=cut("m", "s:t") | cut("n", "u:v"), extents="t - s, v - u", about="matmul slice"),
    serial("concats_of_matmul", "x: *b m k, y: *b k n, z: *b k p, u: *b e k", "matmul concat slice neg",
           cuts=cut("n + p", "0:n", "n:n + p"), extents="n + p, e + m"),
)  # fmt: skip

# ---- transposes, reshapes, concatenations and slices ----

MOVEMENT = (
    serial("transposes", "x: m n, y: m n, c, d: n", f"{RING} transpose relu", about="permute"),
    serial("transposes_of_act", "x: m n, y: m n", "transpose gelu silu tanh exp softmax mul", parts=2),
    serial("permutations", "x: *b m n k, c", "transpose mul neg relu softmax", parts=2),
    serial("concats", "x: *b i, y: *b j, z: *b k, c", "concat neg relu mul slice",
           cuts=cut("i + j", "0:i", "i:i + j"), extents="i + j, i + k, j + k, i + j + k", about="concat slice"),
    serial("concats_of_pairs", "x: *b i, y: *b j, z: *b i, w: *b j", "concat add mul neg sub", extents="i + j",
           about="concat"),
    serial("concats_of_rows", "x: i n, y: j n, z: i n, c: n", "concat slice add mul transpose neg",
           cuts=cut("i + j", "0:i", "i:i + j"), extents="i + j", about="concat slice"),
    serial("slices", "x: *b n, y: *b n, c: n, d", "slice add mul neg relu", cuts=cut("n", "s:t"), extents="t - s",
           about="slice"),
    serial("pieces", "x: *b n, y: *b n, c", "slice concat add mul neg gelu", cuts=cut("n", "0:s", "s:n"),
           extents="s, n - s", about="slice concat"),
    serial("slices_of_rows", "x: m n, y: m n, c: n", "slice add mul transpose relu",
           cuts=cut("m", "s:t") | cut("n", "u:v"), extents="t - s, v - u", about="slice"),
    serial("heads", "x: m (h d), y: m (h d), c", "split merge transpose add mul neg", extents="m, h, d",
           about="reshape permute"),
    serial("heads_of_act", "x: *b (h d), y: *b (h d)", "split merge relu gelu silu mul sub", extents="h, d",
           about="reshape"),
    serial("heads_of_linear", "x: m i, w: (h d) i, c: (h d), g", "linear split merge transpose add mul",
           extents="h, d", about="linear reshape"),
    serial("tokens", "x: b m i, y: b m i, w: o i, c: i", "merge split linear add mul relu neg", extents="b*m",
           about="reshape"),
    serial("tokens_of_layer_norm", "x: b m i, w: i, c: i", "merge layer_norm layer_norm_affine mul transpose",
           extents="b*m", parts=2),
    serial("tokens_of_norm", "x: b m i, w: i", "merge rms_norm softmax mul transpose", extents="b*m", parts=2),
)  # fmt: skip

# ---- sums and softmax ----

REDUCTIONS = (
    serial("sums", "x: *b m n, y: *b m n, c, d: n", "sum add mul neg", about="sum"),
    serial("sums_of_matrices", "x: m n, y: m n, c, d: m", "sum add mul sub transpose", about="sum"),
    serial("sums_of_linear", "x: m *b i, y: m *b i, w: o i, c", "sum linear add mul neg", about="sum linear"),
    serial("sums_of_matmul", "x: *b m k, y: *b k n, c", "sum matmul mul neg transpose", about="sum matmul"),
    serial("sums_of_pieces", "x: *b i, y: *b j, c", "sum concat add mul neg relu", extents="i + j",
           about="sum concat"),
    serial("sums_of_heads", "x: m (h d), c", "sum split merge transpose mul neg", extents="m, h, d",
           about="sum reshape"),
    serial("means", "x: *b i, y: *b i, c", f"{RING} sum_keep", about="sum"),
    serial("softmax", "x: *b i, y: *b i, c: *b 1, d", f"{RING} softmax", parts=2, about="softmax"),
    serial("softmax_parts", "x: *b i, c: *b 1", "exp sum_keep div mul add softmax log_softmax", parts=3, part=1,
           about="exp softmax log_softmax sum"),
    serial("softmax_of_pieces", "x: *b m i, y: *b n i, c", "softmax concat slice mul neg relu",
           cuts=cut("m + n", "0:m", "m:m + n"), extents="m + n", parts=2),
)  # fmt: skip

# ---- norms ----

NORMS = (
    serial("layer_norm", "x: *b i, w: i, c, e: *b 1", "layer_norm layer_norm_scaled add mul neg", about="layer_norm"),
    serial("layer_norm_scaled", "x: *b i, w: i, d: i, c", "layer_norm layer_norm_scaled mul neg", about="layer_norm"),
    serial("layer_norm_affine", "x: *b i, w: i, d: i", "layer_norm layer_norm_scaled layer_norm_affine add mul",
           about="layer_norm"),
    serial("rms_norm", "x: *b i, y: *b i, w: i, c", "rms_norm rms_norm_scaled add mul neg", about="rms_norm"),
    serial("layer_norms_of_pieces", "x: m i, y: n i, w: i, c: i", "layer_norm_affine layer_norm concat slice neg",
           cuts=cut("m + n", "0:m", "m:m + n"), extents="m + n"),
    serial("rms_norms_of_pieces", "x: m i, y: n i, w: i", "rms_norm rms_norm_scaled concat slice neg",
           cuts=cut("m + n", "0:m", "m:m + n"), extents="m + n"),
    serial("layer_norms_of_linear", "x: *b i, w: o i, c: o, d: i, g: i",
           "linear layer_norm layer_norm_scaled mul add", about="layer_norm"),
    serial("rms_norms_of_linear", "x: *b i, w: o i, c: o, d: i, g: i", "linear rms_norm rms_norm_scaled mul add",
           about="rms_norm"),
    serial("norms_moved", "x: *b m n i, w: i", "layer_norm layer_norm_scaled rms_norm rms_norm_scaled transpose neg"),
)  # fmt: skip

# ---- embeddings and cross-entropy ----

LOOKUPS = (
    serial("embedding", "w: v i, u: v i, t: *b -> v, c, d: i", f"{RING} embedding", about="embedding"),
    serial("embedding_moved", "w: v i, t: m n -> v, u: o i", "embedding transpose merge linear relu gelu neg",
           extents="m*n"),
    serial("embedding_norms", "w: v i, t: *b -> v, d: i, u: o i",
           "embedding layer_norm layer_norm_scaled rms_norm softmax linear mul", parts=2, about="embedding"),
    serial("embedding_pieces", "w: v i, u: v j, t: m -> v, s: n -> v", "embedding concat slice neg",
           cuts=cut("m + n", "0:m", "m:m + n") | cut("i", "e:f"), extents="m + n, i + j, f - e"),
    serial("cross_entropy", "x: n v, y: n v, t: n -> v, c: n 1, d", f"cross_entropy {RING} log_softmax", parts=3,
           part=1, samples=4, about="cross_entropy_sum log_softmax"),
    serial("cross_entropy_pieces", "x: n v, y: m v, t: n -> v, s: m -> v",
           "cross_entropy concat slice add log_softmax neg", cuts=cut("m + n", "0:n", "n:m + n"), extents="m + n",
           parts=3, part=1, samples=4),
)  # fmt: skip

# ---- scaled dot-product attention ----

ATTENTION = (
    serial("sdpa", "q: *b m d, k: *b n d, v: *b n e, c", "sdpa mul neg", parts=2, about="sdpa"),
    serial("sdpa_values", "q: *b m d, k: *b n d, v: *b n e, u: *b n e", "sdpa add", parts=2, about="sdpa"),
    serial("sdpa_columns", "q: *b m d, k: *b n d, v: *b n e, c: e, g: d", "sdpa mul", parts=2, about="sdpa"),
    serial("causal_sdpa", "q: *b m d, k: *b n d, v: *b n e, c", "causal_sdpa mul neg", parts=2, about="sdpa"),
    serial("linear_of_causal_sdpa", "q: *b m d, k: *b n d, v: *b n e, w: f e", "causal_sdpa linear", parts=2,
           about="sdpa"),
    serial("sdpa_pieces", "q: *b m d, k: *b n d, v: *b n e", "sdpa slice neg",
           cuts=cut("m", "s:t") | cut("e", "u:w"), extents="t - s, w - u", parts=2),
    serial("sdpa_concats", "q: *b m d, p: *b l d, k: *b n d, v: *b n e, u: *b n f", "sdpa concat",
           extents="l + m, e + f", parts=2),
    serial("sdpa_heads", "q: h m d, k: h n d, v: h n e", "sdpa slice transpose", cuts=cut("h", "s:t"),
           extents="t - s", parts=2),
)  # fmt: skip

SERIAL_CONTEXTS = (
    *POINTWISE, *CONTRACTIONS, *FUSION, *MOVEMENT, *REDUCTIONS, *NORMS, *LOOKUPS, *ATTENTION,
)  # fmt: skip
