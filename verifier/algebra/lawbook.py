"""The laws that normal forms apply, by name: the statement of each, and its proof by Z3.

A certificate of a serial rule names the laws that its proof applied; `normal`, `families`, `powers` and `laws` record
each application. Laws are proven for real numbers, from the facts that define functions (`FACTS`), which are trusted.
A fact is written as its instances at the terms that a proof needs. Laws about sums and maxima over a family of n
numbers are proven by induction: the base case and the step, both ground.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature

from shardwright.verifier.logic import Formula, Number, z3

Obligation = tuple[list[Formula], Formula]
"""Hypotheses and goal."""

FACTS: Mapping[str, str] = {
    "index-semantics": "a row computes what its index semantics says (verifier/algebra/elements_*.py)",
    "exp": "exp(u + v) = exp u · exp v and exp u > 0",
    "log": "log(exp u) = u, and exp(log u) = u for u > 0",
    "sqrt": "√u ≥ 0 and √u · √u = u for u ≥ 0",
    "sigmoid": "sigmoid(u) = 1 / (1 + exp(-u))",
    "silu": "silu(u) = u · sigmoid(u)",
    "gelu": "gelu(u) = u/2 · (1 + φ(u)), φ being erf(u/√2) or what approximates it",
    "odd-functions": "f(-u) = -f(u) for tanh, sin, erf and φ, and f(0) = 0",
    "even-functions": "cos(-u) = cos(u), and cos(0) = 1",
    "indices-in-range": "indices are below the size that they index into; a target that is kept is a class",
    "permutations": "at(compose(p, q), j) = at(p, at(q, j)) and at(iota, j) = j",
    "row-major": "flat(s, unflat(s, n)) = n and unflat(s, flat(s, j)) = j, for row-major order",
}
"""The trusted facts about functions, permutations and indices."""


@dataclass(frozen=True, slots=True)
class Lemma:
    """A named statement with the obligations that prove it, and the facts from which these are written."""

    name: str
    statement: str
    obligations: Callable[[], list[Obligation]]
    facts: tuple[str, ...] = ()


def _function(name: str) -> Number:
    return z3.Function(name, z3.RealSort(), z3.RealSort())


def _larger(u: Number, v: Number) -> Number:
    return z3.If(u > v, u, v)


def _relu(u: Number) -> Number:
    return z3.If(u > 0, u, z3.RealVal(0))


def _abs(u: Number) -> Number:
    return z3.If(u > 0, u, -u)


def _over_reals(obligations: Callable[..., list[Obligation]]) -> Callable[[], list[Obligation]]:
    """Return obligations about real numbers, which the parameters name."""
    return lambda: obligations(*map(z3.Real, signature(obligations).parameters))


def _where(given: Callable[..., list[Formula]], goal: Callable[..., Formula]) -> Callable[[], list[Obligation]]:
    """Return the obligation of a statement about real numbers, which its parameters name, under hypotheses."""
    names = signature(goal).parameters
    return lambda: [(given(*map(z3.Real, names)), goal(*map(z3.Real, names)))]


def _identity(goal: Callable[..., Formula]) -> Callable[[], list[Obligation]]:
    """Return the obligation of a statement about all reals."""
    return _where(lambda *_: [], goal)


# ---- functions, from the facts that define them ----


def _exp_of_multiple() -> list[Obligation]:
    """Return the obligations of exp(k·u) = exp(u)^k, by induction over k; the power of -k is the reciprocal."""
    exp, (u, ku, power) = _function("exp"), z3.Reals("u ku power")
    zero = z3.RealVal(0)
    return [
        ([exp(zero + zero) == exp(zero) * exp(zero), exp(zero) > 0], exp(zero) == 1),
        ([exp(ku + u) == exp(ku) * exp(u), exp(ku) == power], exp(ku + u) == power * exp(u)),
        ([exp(u + -u) == exp(u) * exp(-u), exp(zero) == 1, exp(u) > 0], exp(-u) == 1 / exp(u)),
    ]


def _inverse(u: Number) -> Formula:
    return z3.Implies(u > 0, _function("exp")(_function("log")(u)) == u)


def _log_of_product() -> list[Obligation]:
    exp, log, (u, v) = _function("exp"), _function("log"), z3.Reals("u v")
    total = log(u) + log(v)
    facts = [_inverse(u), _inverse(v), exp(total) == exp(log(u)) * exp(log(v)), log(exp(total)) == total]
    return [([u > 0, v > 0, *facts], log(u * v) == total)]


def _log_of_power() -> list[Obligation]:
    """Return the obligations of log(u^k) = k·log u, by induction over k, and of log(1/u) = -log u."""
    exp, log, (u, power, k) = _function("exp"), _function("log"), z3.Reals("u power k")
    zero, less = z3.RealVal(0), -log(u)
    return [
        ([exp(zero) == 1, log(exp(zero)) == zero], log(z3.RealVal(1)) == 0),
        ([log(power * u) == log(power) + log(u), log(power) == k * log(u)], log(power * u) == (k + 1) * log(u)),
        ([u > 0, _inverse(u), exp(less) == 1 / exp(log(u)), log(exp(less)) == less], log(1 / u) == less),
    ]


def _root(u: Number) -> Number:
    return _function("root")(u)


def _roots(*terms: Number) -> list[Formula]:
    """Return the facts about the roots of these terms."""
    return [z3.Implies(t >= 0, z3.And(_root(t) >= 0, _root(t) * _root(t) == t)) for t in terms]


def _sigmoid_of_negative() -> list[Obligation]:
    exp, sigmoid, (u,) = _function("exp"), _function("sigmoid"), z3.Reals("u")
    facts = [sigmoid(u) == 1 / (1 + exp(-u)), sigmoid(-u) == 1 / (1 + exp(u))]
    return [([*facts, exp(-u) == 1 / exp(u), exp(u) > 0, exp(-u) > 0], sigmoid(-u) == 1 - sigmoid(u))]


def _sum_in_pieces() -> list[Obligation]:
    """Return the obligations of Σ_{i < m+n} t(i) = Σ_{i < m} t(i) + Σ_{j < n} t(m + j), by induction over n."""
    prefix, piece, term = (z3.Function(f, z3.IntSort(), z3.RealSort()) for f in ("S", "piece", "t"))
    m, n = z3.Ints("m n")
    return [
        ([piece(0) == 0], prefix(m + 0) == prefix(m) + piece(0)),
        (
            [
                prefix(m + n + 1) == prefix(m + n) + term(m + n),
                piece(n + 1) == piece(n) + term(m + n),
                prefix(m + n) == prefix(m) + piece(n),
            ],
            prefix(m + n + 1) == prefix(m) + piece(n + 1),
        ),
    ]


LAWS: Mapping[str, Lemma] = {
    lemma.name: lemma
    for lemma in (
        Lemma("add-commutes", "u + v = v + u", _identity(lambda u, v: u + v == v + u)),
        Lemma("add-associates", "(u + v) + w = u + (v + w)", _identity(lambda u, v, w: (u + v) + w == u + (v + w))),
        Lemma("mul-commutes", "u · v = v · u", _identity(lambda u, v: u * v == v * u)),
        Lemma("mul-associates", "(u · v) · w = u · (v · w)", _identity(lambda u, v, w: (u * v) * w == u * (v * w))),
        Lemma("distribute", "(u + v) · w = u · w + v · w", _identity(lambda u, v, w: (u + v) * w == u * w + v * w)),
        Lemma("collect", "a · u + b · u = (a + b) · u", _identity(lambda a, b, u: a * u + b * u == (a + b) * u)),
        Lemma("powers", "u^a · u^b = u^(a + b)", _over_reals(lambda u, first, second, both: [  # by induction over b
            ([], first * 1 == first),
            ([both == first * second], both * u == first * (second * u)),
        ])),
        Lemma("cancel-factor", "u · 1/u = 1 where u is not 0", _where(lambda u: [u != 0], lambda u: u * (1 / u) == 1)),
        Lemma(
            "reciprocal-of-product", "1/(u · v) = 1/u · 1/v where neither is 0",
            _where(lambda u, v: [u != 0, v != 0], lambda u, v: 1 / (u * v) == (1 / u) * (1 / v)),
        ),
        Lemma(
            "reciprocal-of-reciprocal", "1/(1/u) = u where u is not 0",
            _where(lambda u: [u != 0], lambda u: 1 / (1 / u) == u),
        ),
        # by induction over the range of i; the step sums Σ_j (s_j + t_j), which is `linear-sum`
        Lemma("exchange-sum", "Σ_i Σ_j t(i, j) = Σ_j Σ_i t(i, j)", _over_reals(lambda left, right, row, both: [
            ([right == 0], z3.RealVal(0) == right),  # Σ_j 0
            ([left == right, both == right + row], left + row == both),  # Σ_j (Σ_{i<n} t_ij + t_nj)
        ])),
        Lemma("constant-sum", "Σ_{i < n} a = n · a", _over_reals(lambda a, total, n: [
            ([], z3.RealVal(0) == 0 * a),
            ([total == n * a], total + a == (n + 1) * a),
        ])),
        Lemma("sum-in-pieces", "Σ_{i < m+n} t(i) = Σ_{i < m} t(i) + Σ_{j < n} t(m + j)", _sum_in_pieces),
        Lemma("positive-sum", "a sum of one or more positive numbers is positive", _over_reals(lambda total, term: [
            ([term > 0], 0 + term > 0),
            ([total > 0, term > 0], total + term > 0),
        ])),
        Lemma("exp-of-multiple", "exp(k · u) = (exp u)^k for whole k", _exp_of_multiple, ("exp",)),
        Lemma("log-of-product", "log(u · v) = log u + log v where both are positive", _log_of_product, ("exp", "log")),
        Lemma("log-of-power", "log(u^k) = k · log u where u > 0, for whole k", _log_of_power, ("exp", "log")),
        Lemma("root-of-product", "√(u · v) = √u · √v where u > 0 and v ≥ 0", _where(
            lambda u, v: [u > 0, v >= 0, *_roots(u, v, u * v)], lambda u, v: _root(u * v) == _root(u) * _root(v)
        ), ("sqrt",)),
        Lemma("root-of-square", "√(u²) = |u|", _where(
            lambda u: _roots(u * u), lambda u: _root(u * u) == _abs(u)
        ), ("sqrt",)),
        Lemma("abs-of-product", "|u · v| = |u| · |v|", _identity(lambda u, v: _abs(u * v) == _abs(u) * _abs(v))),
        Lemma("abs-of-nonnegative", "|u| = u where u ≥ 0", _where(lambda u: [u >= 0], lambda u: _abs(u) == u)),
        Lemma("abs-squared", "|u|² = u²", _identity(lambda u: _abs(u) * _abs(u) == u * u)),
        Lemma(
            "relu-of-scaled", "relu(c · u) = c · relu(u) where c > 0",
            _where(lambda c, u: [c > 0], lambda c, u: _relu(c * u) == c * _relu(u)),
        ),
        Lemma("relu-of-negative", "relu(-u) = relu(u) - u", _identity(lambda u: _relu(-u) == _relu(u) - u)),
        Lemma("relu-of-nonnegative", "relu(u) = u where u ≥ 0", _where(lambda u: [u >= 0], lambda u: _relu(u) == u)),
        Lemma("relu-squared", "relu(u)² = u · relu(u)", _identity(lambda u: _relu(u) * _relu(u) == u * _relu(u))),
        Lemma("sigmoid-of-negative", "sigmoid(-u) = 1 - sigmoid(u)", _sigmoid_of_negative, ("exp", "sigmoid")),
        Lemma("max-commutes", "max(u, v) = max(v, u)", _identity(lambda u, v: _larger(u, v) == _larger(v, u))),
        Lemma("max-of-equal", "max(u, u) = u, and so for a family", _identity(lambda u: _larger(u, u) == u)),
        Lemma("max-of-shifted", "max_i (u_i + c) = max_i u_i + c", _over_reals(lambda u, v, c, most, shifted: [
            ([], _larger(u + c, v + c) == _larger(u, v) + c),
            ([shifted == most + c], _larger(shifted, u + c) == _larger(most, u) + c),
        ])),
        Lemma("max-of-scaled", "max_i c·u_i = c · max_i u_i where c > 0", _over_reals(lambda u, v, c, most, scaled: [
            ([c > 0], _larger(c * u, c * v) == c * _larger(u, v)),
            ([c > 0, scaled == c * most], _larger(scaled, c * u) == c * _larger(most, u)),
        ])),
        Lemma("max-of-max", "max(u, max(v, w)) = max(max(u, v), w), and so for families", _over_reals(
            lambda u, v, w, most, inner, both: [
                ([], _larger(u, _larger(v, w)) == _larger(_larger(u, v), w)),
                ([both == _larger(most, inner)], _larger(both, u) == _larger(most, _larger(inner, u))),
            ]
        )),
        Lemma(
            "minimum", "min(u, v) = -max(-u, -v)", _identity(lambda u, v: z3.If(u < v, u, v) == -_larger(-u, -v))
        ),
        Lemma("indicator-squared", "[c]² = [c]", _where(lambda c: [z3.Or(c == 0, c == 1)], lambda c: c * c == c)),
        Lemma("indicator-masks", "[c] · f(u) = [c] · f(v) where u = v if c", _where(
            lambda c, u, v: [z3.Or(c == 0, c == 1), z3.Implies(c == 1, u == v)],
            lambda c, u, v: c * _function("f")(u) == c * _function("f")(v),
        )),
    )
}  # fmt: skip


def rested_on(laws: set[str]) -> tuple[str, ...]:
    """Return the laws, and the facts from which their proofs are written."""
    facts = {fact for name in laws if name in LAWS for fact in LAWS[name].facts}
    return tuple(sorted(laws | facts))
