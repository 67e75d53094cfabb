"""The contexts of the generator as units of work, whole or restricted to some operators, and their candidate rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.generator.canonical import named
from shardwright.substitutions.generator.context import PlacementContext, SerialContext
from shardwright.substitutions.generator.contexts.placement import PLACEMENT_CONTEXTS
from shardwright.substitutions.generator.contexts.serial import SERIAL_CONTEXTS
from shardwright.substitutions.generator.placedrules import PlacedRules
from shardwright.substitutions.generator.serialrules import SerialRules
from shardwright.substitutions.generator.vocabulary import VOCABULARY


@dataclass(frozen=True, slots=True)
class ContextSource:
    """A context with the function of the generator that enumerates it."""

    kind: str
    function: str
    context: Any

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.context.name}"


def sources(operators: Sequence[str] = ()) -> list[ContextSource]:
    """Return every context of the generator, restricted to some operators where any are named.

    Raises `RuleError` for an operator that no context has.
    """
    function = f"{candidates.__module__}:{candidates.__name__}"
    contexts = [ContextSource("serial", function, context) for context in SERIAL_CONTEXTS]
    contexts += [ContextSource("placement", function, context) for context in PLACEMENT_CONTEXTS]
    return restricted(contexts, operators)


def restricted(contexts: Sequence[ContextSource], operators: Sequence[str]) -> list[ContextSource]:
    """Return the sources that are left when only these operators, by the names of the op table, are applied."""
    known = {_operator(op) for source in contexts for op in source.context.operators}
    strange = [op for op in operators if op not in known]
    if strange:
        raise RuleError(f"operators: {strange[0]!r} is not generated; choose among {', '.join(sorted(known))}")
    if not operators:
        return list(contexts)
    restricted_sources = [
        (source, tuple(op for op in source.context.operators if _operator(op) in operators)) for source in contexts
    ]
    return [
        replace(source, context=replace(source.context, operators=ops)) for source, ops in restricted_sources if ops
    ]


def _operator(text: str) -> str:
    """Return the row of a context's operator: placement contexts say `permute(dims=(1, 0))`, serial `transpose`."""
    name = text.partition("(")[0]
    return VOCABULARY[name].name if name in VOCABULARY else name


def candidates(
    context: SerialContext | PlacementContext,
    max_ops: int,
    seed: int = 0,
    report: Callable[[Mapping[str, int]], None] = lambda counts: None,
) -> list[Equation]:
    """Return the rules of a context whose sides have up to `max_ops` operators; the same for the same seed.

    `report` is given counts now and then, and at the end: "graphs" (terms looked at), "fingerprints" (classes of equal
    ones), "candidates", and how many pairs were dropped for what reason.
    """
    run = SerialRules(context, seed) if isinstance(context, SerialContext) else PlacedRules(context, seed)
    by_claim: dict[str, Equation] = {}

    def tick() -> None:
        report({**run.counts, "candidates": len(by_claim)})

    for rule in run.rules(max_ops, tick):
        run.counts["duplicate"] += rule.claim in by_claim
        by_claim.setdefault(rule.claim, rule)
    tick()
    return [named(rule) for rule in by_claim.values()]
