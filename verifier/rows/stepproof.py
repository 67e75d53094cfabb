"""The proof of rules of the parallel operators: device by device, and by the denoted tensors.

A dimension that is sharded `S(d, n)` on an axis of degree k is indexed by digits (block, device, rest): by the lemma
`digits`, d = n·k·w has exactly these indices. Device p of a shard holds the elements whose device digit is p. The state
of devices is a function from (device on every axis, digits of every dimension) to an element of the logical tensor X,
or, on a `P` axis, of summands x with X = Σ_p x_p. After a reduction it is a sum of such elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.rules.steps import StepRule, SymbolicLayout, SymbolicStep
from shardwright.verifier.lemmas import require
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.proof import Failure
from shardwright.verifier.solver import is_valid

Where = Mapping[str, Number]
"""Digits by name: "p:a" is the device on axis a; "d:block", "d:a", "d:rest" the digits of dimension d."""
DEGREE = {"a": z3.Int("k"), "b": z3.Int("l")}


@dataclass(frozen=True, eq=False)
class Summed:
    """The sum Σ over devices of x[index]; `over` lists the axes, each with a symbol for the device."""

    index: tuple[Number, ...]
    over: tuple[tuple[str, Number], ...] = ()

    def equals(self, other: Summed, given: list[Formula]) -> bool:
        """Return whether two sums have equal elements, in some order of their axes."""
        inside = [z3.And(p >= 0, p < DEGREE[axis]) for axis, p in self.over]
        return len(self.over) == len(other.over) and any(
            [axis for axis, _ in order] == [axis for axis, _ in self.over]
            and is_valid(self._equal_index(other, order), [*given, *inside])
            for order in permutations(other.over)
        )

    def _equal_index(self, other: Summed, order: tuple[tuple[str, Number], ...]) -> Formula:
        """Return the formula that the indices are equal after the other's device symbols are renamed to ours."""
        swap = [(theirs, ours) for (_, theirs), (_, ours) in zip(order, self.over, strict=True)]
        return z3.And([a == z3.substitute(b, *swap) for a, b in zip(self.index, other.index, strict=True)])


DeviceElement = Callable[[Where], Summed]


@dataclass(frozen=True)
class DeviceState:
    """The element that every device holds, and the layouts."""

    places: Mapping[str, SymbolicLayout]
    element: DeviceElement


def prove_steps(rule: StepRule) -> Failure | None:
    """Return None if both chains lead to the same layouts and values, and denote the initial tensor; or a failure."""
    try:
        ends, digits = (rule.end(rule.left), rule.end(rule.right)), _digits(rule)
    except RuleError as error:
        return Failure(str(error), ill_typed=True)
    if ends[0] != ends[1]:
        shown = [", ".join(f"{a}: {p}" for a, p in end.items()) for end in ends]
        return Failure(f"the left side ends in {shown[0]}, the right side in {shown[1]}", ill_typed=True)
    require("digits")
    start = DeviceState(dict(rule.start), _start(rule, digits))
    left, right = (_run(start, moves) for moves in (rule.left, rule.right))
    where, given = _everywhere(rule, digits)
    if not left.element(where).equals(right.element(where), given):
        return Failure("the two sides leave different values on the devices")
    for side, value in (("left", left), ("right", right)):
        if not _denoted(value)(where).equals(_denoted(start)(where), given):
            return Failure(f"the {side} side denotes another tensor than it started from")
    return None


def _digits(rule: StepRule) -> dict[str, str]:
    """Return the axis of every sharded dimension's device digit; raise if two axes shard a dimension."""
    axis_of: dict[str, str] = {}
    for axis, dim, _ in rule.shards:
        if axis_of.setdefault(dim, axis) != axis:
            raise RuleError(f"rule {rule.name!r}: dimension {dim} is sharded by two axes")
    return axis_of


