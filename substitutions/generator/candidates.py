"""The candidate rules of one context: enumerated, pruned, in canonical form, each once, and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwright.substitutions.equations import Equation
from shardwright.substitutions.generator.canonical import named
from shardwright.substitutions.generator.context import PlacementContext, SerialContext
from shardwright.substitutions.generator.placedrules import PlacedRules
from shardwright.substitutions.generator.serialrules import SerialRules


def candidates(
    context: SerialContext | PlacementContext,
    max_ops: int,
    seed: int = 0,
    report: Callable[[Mapping[str, int]], None] = lambda counts: None,
) -> list[Equation]:
    """The rules of a context whose sides have up to `max_ops` operators; the same for the same seed.

    `report` is given counts now and then, and at the end: "graphs" (terms looked at), "fingerprints" (classes of equal
    ones), "candidates", and how many pairs were dropped for what reason.
    """
    run = SerialRules(context, seed) if isinstance(context, SerialContext) else PlacedRules(context, seed)
    found: dict[str, Equation] = {}

    def tick() -> None:
        report({**run.counts, "candidates": len(found)})

    for rule in run.rules(max_ops, tick):
        run.counts["duplicate"] += rule.claim in found
        found.setdefault(rule.claim, rule)
    tick()
    return [named(rule) for rule in found.values()]
