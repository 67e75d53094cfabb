"""Splits of operators that need more than a sum: serial equations whose right sides are made of rows that can be split.

A softmax over a sharded dimension needs its maximum and its sum. On the right side they are operators of their own, so
the layout search shards them like any other: the sum becomes partial, and the maximum has two stages, one within each
of k blocks and one over the k results. The caller that applies such a rule chooses the *parameter* k. If it is the
number of devices along the dimension, k numbers are gathered instead of the dimension.

The maximum only keeps exponentials small: these equations hold for any numbers in its place that are the same along the
dimension. They are proven so. A `detach` in an equation stands for an arbitrary tensor, which makes the equation true
for the gradients as well: a detached tensor has none, and none is due (docs/proofs.md).
"""

from __future__ import annotations

from shardwright.substitutions.equations import Equation, equation

_BLOCKS = ("k",)
_X = {"x": "*b n"}


def _maximum(x: str, lead: str, size: str, dim: str) -> str:
    """Return the maximum of x along its last dimension `dim`, of `size`, kept as a dimension of size 1; in k blocks."""
    blocks = f"reshape({x}, shape=({lead}, k, {size} // k))"
    return f"amax(amax({blocks}, dims=({dim} + 1,), keepdim=False), dims=({dim},), keepdim=True)"


def _total(x: str) -> str:
    return f"sum({x}, dims=(len(b),), keepdim=True)"


_SHIFTED = f"sub(x, {_maximum('detach(x)', '*b', 'n', 'len(b)')})"
_EXP = f"exp({_SHIFTED})"

MAXIMUM = [
    equation("maximum_in_blocks", _X, "amax(x, dims=(len(b),), keepdim=True)", _maximum("x", "*b", "n", "len(b)"),
             guard=("n % k == 0", "1 < k", "k < n"), parameters=_BLOCKS),
]  # fmt: skip

SOFTMAX = [
    equation("softmax_in_parts", _X, "softmax(x, dim=len(b))", f"div({_EXP}, {_total(_EXP)})",
             guard=("n % k == 0",), parameters=_BLOCKS),
    equation("log_softmax_in_parts", _X, "log_softmax(x, dim=len(b))", f"sub({_SHIFTED}, log({_total(_EXP)}))",
             guard=("n % k == 0",), parameters=_BLOCKS),
]  # fmt: skip


def _cross_entropy() -> Equation:
    """Return the rule: the loss of a target t is log Σ_v exp(x_v - m) - (x_t - m); ignored targets lose nothing."""
    maximum = _maximum("detach(x)", "m", "v", "1")
    total = f"sum(exp(sub(x, {maximum})), dims=(1,), keepdim=False)"
    losses = f"sub(log({total}), sub(pick(x, t), reshape({maximum}, shape=(m,))))"
    counted = "ne(t, full(shape=(), value=g, dtype='int64'))"
    return equation(
        "cross_entropy_in_parts", {"x": "m v", "t": "m"},
        "cross_entropy_sum(x, t, ignore_index=g, label_smoothing=s)",
        f"sum(where({counted}, {losses}, full(shape=(), value=0, dtype='int64')), dims=(0,), keepdim=False)",
        guard=("s == 0", "v % k == 0"), parameters=_BLOCKS,
    )  # fmt: skip


_COUNT = "full(shape=(), value=n, dtype='int64')"
_CENTRED = f"sub(x, div({_total('x')}, {_COUNT}))"


def _scaled(x: str) -> str:
    """Return x over the root of its mean square."""
    return f"mul({x}, rsqrt(add(div({_total(f'mul({x}, {x})')}, {_COUNT}), full(shape=(), value=e, dtype='float32'))))"


def _norms() -> list[Equation]:
    affine = {"w": "n", "c": "n"}
    equations: list[Equation] = []
    for op, plain, names in (("layer_norm", _scaled(_CENTRED), "wc"), ("rms_norm", _scaled("x"), "w")):
        right = (plain, f"mul({plain}, w)", f"add(mul({plain}, w), c)")
        for count in range(len(names) + 1):
            operands = ", ".join(["x", *names[:count]])
            variables = _X | {name: affine[name] for name in names[:count]}
            suffix = ("", "_weighted", "_affine")[count]
            equations.append(
                equation(f"{op}_in_parts{suffix}", variables, f"{op}({operands}, eps=e, normalized_dims=1)",
                         right[count], )
            )  # fmt: skip
    return equations


_SCALES = {
    "": ("c", "full(shape=(), value=c, dtype='float32')", ("c > 0",)),
    "_of_usual_scale": ("None", "rsqrt(full(shape=(), value=d, dtype='int64'))", ()),
}
_SEEN = (
    "le(arange(start=0, stop=j, step=1, dtype='int64'),"
    " reshape(arange(start=0, stop=i, step=1, dtype='int64'), shape=(i, 1)))"
)
_LOWEST = "full(shape=(), value=-1e30, dtype='float32')"


def _attention(kind: str, suffix: str) -> Equation:
    """Return the rule of attention with sharded keys: products with values and sums of weights are partial.

    A causal query sees the keys up to its own position; the others weigh nothing, whatever their score. Grouped query
    heads `(h r)` share key heads `h`.
    """
    value, scale, guard = _SCALES[suffix]
    causal, masked, grouped = ("causal" in kind), ("masked" in kind), ("grouped" in kind)
    lead, heads, dim = ("b, h, r", "(h r)", "4") if grouped else ("b, h", "h", "3")
    query, key, attended = "q", "y", "z"
    if grouped:
        query = "reshape(q, shape=(b, h, r, i, d))"
        key, attended = (f"reshape({x}, shape=(b, h, 1, j, {n}))" for x, n in (("y", "d"), ("z", "e")))
    turned = "0, 1, 2, 4, 3" if grouped else "0, 1, 3, 2"
    scores = f"mul(matmul({query}, permute({key}, dims=({turned}))), {scale})"
    scores = f"add({scores}, a)" if masked else scores
    visible = f"where({_SEEN}, {scores}, {_LOWEST})" if causal else scores
    maximum = _maximum(f"detach({visible})", f"{lead}, i", "j", dim)
    weights = f"exp(sub({scores}, {maximum}))"
    if causal:  # no exponential of a masked score, which may be large
        weights = f"mul(exp(sub(where({_SEEN}, {scores}, {maximum}), {maximum})), {_SEEN})"
    result = f"div(matmul({weights}, {attended}), sum({weights}, dims=({dim},), keepdim=True))"
    return equation(
        f"{kind}attention_in_parts{suffix}",
        {"q": f"b {heads} i d", "y": "b h j d", "z": "b h j e"} | ({"a": "i j"} if masked else {}),
        f"sdpa(q, y, z{', a' * masked}, causal={causal}, scale={value})",
        f"reshape({result}, shape=(b, h * r, i, e))" if grouped else result,
        guard=(*guard, *(("1 < r",) if grouped else ()), "j % k == 0"), parameters=_BLOCKS,
    )  # fmt: skip


_KINDS = ("", "masked_", "causal_", "grouped_", "grouped_causal_")
ATTENTION = [_attention(kind, suffix) for kind in _KINDS for suffix in _SCALES]

DECOMPOSITIONS = [*SOFTMAX, _cross_entropy(), *_norms(), *ATTENTION]
"""Every decomposition of an operator; the norms have no parameters, as their statistics are sums."""
