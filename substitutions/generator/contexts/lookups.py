"""Embeddings and cross-entropy."""

from __future__ import annotations

from shardwright.substitutions.generator.universe import RING, SerialContext, cut

LOOKUPS = (
    SerialContext(
        "embedding",
        {"w": "v i", "u": "v i", "t": "*b -> v", "c": "", "d": "i"},
        (*RING, "embedding"),
        about=("embedding",),
    ),
    SerialContext(
        "embedding_moved",
        {"w": "v i", "t": "m n -> v", "u": "o i"},
        ("embedding", "transpose", "merge", "linear", "relu", "gelu", "neg"),
        extents=("m*n",),
    ),
    SerialContext(
        "embedding_norms",
        {"w": "v i", "t": "*b -> v", "d": "i", "u": "o i"},
        ("embedding", "layer_norm", "layer_norm_scaled", "rms_norm", "softmax", "linear", "mul"),
        parts=2,
        about=("embedding",),
    ),
    SerialContext(
        "embedding_pieces",
        {"w": "v i", "u": "v j", "t": "m -> v", "s": "n -> v"},
        ("embedding", "concat", "slice", "neg"),
        cuts={**cut("m + n", "0:m", "m:m + n"), **cut("i", "e:f")},
        extents=("m + n", "i + j", "f - e"),
    ),
    SerialContext(
        "cross_entropy",
        {"x": "n v", "y": "n v", "t": "n -> v", "c": "n 1", "d": ""},
        ("cross_entropy", *RING, "log_softmax"),
        parts=3,
        part=1,
        samples=4,
        about=("cross_entropy_sum", "log_softmax"),
    ),
    SerialContext(
        "cross_entropy_pieces",
        {"x": "n v", "y": "m v", "t": "n -> v", "s": "m -> v"},
        ("cross_entropy", "concat", "slice", "add", "log_softmax", "neg"),
        cuts=cut("m + n", "0:n", "n:m + n"),
        extents=("m + n",),
        parts=3,
        part=1,
        samples=4,
    ),
)
