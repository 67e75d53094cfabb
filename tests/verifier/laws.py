"""True serial rules and, beside each, wrong ones: what the laws of index semantics must and must not prove.

(variables, left, [true right sides], [wrong right sides]); a guard may follow.
"""

from __future__ import annotations

Case = tuple[dict[str, str], str, list[str], list[str]]

M = {"x": "m n"}
MM = {"x": "m n", "y": "m n"}
ROW = {"x": "m n", "r": "m 1"}
SOFT = "softmax(x, dim=1)"
SUM = "sum({0}, dims=({1},), keepdim={2})".format
MAX = "amax({0}, dims=({1},), keepdim={2})".format

FUNCTIONS: dict[str, Case] = {
    "exp_of_sum": (MM, "exp(add(x, y))", ["mul(exp(x), exp(y))"], ["add(exp(x), exp(y))", "mul(exp(x), exp(x))"]),
    "exp_of_neg": (M, "exp(neg(x))", ["reciprocal(exp(x))"], ["neg(exp(x))", "exp(x)"]),
    "exp_times_inverse": (MM, "mul(mul(exp(x), exp(neg(x))), y)", ["add(y, sub(x, x))"], ["x", "exp(y)"]),
    "log_of_exp": (M, "log(exp(x))", ["x"], ["exp(x)", "neg(x)"]),
    "log_of_product": (MM, "log(mul(exp(x), exp(y)))", ["add(x, y)"], ["mul(x, y)"]),
    "log_of_quotient": (MM, "log(div(exp(x), exp(y)))", ["sub(x, y)"], ["sub(y, x)", "add(x, y)"]),
    "log_of_reciprocal": (M, "log(reciprocal(x))", ["neg(log(x))"], ["log(x)", "reciprocal(log(x))"]),
    "reciprocal_of_product": (
        MM,
        "reciprocal(mul(x, y))",
        ["mul(reciprocal(x), reciprocal(y))"],
        ["reciprocal(x)", "add(reciprocal(x), reciprocal(y))"],
    ),
    "reciprocal_of_positive": (
        MM,
        "mul(reciprocal(reciprocal(exp(x))), y)",
        ["mul(exp(x), y)"],
        ["mul(reciprocal(exp(x)), y)"],
    ),
    "div_as_product": (MM, "div(x, y)", ["mul(x, reciprocal(y))"], ["div(y, x)", "mul(x, y)"]),
    "quotient_of_quotient": ({**MM, "z": "m n"}, "div(div(x, y), z)", ["div(x, mul(y, z))"], ["div(x, div(y, z))"]),
    "abs_of_neg": (M, "abs(neg(x))", ["abs(x)"], ["x", "neg(abs(x))"]),
    "abs_of_product": (MM, "abs(mul(x, y))", ["mul(abs(x), abs(y))"], ["mul(abs(x), y)"]),
    "abs_squared": (M, "mul(abs(x), abs(x))", ["mul(x, x)"], ["abs(x)", "mul(x, abs(x))"]),
    "abs_of_difference": (MM, "abs(sub(x, y))", ["abs(sub(y, x))"], ["sub(abs(x), abs(y))", "abs(add(x, y))"]),
    "abs_of_exp": (M, "abs(exp(x))", ["exp(x)"], ["exp(abs(x))"]),
    "sqrt_of_square": (M, "sqrt(mul(x, x))", ["abs(x)"], ["x"]),
    "sqrt_of_exp_product": (MM, "sqrt(mul(exp(x), y))", ["mul(sqrt(exp(x)), sqrt(y))"], ["mul(exp(x), sqrt(y))"]),
    "rsqrt_as_reciprocal": (M, "rsqrt(x)", ["reciprocal(sqrt(x))"], ["sqrt(x)", "sqrt(reciprocal(exp(x)))"]),
    "common_denominator": (
        {**MM, "z": "m n"},
        "add(mul(div(x, y), z), x)",
        ["div(mul(x, add(y, z)), y)"],
        ["div(mul(x, add(y, z)), z)", "mul(x, add(y, z))"],
    ),
    "relu_of_neg": (M, "relu(neg(x))", ["sub(relu(x), x)"], ["relu(x)", "sub(x, relu(x))"]),
    "relu_of_double": (M, "relu(add(x, x))", ["add(relu(x), relu(x))"], ["relu(x)"]),
    "relu_of_scaled": (MM, "relu(mul(exp(y), x))", ["mul(relu(x), exp(y))"], ["mul(relu(y), x)", "relu(x)"]),
    "relu_squared": (M, "mul(relu(x), relu(x))", ["mul(x, relu(x))"], ["mul(x, x)"]),
    "relu_of_relu_of_neg": (M, "relu(relu(neg(x)))", ["relu(neg(x))"], ["relu(x)"]),
    "sigmoid_of_neg": (M, "add(sigmoid(neg(x)), sigmoid(x))", ["exp(sub(x, x))"], ["exp(x)"]),
    "relu_of_relu_times": (M, "relu(mul(relu(x), x))", ["mul(relu(x), x)"], ["mul(x, x)"]),
    "gelu_of_neg": (
        M,
        "gelu(neg(x), approximate='none')",
        ["sub(gelu(x, approximate='none'), x)"],
        ["neg(gelu(x, approximate='none'))", "gelu(x, approximate='tanh')"],
    ),
    "relu_of_relu": (M, "relu(relu(x))", ["relu(x)"], ["x"]),
    "relu_of_exp": (M, "relu(exp(x))", ["exp(x)"], ["relu(x)"]),
    "silu_by_sigmoid": (M, "mul(sigmoid(x), x)", ["silu(x)"], ["sigmoid(x)"]),
    "tanh_is_odd": (MM, "tanh(sub(x, y))", ["neg(tanh(sub(y, x)))"], ["tanh(sub(y, x))"]),
    "maximum_of_sums": (
        {**MM, "z": "m n"},
        "maximum(add(x, z), add(y, z))",
        ["add(maximum(x, y), z)"],
        ["maximum(x, y)", "add(minimum(x, y), z)"],
    ),
    "maximum_is_a_semilattice": (
        {**MM, "z": "m n"},
        "maximum(maximum(x, y), maximum(z, x))",
        ["maximum(z, maximum(y, x))"],
        ["maximum(x, y)"],
    ),
    "minimum_by_maximum": (MM, "neg(minimum(x, y))", ["maximum(neg(x), neg(y))"], ["maximum(x, y)"]),
}

