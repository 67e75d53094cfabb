"""Concatenations and slices around linear layers and products."""

from __future__ import annotations

from shardwright.substitutions.generator.universe import SerialContext, cut

FUSION = (
    SerialContext(
        "outputs",
        {"x": "*b i", "v": "o i", "w": "p i", "c": "", "d": "o"},
        ("linear", "concat", "slice", "add", "mul", "neg"),
        cuts=cut("o + p", "0:o", "o:o + p"),
        extents=("o + p",),
        about=("linear", "concat", "slice"),
    ),
    SerialContext(
        "outputs_of_act",
        {"x": "*b i", "v": "o i", "w": "p i"},
        ("linear", "concat", "slice", "relu", "gelu", "neg"),
        cuts=cut("o + p", "0:o", "o:o + p"),
        extents=("o + p",),
    ),
    SerialContext(
        "inputs",
        {"x": "*b i", "y": "*b j", "v": "o i", "w": "o j", "c": ""},
        ("linear", "concat", "add", "mul", "neg"),
        extents=("i + j",),
        about=("linear", "concat"),
    ),
    SerialContext(
        "slices_of_linear",
        {"x": "*b i", "w": "o i", "c": "o", "d": ""},
        ("linear", "slice", "add", "mul", "neg"),
        cuts=cut("o", "s:t"),
        extents=("t - s",),
        about=("linear", "slice"),
    ),
    SerialContext(
        "batch_of_linear",
        {"x": "m i", "y": "n i", "w": "o i", "c": ""},
        ("linear", "concat", "slice", "mul", "neg", "relu"),
        cuts=cut("m + n", "0:m", "m:m + n"),
        extents=("m + n",),
        about=("linear", "concat", "slice"),
    ),
    SerialContext(
        "slices_of_matmul",
        {"x": "*b m k", "y": "*b k n", "c": ""},
        ("matmul", "slice", "mul", "neg"),
        cuts={**cut("m", "s:t"), **cut("n", "u:v")},
        extents=("t - s", "v - u"),
        about=("matmul", "slice"),
    ),
    SerialContext(
        "concats_of_matmul",
        {"x": "*b m k", "y": "*b k n", "z": "*b k p", "u": "*b e k"},
        ("matmul", "concat", "slice", "neg"),
        cuts=cut("n + p", "0:n", "n:n + p"),
        extents=("n + p", "e + m"),
    ),
)
