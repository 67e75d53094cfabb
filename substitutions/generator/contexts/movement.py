"""Transposes, reshapes, concatenations and slices."""

from __future__ import annotations

from shardwright.substitutions.generator.universe import RING, SerialContext, cut

MOVEMENT = (
    SerialContext(
        "transposes", {"x": "m n", "y": "m n", "c": "", "d": "n"}, (*RING, "transpose", "relu"), about=("permute",)
    ),
    SerialContext(
        "transposes_of_act",
        {"x": "m n", "y": "m n"},
        ("transpose", "gelu", "silu", "tanh", "exp", "softmax", "mul"),
        parts=2,
    ),
    SerialContext("permutations", {"x": "*b m n k", "c": ""}, ("transpose", "mul", "neg", "relu", "softmax"), parts=2),
    SerialContext(
        "concats",
        {"x": "*b i", "y": "*b j", "z": "*b k", "c": ""},
        ("concat", "neg", "relu", "mul", "slice"),
        cuts=cut("i + j", "0:i", "i:i + j"),
        extents=("i + j", "i + k", "j + k", "i + j + k"),
        about=("concat", "slice"),
    ),
    SerialContext(
        "concats_of_pairs",
        {"x": "*b i", "y": "*b j", "z": "*b i", "w": "*b j"},
        ("concat", "add", "mul", "neg", "sub"),
        extents=("i + j",),
        about=("concat",),
    ),
    SerialContext(
        "concats_of_rows",
        {"x": "i n", "y": "j n", "z": "i n", "c": "n"},
        ("concat", "slice", "add", "mul", "transpose", "neg"),
        cuts=cut("i + j", "0:i", "i:i + j"),
        extents=("i + j",),
        about=("concat", "slice"),
    ),
    SerialContext(
        "slices",
        {"x": "*b n", "y": "*b n", "c": "n", "d": ""},
        ("slice", "add", "mul", "neg", "relu"),
        cuts=cut("n", "s:t"),
        extents=("t - s",),
        about=("slice",),
    ),
    SerialContext(
        "pieces",
        {"x": "*b n", "y": "*b n", "c": ""},
        ("slice", "concat", "add", "mul", "neg", "gelu"),
        cuts=cut("n", "0:s", "s:n"),
        extents=("s", "n - s"),
        about=("slice", "concat"),
    ),
    SerialContext(
        "slices_of_rows",
        {"x": "m n", "y": "m n", "c": "n"},
        ("slice", "add", "mul", "transpose", "relu"),
        cuts={**cut("m", "s:t"), **cut("n", "u:v")},
        extents=("t - s", "v - u"),
        about=("slice",),
    ),
    SerialContext(
        "heads",
        {"x": "m (h d)", "y": "m (h d)", "c": ""},
        ("split", "merge", "transpose", "add", "mul", "neg"),
        extents=("m", "h", "d"),
        about=("reshape", "permute"),
    ),
    SerialContext(
        "heads_of_act",
        {"x": "*b (h d)", "y": "*b (h d)"},
        ("split", "merge", "relu", "gelu", "silu", "mul", "sub"),
        extents=("h", "d"),
        about=("reshape",),
    ),
    SerialContext(
        "heads_of_linear",
        {"x": "m i", "w": "(h d) i", "c": "(h d)", "g": ""},
        ("linear", "split", "merge", "transpose", "add", "mul"),
        extents=("h", "d"),
        about=("linear", "reshape"),
    ),
    SerialContext(
        "tokens",
        {"x": "b m i", "y": "b m i", "w": "o i", "c": "i"},
        ("merge", "split", "linear", "add", "mul", "relu", "neg"),
        extents=("b*m",),
        about=("reshape",),
    ),
    SerialContext(
        "tokens_of_layer_norm",
        {"x": "b m i", "w": "i", "c": "i"},
        ("merge", "layer_norm", "layer_norm_affine", "mul", "transpose"),
        extents=("b*m",),
        parts=2,
    ),
    SerialContext(
        "tokens_of_norm",
        {"x": "b m i", "w": "i"},
        ("merge", "rms_norm", "softmax", "mul", "transpose"),
        extents=("b*m",),
        parts=2,
    ),
)