EXISTING: dict[str, tuple[dict[str, str], str, str]] = {
    # true wherever the left side exists; the right side exists for more tensors
    "reciprocal_twice": (MM, "add(reciprocal(reciprocal(x)), y)", "add(x, y)"),
    "quotient_of_quotient": ({**MM, "z": "m n"}, "div(x, div(y, z))", "div(mul(x, z), y)"),
    "quotient_by_itself": (MM, "add(div(x, x), y)", "add(exp(sub(x, x)), y)"),
    "quotient_of_multiple": (MM, "div(mul(x, y), x)", "mul(y, exp(sub(x, x)))"),
    "sqrt_squared": (MM, "add(mul(sqrt(x), sqrt(x)), y)", "add(x, y)"),
    "exp_of_log": (MM, "mul(exp(log(x)), y)", "mul(x, y)"),
    "cancelled_logarithm": (MM, "add(y, sub(log(x), log(x)))", "add(y, sub(x, x))"),
}

NOT_PROVEN: dict[str, tuple[dict[str, str], str, str]] = {
    # a false rule, or one whose right side does not exist wherever the left does
    "log_of_any_product": (MM, "log(mul(x, y))", "add(log(x), log(y))"),
    "sqrt_of_any_product": (MM, "sqrt(mul(x, y))", "mul(sqrt(x), sqrt(y))"),
    "relu_of_scaled": ({"x": "m n", "c": ""}, "relu(mul(x, c))", "mul(relu(x), c)"),
    "sqrt_of_square": (M, "sqrt(mul(x, x))", "x"),
    "quotient_by_other": (MM, "mul(div(x, y), x)", "y"),
} | {f"{name} from right to left": (v, right, left) for name, (v, left, right) in EXISTING.items()}

