"""The lemmas of proofs: integers, digits, finite sums by induction, orders, laws. Each is proven by Z3.

Sums are handled by prefix sums S(n): S(0) = 0 and S(n + 1) = S(n) + t(n). A lemma about sums is proven by its base case
and its induction step, both ground; the principle of induction itself is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from shardwright.pcg.errors import RuleError
from shardwright.verifier.algebra.lawbook import FACTS, LAWS, Lemma, Obligation
from shardwright.verifier.logic import z3
from shardwright.verifier.routing import ROUTING
from shardwright.verifier.solver import is_valid


def _digits() -> list[Obligation]:
    k, c, p, r, p2, r2, i = z3.Ints("k c p r p2 r2 i")
    size, first = [k >= 1, c >= 1], [p >= 0, p < k, r >= 0, r < c]
    second = [p2 >= 0, p2 < k, r2 >= 0, r2 < c]
    quotient, rest = i / c, i % c
    return [
        (size + first, z3.And(p * c + r >= 0, p * c + r < k * c)),
        (size + first + second + [p * c + r == p2 * c + r2], z3.And(p == p2, r == r2)),
        (
            [*size, i >= 0, i < k * c],
            z3.And(quotient >= 0, quotient < k, rest >= 0, rest < c, i == quotient * c + rest),
        ),
    ]


def _range() -> list[Obligation]:
    a, n, d, m = z3.Ints("a n d m")
    return [([a >= 0, a < n, d >= 0, d < m], z3.And(a * m + d >= 0, a * m + d < n * m))]


def _euclid() -> list[Obligation]:
    a, b, x, y, m = z3.Ints("a b x y m")
    return [([x >= 0, x < m, y >= 0, y < m, a * m + x == b * m + y], z3.And(a == b, x == y))]


def _cancel() -> list[Obligation]:
    d, x, y = z3.Ints("d x y")
    return [([d >= 1, d * x == d * y], x == y)]


def _exact() -> list[Obligation]:
    d, n, w = z3.Ints("d n w")
    return [([d >= 1, n == d * w], n / d == w)]


def _split_sum() -> list[Obligation]:
    """Return the obligations of Σ_{i < k·c} t(i) = Σ_{p < k} Σ_{r < c} t(p·c + r)."""
    prefix = z3.Function("S", z3.IntSort(), z3.RealSort())
    term = z3.Function("t", z3.IntSort(), z3.RealSort())
    inner = z3.Function("inner", z3.IntSort(), z3.IntSort(), z3.RealSort())
    outer = z3.Function("outer", z3.IntSort(), z3.RealSort())
    p, c, r = z3.Ints("p c r")
    start = p * c
    inner_base = ([inner(p, 0) == 0], inner(p, 0) == prefix(start) - prefix(start))
    inner_step = (
        [
            inner(p, r + 1) == inner(p, r) + term(start + r),
            prefix(start + r + 1) == prefix(start + r) + term(start + r),
            inner(p, r) == prefix(start + r) - prefix(start),
        ],
        inner(p, r + 1) == prefix(start + r + 1) - prefix(start),
    )
    outer_base = ([outer(0) == 0, prefix(0) == 0], outer(0) == prefix(0 * c))
    outer_step = (
        [
            outer(p + 1) == outer(p) + inner(p, c),
            inner(p, c) == prefix(start + c) - prefix(start),
            outer(p) == prefix(start),
        ],
        outer(p + 1) == prefix((p + 1) * c),
    )
    return [inner_base, inner_step, outer_base, outer_step]


def _additive_sum() -> list[Obligation]:
    """Return the obligations of f(Σ_p x_p) = Σ_p f(x_p) for an additive f with f(0) = 0."""
    value = z3.DeclareSort("Value")
    plus = z3.Function("plus", value, value, value)
    body = z3.Function("f", value, z3.RealSort())
    zero, total, term = z3.Const("zero", value), z3.Const("total", value), z3.Const("term", value)
    image = z3.Real("image")
    return [
        ([body(zero) == 0], body(zero) == 0),
        (
            [body(plus(total, term)) == body(total) + body(term), image == body(total)],
            body(plus(total, term)) == image + body(term),
        ),
    ]


def _sum_of_sums() -> list[Obligation]:
    """Return the obligations of Σ (s + t) = Σ s + Σ t and Σ a·t = a·Σ t."""
    a, s, t, both, left, right, scaled = z3.Reals("a s t both left right scaled")
    return [
        ([], z3.RealVal(0) == z3.RealVal(0) + z3.RealVal(0)),
        ([both == left + right], both + (s + t) == (left + s) + (right + t)),
        ([], z3.RealVal(0) == a * z3.RealVal(0)),
        ([scaled == a * right], scaled + a * t == a * (right + t)),
    ]


def _pieces() -> list[Obligation]:
    """Return the obligations of parts that are each cut in pieces: n parts of size c, k pieces of size d in each."""
    n, k, c, d, p, q, r = z3.Ints("n k c d p q r")
    given = [k >= 1, d >= 1, c == k * d, q >= 0, q < k, r >= 0, r < d]
    term = z3.Function("t", z3.IntSort(), z3.RealSort())
    by_part, by_piece, row, old, new = z3.Reals("by_part by_piece row old new")
    return [
        (given, z3.And(q * d + r >= 0, q * d + r < c)),  # a piece lies within its part
        ([d >= 1, r >= 0, r < d], z3.And((p * d + r) / d == p, (p * d + r) % d == r)),  # the gathered piece has digits
        (given, term(p * c + (q * d + r)) == term((p * k + q) * d + r)),  # and is slice q of each of n blocks
        ([n >= 1, by_part == 0, by_piece == 0], by_part == by_piece),
        ([by_part == by_piece, old == by_piece, new == old + row], by_part + row == new),  # a part more: linear-sum
    ]


def _merged_means() -> list[Obligation]:
    """Return the obligations of means N/D over parts, with D = exp(l) the sum of positive weights and N = Σ w·v.

    Either part may have no visible key: then its weights are 0, and its mean is any. `s` is the score of one key,
    w = exp(s) its weight. A hidden key has a weight of 0, and gives no gradient: it need not be looked at.
    """
    n, d, n2, d2, mean, mean2, whole = z3.Reals("n d n2 d2 mean mean2 whole")
    w, v, p, score_slope, value_slope = z3.Reals("w v p score_slope value_slope")
    parts = [d >= 0, d2 >= 0, d + d2 > 0, n == d * mean, n2 == d2 * mean2]
    share = d2 / (d + d2)
    of_weight = [d > 0, w > 0, n == d * whole, p == w / d]
    return [
        (parts, (n + n2) / (d + d2) == mean + share * (mean2 - mean)),
        ([d > 0, d2 > 0], 1 / (1 + d / d2) == share),  # sigmoid(l2 - l), as exp(l - l2) = d / d2
        (
            parts,
            z3.And(d + d2 > 0, n + n2 == (d + d2) * (mean + share * (mean2 - mean))),
        ),  # so further parts merge, too
        # the derivative of (n + (w' - w)·v) / (d + (w' - w)) in w, times dw/ds = w: that of a score
        ([*of_weight, score_slope == (v * d - n) / (d * d) * w], score_slope == p * (v - whole)),
        ([*of_weight, value_slope == w / d], value_slope == p),  # that of a value
        ([d > 0, w == 0, p == w / d], z3.And(p == 0, p * (v - whole) == 0)),  # of a hidden key both are 0
    ]


LEMMAS: Mapping[str, Lemma] = {
    **LAWS,
    **ROUTING,
    **{
        lemma.name: lemma
        for lemma in (
            Lemma("digits", "i = p·c + r is a bijection of [0, k) × [0, c) and [0, k·c)", _digits),
            Lemma("range", "0 ≤ a < n and 0 ≤ d < m give 0 ≤ a·m + d < n·m", _range),
            Lemma("euclid", "a·m + x = b·m + y with 0 ≤ x, y < m gives a = b and x = y", _euclid),
            Lemma("cancel", "d·x = d·y with d ≥ 1 gives x = y", _cancel),
            Lemma("exact", "n = d·w with d ≥ 1 gives n div d = w", _exact),
            Lemma("split-sum", "Σ_{i < k·c} t(i) = Σ_{p < k} Σ_{r < c} t(p·c + r)", _split_sum),
            Lemma("additive-sum", "f(x + y) = f(x) + f(y) and f(0) = 0 give f(Σ x) = Σ f(x)", _additive_sum),
            Lemma("linear-sum", "Σ (s + t) = Σ s + Σ t and Σ a·t = a·Σ t", _sum_of_sums),
            Lemma(
                "pieces",
                "piece q of all n parts, in their order, is slice q of each of n blocks, and Σ_p Σ_q t = Σ_q Σ_p t",
                _pieces,
            ),
            Lemma(
                "merged-means",
                "means o weighted by exp s merge by l = log Σ exp s; exp(s - l) = ∂o/∂v, and times v - o it is ∂o/∂s",
                _merged_means,
                ("exp", "log"),
            ),
        )
    },
}

TRUSTED: Mapping[str, str] = {
    **FACTS,
    "chain-rule": "the derivative of a composition is the product of the derivatives",
    "adjoint-of-linear": "the derivative of what is linear is linear",
}
"""The trusted facts, which are not proven. `declared: …` is trusted, too: a row declares that it is linear."""


def statement(name: str) -> str:
    """Return the statement of a lemma, a law or a trusted fact; "" if it has none here."""
    return LEMMAS[name].statement if name in LEMMAS else TRUSTED.get(name, "")


@lru_cache(maxsize=128)
def require(name: str) -> str:
    """Prove a lemma (once) and return its name; raise `RuleError` if Z3 does not prove it."""
    for number, (given, goal) in enumerate(LEMMAS[name].obligations()):
        if not is_valid(goal, given):
            raise RuleError(f"lemma {name!r} is not proven: obligation {number} of {LEMMAS[name].statement!r}")
    return name
