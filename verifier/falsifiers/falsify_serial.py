"""The falsifier of serial rules: small tensors, in exact arithmetic where possible.

Both sides run as graphs: the left side is built at random small sizes that satisfy the guard, the rule is applied to
it, and both graphs are interpreted: on integers, where sums and products are exact, or, where a row rounds, on small
decimals. Results are compared wherever the left side has a value, then gradients (`tangents`). Placement rules run
device by device (`falsify_placement`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwright.pcg.errors import RuleError
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import Array, run_serial
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.match import Match
from shardwright.verifier.falsifiers.falsify_placement import falsify_placement
from shardwright.verifier.falsifiers.instances import ATTEMPTS, MAX_ELEMENTS, drawn, instance, right_graph
from shardwright.verifier.falsifiers.mismatch import ERRORS, Mismatch, largest_of, same
from shardwright.verifier.falsifiers.tangents import tangents


def falsify_equation(rule: Equation, trials: int = 6, seed: int = 0) -> Mismatch | None:
    """Return a counterexample to a serial or placement rule among random small instances, or None.

    Raises `RuleError` if no sizes are found that satisfy the left side and the guard.
    """
    if rule.axes:
        return falsify_placement(rule, seed=seed)
    rng, done, empty, compared = random.Random(seed), 0, 0, 0
    for _ in range(ATTEMPTS):
        made = instance(rule, rng)
        if made is None:
            continue
        if _is_empty(*made):  # empty results say little: a few are enough
            empty += 1
            if empty > max(2, trials // 2):
                continue
        try:
            mismatch = _compare(rule, *made, seed=done, positive=done % 2 == 1)
        except ERRORS:  # the left side has no value at these sizes
            continue
        compared += 1
        done += not _is_empty(*made)
        if mismatch is not None:
            return mismatch
        if done == trials:
            return None
    if not compared:
        raise RuleError(f"rule {rule.name!r}: no small sizes satisfy its left side and guard")
    return None


def _is_empty(graph: Graph, match: Match) -> bool:
    """Return whether a result has no elements, such as a slice that ends before it starts."""
    return any(0 in graph.types[root].shape for root in match.roots)


def _compare(rule: Equation, graph: Graph, match: Match, seed: int, positive: bool) -> Mismatch | None:
    names = {variable: name for name, variable in match.variables.items()}
    shapes = {names[n.name]: graph.types[n.name].shape for n in graph.leaves("input")}
    shown = drawn(rule, shapes, match.sizes, seed, positive)
    tensors = {match.variables[name]: array for name, array in shown.items()}
    expected = run_serial(graph, tensors)
    first = expected[match.roots[0]]
    try:
        right, results = right_graph(rule, graph, match)
        if any(kind.num_elements > MAX_ELEMENTS for kind in right.types.values()):
            return None
        got = run_serial(right, tensors)
    except (RuleError, *ERRORS) as error:
        return Mismatch(rule.name, match.sizes, shown, first, f"not defined: {error}")
    largest = max((largest_of(value) for value in (*expected.values(), *got.values())), default=1.0)
    for root in match.roots:
        want, have = expected[root], got[results[root]]
        if not same(want, have, largest):
            return Mismatch(rule.name, match.sizes, shown, want, have)
    pairs = [(root, results[root]) for root in match.roots]
    return _wrong_gradient(rule, match.sizes, (graph, right), pairs, shown, tensors)


def _wrong_gradient(
    rule: Equation,
    sizes: Mapping[str, Any],
    graphs: tuple[Graph, Graph],
    pairs: list[tuple[str, str]],
    shown: Mapping[str, Array],
    tensors: Mapping[str, Array],
) -> Mismatch | None:
    """Return roots whose derivatives along one direction of all variables differ, so that gradients differ; or None."""
    rng = np.random.default_rng(len(tensors))
    moved = {name: rng.standard_normal(x.shape) for name, x in tensors.items() if x.dtype.kind == "f"}
    shifted = {
        name: x + 1e-3 * moved[name] if name in moved else x for name, x in tensors.items()
    }  # off kinks and ties
    left, right = (tangents(graph, shifted, moved) for graph in graphs)
    for ours, theirs in pairs:
        if not left[ours].agrees(right[theirs]):
            note = "the values are equal; these are derivatives, which are not"
            return Mismatch(rule.name, sizes, shown, left[ours].slope, right[theirs].slope, note)
    return None
