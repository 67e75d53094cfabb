"""Placement rules of one context: enumerated, pruned, and in canonical form.

Dropped at once, and counted: pairs without parallel operators along every axis (serial rules, or rules of fewer axes),
terms that are zero whatever their variables are, and pairs with a common subterm that may as well be a variable. Rules
have a canonical form, so that equal ones are found once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from shardwright.substitutions.equations import Equation
from shardwright.substitutions.generator.primesizes import PlacementContext
from shardwright.substitutions.generator.rendering import Renderer
from shardwright.substitutions.generator.typedgraphs import TypedGraphs

_EVERY = 50_000


def generate_placements(
    context: PlacementContext,
    max_ops: int,
    seed: int = 0,
    report: Callable[[Mapping[str, int]], None] = lambda counts: None,
) -> list[Equation]:
    """The placement rules of a context whose sides have up to `max_ops` operators.

    `report` is given counts now and then, and at the end: graphs, fingerprints (classes), candidates, and what was
    dropped as "serial", "fewer axes", "zero", "subterm" and "duplicate".
    """
    enumeration, counts = TypedGraphs(context, seed), Counter[str]()

    def tick() -> None:
        if enumeration.num_graphs - counts["graphs"] > _EVERY:
            counts.update(graphs=enumeration.num_graphs - counts["graphs"])
            counts["fingerprints"] = len(enumeration.terms)
            report(counts)

    enumeration.run(max_ops, tick)
    counts["graphs"], counts["fingerprints"] = enumeration.num_graphs, len(enumeration.terms)
    rules = Renderer(enumeration).rules(counts)
    counts["candidates"] = len(rules)
    report(counts)
    return rules
