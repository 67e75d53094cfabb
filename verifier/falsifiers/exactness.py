"""The test that a rule which claims only to move data is exact bit for bit, on numbers that round.

Equality over the reals is proven elsewhere. Here both sides run in float64 on random numbers, where reassociated sums
and products differ in their last bits. This is a test, not a proof. It decides whether a rule may have the field
`moves`.
"""

from __future__ import annotations

import random

import numpy as np

from shardwright.pcg.interpret import run_serial
from shardwright.pcg.parallel import REDUCE
from shardwright.substitutions.equations import Equation
from shardwright.verifier.falsifiers.instances import instances, right_graph
from shardwright.verifier.falsifiers.mismatch import Mismatch

TRIALS = 4


def reduces(rule: Equation) -> bool:
    """Return whether a placement rule adds up the devices' values, which is more than moving data."""
    return any(term.op == REDUCE for term in rule.operators)


def inexact(rule: Equation, seed: int = 0) -> Mismatch | None:
    """Return numbers, if there are any among a few, for which the sides of a serial rule differ by a bit.

    Raises `RuleError` if no small sizes satisfy the left side and the guard.
    """
    rng = np.random.default_rng(seed)
    for graph, match in instances(rule, random.Random(seed), TRIALS):
        names = {node.name: graph.types[node.name].shape for node in graph.leaves("input")}
        tensors = {name: rng.standard_normal(shape) for name, shape in names.items()}
        right, results = right_graph(rule, graph, match)
        left, got = run_serial(graph, tensors), run_serial(right, tensors)
        for root in match.roots:
            if not np.array_equal(left[root], got[results[root]], equal_nan=True):
                shown = {name.removeprefix("v_"): array for name, array in tensors.items()}
                return Mismatch(rule.name, match.sizes, shown, left[root], got[results[root]])
    return None
