"""Occurrences in a graph of a placement rule's terms, parallel operators and layouts included.

Rewriting uses serial rules and `substitutions.match`; placement rules are not applied one by one, because certified
row rules, steps and serial rules imply them all. Their occurrences show which of them a plan makes use of.

A side counts if it has a parallel operator next to another operator: `replicate(x)` alone is in every plan, and does
not show that a rule which replaces something by it was used.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

from shardwright.pcg.graph import Graph
from shardwright.pcg.parallel import PARALLEL_OPS
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.match import PartialMatch, extended
from shardwright.substitutions.terms import Term, Variable, applied, erase

Side = tuple[Term, ...]


class Occurrences:
    """Counts the places where rules occur in one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._ops = frozenset(node.op for node in graph.nodes)

    def of(self, rule: Equation) -> int:
        """Count the places in a parallel graph that hold a side of the rule, in the rule's layouts."""
        axes = [
            dict(zip(rule.axes, chosen, strict=True)) for chosen in permutations(self.graph.mesh.names, len(rule.axes))
        ]
        return sum(self._count(rule, side, mapping) for side in _sides(rule) for mapping in axes)

    def erased(self, rule: Equation) -> int:
        """Count the places in a serial graph that hold a side of the rule without its parallel operators."""
        erased = dict.fromkeys(tuple(map(erase, side)) for side in _sides(rule))
        return sum(self._count(rule, side, {}) for side in erased)

    def _count(self, rule: Equation, side: Side, axes: Mapping[str, str]) -> int:
        """Count the nodes that the first root can stand for."""
        if any(isinstance(root, Variable) for root in side) or not self._ops.issuperset(_ops(side)):
            return 0
        matches = extended(PartialMatch(self.graph, rule, axes), side)
        return len({match.placed[side[0]] for match in matches if match.solved()})


def _sides(rule: Equation) -> list[Side]:
    """Return the sides that hold a parallel operator next to another operator."""
    return [s for s in (rule.left, rule.right) if len(_ops(s)) > 1 and not set(PARALLEL_OPS).isdisjoint(_ops(s))]


def _ops(side: Side) -> list[str]:
    return [term.op for term in set(applied(side))]
