"""Every context of the generator as a unit of work, whole or restricted to some operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.generator.candidates import generate_context
from shardwright.substitutions.generator.contexts import PLACEMENT_CONTEXTS, SERIAL_CONTEXTS
from shardwright.substitutions.generator.placements import generate_placements
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
    """Every context of the generator, restricted to some operators where any are named.

    Raises `RuleError` for an operator that no context has.
    """
    serial = [ContextSource("serial", _path(generate_context), context) for context in SERIAL_CONTEXTS]
    placed = [ContextSource("placement", _path(generate_placements), context) for context in PLACEMENT_CONTEXTS]
    return restricted([*serial, *placed], operators)


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__name__}"


def restricted(found: Sequence[ContextSource], operators: Sequence[str]) -> list[ContextSource]:
    """The sources that are left when only these operators, by the names of the op table, are applied."""
    known = {_operator(op) for source in found for op in source.context.operators}
    strange = [op for op in operators if op not in known]
    if strange:
        raise RuleError(f"operators: {strange[0]!r} is not generated; choose among {', '.join(sorted(known))}")
    if not operators:
        return list(found)
    kept = [(source, tuple(op for op in source.context.operators if _operator(op) in operators)) for source in found]
    return [replace(source, context=replace(source.context, operators=ops)) for source, ops in kept if ops]


def _operator(text: str) -> str:
    """The row of an operator of a context: placement contexts say `permute(dims=(1, 0))`, serial ones `transpose`."""
    name = text.partition("(")[0]
    return VOCABULARY[name].name if name in VOCABULARY else name
