"""The contexts that placement rules are enumerated over."""

from __future__ import annotations

from shardwright.substitutions.generator.primesizes import PlacementContext

_CONV = "conv2d(stride=stride, padding=padding, dilation=dilation, groups=1)"
_NORM = "(eps=eps, normalized_dims=1)"
_CUT = "slice(dim=0, start=0, stop=o, step=1)"
_REST = "slice(dim=0, start=o, stop=2 * o, step=1)"
_LOSS = "cross_entropy_sum(ignore_index=ignore, label_smoothing=smoothing)"
_SUMS = ("sum(dims=(0,), keepdim=False)", "sum(dims=(1,), keepdim=False)")

ONE_AXIS = (
    PlacementContext(
        "dense",
        (("x", "m i"), ("y", "m i"), ("w", "o i"), ("c", "")),
        ("linear", "add", "mul", "relu", "tanh", "permute(dims=(1, 0))", "softmax(dim=1)", *_SUMS),
    ),
    PlacementContext(
        "bias",
        (("x", "m i"), ("w", "o i"), ("v", "o i"), ("z", "o")),
        ("linear", "add", "sub", "mul", "neg", "relu", "concat(dim=0)"),
    ),
    PlacementContext(
        "chain",
        (("x", "m i"), ("w", "h i"), ("v", "o h")),
        ("linear", "matmul", "relu", "permute(dims=(1, 0))", "softmax(dim=0)"),
    ),
    PlacementContext(
        "batched",
        (("x", "b m k"), ("y", "b k n"), ("c", "")),
        ("matmul", "mul", "relu", "softmax(dim=2)", "permute(dims=(0, 2, 1))", "sum(dims=(0,), keepdim=False)"),
    ),
    PlacementContext(
        "heads",
        (("x", "m (h d)"), ("y", "m h d"), ("w", "(h d) i")),
        (
            "reshape(shape=(m, h, d))",
            "reshape(shape=(m, h * d))",
            "reshape(shape=(m * h, d))",
            "permute(dims=(1, 0, 2))",
            "add",
            "relu",
            "linear",
            "sum(dims=(1,), keepdim=False)",
        ),
    ),
    PlacementContext(
        "layer_norm",
        (("x", "m i"), ("g", "i"), ("c", "i")),
        ("layer_norm" + _NORM, "add", "relu", "permute(dims=(1, 0))"),
        parts=1,
    ),
    PlacementContext(
        "rms_norm",
        (("x", "b m i"), ("g", "i"), ("w", "o i"), ("y", "b m i")),
        ("rms_norm" + _NORM, "linear", "add", "mul", "silu"),
    ),
    PlacementContext(
        "lookup",
        (("w", "v h"), ("t", "n"), ("u", "o h"), ("g", "h")),
        ("embedding(padding_idx=pad)", "linear", "add", "mul", "relu", "rms_norm" + _NORM),
        indices=(("t", "v"),),
    ),
    PlacementContext(
        "loss",
        (("x", "m v"), ("t", "m"), ("y", "m v"), ("c", "")),
        (_LOSS, "add", "mul", "relu", "softmax(dim=1)"),
        indices=(("t", "v"),),
    ),
    PlacementContext(
        "image",
        (("x", "b i h w"), ("k", "o i p q"), ("z", "b i h w")),
        (_CONV, "add", "relu", "concat(dim=1)", "sum(dims=(0,), keepdim=False)"),
        whole=("h", "w", "p", "q"),
        sizes=(("h", 41), ("w", 47), ("p", 7), ("q", 11)),
        small=(("h", 9), ("w", 10), ("p", 2), ("q", 3)),
        parts=1,
    ),
    PlacementContext(
        "attention",
        (("q", "h n d"), ("k", "h s d"), ("v", "h s e"), ("c", "")),
        ("sdpa(causal=False, scale=scale)", "mul", "relu", "permute(dims=(1, 0, 2))", "softmax(dim=2)"),
    ),
    PlacementContext(
        "pieces",
        (("x", "m i"), ("w", "(q o) i"), ("y", "m i"), ("z", "m j")),
        ("linear", "add", "relu", _CUT, _REST, "concat(dim=0)", "concat(dim=1)"),
    ),
    PlacementContext(
        "sequence",
        (("x", "b m i"), ("w", "o i"), ("z", "o"), ("u", "b m o")),
        (
            "linear",
            "add",
            "mul",
            "relu",
            "softmax(dim=2)",
            "sum(dims=(0,), keepdim=False)",
            "sum(dims=(1,), keepdim=False)",
        ),
    ),
    PlacementContext(
        "flatten",
        (("x", "b m i"), ("w", "o i"), ("u", "(b m) i")),
        (
            "linear",
            "add",
            "relu",
            "reshape(shape=(b * m, i))",
            "reshape(shape=(b, m, i))",
            "reshape(shape=(b * m, o))",
            "reshape(shape=(b, m, o))",
            "softmax(dim=1)",
        ),
    ),
    PlacementContext(
        "projection",
        (("x", "m i"), ("w", "(h d) i"), ("v", "o (h d)")),
        ("linear", "reshape(shape=(m, h, d))", "reshape(shape=(m, h * d))", "permute(dims=(1, 0, 2))", "relu"),
    ),
    PlacementContext(
        "grouped",
        (("q", "(h r) n d"), ("k", "h s d"), ("v", "h s e")),
        ("sdpa(causal=True, scale=scale)", "add", "permute(dims=(1, 0, 2))", "relu"),
    ),
    PlacementContext(
        "gated",
        (("x", "m i"), ("w", "h i"), ("v", "h i"), ("u", "m h")),
        ("linear", "mul", "add", "sub", "silu", "permute(dims=(1, 0))"),
    ),
    PlacementContext(
        "statistics",
        (("x", "m i"), ("y", "m i"), ("c", "")),
        ("sum(dims=(0,), keepdim=True)", "sum(dims=(1,), keepdim=True)", *_SUMS, "mul", "sub", "exp"),
    ),
    PlacementContext(
        "tokens",
        (("w", "v h"), ("t", "b n"), ("u", "o h"), ("p", "n h")),
        ("embedding(padding_idx=pad)", "linear", "add", "relu", "softmax(dim=2)"),
        indices=(("t", "v"),),
    ),
    PlacementContext(
        "objective",
        (("x", "m i"), ("w", "v i"), ("t", "m"), ("c", "")),
        (_LOSS, "linear", "mul", "relu", "add"),
        indices=(("t", "v"),),
    ),
    PlacementContext(
        "product",
        (("x", "m k"), ("y", "k n"), ("z", "k n"), ("c", "")),
        ("matmul", "mul", "add", "permute(dims=(1, 0))", "tanh", "concat(dim=1)"),
    ),
    PlacementContext(
        "fused",
        (("x", "m i"), ("w", "(q o) i"), ("z", "(q o)")),
        (
            "linear",
            "add",
            "slice(dim=1, start=0, stop=o, step=1)",
            "slice(dim=1, start=o, stop=2 * o, step=1)",
            _CUT,
            _REST,
            "mul",
        ),
    ),
    PlacementContext(
        "bias_of_channels",
        (("x", "b i h w"), ("k", "o i p q"), ("z", "o 1 1"), ("y", "i 1 1")),
        (_CONV, "add", "mul", "relu"),
        whole=("h", "w", "p", "q"),
        sizes=(("h", 41), ("w", 47), ("p", 7), ("q", 11)),
        small=(("h", 9), ("w", 10), ("p", 2), ("q", 3)),
        parts=1,
    ),
    PlacementContext(
        "attention_batched",
        (("q", "b h n d"), ("k", "b h s d"), ("v", "b h s e"), ("c", "")),
        ("sdpa(causal=False, scale=scale)", "add", "mul", "permute(dims=(0, 2, 1, 3))"),
        sizes=(("b", 5),),
    ),
    PlacementContext(
        "scores",
        (("q", "h n d"), ("k", "h d s"), ("p", "n s"), ("v", "h s e")),
        ("matmul", "add", "softmax(dim=2)", "permute(dims=(1, 0, 2))", "permute(dims=(0, 2, 1))"),
    ),
    PlacementContext(
        "affine",
        (("x", "m i"), ("g", "i"), ("c", "i"), ("r", "m 1")),
        ("mul", "add", "sub", "relu", "sum(dims=(1,), keepdim=True)", "permute(dims=(1, 0))"),
    ),
    PlacementContext(
        "blocks",
        (("x", "b (h d)"), ("y", "b h d"), ("g", "d"), ("c", "(h d)")),
        (
            "reshape(shape=(b, h, d))",
            "reshape(shape=(b, h * d))",
            "add",
            "mul",
            "tanh",
            "softmax(dim=2)",
            "sum(dims=(2,), keepdim=False)",
        ),
    ),
    PlacementContext(
        "pairs",
        (("x", "m i"), ("y", "m i"), ("w", "o i"), ("v", "o i")),
        ("linear", "concat(dim=0)", "concat(dim=1)", "mul", "tanh", "permute(dims=(1, 0))"),
    ),
)