def _start(rule: StepRule, digits: Mapping[str, str]) -> DeviceElement:
    """Return the devices' elements of the logical tensor; on `P` axes, one summand each."""
    places = dict(rule.start)
    partial = [axis for axis, place in rule.start if place.kind == "P"]

    def element(where: Where) -> Summed:
        index: list[Number] = [where[f"p:{axis}"] for axis in partial]
        for dim, axis in sorted(digits.items()):
            held = places[axis].kind == "S" and places[axis].dim == dim
            index += [where[f"{dim}:block"], where[f"p:{axis}" if held else f"{dim}:{axis}"], where[f"{dim}:rest"]]
        return Summed(tuple(index))

    return element


def _run(start: DeviceState, moves: tuple[SymbolicStep, ...]) -> DeviceState:
    value = start
    for move in moves:
        before = value.places[move.axis]
        value = DeviceState({**value.places, move.axis: move.after(before)}, _moved(value.element, move, before))
    return value


def _summed(element: DeviceElement, axis: str) -> DeviceElement:
    def total(where: Where) -> Summed:
        q = z3.FreshInt("q")
        inner = element({**where, f"p:{axis}": q})
        return Summed(inner.index, ((axis, q), *inner.over))

    return total


def _sliced(element: DeviceElement, axis: str, dim: str) -> DeviceElement:
    """Return the element after a slicing: device p keeps the elements with its digit."""
    return lambda where: element({**where, f"{dim}:{axis}": where[f"p:{axis}"]})


def _gathered(element: DeviceElement, axis: str, dim: str) -> DeviceElement:
    """Return the element after a gather: every element comes from the device that its digit names."""
    return lambda where: element({**where, f"p:{axis}": where[f"{dim}:{axis}"]})


def _moved(element: DeviceElement, move: SymbolicStep, before: SymbolicLayout) -> DeviceElement:
    """Return the devices' elements after one step."""
    axis = move.axis
    match move.op:
        case "partition":
            return _sliced(element, axis, move.dim)
        case "combine" | "gather_copy":
            return _gathered(element, axis, before.dim)
        case "reduce" | "reduce_copy":
            return _summed(element, axis)
        case "reduce_scatter":
            return lambda where: _summed(_kept(element, axis, move.dim, where), axis)(where)
        case "all_to_all":
            return lambda where: element(
                {**where, f"p:{axis}": where[f"{before.dim}:{axis}"], f"{move.dim}:{axis}": where[f"p:{axis}"]}
            )
        case _:
            return element


def _kept(element: DeviceElement, axis: str, dim: str, receiver: Where) -> DeviceElement:
    """Return the element that every device sends to the receiver: its slice number `receiver`."""
    return lambda where: element({**where, f"{dim}:{axis}": receiver[f"p:{axis}"]})


def _denoted(value: DeviceState) -> DeviceElement:
    """Return the denoted logical tensor: gather shards, sum partial values, take any copy."""
    element = value.element
    for axis, place in value.places.items():
        if place.kind == "S":
            element = _gathered(element, axis, place.dim)
        elif place.kind == "P":
            element = _summed(element, axis)
    return element


def _everywhere(rule: StepRule, digits: Mapping[str, str]) -> tuple[Where, list[Formula]]:
    """Return a symbolic device and element, and the assumptions about them."""
    where = {f"p:{axis}": z3.Int(f"p_{axis}") for axis, _ in rule.start}
    given = [DEGREE[axis] >= 1 for axis, _ in rule.start]
    given += [z3.And(where[f"p:{axis}"] >= 0, where[f"p:{axis}"] < DEGREE[axis]) for axis, _ in rule.start]
    for dim, axis in digits.items():
        for part in ("block", axis, "rest"):
            where[f"{dim}:{part}"] = z3.Int(f"{dim}_{part}")
        given += [where[f"{dim}:{axis}"] >= 0, where[f"{dim}:{axis}"] < DEGREE[axis]]
    return where, given
