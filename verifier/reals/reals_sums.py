"""Rows that sum, in real numbers: contractions, reductions, and rows that are defined by them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.elements import extent, spliced
from shardwright.verifier.logic import Number, z3
from shardwright.verifier.reals.numbersums import name_of
from shardwright.verifier.reals.reals import Address, Place, RealRow, Reals, expect
from shardwright.verifier.reals.reals_moves import chosen, inside, not_ignored, number_of

# ---- sums ----


def _linear(reals: Reals, term: Apply, index: Address) -> Number:
    x, w = term.operands
    return reals.total(
        reals.dims(x)[-1:], lambda i: reals.element(x, (*index[:-1], i)) * reals.element(w, (index[-1], i))
    )


def _matmul(reals: Reals, term: Apply, index: Address) -> Number:
    x, y = term.operands
    return reals.total(
        reals.dims(x)[-1:], lambda k: reals.read(x, (*index[:-1], k)) * reals.read(y, (*index[:-2], k, index[-1]))
    )


def _reduced(most: Callable[..., Number], sign: int = 1) -> RealRow:
    """Return a row that sums, or takes the maximum, along some dimensions."""

    def row(reals: Reals, term: Apply, index: Address) -> Number:
        (x,), attrs = term.operands, dict(term.attrs)
        dims, keep = reals.dims(x), str(attrs["keepdim"]) == "True"
        over = [reals.run.position(dims, Expression(ast.unparse(tree))) for tree in attrs["dims"].tree.elts]  # type: ignore[attr-defined]

        def number(*places: Place) -> Number:
            rest = iter(index)
            spots = [next(rest) if keep or i not in over else () for i in range(len(dims))]
            for i, place in zip(over, places, strict=True):
                spots[i] = place
            return sign * reals.element(x, tuple(spots))

        return sign * most(reals, [dims[i] for i in over], number)

    return row


def _softmax(reals: Reals, term: Apply, index: Address) -> Number:
    """Return exp x / Σ_j exp x_j, or its logarithm."""
    (x,), numbers = term.operands, reals.numbers
    at = reals.run.position(reals.dims(x), dict(term.attrs)["dim"])
    element, over = reals.element(x, index), reals.dims(x)[at : at + 1]
    bottom = reals.total(over, lambda j: numbers.exp(reals.element(x, (*index[:at], j, *index[at + 1 :]))))
    if term.op == "log_softmax":
        return element - numbers.log(numbers.flat(bottom))
    return numbers.exp(element) * numbers.inverse(bottom)


def _norm(reals: Reals, term: Apply, index: Address) -> Number:
    """Return (x - mean) / √(mean of squares + eps), times the weight, plus the bias; the mean is 0 for rms_norm."""
    x, *affine = term.operands
    attrs, numbers = dict(term.attrs), reals.numbers
    lead = len(reals.dims(x)) - attrs["normalized_dims"].evaluate({})
    over = reals.dims(x)[lead:]
    per = numbers.inverse(numbers.size(polys.product(map(extent, over))))

    def mean(number: Callable[[Number], Number]) -> Number:
        return per * reals.total(over, lambda *j: number(reals.element(x, (*index[:lead], *j))))

    centre = numbers.flat(mean(lambda u: u)) if term.op == "layer_norm" else z3.RealVal(0)
    square = mean(lambda u: (u - centre) * (u - centre)) + reals.constant(attrs["eps"])
    value = (reals.element(x, index) - centre) * numbers.inverse(numbers.root(square))
    if affine:
        value = value * reals.read(affine[0], index)
    return value + reals.read(affine[1], index) if len(affine) > 1 else value


def _sdpa(reals: Reals, term: Apply, index: Address) -> Number:
    """Return softmax(q kᵀ · scale + mask) v; query heads (h r) share key heads h."""
    (q, k, v, *masks), attrs, numbers = term.operands, dict(term.attrs), reals.numbers
    shared = len(reals.dims(k)[-3]) if not spliced(reals.dims(q)[-3]) else 1
    lead = (*index[:-3], index[-3][:shared])
    keys, inner = reals.dims(k)[-2], reals.dims(k)[-1]
    scale = (
        numbers.inverse(numbers.root(numbers.size(extent(inner))))
        if str(attrs["scale"]) == "None"
        else (reals.constant(attrs["scale"]))
    )

    def weight(j: Place) -> Number:
        dot = reals.total([inner], lambda d: reals.element(q, (*index[:-1], d)) * reals.element(k, (*lead, j, d)))
        weight = numbers.exp(z3.Sum([dot * scale, *(reals.read(mask, (*index[:-1], j)) for mask in masks)]))
        if str(attrs["causal"]) == "False":
            return weight
        return weight * numbers.indicator("at least 0", number_of(reals.dims(q)[-2], index[-2]) - number_of(keys, j))

    top = reals.total([keys], lambda j: weight(j) * reals.element(v, (*lead, j, index[-1])))
    return top * numbers.inverse(reals.total([keys], weight))


def _conv2d(reals: Reals, term: Apply, index: Address) -> Number:
    """Return Σ over channels and window of x · w; positions of windows are functions named by the attributes."""
    (x, w), attrs = term.operands, dict(term.attrs)
    expect(term, str(attrs["groups"]) == "1")
    geometry = " ".join(f"{key}={attrs[key]}" for key in ("stride", "padding", "dilation"))

    def number(c: Place, *taps: Place) -> Number:
        value, inside = reals.element(w, (index[1], c, *taps)), list[Place]()
        for i, tap in enumerate(taps):
            size = extent(reals.dims(x)[2 + i])
            at = [*index[2 + i], *tap]
            sorts = [n.sort() for n in at]
            value = value * z3.Function(f"inside {i} of {size} {geometry}", *sorts, z3.RealSort())(*at)
            inside.append((z3.Function(f"place {i} {geometry}", *sorts, z3.IntSort())(*at),))
        expect(term, all(len(dim) == 1 for dim in reals.dims(x)[2:]))
        return value * reals.element(x, (index[0], c, *inside))

    return reals.total((reals.dims(x)[1], *reals.dims(w)[2:]), number)


def _cross_entropy(reals: Reals, term: Apply, index: Address) -> Number:
    """Return Σ_n kept_n · (log Σ_j exp x[n, j] - (1 - s)·x[n, t_n] - s·mean_j x[n, j])."""
    (x, target), attrs, numbers = term.operands, dict(term.attrs), reals.numbers
    at = len(reals.dims(target)[:1])
    classes, smoothing = reals.dims(x)[at : at + 1], reals.constant(attrs["label_smoothing"])

    def loss(*places: Place) -> Number:
        def logit(j: Place) -> Number:
            return reals.element(x, (*places[:at], j, *places[at:]))

        value = reals.element(target, places)
        counts, is_class = not_ignored(reals, attrs["ignore_index"], value), inside(reals, classes[0], value)
        expect(term, name_of(value) in reals.run.rule.dims)
        if reals.given:  # targets are classes or ignored
            numbers.implied.add((name_of(value), name_of(counts), name_of(is_class)))
        log_sum = numbers.log(numbers.flat(reals.total(classes, lambda j: numbers.exp(logit(j)))))
        mean = reals.total(classes, logit) * numbers.inverse(numbers.size(extent(classes[0])))
        picked = is_class * logit(chosen(classes[0], value))
        return counts * (log_sum - (1 - smoothing) * picked - smoothing * mean)

    return reals.total(reals.dims(target), loss)


SUMS: Mapping[str, RealRow] = {
    "linear": _linear, "matmul": _matmul, "sum": _reduced(Reals.total),
    "amax": _reduced(Reals.greatest), "amin": _reduced(Reals.greatest, -1), "softmax": _softmax,
    "log_softmax": _softmax, "layer_norm": _norm, "rms_norm": _norm, "sdpa": _sdpa, "conv2d": _conv2d,
    "cross_entropy_sum": _cross_entropy,
}  # fmt: skip