INDICES: dict[str, Case] = {
    "transposed_twice": (M, "permute(permute(x, dims=(1, 0)), dims=(1, 0))", ["x"], ["permute(x, dims=(1, 0))"]),
    "rolled": (
        {"x": "l m n"},
        "permute(permute(x, dims=(1, 2, 0)), dims=(1, 2, 0))",
        ["permute(x, dims=(2, 0, 1))"],
        ["permute(x, dims=(1, 2, 0))", "x"],
    ),
    "split_heads": (
        {"x": "m (h d)"},
        "relu(reshape(x, shape=(m, h, d)))",
        ["reshape(relu(x), shape=(m, h, d))"],
        ["reshape(x, shape=(m, h, d))"],
    ),
    "split_and_merge": (
        {"x": "m (h d)", "y": "m (h d)"},
        "add(reshape(reshape(x, shape=(m, h, d)), shape=(m, h * d)), y)",
        ["add(x, y)"],
        ["add(x, x)"],
    ),
    "merge_by_transpose": (
        {"x": "m h d"},
        "reshape(permute(x, dims=(1, 0, 2)), shape=(h, m * d))",
        ["reshape(permute(x, dims=(1, 0, 2)), shape=(h, d * m))"],
        ["reshape(x, shape=(h, m * d))"],
    ),
    "heads_of_linear": (
        {"x": "m i", "w": "(h d) i"},
        "reshape(linear(x, w), shape=(m, h, d))",
        ["reshape(linear(x, reshape(reshape(w, shape=(h, d, i)), shape=(h * d, i))), shape=(m, h, d))"],
        [
            (
                "reshape(linear(x, reshape(permute(reshape(w, shape=(h, d, i)), dims=(1, 0, 2)),"
                " shape=(d * h, i))), shape=(m, h, d))"
            )
        ],
    ),
    "expanded_row": ({"x": "m n", "r": "1 n"}, "add(x, expand(r, shape=(m, n)))", ["add(x, r)", "add(r, x)"], ["x"]),
    "rows_of_sum": (
        {"x": "m n", "r": "1 n"},
        "slice(add(x, r), dim=0, start=s, stop=t, step=1)",
        ["add(slice(x, dim=0, start=s, stop=t, step=1), r)"],
        ["add(slice(x, dim=0, start=0, stop=t - s, step=1), r)"],
    ),
    "concat_then_slice": (
        {"x": "m n", "y": "k n"},
        "slice(concat(x, y, dim=0), dim=0, start=m, stop=m + k, step=1)",
        ["y"],
        ["x", "slice(concat(x, y, dim=0), dim=0, start=0, stop=k, step=1)"],
    ),
    "concat_is_pointwise": (
        {"x": "m n", "y": "k n"},
        "concat(exp(x), exp(y), dim=0)",
        ["exp(concat(x, y, dim=0))"],
        ["exp(concat(y, x, dim=0))", "concat(exp(x), y, dim=0)"],
    ),
    "concat_transposed": (
        {"x": "m n", "y": "k n"},
        "permute(concat(x, y, dim=0), dims=(1, 0))",
        ["concat(permute(x, dims=(1, 0)), permute(y, dims=(1, 0)), dim=1)"],
        ["concat(permute(y, dims=(1, 0)), permute(x, dims=(1, 0)), dim=1)"],
    ),
    "concat_of_heads": (
        {"x": "m (h d)", "y": "m (k d)"},
        "reshape(concat(x, y, dim=1), shape=(m, h + k, d))",
        ["concat(reshape(x, shape=(m, h, d)), reshape(y, shape=(m, k, d)), dim=1)"],
        ["concat(reshape(y, shape=(m, k, d)), reshape(x, shape=(m, h, d)), dim=1)"],
    ),
    "crossing_slice": (
        {"x": "m n", "y": "k n"},
        "relu(slice(concat(x, y, dim=0), dim=0, start=s, stop=t, step=1))",
        ["slice(relu(concat(x, y, dim=0)), dim=0, start=s, stop=t, step=1)"],
        ["relu(slice(concat(y, x, dim=0), dim=0, start=s, stop=t, step=1))"],
    ),
    "embedding_of_sum": (
        {"v": "a h", "w": "a h", "i": "m"},
        "embedding(add(v, w), i, padding_idx=None)",
        ["add(embedding(v, i, padding_idx=None), embedding(w, i, padding_idx=None))"],
        ["add(embedding(v, i, padding_idx=None), embedding(v, i, padding_idx=None))"],
    ),
    "embedding_of_columns": (
        {"v": "a h", "w": "a k", "i": "m"},
        "embedding(concat(v, w, dim=1), i, padding_idx=None)",
        ["concat(embedding(v, i, padding_idx=None), embedding(w, i, padding_idx=None), dim=1)"],
        ["concat(embedding(w, i, padding_idx=None), embedding(v, i, padding_idx=None), dim=1)"],
    ),
    "embedding_of_pieces": (
        {"w": "a h", "i": "m", "j": "k"},
        "embedding(w, concat(i, j, dim=0), padding_idx=p)",
        ["concat(embedding(w, i, padding_idx=p), embedding(w, j, padding_idx=p), dim=0)"],
        ["concat(embedding(w, j, padding_idx=p), embedding(w, i, padding_idx=p), dim=0)"],
    ),
    "gather_of_sum": (
        {"x": "m n", "y": "m n", "i": "m k"},
        "gather(add(x, y), i, dim=1)",
        ["add(gather(x, i, dim=1), gather(y, i, dim=1))"],
        ["gather(x, i, dim=1)"],
    ),
    "gather_is_pointwise": (
        {"x": "m n", "i": "m k"},
        "exp(gather(x, i, dim=1))",
        ["gather(exp(x), i, dim=1)"],
        ["gather(x, i, dim=1)"],
    ),
}

