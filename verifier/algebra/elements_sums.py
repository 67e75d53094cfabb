"""Index semantics of rows that sum: contractions, reductions, and rows that are defined by them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.elements import (
    Digit,
    Dim,
    Element,
    Evaluator,
    Index,
    Position,
    Rows,
    Semantics,
    Tensor,
    expect,
    extent,
    plain,
    spliced,
)  # fmt: skip
from shardwright.verifier.algebra.elements_lookups import constant, looked_up, not_ignored, number, picked
from shardwright.verifier.algebra.elements_pointwise import broadcast, read
from shardwright.verifier.algebra.monomials import ONE, ZERO, Bound, Normal, total_normal
from shardwright.verifier.algebra.polys import Poly, app, applied, poly

Families = list[tuple[list[Bound], Normal]]
"""Elements with their bound indices."""


def total(run: Evaluator, dims: Sequence[Dim], element: Element) -> Normal:
    """Return Σ over these dimensions of element(places)."""
    return _sum(run, [(bounds, element(places)) for places, bounds in run.families(dims)])


def linear(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate Σ_i x[…, i]·w[o, i]."""
    expect(term, len(operands) == 2)
    x, w = operands
    expect(term, len(w.dims) == 2 and bool(x.dims))
    summed = run.need_equal(f"{term}: summed dimensions agree", x.dims[-1], w.dims[1])

    def element(index: Index) -> Normal:
        return total(run, [summed],
                     lambda i: run.forms.times(x.element((*index[:-1], *i)), w.element((index[-1], *i))))  # fmt: skip

    plain(term, summed)
    return Tensor((*x.dims[:-1], w.dims[0]), element)


