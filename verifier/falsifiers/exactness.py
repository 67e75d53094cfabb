"""Whether a rule that says that it only moves data is equal bit for bit, on numbers that round.

That both sides are equal over the reals is proven elsewhere. Here they run in float64 on random numbers: reassociated
sums and products then differ in their last bits. A test, not a proof; it decides whether `moves` may stand in the rule.
"""

from __future__ import annotations

import random

import numpy as np

from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import run_serial
from shardwright.pcg.parallel import REDUCE
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.match import replacement
from shardwright.substitutions.terms import Apply, subterms
from shardwright.verifier.falsifiers.instances import instances
from shardwright.verifier.falsifiers.mismatch import Mismatch

TRIALS = 4


def reduces(rule: Equation) -> bool:
    """Whether a placement rule adds up what devices hold: that is more than moving data."""
    terms = (term for root in (*rule.left, *rule.right) for term in subterms(root))
    return any(isinstance(term, Apply) and term.op == REDUCE for term in terms)


def inexact(rule: Equation, seed: int = 0) -> Mismatch | None:
    """Numbers for which the sides of a serial rule differ by a bit, if there are any among a few.

    Raises `RuleError` where no small sizes satisfy the left side and the guard.
    """
    rng = np.random.default_rng(seed)
    for graph, match in instances(rule, random.Random(seed), TRIALS):
        names = {node.name: graph.types[node.name].shape for node in graph.leaves("input")}
        tensors = {name: rng.standard_normal(shape) for name, shape in names.items()}
        nodes, results = replacement(graph, rule, match)
        leaves = tuple(node for node in graph.nodes if node.is_leaf)
        right = Graph((*leaves, *nodes), tuple((key, results[name]) for key, name in graph.outputs)).validate()
        left, got = run_serial(graph, tensors), run_serial(right, tensors)
        for root in match.roots:
            if not np.array_equal(left[root], got[results[root]], equal_nan=True):
                shown = {name.removeprefix("v_"): array for name, array in tensors.items()}
                return Mismatch(rule.name, match.sizes, shown, left[root], got[results[root]])
    return None
