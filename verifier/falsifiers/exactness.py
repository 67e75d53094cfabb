"""Whether a rule that says that it only moves data is equal bit for bit, on numbers that round.

That both sides are equal over the reals is proven elsewhere. Here they run in float64 on random numbers: reassociated
sums and products then differ in their last bits. A test, not a proof; it decides whether `moves` may stand in the rule.
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
    """Whether a placement rule adds up what devices hold: that is more than moving data."""
    return any(term.op == REDUCE for term in rule.operators)


def inexact(rule: Equation, seed: int = 0) -> Mismatch | None:
    """Numbers for which the sides of a serial rule differ by a bit, if there are any among a few.

    Raises `RuleError` where no small sizes satisfy the left side and the guard.
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
