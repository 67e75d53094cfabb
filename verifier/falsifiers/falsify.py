"""The falsifier of row rules: it runs a rule device by device in float64 and looks for a counterexample.

It shares only the rule with the proofs. Operands are scattered in the rule's layouts, every device runs the row's NumPy
semantics on its part, and the devices' values must denote the result of one device. Gradients are compared through
directional derivatives, with the gradient of the result in the dual of its layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.interpret import Array, scatter, shard_indices
from shardwright.pcg.layout import Layout, local_shape
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS, LocalShapes
from shardwright.pcg.types import TensorType, is_float
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import pattern_of
from shardwright.substitutions.rules.rowrules import RowRule, derive, offset_factor
from shardwright.verifier.falsifiers.mismatch import listed

_STEP = 1e-6
_MAX_ELEMENTS = 200_000


@dataclass(frozen=True)
class Counterexample:
    """Concrete operands for which a rule is false, and a text on the difference."""

    rule: str
    degree: int
    what: str
    operands: tuple[Array, ...]

    def __str__(self) -> str:
        head = f"{self.rule} is false for degree {self.degree}: {self.what}"
        return "\n".join([head, *listed({f"x{number}": array for number, array in enumerate(self.operands)})])


@dataclass(frozen=True)
class _Trial:
    """A rule on concrete operands, at a degree."""

    rule: RowRule
    arrays: Sequence[Array]
    attrs: Mapping[str, Any]
    degree: int

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(a=self.degree)

    def sizes(self) -> dict[str, int]:
        shapes = [a.shape for a in self.arrays]
        signature = ROWS[self.rule.row].signature(shapes, dict(self.attrs))
        pattern, names = pattern_of(signature)
        if str(pattern) != self.rule.pattern:
            raise RuleError(f"{self.rule.name}: these operands have the pattern {pattern}")
        return {name: signature.factors[i].size for i, name in enumerate(names)}

    def run(self, arrays: Sequence[Array], attrs: Mapping[str, Any]) -> Array:
        """Run the row's NumPy semantics; floats are float64 throughout, as close to the reals as NumPy gets."""
        if is_float(str(attrs.get("dtype", ""))):
            attrs = {**attrs, "dtype": "float64"}
        with np.errstate(all="ignore"):
            return np.asarray(ROWS[self.rule.row].numpy(*arrays, **attrs))

    def results(
        self, parts: Sequence[Sequence[Array]], attrs: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]
    ) -> list[Array]:
        """Return every device's result; `parts` are the parts of each operand, `attrs` each device's attributes.

        A choice that sends parts runs as its composition: what its inner choice needs whole is joined, and the sum
        over devices is placed in the rule's layout.
        """
        rule, devices = self.rule, range(self.degree)
        if not rule.choice.sends:
            return [self.run([p[d] for p in parts], attrs[d]) for d in devices]
        inner = derive(rule.row, rule.shapes(), rule.choice.inner)
        whole = [
            [np.concatenate(p, mine.dim)] * self.degree if mine.kind == "S" and need.kind != "S" else p
            for p, mine, need in zip(parts, rule.operands, inner.operands, strict=True)
        ]
        results = [self.run([p[d] for p in whole], attrs[d]) for d in devices]
        return results if inner.result.kind != "P" else self.held(sum(results[1:], results[0]), rule.result, sizes)

    def held(self, array: Array, placement: Placement, sizes: Mapping[str, int], seed: int = 0) -> list[Array]:
        return scatter(array, (placement.at(sizes),), self.mesh, seed)

    def local_attrs(self, sizes: Mapping[str, int], result: Array, layout: Layout) -> list[dict[str, Any]]:
        """Return the attributes on every device, as the rule defines them."""
        row, rule = ROWS[self.rule.row], self.rule
        shapes = [a.shape for a in self.arrays]
        parts = [local_shape(s, (p.at(sizes),), (self.degree,)) for s, p in zip(shapes, rule.operands, strict=True)]
        local_result = local_shape(result.shape, (layout,), (self.degree,))
        attrs: dict[str, Any] = dict(self.attrs)
        if "attrs" in rule.local:
            attrs |= row.localize(attrs, LocalShapes(tuple(shapes), result.shape, tuple(parts), local_result))
        by_device: list[dict[str, Any]] = []
        for device in range(self.degree):
            device_attrs = dict(attrs)
            if "offset" in rule.local and (factor := offset_factor(row, rule.shapes())) is not None:
                device_attrs["offset"] = device_attrs.get("offset", 0) + device * sizes[factor] // self.degree
            if row.random and ("shard" in rule.local or rule.factor is None):
                drawn = TensorType(result.shape, "float64", (layout,))
                device_attrs |= {"shape": result.shape, "shard": shard_indices(drawn, self.mesh, (device,))}
            by_device.append(device_attrs)
        return by_device