CONV = "conv2d({0}, {1}, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)".format
IMAGE = {"x": "b c h w", "k": "o c p q"}

SUMS: dict[str, Case] = {
    "sum_of_transposed": (M, SUM("permute(x, dims=(1, 0))", 0, False), [SUM("x", 1, False)], [SUM("x", 0, False)]),
    "sum_of_sum": (
        {"x": "l m n"},
        "sum(x, dims=(0, 1), keepdim=False)",
        [SUM(SUM("x", 0, False), 0, False)],
        [SUM(SUM("x", 0, False), 1, False)],
    ),
    "sum_of_scaled": (ROW, SUM("mul(x, r)", 1, True), ["mul(" + SUM("x", 1, True) + ", r)"], [SUM("x", 1, True)]),
    "sum_of_broadcast": (
        {"x": "m n", "r": "1 n"},
        SUM("add(x, r)", 0, True),
        ["add(" + SUM("x", 0, True) + ", " + SUM("expand(r, shape=(m, n))", 0, True) + ")"],
        ["add(" + SUM("x", 0, True) + ", r)"],
    ),
    "sum_of_copies": (
        {"r": "1 n"},
        SUM("expand(r, shape=(m, n))", 0, True),
        ["mul(r, full(shape=(), value=m, dtype='float32'))"],
        ["r", "mul(r, full(shape=(), value=n, dtype='float32'))"],
    ),
    "sum_of_concat": (
        {"x": "m n", "y": "k n"},
        SUM("concat(x, y, dim=0)", 0, False),
        ["add(" + SUM("x", 0, False) + ", " + SUM("y", 0, False) + ")"],
        [SUM("x", 0, False)],
    ),
    "sum_in_stages": (
        {"x": "m (h d)"},
        SUM(SUM("reshape(x, shape=(m, h, d))", 2, False), 1, False),
        [SUM("x", 1, False)],
        [SUM("x", 0, False), SUM("reshape(x, shape=(m, h, d))", 2, False)],
    ),
    "max_in_stages": (
        {"x": "m (h d)"},
        MAX(MAX("reshape(x, shape=(m, h, d))", 2, False), 1, False),
        [MAX("x", 1, False)],
        [MAX("x", 0, False)],
    ),
    "max_of_broadcast": ({"r": "1 n"}, MAX("expand(r, shape=(m, n))", 0, True), ["r"], ["neg(r)"]),
    "max_of_shifted": (
        ROW,
        MAX("add(x, r)", 1, True),
        ["add(" + MAX("x", 1, True) + ", r)"],
        [MAX("x", 1, True), "add(" + MAX("x", 0, True) + ", r)"],
    ),
    "max_of_concat": (
        {"x": "m n", "y": "k n"},
        MAX("concat(x, y, dim=0)", 0, True),
        ["maximum(" + MAX("y", 0, True) + ", " + MAX("x", 0, True) + ")"],
        [MAX("x", 0, True)],
    ),
    "min_by_max": (M, "neg(amin(x, dims=(1,), keepdim=False))", [MAX("neg(x)", 1, False)], [MAX("x", 1, False)]),
    "matmul_associates": (
        {"x": "b m k", "y": "b k n", "z": "b n p"},
        "matmul(matmul(x, y), z)",
        ["matmul(x, matmul(y, z))"],
        ["matmul(y, matmul(x, z))"],
    ),
    "matmul_transposed": (
        {"x": "m k", "y": "k n"},
        "permute(matmul(x, y), dims=(1, 0))",
        ["matmul(permute(y, dims=(1, 0)), permute(x, dims=(1, 0)))"],
        ["matmul(permute(x, dims=(1, 0)), permute(y, dims=(1, 0)))"],
    ),
    "matmul_of_blocks": (
        {"x": "m (n c)", "y": "(n c) o"},
        "matmul(x, y)",
        [SUM("matmul(permute(reshape(x, shape=(m, n, c)), dims=(1, 0, 2)), reshape(y, shape=(n, c, o)))", 0, False)],
        ["matmul(permute(reshape(x, shape=(m, n, c)), dims=(1, 0, 2)), reshape(y, shape=(n, c, o)))"],
    ),
    "matmul_of_row_scaled": (
        {"x": "m k", "r": "m 1", "y": "k n"},
        "matmul(mul(x, r), y)",
        ["mul(matmul(x, y), r)"],
        ["matmul(x, y)"],
    ),
    "conv_of_sum": (
        {**IMAGE, "y": "b c h w"},
        CONV("add(x, y)", "k"),
        [f"add({CONV('x', 'k')}, {CONV('y', 'k')})"],
        [f"add({CONV('x', 'k')}, y)", CONV("x", "k")],
    ),
    "conv_by_sum": (
        {**IMAGE, "l": "o c p q"},
        CONV("x", "add(k, l)"),
        [f"add({CONV('x', 'k')}, {CONV('x', 'l')})"],
        [CONV("x", "k")],
    ),
    "conv_by_channels": (
        {**IMAGE, "l": "u c p q"},
        CONV("x", "concat(k, l, dim=0)"),
        [f"concat({CONV('x', 'k')}, {CONV('x', 'l')}, dim=1)"],
        [f"concat({CONV('x', 'l')}, {CONV('x', 'k')}, dim=1)"],
    ),
    "conv_of_channels": (
        {"x": "b c h w", "y": "b d h w", "k": "o c p q", "l": "o d p q"},
        CONV("concat(x, y, dim=1)", "concat(k, l, dim=1)"),
        [f"add({CONV('x', 'k')}, {CONV('y', 'l')})"],
        [f"add({CONV('x', 'k')}, {CONV('x', 'k')})"],
    ),
    "conv_of_batches": (
        {**IMAGE, "y": "a c h w"},
        CONV("concat(x, y, dim=0)", "k"),
        [f"concat({CONV('x', 'k')}, {CONV('y', 'k')}, dim=0)"],
        [f"concat({CONV('y', 'k')}, {CONV('x', 'k')}, dim=0)"],
    ),
    "conv_of_scaled": ({**IMAGE, "s": ""}, CONV("mul(x, s)", "k"), [f"mul({CONV('x', 'k')}, s)"], [CONV("x", "k")]),
    "conv_of_relu": (IMAGE, f"relu({CONV('x', 'k')})", [f"relu({CONV('neg(x)', 'neg(k)')})"], [CONV("relu(x)", "k")]),
}