def matmul(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate Σ_k x[…, m, k]·y[…, k, n]."""
    expect(term, len(operands) == 2)
    x, y = operands
    expect(term, run.rank(x) >= 2 and run.rank(y) >= 2 and not any(map(spliced, (x.dims[-1], *y.dims[-2:]))))
    expect(term, len(y.dims) == 2 or not spliced(x.dims[-2]))
    summed = run.need_equal(f"{term}: summed dimensions agree", x.dims[-1], y.dims[-2])
    lead = broadcast(run, str(term), x.dims[:-2], y.dims[:-2])

    def element(index: Index) -> Normal:
        return total(
            run, [summed], lambda k: run.forms.times(read(x, (*index[:-1], *k)), read(y, (*index[:-2], *k, index[-1])))
        )

    return Tensor((*lead, x.dims[-2], y.dims[-1]), element)


def reduction(merge: Callable[[Evaluator, Families], Normal]) -> Semantics:
    """Return the semantics of a row that merges elements along some dimensions."""

    def semantics(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
        (x,), attrs = operands, dict(term.attrs)
        dims, keep = attrs["dims"].tree, str(attrs["keepdim"])
        expect(term, isinstance(dims, ast.Tuple) and keep in ("True", "False"))
        over = [run.position(x.dims, Expression(ast.unparse(tree))) for tree in dims.elts]  # type: ignore[attr-defined]
        expect(term, len(set(over)) == len(over) and all(not spliced(x.dims[at]) for at in over))
        gone = over if keep == "False" else []

        def element(index: Index) -> Normal:
            rest = iter(index)
            spots = [() if i in gone else next(rest) for i in range(len(x.dims))]
            families: Families = []
            for places, bounds in run.families([x.dims[i] for i in over]):
                at = dict(zip(over, places, strict=True))
                families.append((bounds, x.element(tuple(at.get(i, spot) for i, spot in enumerate(spots)))))
            return merge(run, families)

        return Tensor(tuple(() if i in over else d for i, d in enumerate(x.dims) if i not in gone), element)

    return semantics


def _sum(run: Evaluator, families: Families) -> Normal:
    run.forms.noted(len(families) > 1, "sum-in-pieces")
    return run.forms.add(*(run.forms.sum_over(normal, bounds) for bounds, normal in families))


def _amax(run: Evaluator, families: Families) -> Normal:
    run.forms.noted(len(families) > 1, "max-of-max")
    return run.forms.maximum(families)


def _amin(run: Evaluator, families: Families) -> Normal:
    run.forms.used.add("minimum")
    return run.forms.scaled(_amax(run, [(bounds, run.forms.scaled(normal, -1)) for bounds, normal in families]), -1)


# ---- softmax and cross-entropy: exp, sums, reciprocals and logarithms ----


def exp_sum(run: Evaluator, x: Tensor, at: int, index: Index) -> Normal:
    """Return Σ_j exp x[…, j, …] along dimension `at`."""
    return total(run, [x.dims[at]],
                 lambda j: run.forms.function("exp", x.element((*index[:at], *j, *index[at + 1 :]))))  # fmt: skip


def softmax(log: bool) -> Semantics:
    """Return the semantics of exp x / Σ_j exp x_j, or of x - log Σ_j exp x_j."""

    def semantics(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
        (x,), forms = operands, run.forms
        at = run.position(x.dims, dict(term.attrs)["dim"])
        plain(term, x.dims[at])

        def element(index: Index) -> Normal:
            element, bottom = x.element(index), exp_sum(run, x, at, index)
            if log:
                return forms.add(element, forms.scaled(forms.function("log", bottom), -1))
            return forms.times(forms.function("exp", element), forms.reciprocal(bottom))

        return Tensor(x.dims, element)

    return semantics


def cross_entropy_sum(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate Σ_n kept_n · (log Σ_j exp x[n, j] - (1 - s)·x[n, t_n] - s·mean_j x[n, j]); kept targets are classes."""
    x, target = operands
    attrs, at = dict(term.attrs), 1 if target.dims else 0
    expect(term, len(x.dims) == len(target.dims) + 1 and not any(map(spliced, (*x.dims, *target.dims))))
    for a, b in zip((*x.dims[:at], *x.dims[at + 1 :]), target.dims, strict=True):
        run.proven_equal(f"{term}: dimensions agree", a, b)
    ignored, forms = str(attrs["ignore_index"]), run.forms
    smoothing, well_formed = constant(run, attrs["label_smoothing"]), run.assuming

    def loss(places: Index) -> Normal:
        value = looked_up(run, term, target, places)
        if well_formed:  # a matched graph is valid: its targets are classes or ignored
            run.forms.in_range.add((f"kept unless {ignored}", applied(value).name, extent(x.dims[at])))  # type: ignore[union-attr]

        def logit(chosen: tuple[Position, ...]) -> Normal:
            return x.element((*places[:at], chosen, *places[at:]))

        log_sum = forms.function("log", exp_sum(run, x, at, (*places[:at], (), *places[at:])))
        nll = forms.scaled(picked(run, term, x.dims[at], value, logit), -1)
        log_sum = forms.add(log_sum, forms.times(forms.add(ONE, forms.scaled(smoothing, -1)), nll))
        if smoothing != ZERO:
            mean = total(run, [x.dims[at]], lambda j: forms.scaled(logit(*j), -1))
            mean = forms.times(mean, forms.reciprocal(forms.size(extent(x.dims[at]))))
            log_sum = forms.add(log_sum, forms.times(smoothing, mean))
        expect(term, total_normal(log_sum))  # the loss of an ignored target need not exist
        return forms.times(not_ignored(run, ignored, value), log_sum)

    return Tensor((), lambda index: total(run, target.dims, loss))


# ---- norms ----


def _normalized(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> int:
    """Return the number of normalized dimensions; weight and bias must have exactly these."""
    x, count = operands[0], dict(term.attrs)["normalized_dims"].evaluate({})
    expect(term, type(count) is int and 1 <= count <= len(x.dims) and not any(map(spliced, x.dims[-count:])))
    for affine in operands[1:]:
        expect(term, len(affine.dims) == count)
        for a, b in zip(x.dims[-count:], affine.dims, strict=True):
            run.need_equal(f"{term}: dimensions agree", a, b)
    return count


def _affine(run: Evaluator, operands: Sequence[Tensor], value: Normal, index: Index) -> Normal:
    if len(operands) > 1:
        value = run.forms.times(value, read(operands[1], index))
    return run.forms.add(value, read(operands[2], index)) if len(operands) > 2 else value


def norm(centred: bool) -> Semantics:
    """Return the semantics of (x - mean) / √(variance + eps), or x / √(mean square + eps), with weight and bias."""

    def semantics(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
        expect(term, len(operands) <= (3 if centred else 2))
        x, count, forms = operands[0], _normalized(run, term, operands), run.forms
        over = x.dims[-count:]
        eps = constant(run, dict(term.attrs)["eps"])

        def element(index: Index) -> Normal:
            lead = index[:-count]
            per = forms.reciprocal(forms.size(polys.product(map(extent, over))))
            value, mean = x.element(index), ZERO
            if centred:
                mean = forms.times(per, total(run, over, lambda j: x.element((*lead, *j))))
                value = forms.add(value, forms.scaled(mean, -1))
            square = forms.times(per, total(run, over, lambda j: forms.to_the(x.element((*lead, *j)), 2)))
            if centred:
                square = forms.add(square, forms.scaled(forms.to_the(mean, 2), -1))
            value = forms.times(value, forms.rsqrt(forms.add(square, eps)))
            return _affine(run, operands, value, index)

        return Tensor(x.dims, element)

    return semantics


# ---- attention ----


def sdpa(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate softmax(q kᵀ · scale + mask) v over keys; query heads (h r) share key heads h; masks are numbers."""
    expect(term, len(operands) in (3, 4) and all(run.rank(x) >= 3 for x in operands[:3]))
    (q, k, v, *masks), attrs, forms = operands, dict(term.attrs), run.forms
    expect(term, len(q.dims) == len(k.dims) == len(v.dims) and str(attrs["causal"]) in ("True", "False"))
    expect(term, not any(spliced(d) for x in operands for d in x.dims[-2:]))
    shared = len(k.dims[-3]) if not spliced(q.dims[-3]) else 1
    for a, b, c in zip((*q.dims[:-3], q.dims[-3][:shared]), k.dims[:-2], v.dims[:-2], strict=True):
        run.proven_equal(f"{term}: leading dimensions agree", a, b)
        run.proven_equal(f"{term}: leading dimensions agree", a, c)
    inner = run.need_equal(f"{term}: query and key agree", q.dims[-1], k.dims[-1])
    keys = run.need_equal(f"{term}: key and value agree", k.dims[-2], v.dims[-2])
    for mask in masks:
        broadcast(run, str(term), (*q.dims[:-1], keys), mask.dims)
        expect(term, len(mask.dims) <= len(q.dims))
    scale = forms.rsqrt(forms.size(extent(inner))) if str(attrs["scale"]) == "None" else constant(run, attrs["scale"])

    def lead(index: Index) -> Index:
        return (*index[:-3], index[-3][:shared])

    def weight(index: Index, at: tuple[Position, ...]) -> Normal:
        dot = total(
            run, [inner], lambda d: forms.times(q.element((*index[:-1], *d)), k.element((*lead(index), at, *d)))
        )
        bias = (read(mask, (*index[:-1], at)) for mask in masks)
        weight = forms.function("exp", forms.add(forms.times(dot, scale), *bias))
        if str(attrs["causal"]) == "False":
            return weight
        return forms.times(weight, forms.indicator("ge", number(q.dims[-2], index[-2]) - number(keys, at)))

    def element(index: Index) -> Normal:
        top = total(run, [keys], lambda j: forms.times(weight(index, *j), v.element((*lead(index), *j, index[-1]))))
        bottom = total(run, [keys], lambda j: weight(index, *j))
        return forms.times(top, forms.reciprocal(bottom))

    return Tensor((*q.dims[:-1], v.dims[-1]), element)


# ---- convolution ----


def conv2d(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate Σ over channels and window of x times w, for one group; x is 0 outside its border."""
    expect(term, len(operands) == 2)
    (x, w), attrs = operands, dict(term.attrs)
    expect(term, len(x.dims) == len(w.dims) == 4 and not any(map(spliced, (*x.dims, *w.dims))))
    expect(term, str(attrs["groups"]) == "1" and all(len(x.dims[d]) <= 1 and len(w.dims[d]) <= 1 for d in (2, 3)))
    channels = run.need_equal(f"{term}: channels agree", x.dims[1], w.dims[1])
    steps = {key: [_item(run, attrs[key], i) for i in range(2)] for key in ("stride", "padding", "dilation")}
    spatial = [_window(run, x.dims[2 + i], w.dims[2 + i], *(steps[key][i] for key in steps)) for i in range(2)]
    for size in spatial:
        run.need(f"{term}: the window fits", size - 1)

    def element(index: Index) -> Normal:
        def term_at(places: tuple[tuple[Position, ...], ...]) -> Normal:
            c, *taps = places
            value, inside = w.element((index[1], c, *taps)), list[tuple[Position, ...]]()
            for i, tap in enumerate(taps):
                stride, padding, dilation = (steps[key][i] for key in ("stride", "padding", "dilation"))
                at = _value(index[2 + i]) * stride + _value(tap) * dilation - padding
                size = extent(x.dims[2 + i])
                inside.append((Position(at, polys.ZERO, size),) if x.dims[2 + i] else ())
                value = run.forms.times(value, run.forms.indicator("in", at, size))
            return run.forms.times(value, x.element((index[0], c, *inside)))

        return total(run, [channels, w.dims[2], w.dims[3]], term_at)

    rows = tuple((Digit((size,)),) for size in spatial)
    return Tensor((x.dims[0], w.dims[0], *rows), element)


def _value(place: tuple[Position, ...]) -> Poly:
    return place[0].value if place else polys.ZERO


def _item(run: Evaluator, value: Expression, number: int) -> Poly:
    """Return one of the two steps of an attribute such as the stride."""
    if isinstance(value.tree, ast.Tuple) and len(value.tree.elts) == 2:
        return run.symbols.number(value.tree.elts[number])
    if value.name is None:
        raise RuleError(f"{value} is no pair of steps")
    return poly(f"{value.name}[{number}]")


def _window(run: Evaluator, x: Dim, w: Dim, stride: Poly, padding: Poly, dilation: Poly) -> Poly:
    """Return the size of a convolution's result along one dimension."""
    reach = extent(x) + padding * 2 - dilation * (extent(w) - 1)
    return reach if stride == polys.ONE else app("windows", reach, stride)


SUMS: Rows = {
    "linear": linear, "matmul": matmul, "sum": reduction(_sum), "amax": reduction(_amax), "amin": reduction(_amin),
    "softmax": softmax(log=False), "log_softmax": softmax(log=True), "cross_entropy_sum": cross_entropy_sum,
    "layer_norm": norm(centred=True), "rms_norm": norm(centred=False), "sdpa": sdpa, "conv2d": conv2d,
}  # fmt: skip