def falsify(rule: RowRule, arrays: Sequence[Array], attrs: Mapping[str, Any], degree: int) -> Counterexample | None:
    """Return a counterexample if these operands are one, else None. Operands that the guard excludes are none.

    Raises `RuleError` if the operands have another pattern than the rule.
    """
    if not admitted(rule, arrays, attrs, degree):
        return None
    trial = _Trial(rule, arrays, attrs, degree)
    sizes = trial.sizes()
    try:
        what = next(_differences(trial, sizes), None)
    except (GraphError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        what = f"the local operator is not defined: {error}"
    return Counterexample(rule.name, degree, what, tuple(arrays)) if what else None


def admitted(rule: RowRule, arrays: Sequence[Array], attrs: Mapping[str, Any], degree: int) -> bool:
    """Return whether operands satisfy the guard's divisibilities; raise `RuleError` if they have another pattern."""
    sizes = _Trial(rule, arrays, attrs, degree).sizes()
    divided = [sizes[g[4:]] for g in rule.guard if g.startswith("k | ")]
    return all(size and size % degree == 0 for size in divided)


def falsify_row(rule: RowRule, degrees: Sequence[int] = (2, 3)) -> Counterexample | None:
    """Return a counterexample on small operands, or None; only for rows whose operands alone decide the pattern.

    Raises `RuleError` if the row's operands do not have the rule's pattern.
    """
    if not isinstance(ROWS[rule.row].factors, str):
        return None
    pattern, rng = rule.shapes(), np.random.default_rng(5)
    for degree in degrees:
        sizes = {name: degree * (2 + i) for i, name in enumerate(pattern.factors)}
        shapes = pattern.shapes(sizes)[:-1]
        if sum(map(prod, shapes)) > _MAX_ELEMENTS:
            return None
        counterexample = falsify(rule, [rng.integers(-4, 5, shape).astype(float) for shape in shapes], {}, degree)
        if counterexample is not None:
            return counterexample
    return None


def _differences(trial: _Trial, sizes: Mapping[str, int]) -> Iterator[str]:
    rule = trial.rule
    whole = trial.run(trial.arrays, trial.attrs)
    layout = rule.result.at(sizes)
    parts = [trial.held(a, p, sizes, seed=i) for i, (a, p) in enumerate(zip(trial.arrays, rule.operands, strict=True))]
    attrs = trial.local_attrs(sizes, whole, layout)
    results = trial.results(parts, attrs, sizes)
    yield from _disagreement(results, whole, layout, trial)
    if whole.dtype.kind == "f" and ROWS[rule.row].differentiable:
        for j, array in enumerate(trial.arrays):
            if array.dtype.kind == "f":
                yield from _gradient(trial, sizes, j, parts, attrs, whole)


def _disagreement(results: Sequence[Array], whole: Array, layout: Layout, trial: _Trial) -> Iterator[str]:
    """Yield the differences of the devices' results from the logical result in the claimed layout."""
    if layout.kind == "P":
        if any(r.shape != whole.shape for r in results):
            yield f"a summand has shape {list(results[0].shape)}, the result {list(whole.shape)}"
            return
        yield from _first_difference("the sum over devices", sum(results[1:], results[0]), whole)
        return
    expected = scatter(whole, (layout,), trial.mesh)
    for device, (got, want) in enumerate(zip(results, expected, strict=True)):
        yield from _first_difference(f"device {device} ({layout})", got, want)


def _first_difference(where: str, got: Array, want: Array) -> Iterator[str]:
    if got.shape != want.shape:
        yield f"{where} has shape {list(got.shape)}, expected {list(want.shape)}"
        return
    wrong = ~np.isclose(got, want, rtol=1e-7, atol=1e-9, equal_nan=True)
    if wrong.any():
        at = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(wrong)))
        pair = np.atleast_1d(got)[at], np.atleast_1d(want)[at]
        yield f"{where} has {pair[0]:.6g} at {list(at)}, expected {pair[1]:.6g}"


def _gradient(
    trial: _Trial,
    sizes: Mapping[str, int],
    j: int,
    parts: Sequence[Sequence[Array]],
    attrs: Sequence[Mapping[str, Any]],
    whole: Array,
) -> Iterator[str]:
    """Compare the derivatives of ⟨dy, result⟩ along a direction u of operand j, on one device and on all."""
    rule, rng = trial.rule, np.random.default_rng(7)
    dy, u = rng.standard_normal(whole.shape), rng.standard_normal(trial.arrays[j].shape)
    dys = trial.held(dy, rule.result.dual, sizes, seed=11)
    dual = rule.operands[j].dual
    directions = trial.held(u, dual, sizes) if dual.kind == "S" else [u] * trial.degree
    expected = _slope(trial, list(trial.arrays), j, u, dy, trial.attrs)
    slopes = _slopes(trial, sizes, parts, j, directions, dys, attrs)
    title = f"the gradient of operand {j}, {dual}, along a direction"
    if dual.kind in "SP":
        yield from _slope_difference(f"{title}: summed over devices", sum(slopes), expected)
        return
    for device, slope in enumerate(slopes):
        yield from _slope_difference(f"{title}: device {device}", slope, expected)


def _slope(trial: _Trial, arrays: list[Array], j: int, u: Array, dy: Array, attrs: Mapping[str, Any]) -> float:
    def inner(step: float) -> float:
        moved = [*arrays[:j], arrays[j] + step * u, *arrays[j + 1 :]]
        return float(np.sum(dy * trial.run(moved, attrs)))

    return (inner(_STEP) - inner(-_STEP)) / (2 * _STEP)


def _slopes(
    trial: _Trial,
    sizes: Mapping[str, int],
    parts: Sequence[Sequence[Array]],
    j: int,
    directions: Sequence[Array],
    dys: Sequence[Array],
    attrs: Sequence[Mapping[str, Any]],
) -> list[float]:
    """Return the derivative on every device, where each moves its part of operand j."""

    def inner(step: float) -> Array:
        mine = [x + step * u for x, u in zip(parts[j], directions, strict=True)]
        results = trial.results([*parts[:j], mine, *parts[j + 1 :]], attrs, sizes)
        return np.array([np.sum(dy * y) for dy, y in zip(dys, results, strict=True)])

    return list((inner(_STEP) - inner(-_STEP)) / (2 * _STEP))


def _slope_difference(where: str, got: float, want: float) -> Iterator[str]:
    if not np.isclose(got, want, rtol=1e-4, atol=1e-5):
        yield f"{where} has {got:.6g}, expected {want:.6g}"
