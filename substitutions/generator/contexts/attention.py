"""Scaled dot-product attention."""

from __future__ import annotations

from shardwright.substitutions.generator.universe import SerialContext, cut

ATTENTION = (
    SerialContext(
        "sdpa", {"q": "*b m d", "k": "*b n d", "v": "*b n e", "c": ""}, ("sdpa", "mul", "neg"), parts=2, about=("sdpa",)
    ),
    SerialContext(
        "sdpa_values",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e", "u": "*b n e"},
        ("sdpa", "add"),
        parts=2,
        about=("sdpa",),
    ),
    SerialContext(
        "sdpa_columns",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e", "c": "e", "g": "d"},
        ("sdpa", "mul"),
        parts=2,
        about=("sdpa",),
    ),
    SerialContext(
        "causal_sdpa",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e", "c": ""},
        ("causal_sdpa", "mul", "neg"),
        parts=2,
        about=("sdpa",),
    ),
    SerialContext(
        "linear_of_causal_sdpa",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e", "w": "f e"},
        ("causal_sdpa", "linear"),
        parts=2,
        about=("sdpa",),
    ),
    SerialContext(
        "sdpa_pieces",
        {"q": "*b m d", "k": "*b n d", "v": "*b n e"},
        ("sdpa", "slice", "neg"),
        cuts={**cut("m", "s:t"), **cut("e", "u:w")},
        extents=("t - s", "w - u"),
        parts=2,
    ),
    SerialContext(
        "sdpa_concats",
        {"q": "*b m d", "p": "*b l d", "k": "*b n d", "v": "*b n e", "u": "*b n f"},
        ("sdpa", "concat"),
        extents=("l + m", "e + f"),
        parts=2,
    ),
    SerialContext(
        "sdpa_heads",
        {"q": "h m d", "k": "h n d", "v": "h n e"},
        ("sdpa", "slice", "transpose"),
        cuts=cut("h", "s:t"),
        extents=("t - s",),
        parts=2,
    ),
)
