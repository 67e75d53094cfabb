"""Linear layers, products of matrices, and convolutions."""

from __future__ import annotations

from shardwright.substitutions.generator.universe import RING, SerialContext, cut

CONTRACTIONS = (
    SerialContext(
        "linear", {"x": "*b i", "y": "*b i", "w": "o i", "v": "o i", "c": ""}, (*RING, "linear"), about=("linear",)
    ),
    SerialContext(
        "bias",
        {"x": "*b i", "w": "o i", "c": "o", "d": "i", "g": ""},
        ("add", "mul", "neg", "linear"),
        about=("linear",),
    ),
    SerialContext(
        "layers",
        {"x": "*b i", "w": "h i", "v": "o h", "u": "h o", "c": ""},
        ("add", "mul", "linear", "matmul", "relu", "gelu"),
        about=("linear", "matmul"),
    ),
    SerialContext(
        "products", {"x": "*b i", "w": "o i", "v": "i o", "u": "o o1"}, ("linear", "matmul", "transpose", "neg")
    ),
    SerialContext(
        "matmul",
        {"x": "*b m k", "y": "*b k n", "z": "*b k n", "c": ""},
        (*RING, "matmul", "transpose"),
        about=("matmul", "permute"),
    ),
    SerialContext(
        "matrices",
        {"x": "m k", "y": "k n", "z": "n p", "c": ""},
        ("add", "mul", "matmul", "linear", "transpose"),
        about=("linear", "matmul"),
    ),
    SerialContext(
        "matmul_rows",
        {"x": "*b m k", "y": "*b k n", "c": "*b m 1", "d": "n", "e": "k"},
        ("add", "mul", "matmul"),
        about=("matmul",),
    ),
    SerialContext(
        "attention_products",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e", "c": ""},
        ("matmul", "transpose", "softmax", "mul", "neg"),
        parts=2,
        about=("matmul", "permute", "softmax"),
    ),
    SerialContext(
        "conv",
        {"x": "n c h w", "y": "n c h w", "f": "o c p q", "g": "o c p q", "s": ""},
        (*RING, "conv2d"),
        about=("conv2d",),
    ),
    SerialContext(
        "conv_outputs",
        {"x": "n c h w", "f": "o c p q", "g": "e c p q", "s": ""},
        ("conv2d", "concat", "slice", "mul", "neg", "relu"),
        cuts=cut("e + o", "0:o", "o:e + o"),
        extents=("e + o",),
        about=("conv2d", "concat", "slice"),
    ),
    SerialContext(
        "conv_inputs",
        {"x": "n c h w", "y": "n e h w", "f": "o c p q", "g": "o e p q", "s": ""},
        ("conv2d", "concat", "add", "mul", "neg"),
        extents=("c + e",),
        about=("conv2d", "concat"),
    ),
    SerialContext(
        "conv_batch",
        {"x": "n c h w", "y": "m c h w", "f": "o c p q", "s": ""},
        ("conv2d", "concat", "slice", "mul", "neg", "relu"),
        cuts=cut("n", "s0:t0"),
        extents=("m + n", "t0 - s0"),
        about=("conv2d", "concat", "slice"),
    ),
)
