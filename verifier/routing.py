"""The proofs of the equations that remove the order of experts from a model (`pcg.capture.routing` and `networks`).

A vector e of n experts, 0 ≤ e, has the order p: s_r = e_{p(r)} does not fall, and p is a permutation of 0, …, n - 1.
This is the trusted meaning of `sort_indices`. N(j) is the number of entries that are at most j.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.verifier.algebra.lawbook import Lemma, Obligation
from shardwright.verifier.logic import Number, z3


def _sorted_counts() -> list[Obligation]:
    """Return the obligations that the first N(j) sorted entries are those at most j, by induction over the entries."""
    m, r, j, count, one, before, last = z3.Ints("m r j N s_r s_before s_m")
    more = count + z3.If(last <= j, 1, 0)
    known = [
        m >= 0, count >= 0, count <= m,
        z3.Implies(r < m, (one <= j) == (r < count)),
        z3.Implies(m > 0, (before <= j) == (m - 1 < count)),
    ]  # fmt: skip
    rising = [z3.Implies(r < m, one <= last), z3.Implies(m > 0, before <= last), z3.Implies(r == m, one == last)]
    base = ([count == 0, m == 0], z3.And(count >= 0, count <= m))
    step = z3.And(more >= 0, more <= m + 1, (one <= j) == (r < more))
    return [base, ([*known, *rising, r >= 0, r < m + 1], step)]


def _histogram() -> list[Obligation]:
    """Return the obligations that an entry adds to one bin at most, by induction over j."""
    s, j, total = z3.Ints("s j total")
    upto = lambda limit: z3.If(s <= limit, 1, 0)  # noqa: E731
    first = ([s >= 0], z3.If(s == 0, 1, 0) == upto(0))
    return [first, ([total == upto(j)], total + z3.If(s == j + 1, 1, 0) == upto(j + 1))]


def _sorted_groups() -> list[Obligation]:
    """Return the obligations that group j has the rows N(j - 1) ≤ r < N(j), by the meaning of `sorted-counts`."""
    r, j, s, start, end = z3.Ints("r j s start end")
    given = [(s <= j - 1) == (r < start), (s <= j) == (r < end)]
    return [(given, z3.And(start <= r, r < end) == (s == j))]


def _row() -> tuple[Number, Number]:
    """Return an operator that maps a row to a row, and the rows of an operand."""
    value = z3.DeclareSort("Row")
    return z3.Function("f", value, value), z3.Function("x", z3.IntSort(), value)


def _rows_commute() -> list[Obligation]:
    f, x = _row()
    p, result = z3.Function("p", z3.IntSort(), z3.IntSort()), z3.Function("y", z3.IntSort(), x.range())
    r = z3.Int("r")
    return [([result(p(r)) == f(x(p(r)))], f(x(p(r))) == result(p(r)))]


def _repeated_rows() -> list[Obligation]:
    t, k, i = z3.Ints("t k i")
    return [([k >= 1, i >= 0, i < k], (t * k + i) / k == t)]


def _put_back() -> list[Obligation]:
    """Return the obligations of `index_put`, which writes r to p(r): the order of a permutation is its inverse."""
    p, q, w = (z3.Function(name, z3.IntSort(), z3.IntSort()) for name in "pqw")
    i, r, n = z3.Ints("i r n")
    rising = ([w(i + 1) > w(i), w(i) >= i], w(i + 1) >= i + 1)
    falling = ([w(i + 1) > w(i), w(i + 1) <= i + 1], w(i) <= i)
    ends = ([w(0) >= 0, w(n - 1) < n], z3.And(w(0) >= 0, w(n - 1) <= n - 1))
    return [([i == p(r), q(p(r)) == r], p(q(i)) == i), rising, falling, ends, ([w(i) >= i, w(i) <= i], w(i) == i)]


def _one_expert() -> list[Obligation]:
    """Return the obligations that a sum over experts has one nonzero term, by induction over their number m."""
    g = z3.Function("g", z3.IntSort(), z3.RealSort())
    t, m = z3.Ints("t m")
    total = z3.Real("S")
    upto = lambda limit: z3.If(t < limit, g(t), z3.RealVal(0))  # noqa: E731
    step = total + z3.If(m == t, g(m), z3.RealVal(0)) == upto(m + 1)
    return [
        ([t >= 0], upto(0) == 0),
        ([t >= 0, m >= 0, total == upto(m)], step),
        ([t < m, total == upto(m)], total == g(t)),
    ]


ROUTING: Mapping[str, Lemma] = {
    lemma.name: lemma
    for lemma in (
        Lemma("sorted-counts", "where s does not fall, s_r ≤ j exactly for r < N(j)", _sorted_counts),
        Lemma("histogram", "[s = 0] + … + [s = j] = [s ≤ j] for whole s ≥ 0", _histogram),
        Lemma("sorted-groups", "row r is in group j, N(j - 1) ≤ r < N(j), exactly where s_r = j", _sorted_groups),
        Lemma("rows-commute", "f(x[p]) = f(x)[p] where f makes each row of one row", _rows_commute),
        Lemma("repeated-rows", "(t·k + i) div k = t for 0 ≤ i < k", _repeated_rows),
        Lemma("put-back", "x[p][q] = x where q(p(r)) = r, and where q is the order of p", _put_back),
        Lemma("one-expert", "Σ_{e < n} [e = t]·g(e) = g(t) for 0 ≤ t < n", _one_expert),
    )
}