NORMED = {"x": "m n", "w": "n"}
LAYER = "layer_norm({0}, w, b, eps=1e-05, normalized_dims=1)".format
CE = "cross_entropy_sum({0}, {1}, ignore_index=-100, label_smoothing=0.0)".format

DEFINED: dict[str, Case] = {
    "softmax_is_shift_invariant": (
        ROW,
        "softmax(add(x, r), dim=1)",
        [SOFT],
        ["softmax(add(x, r), dim=0)", "add(" + SOFT + ", r)"],
    ),
    "softmax_by_primitives": (
        M,
        "div(exp(x), " + SUM("exp(x)", 1, True) + ")",
        [SOFT],
        ["softmax(x, dim=0)", "exp(x)"],
    ),
    "softmax_with_max": (
        M,
        (
            "div(exp(sub(x, amax(x, dims=(1,), keepdim=True))), sum(exp(sub(x, amax(x, dims=(1,), keepdim=True))),"
            " dims=(1,), keepdim=True))"
        ),
        [SOFT],
        ["softmax(x, dim=0)"],
    ),
    "softmax_sums_to_1": (
        M,
        SUM(SOFT, 1, True),
        ["reciprocal(exp(sub(" + SUM("x", 1, True) + ", " + SUM("x", 1, True) + ")))"],
        [SUM("x", 1, True), SUM(SOFT, 0, True)],
    ),
    "softmax_transposed": (
        M,
        "permute(softmax(x, dim=1), dims=(1, 0))",
        ["softmax(permute(x, dims=(1, 0)), dim=0)"],
        ["softmax(permute(x, dims=(1, 0)), dim=1)"],
    ),
    "softmax_of_batches": (
        {"x": "m n", "y": "k n"},
        "softmax(concat(x, y, dim=0), dim=1)",
        ["concat(softmax(x, dim=1), softmax(y, dim=1), dim=0)"],
        ["concat(softmax(y, dim=1), softmax(x, dim=1), dim=0)", "softmax(concat(x, y, dim=0), dim=0)"],
    ),
    "softmax_by_log_softmax": (M, "exp(log_softmax(x, dim=1))", [SOFT], ["exp(log_softmax(x, dim=0))", "x"]),
    "log_of_softmax": (M, "log(softmax(x, dim=1))", ["log_softmax(x, dim=1)"], ["log_softmax(x, dim=0)"]),
    "softmax_in_blocks": (
        {"x": "m (n c)"},
        "reshape(softmax(reshape(x, shape=(m, n * c)), dim=1), shape=(m, n, c))",
        ["div(exp(reshape(x, shape=(m, n, c))), sum(exp(reshape(x, shape=(m, n, c))), dims=(1, 2), keepdim=True))"],
        ["softmax(reshape(x, shape=(m, n, c)), dim=2)"],
    ),
    "layer_norm_is_shift_invariant": (
        {**NORMED, "b": "n", "r": "m 1"},
        LAYER("add(x, r)"),
        [LAYER("x")],
        [LAYER("mul(x, r)"), f"add({LAYER('x')}, r)"],
    ),
    "layer_norm_of_batches": (
        {**NORMED, "b": "n", "y": "k n"},
        LAYER("concat(x, y, dim=0)"),
        [f"concat({LAYER('x')}, {LAYER('y')}, dim=0)"],
        [f"concat({LAYER('y')}, {LAYER('x')}, dim=0)"],
    ),
    "rms_norm_by_primitives": (
        NORMED,
        "rms_norm(x, w, eps=e, normalized_dims=1)",
        [
            (
                "mul(mul(x, rsqrt(add(div(sum(mul(x, x), dims=(1,), keepdim=True),"
                " full(shape=(), value=n, dtype='float32')), full(shape=(), value=e, dtype='float32')))), w)"
            )
        ],
        [
            (
                "mul(mul(x, rsqrt(add(div(sum(mul(x, x), dims=(1,), keepdim=True),"
                " full(shape=(), value=m, dtype='float32')), full(shape=(), value=e, dtype='float32')))), w)"
            ),
            "mul(x, w)",
        ],
    ),
    "rms_norm_of_weights": (
        {**NORMED, "v": "n"},
        "mul(rms_norm(x, w, eps=e, normalized_dims=1), v)",
        ["rms_norm(x, mul(w, v), eps=e, normalized_dims=1)"],
        ["rms_norm(mul(x, v), w, eps=e, normalized_dims=1)"],
    ),
    "sdpa_by_primitives": (
        {"q": "b q d", "k": "b t d", "v": "b t e"},
        "sdpa(q, k, v, causal=False, scale=1.0)",
        ["matmul(softmax(matmul(q, permute(k, dims=(0, 2, 1))), dim=2), v)"],
        ["matmul(softmax(matmul(q, permute(k, dims=(0, 2, 1))), dim=1), v)"],
    ),
    "sdpa_of_values": (
        {"q": "b h q d", "k": "b h t d", "v": "b h t e", "u": "b h t e"},
        "sdpa(q, k, add(v, u), causal=True, scale=None)",
        ["add(sdpa(q, k, v, causal=True, scale=None), sdpa(q, k, u, causal=True, scale=None))"],
        ["add(sdpa(q, k, v, causal=False, scale=None), sdpa(q, k, u, causal=True, scale=None))"],
    ),
    "sdpa_of_batches": (
        {"q": "b h q d", "k": "b h t d", "v": "b h t e", "r": "a h q d", "l": "a h t d", "u": "a h t e"},
        "sdpa(concat(q, r, dim=0), concat(k, l, dim=0), concat(v, u, dim=0), causal=False, scale=None)",
        ["concat(sdpa(q, k, v, causal=False, scale=None), sdpa(r, l, u, causal=False, scale=None), dim=0)"],
        ["concat(sdpa(r, l, u, causal=False, scale=None), sdpa(q, k, v, causal=False, scale=None), dim=0)"],
    ),
    "loss_is_shift_invariant": (
        {"x": "m n", "r": "m 1", "t": "m"},
        CE("add(x, r)", "t"),
        [CE("x", "t")],
        [CE("mul(x, r)", "t")],
    ),
    "loss_of_batches": (
        {"x": "m n", "y": "k n", "t": "m", "s": "k"},
        CE("concat(x, y, dim=0)", "concat(t, s, dim=0)"),
        [f"add({CE('x', 't')}, {CE('y', 's')})"],
        [CE("x", "t"), f"add({CE('x', 't')}, {CE('x', 't')})"],
    ),
    "loss_of_log_softmax": (
        {"x": "m n", "t": "m"},
        CE("log_softmax(x, dim=1)", "t"),
        [CE("x", "t")],
        [CE("neg(x)", "t")],
    ),
}