_AB = ("a", "b")
_TRANSPOSED = "permute(dims=(1, 0))"
TWO_AXES = (
    PlacementContext(
        "two_axes", (("x", "m i"), ("w", "o i")), ("linear", "add", "mul", "relu", _TRANSPOSED, *_SUMS), axes=_AB
    ),
    PlacementContext(
        "two_axes_layers",
        (("x", "m i"), ("w", "h i"), ("v", "o h"), ("u", "m h")),
        ("linear", "add", "mul", "silu"),
        axes=_AB,
    ),
    PlacementContext(
        "two_axes_bias", (("x", "m i"), ("w", "o i"), ("z", "o"), ("c", "")), ("linear", "add", "mul", "relu"), axes=_AB
    ),
    PlacementContext(
        "two_axes_product",
        (("x", "m k"), ("y", "k n")),
        ("matmul", "mul", "sub", "tanh", _TRANSPOSED, *_SUMS),
        axes=_AB,
    ),
    PlacementContext(
        "two_axes_batched",
        (("x", "n m k"), ("y", "n k o")),
        ("matmul", "mul", "relu", "softmax(dim=2)", "permute(dims=(0, 2, 1))", "sum(dims=(0,), keepdim=False)"),
        axes=_AB,
    ),
    PlacementContext(
        "two_axes_elements",
        (("x", "m i"), ("y", "m i"), ("c", "")),
        ("add", "sub", "mul", "neg", "relu", "exp", "softmax(dim=1)", _TRANSPOSED, *_SUMS),
        axes=_AB,
    ),
    PlacementContext(
        "two_axes_sequence",
        (("x", "n m i"), ("w", "o i"), ("g", "i")),
        ("linear", "add", "mul", "rms_norm" + _NORM, "sum(dims=(0,), keepdim=False)"),
        axes=_AB,
    ),
    PlacementContext(
        "two_axes_heads",
        (("x", "m (h d)"), ("y", "m h d"), ("w", "(h d) i")),
        ("linear", "add", "relu", "reshape(shape=(m, h, d))", "reshape(shape=(m, h * d))", "permute(dims=(1, 0, 2))"),
        axes=_AB,
    ),
    PlacementContext(
        "two_axes_pieces",
        (("x", "m i"), ("w", "(q o) i"), ("y", "m i")),
        ("linear", "add", _CUT, _REST, "concat(dim=0)", "concat(dim=1)"),
        axes=_AB,
    ),
    PlacementContext(
        "two_axes_lookup",
        (("w", "v h"), ("t", "n"), ("u", "o h")),
        ("embedding(padding_idx=pad)", "linear", "add", "relu"),
        indices=(("t", "v"),),
        axes=_AB,
    ),
)
