"""Sums, softmax and norms."""

from __future__ import annotations

from shardwright.substitutions.generator.universe import RING, SerialContext, cut

REDUCTIONS = (
    SerialContext(
        "sums", {"x": "*b m n", "y": "*b m n", "c": "", "d": "n"}, ("sum", "add", "mul", "neg"), about=("sum",)
    ),
    SerialContext(
        "sums_of_matrices",
        {"x": "m n", "y": "m n", "c": "", "d": "m"},
        ("sum", "add", "mul", "sub", "transpose"),
        about=("sum",),
    ),
    SerialContext(
        "sums_of_linear",
        {"x": "m *b i", "y": "m *b i", "w": "o i", "c": ""},
        ("sum", "linear", "add", "mul", "neg"),
        about=("sum", "linear"),
    ),
    SerialContext(
        "sums_of_matmul",
        {"x": "*b m k", "y": "*b k n", "c": ""},
        ("sum", "matmul", "mul", "neg", "transpose"),
        about=("sum", "matmul"),
    ),
    SerialContext(
        "sums_of_pieces",
        {"x": "*b i", "y": "*b j", "c": ""},
        ("sum", "concat", "add", "mul", "neg", "relu"),
        extents=("i + j",),
        about=("sum", "concat"),
    ),
    SerialContext(
        "sums_of_heads",
        {"x": "m (h d)", "c": ""},
        ("sum", "split", "merge", "transpose", "mul", "neg"),
        extents=("m", "h", "d"),
        about=("sum", "reshape"),
    ),
    SerialContext("means", {"x": "*b i", "y": "*b i", "c": ""}, (*RING, "sum_keep"), about=("sum",)),
    SerialContext(
        "softmax", {"x": "*b i", "y": "*b i", "c": "*b 1", "d": ""}, (*RING, "softmax"), parts=2, about=("softmax",)
    ),
    SerialContext(
        "softmax_parts",
        {"x": "*b i", "c": "*b 1"},
        ("exp", "sum_keep", "div", "mul", "add", "softmax", "log_softmax"),
        parts=3,
        part=1,
        about=("exp", "softmax", "log_softmax", "sum"),
    ),
    SerialContext(
        "softmax_of_pieces",
        {"x": "*b m i", "y": "*b n i", "c": ""},
        ("softmax", "concat", "slice", "mul", "neg", "relu"),
        cuts=cut("m + n", "0:m", "m:m + n"),
        extents=("m + n",),
        parts=2,
    ),
)

NORMS = (
    SerialContext(
        "layer_norm",
        {"x": "*b i", "w": "i", "c": "", "e": "*b 1"},
        ("layer_norm", "layer_norm_scaled", "add", "mul", "neg"),
        about=("layer_norm",),
    ),
    SerialContext(
        "layer_norm_scaled",
        {"x": "*b i", "w": "i", "d": "i", "c": ""},
        ("layer_norm", "layer_norm_scaled", "mul", "neg"),
        about=("layer_norm",),
    ),
    SerialContext(
        "layer_norm_affine",
        {"x": "*b i", "w": "i", "d": "i"},
        ("layer_norm", "layer_norm_scaled", "layer_norm_affine", "add", "mul"),
        about=("layer_norm",),
    ),
    SerialContext(
        "rms_norm",
        {"x": "*b i", "y": "*b i", "w": "i", "c": ""},
        ("rms_norm", "rms_norm_scaled", "add", "mul", "neg"),
        about=("rms_norm",),
    ),
    SerialContext(
        "layer_norms_of_pieces",
        {"x": "m i", "y": "n i", "w": "i", "c": "i"},
        ("layer_norm_affine", "layer_norm", "concat", "slice", "neg"),
        cuts=cut("m + n", "0:m", "m:m + n"),
        extents=("m + n",),
    ),
    SerialContext(
        "rms_norms_of_pieces",
        {"x": "m i", "y": "n i", "w": "i"},
        ("rms_norm", "rms_norm_scaled", "concat", "slice", "neg"),
        cuts=cut("m + n", "0:m", "m:m + n"),
        extents=("m + n",),
    ),
    *(
        SerialContext(
            f"{norm}s_of_linear",
            {"x": "*b i", "w": "o i", "c": "o", "d": "i", "g": "i"},
            ("linear", norm, f"{norm}_scaled", "mul", "add"),
            about=(norm,),
        )
        for norm in ("layer_norm", "rms_norm")
    ),
    SerialContext(
        "norms_moved",
        {"x": "*b m n i", "w": "i"},
        ("layer_norm", "layer_norm_scaled", "rms_norm", "rms_norm_scaled", "transpose", "neg"),
    ),
)
