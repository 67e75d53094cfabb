"""Functions of elements."""

from __future__ import annotations

from shardwright.substitutions.generator.universe import RING, SerialContext

POINTWISE = (
    SerialContext("arithmetic", {"x": "*b", "y": "*b", "z": "*b", "c": ""}, RING),
    SerialContext("scalars", {"x": "*b", "y": "*b", "c": "", "d": ""}, ("add", "mul", "div", "neg"), about=("div",)),
    SerialContext("quotients", {"x": "*b", "y": "*b", "z": "*b"}, ("add", "sub", "mul", "div", "neg"), about=("div",)),
    SerialContext("rows", {"x": "*b i", "y": "*b i", "c": "i", "d": ""}, RING),
    SerialContext("columns", {"x": "*b i", "y": "*b i", "c": "*b 1"}, RING),
    SerialContext("relu", {"x": "*b", "y": "*b", "c": ""}, (*RING, "relu"), samples=4, about=("relu",)),
    SerialContext("exponentials", {"x": "*b", "y": "*b", "c": ""}, (*RING, "div", "exp"), parts=3, about=("exp",)),
    SerialContext(
        "activations", {"x": "*b", "y": "*b"}, ("sub", "mul", "neg", "relu", "gelu", "sigmoid", "tanh", "silu"), parts=3
    ),
)
