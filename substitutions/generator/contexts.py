"""The contexts that are enumerated, by topic. Together they hold every operator of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.substitutions.generator.universe import Context

_NO_CUTS: Mapping[str, tuple[tuple[str, str], ...]] = {}
_RING = ("add", "sub", "mul", "neg")
_LEADING = {"x": "*b i", "y": "*b i", "c": ""}


def _cut(dim: str, *pairs: str) -> Mapping[str, tuple[tuple[str, str], ...]]:
    """`_cut("n", "s:t")`: slices of dimension n from s to t."""
    return {dim: tuple((a.strip(), b.strip()) for a, b in (pair.split(":") for pair in pairs))}


POINTWISE = (
    Context("arithmetic", {"x": "*b", "y": "*b", "z": "*b", "c": ""}, _RING, _NO_CUTS),
    Context(
        "scalars", {"x": "*b", "y": "*b", "c": "", "d": ""}, ("add", "mul", "div", "neg"), _NO_CUTS, about=("div",)
    ),
    Context(
        "quotients", {"x": "*b", "y": "*b", "z": "*b"}, ("add", "sub", "mul", "div", "neg"), _NO_CUTS, about=("div",)
    ),
    Context("rows", {"x": "*b i", "y": "*b i", "c": "i", "d": ""}, _RING, _NO_CUTS),
    Context("columns", {"x": "*b i", "y": "*b i", "c": "*b 1"}, _RING, _NO_CUTS),
    Context("relu", {"x": "*b", "y": "*b", "c": ""}, (*_RING, "relu"), _NO_CUTS, samples=4, about=("relu",)),
    Context("exponentials", {"x": "*b", "y": "*b", "c": ""}, (*_RING, "div", "exp"), _NO_CUTS, parts=3, about=("exp",)),
    Context(
        "activations",
        {"x": "*b", "y": "*b"},
        ("sub", "mul", "neg", "relu", "gelu", "sigmoid", "tanh", "silu"),
        _NO_CUTS,
        parts=3,
    ),
)

CONTRACTIONS = (
    Context(
        "linear",
        {"x": "*b i", "y": "*b i", "w": "o i", "v": "o i", "c": ""},
        (*_RING, "linear"),
        _NO_CUTS,
        about=("linear",),
    ),
    Context(
        "bias",
        {"x": "*b i", "w": "o i", "c": "o", "d": "i", "g": ""},
        ("add", "mul", "neg", "linear"),
        _NO_CUTS,
        about=("linear",),
    ),
    Context(
        "layers",
        {"x": "*b i", "w": "h i", "v": "o h", "u": "h o", "c": ""},
        ("add", "mul", "linear", "matmul", "relu", "gelu"),
        _NO_CUTS,
        about=("linear", "matmul"),
    ),
    Context(
        "products",
        {"x": "*b i", "w": "o i", "v": "i o", "u": "o o1"},
        ("linear", "matmul", "transpose", "neg"),
        _NO_CUTS,
    ),
    Context(
        "matmul",
        {"x": "*b m k", "y": "*b k n", "z": "*b k n", "c": ""},
        (*_RING, "matmul", "transpose"),
        _NO_CUTS,
        about=("matmul", "permute"),
    ),
    Context(
        "matrices",
        {"x": "m k", "y": "k n", "z": "n p", "c": ""},
        ("add", "mul", "matmul", "linear", "transpose"),
        _NO_CUTS,
        about=("linear", "matmul"),
    ),
    Context(
        "matmul_rows",
        {"x": "*b m k", "y": "*b k n", "c": "*b m 1", "d": "n", "e": "k"},
        ("add", "mul", "matmul"),
        _NO_CUTS,
        about=("matmul",),
    ),
    Context(
        "attention_products",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e", "c": ""},
        ("matmul", "transpose", "softmax", "mul", "neg"),
        _NO_CUTS,
        parts=2,
        about=("matmul", "permute", "softmax"),
    ),
    Context(
        "conv",
        {"x": "n c h w", "y": "n c h w", "f": "o c p q", "g": "o c p q", "s": ""},
        (*_RING, "conv2d"),
        _NO_CUTS,
        about=("conv2d",),
    ),
    Context(
        "conv_outputs",
        {"x": "n c h w", "f": "o c p q", "g": "e c p q", "s": ""},
        ("conv2d", "concat", "slice", "mul", "neg", "relu"),
        _cut("e + o", "0:o", "o:e + o"),
        ("e + o",),
        about=("conv2d", "concat", "slice"),
    ),
    Context(
        "conv_inputs",
        {"x": "n c h w", "y": "n e h w", "f": "o c p q", "g": "o e p q", "s": ""},
        ("conv2d", "concat", "add", "mul", "neg"),
        _NO_CUTS,
        ("c + e",),
        about=("conv2d", "concat"),
    ),
    Context(
        "conv_batch",
        {"x": "n c h w", "y": "m c h w", "f": "o c p q", "s": ""},
        ("conv2d", "concat", "slice", "mul", "neg", "relu"),
        _cut("n", "s0:t0"),
        ("m + n", "t0 - s0"),
        about=("conv2d", "concat", "slice"),
    ),
)

FUSION = (
    Context(
        "outputs",
        {"x": "*b i", "v": "o i", "w": "p i", "c": "", "d": "o"},
        ("linear", "concat", "slice", "add", "mul", "neg"),
        _cut("o + p", "0:o", "o:o + p"),
        ("o + p",),
        about=("linear", "concat", "slice"),
    ),
    Context(
        "outputs_of_act",
        {"x": "*b i", "v": "o i", "w": "p i"},
        ("linear", "concat", "slice", "relu", "gelu", "neg"),
        _cut("o + p", "0:o", "o:o + p"),
        ("o + p",),
    ),
    Context(
        "inputs",
        {"x": "*b i", "y": "*b j", "v": "o i", "w": "o j", "c": ""},
        ("linear", "concat", "add", "mul", "neg"),
        _NO_CUTS,
        ("i + j",),
        about=("linear", "concat"),
    ),
    Context(
        "slices_of_linear",
        {"x": "*b i", "w": "o i", "c": "o", "d": ""},
        ("linear", "slice", "add", "mul", "neg"),
        _cut("o", "s:t"),
        ("t - s",),
        about=("linear", "slice"),
    ),
    Context(
        "batch_of_linear",
        {"x": "m i", "y": "n i", "w": "o i", "c": ""},
        ("linear", "concat", "slice", "mul", "neg", "relu"),
        _cut("m + n", "0:m", "m:m + n"),
        ("m + n",),
        about=("linear", "concat", "slice"),
    ),
    Context(
        "slices_of_matmul",
        {"x": "*b m k", "y": "*b k n", "c": ""},
        ("matmul", "slice", "mul", "neg"),
        {**_cut("m", "s:t"), **_cut("n", "u:v")},
        ("t - s", "v - u"),
        about=("matmul", "slice"),
    ),
    Context(
        "concats_of_matmul",
        {"x": "*b m k", "y": "*b k n", "z": "*b k p", "u": "*b e k"},
        ("matmul", "concat", "slice", "neg"),
        _cut("n + p", "0:n", "n:n + p"),
        ("n + p", "e + m"),
    ),
)

MOVEMENT = (
    Context(
        "transposes",
        {"x": "m n", "y": "m n", "c": "", "d": "n"},
        (*_RING, "transpose", "relu"),
        _NO_CUTS,
        about=("permute",),
    ),
    Context(
        "transposes_of_act",
        {"x": "m n", "y": "m n"},
        ("transpose", "gelu", "silu", "tanh", "exp", "softmax", "mul"),
        _NO_CUTS,
        parts=2,
    ),
    Context(
        "permutations", {"x": "*b m n k", "c": ""}, ("transpose", "mul", "neg", "relu", "softmax"), _NO_CUTS, parts=2
    ),
    Context(
        "concats",
        {"x": "*b i", "y": "*b j", "z": "*b k", "c": ""},
        ("concat", "neg", "relu", "mul", "slice"),
        _cut("i + j", "0:i", "i:i + j"),
        ("i + j", "i + k", "j + k", "i + j + k"),
        about=("concat", "slice"),
    ),
    Context(
        "concats_of_pairs",
        {"x": "*b i", "y": "*b j", "z": "*b i", "w": "*b j"},
        ("concat", "add", "mul", "neg", "sub"),
        _NO_CUTS,
        ("i + j",),
        about=("concat",),
    ),
    Context(
        "concats_of_rows",
        {"x": "i n", "y": "j n", "z": "i n", "c": "n"},
        ("concat", "slice", "add", "mul", "transpose", "neg"),
        _cut("i + j", "0:i", "i:i + j"),
        ("i + j",),
        about=("concat", "slice"),
    ),
    Context(
        "slices",
        {"x": "*b n", "y": "*b n", "c": "n", "d": ""},
        ("slice", "add", "mul", "neg", "relu"),
        _cut("n", "s:t"),
        ("t - s",),
        about=("slice",),
    ),
    Context(
        "pieces",
        {"x": "*b n", "y": "*b n", "c": ""},
        ("slice", "concat", "add", "mul", "neg", "gelu"),
        _cut("n", "0:s", "s:n"),
        ("s", "n - s"),
        about=("slice", "concat"),
    ),
    Context(
        "slices_of_rows",
        {"x": "m n", "y": "m n", "c": "n"},
        ("slice", "add", "mul", "transpose", "relu"),
        {**_cut("m", "s:t"), **_cut("n", "u:v")},
        ("t - s", "v - u"),
        about=("slice",),
    ),
    Context(
        "heads",
        {"x": "m (h d)", "y": "m (h d)", "c": ""},
        ("split", "merge", "transpose", "add", "mul", "neg"),
        _NO_CUTS,
        ("m", "h", "d"),
        about=("reshape", "permute"),
    ),
    Context(
        "heads_of_act",
        {"x": "*b (h d)", "y": "*b (h d)"},
        ("split", "merge", "relu", "gelu", "silu", "mul", "sub"),
        _NO_CUTS,
        ("h", "d"),
        about=("reshape",),
    ),
    Context(
        "heads_of_linear",
        {"x": "m i", "w": "(h d) i", "c": "(h d)", "g": ""},
        ("linear", "split", "merge", "transpose", "add", "mul"),
        _NO_CUTS,
        ("h", "d"),
        about=("linear", "reshape"),
    ),
    Context(
        "tokens",
        {"x": "b m i", "y": "b m i", "w": "o i", "c": "i"},
        ("merge", "split", "linear", "add", "mul", "relu", "neg"),
        _NO_CUTS,
        ("b*m",),
        about=("reshape",),
    ),
    Context(
        "tokens_of_norm",
        {"x": "b m i", "w": "i", "c": "i"},
        ("merge", "layer_norm", "layer_norm_affine", "rms_norm", "softmax", "mul", "transpose"),
        _NO_CUTS,
        ("b*m",),
        parts=2,
    ),
)

REDUCTIONS = (
    Context(
        "sums",
        {"x": "*b m n", "y": "*b m n", "c": "", "d": "n"},
        ("sum", "add", "mul", "neg"),
        _NO_CUTS,
        about=("sum",),
    ),
    Context(
        "sums_of_matrices",
        {"x": "m n", "y": "m n", "c": "", "d": "m"},
        ("sum", "add", "mul", "sub", "transpose"),
        _NO_CUTS,
        about=("sum",),
    ),
    Context(
        "sums_of_linear",
        {"x": "m *b i", "y": "m *b i", "w": "o i", "c": ""},
        ("sum", "linear", "add", "mul", "neg"),
        _NO_CUTS,
        about=("sum", "linear"),
    ),
    Context(
        "sums_of_matmul",
        {"x": "*b m k", "y": "*b k n", "c": ""},
        ("sum", "matmul", "mul", "neg", "transpose"),
        _NO_CUTS,
        about=("sum", "matmul"),
    ),
    Context(
        "sums_of_pieces",
        {"x": "*b i", "y": "*b j", "c": ""},
        ("sum", "concat", "add", "mul", "neg", "relu"),
        _NO_CUTS,
        ("i + j",),
        about=("sum", "concat"),
    ),
    Context(
        "sums_of_heads",
        {"x": "m (h d)", "c": ""},
        ("sum", "split", "merge", "transpose", "mul", "neg"),
        _NO_CUTS,
        ("m", "h", "d"),
        about=("sum", "reshape"),
    ),
    Context("means", {**_LEADING}, (*_RING, "sum_keep"), _NO_CUTS, about=("sum",)),
    Context(
        "softmax",
        {"x": "*b i", "y": "*b i", "c": "*b 1", "d": ""},
        (*_RING, "softmax"),
        _NO_CUTS,
        parts=2,
        about=("softmax",),
    ),
    Context(
        "softmax_parts",
        {"x": "*b i", "c": "*b 1"},
        ("exp", "sum_keep", "div", "mul", "add", "softmax", "log_softmax"),
        _NO_CUTS,
        parts=3,
        part=1,
        about=("exp", "softmax", "log_softmax", "sum"),
    ),
    Context(
        "softmax_of_pieces",
        {"x": "*b m i", "y": "*b n i", "c": ""},
        ("softmax", "concat", "slice", "mul", "neg", "relu"),
        _cut("m + n", "0:m", "m:m + n"),
        ("m + n",),
        parts=2,
    ),
)

NORMS = (
    Context(
        "layer_norm",
        {"x": "*b i", "w": "i", "c": "", "e": "*b 1"},
        ("layer_norm", "layer_norm_scaled", "add", "mul", "neg"),
        _NO_CUTS,
        about=("layer_norm",),
    ),
    Context(
        "layer_norm_affine",
        {"x": "*b i", "w": "i", "d": "i", "c": ""},
        ("layer_norm", "layer_norm_scaled", "layer_norm_affine", "add", "mul", "neg"),
        _NO_CUTS,
        about=("layer_norm",),
        num_ops=3,
    ),
    Context(
        "rms_norm",
        {"x": "*b i", "y": "*b i", "w": "i", "c": ""},
        ("rms_norm", "rms_norm_scaled", "add", "mul", "neg"),
        _NO_CUTS,
        about=("rms_norm",),
    ),
    Context(
        "norms_of_pieces",
        {"x": "m i", "y": "n i", "w": "i", "c": "i"},
        ("layer_norm_affine", "layer_norm", "rms_norm", "rms_norm_scaled", "concat", "slice", "neg"),
        _cut("m + n", "0:m", "m:m + n"),
        ("m + n",),
        num_ops=3,
    ),
    Context(
        "norms_of_linear",
        {"x": "*b i", "w": "o i", "c": "o", "d": "i", "g": "i"},
        ("linear", "layer_norm", "layer_norm_scaled", "rms_norm", "rms_norm_scaled", "mul", "add"),
        _NO_CUTS,
        about=("layer_norm", "rms_norm"),
    ),
    Context(
        "norms_moved",
        {"x": "*b m n i", "w": "i"},
        ("layer_norm", "layer_norm_scaled", "rms_norm", "rms_norm_scaled", "transpose", "neg"),
        _NO_CUTS,
    ),
)

LOOKUPS = (
    Context(
        "embedding",
        {"w": "v i", "u": "v i", "t": "*b -> v", "c": "", "d": "i"},
        (*_RING, "embedding"),
        _NO_CUTS,
        about=("embedding",),
    ),
    Context(
        "embedding_moved",
        {"w": "v i", "t": "m n -> v", "u": "o i"},
        ("embedding", "transpose", "merge", "linear", "relu", "gelu", "neg"),
        _NO_CUTS,
        ("m*n",),
    ),
    Context(
        "embedding_norms",
        {"w": "v i", "t": "*b -> v", "d": "i", "u": "o i"},
        ("embedding", "layer_norm", "layer_norm_scaled", "rms_norm", "softmax", "linear", "mul"),
        _NO_CUTS,
        parts=2,
        about=("embedding",),
    ),
    Context(
        "embedding_pieces",
        {"w": "v i", "u": "v j", "t": "m -> v", "s": "n -> v"},
        ("embedding", "concat", "slice", "neg"),
        {**_cut("m + n", "0:m", "m:m + n"), **_cut("i", "e:f")},
        ("m + n", "i + j", "f - e"),
    ),
    Context(
        "cross_entropy",
        {"x": "n v", "y": "n v", "t": "n -> v", "c": "n 1", "d": ""},
        ("cross_entropy", *_RING, "log_softmax"),
        _NO_CUTS,
        parts=3,
        part=1,
        samples=4,
        about=("cross_entropy_sum", "log_softmax"),
    ),
    Context(
        "cross_entropy_pieces",
        {"x": "n v", "y": "m v", "t": "n -> v", "s": "m -> v"},
        ("cross_entropy", "concat", "slice", "add", "log_softmax", "neg"),
        _cut("m + n", "0:n", "n:m + n"),
        ("m + n",),
        parts=3,
        part=1,
        samples=4,
    ),
)

ATTENTION = (
    Context(
        "sdpa",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e", "c": ""},
        ("sdpa", "mul", "neg"),
        _NO_CUTS,
        parts=2,
        about=("sdpa",),
    ),
    Context(
        "sdpa_values",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e", "u": "*b n e", "c": "e"},
        ("sdpa", "add", "mul"),
        _NO_CUTS,
        parts=2,
        about=("sdpa",),
        num_ops=3,
    ),
    Context(
        "causal_sdpa",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e", "c": "", "w": "f e"},
        ("causal_sdpa", "mul", "neg", "linear"),
        _NO_CUTS,
        parts=2,
        about=("sdpa",),
    ),
    Context(
        "sdpa_pieces",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e"},
        ("sdpa", "slice", "neg"),
        {**_cut("m", "s:t"), **_cut("e", "u:w")},
        ("t - s", "w - u"),
        parts=2,
    ),
    Context(
        "sdpa_concats",
        {"q": "*b m d", "p": "*b l d", "k": "*b n d", "v": "*b n e", "u": "*b n f"},
        ("sdpa", "concat", "neg"),
        _NO_CUTS,
        ("l + m", "e + f"),
        parts=2,
        num_ops=3,
    ),
    Context(
        "sdpa_heads",
        {"q": "h m d", "k": "h n d", "v": "h n e"},
        ("sdpa", "slice", "transpose"),
        _cut("h", "s:t"),
        ("t - s",),
        parts=2,
    ),
)

CONTEXTS = (*POINTWISE, *CONTRACTIONS, *FUSION, *MOVEMENT, *REDUCTIONS, *NORMS, *LOOKUPS, *ATTENTION)


def contexts() -> tuple[Context, ...]:
    """Every context, each an independent unit of work."""
    return CONTEXTS
