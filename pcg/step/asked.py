"""An execution's wish for every operation: the fate of its value, and which pattern decides that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import NamedTuple

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operation import Operation
from shardwright.pcg.step.parameters import module_block
from shardwright.pcg.step.places import Listed, is_at, modules_of, places
from shardwright.pcg.step.recompute import FIELDS, OFFLOAD, RECOMPUTE, BlockKind, Field, Kind

_MOST_NAMED = 20
_ASKED = {RECOMPUTE: Fate.AGAIN, OFFLOAD: Fate.HOST}
"""The fate of values that a field asks for."""


class Wish(NamedTuple):
    """The wish of an execution for one operation.

    pattern     the pattern that decides about it
    fate        of its result: kept, or what the field asks for
    attention   whether only attention and gathered activations are made again
    alone       whether the wish is about it alone, not about its whole block
    """

    pattern: str
    fate: Fate
    attention: bool = False
    alone: bool = False

    @classmethod
    def of(cls, pattern: str, kind: Kind, field: Field, *, alone: bool = False) -> Wish:
        """Return the wish that a kind of a field expresses."""
        return cls(pattern, Fate.KEPT if kind == "none" else _ASKED[field], kind == "selective", alone)


def wishes(
    graph: Graph, operations: Sequence[Operation], execution: Execution, where: Mapping[str, str], field: Field
) -> dict[str, Wish]:
    """Return a field's wishes by the names of operations. Raise a `PlanError` for a listed place without an operation.

    A part of a graph may lack places. `where`: the places of operations, where the execution has lists.
    """
    if (kind := execution.kind_of_all(field)) is not None:
        alike = Wish.of("*", kind, field)
        return {o.name: alike for o in operations}
    request = _Asked(graph, operations, execution, where, field)
    for pattern, place in () if graph.is_part else request.missing():
        there = request.there(pattern)
        shown = ", ".join(there[:_MOST_NAMED]) + (", …" if len(there) > _MOST_NAMED else "")
        raise PlanError(
            f"{field.name}: {pattern!r}: {place!r}: no operation of such a block is there; expected one of: "
            f"{shown or 'none, no block of the model is so named'}"
        )
    return request.wishes


def still_there(graph: Graph, operations: Sequence[Operation], execution: Execution) -> Execution:
    """Return the execution for a graph that was rewritten since: its lists have only the places that are left."""
    listed = [field for field in FIELDS if execution.kind_of_all(field) is None]
    if not listed:
        return execution
    where = places(graph, {o.name: o.block for o in operations})
    left = {field.name: _left(_Asked(graph, operations, execution, where, field)) for field in listed}
    return replace(execution, **left)


def _left(request: _Asked) -> tuple[tuple[str, BlockKind], ...]:
    missing, pairs = set(request.missing()), list[tuple[str, BlockKind]]()
    for pattern, kind in request.pairs:
        rest = kind if isinstance(kind, str) else tuple(p for p in kind if (pattern, p) not in missing)
        pairs.append((pattern, rest or "none"))
    return tuple(pairs)


class _Asked:
    """The wish of one field for every operation, and the places that its lists name."""

    def __init__(
        self,
        graph: Graph,
        operations: Sequence[Operation],
        execution: Execution,
        where: Mapping[str, str],
        field: Field,
    ) -> None:
        self.graph, self.where, self.field, self.used = graph, where, field, set[tuple[str, str]]()
        self.pairs = execution.by_pattern(field)
        self._word = cache(partial(execution.kind_of, field=field))
        self._listed: dict[str, Listed] = {}
        of_module, of_place = cache(self._of_module), cache(self._of_place)  # kept by no attribute, which were a cycle

        def decided(block: str, place: str) -> Wish:
            said = of_module(block, place.partition(":")[0])
            return said if isinstance(said, Wish) else of_place(said, place)

        self.wishes = {o.name: decided(o.block, where[o.name]) for o in operations}

    def _of_module(self, block: str, module: str) -> Wish | str:
        """Return the wish for everything in a module of a block, or the pattern that decides by a list."""
        inside = tuple(f"{block}.{name}" for name in modules_of(module)) if block else ()
        pattern, mode = self._word(block)
        match, word = self._word(block, inside)
        if isinstance(word, str):
            return Wish.of(match, word, self.field, alone=match != pattern or not isinstance(mode, str))
        if match not in self._listed:
            self._listed[match] = Listed(word)
        return match

    def _of_place(self, pattern: str, place: str) -> Wish:
        """Return the wish that the list of a pattern expresses; it is the same in equal blocks."""
        named = self._listed[pattern].at(place)
        self.used.update((pattern, listed) for listed in named)
        return Wish(pattern, _ASKED[self.field] if named else Fate.KEPT, alone=True)

    @cached_property
    def _patterns(self) -> Mapping[str, str]:
        """The pattern of every node, also of nodes computed once or first, which are there but not recomputed."""
        patterns = {name: wish.pattern for name, wish in self.wishes.items()}
        rest = {name: module_block(f"{self.graph.by_name[name].source.module}.") for name in self.where}
        return {name: self._word(block)[0] for name, block in rest.items()} | patterns

    def there(self, pattern: str) -> list[str]:
        """Return the places in blocks that a pattern decides about."""
        return list(dict.fromkeys(self.where[name] for name, by in self._patterns.items() if by == pattern))

    def missing(self) -> Iterator[tuple[str, str]]:
        """Yield patterns and listed places without an operation.

        Changes of layout, which differ between plans, are exempt.
        """
        there = cache(self.there)
        for pattern, kind in self.pairs:
            for place in kind if isinstance(kind, tuple) else ():
                if (pattern, place) in self.used or "/" in place:
                    continue
                if not any(is_at(other, place) for other in there(pattern)):
                    yield pattern, place


def check_used(operations: Sequence[Operation], execution: Execution, wished: Mapping[str, Wish]) -> None:
    """Raise a `PlanError` for a pattern that fits no block, or for which there is nothing to recompute."""
    used = {wished[o.name].pattern for o in operations if o.region is not None}
    for pattern, mode in execution.by_pattern():
        if mode == "none" or isinstance(mode, tuple) or pattern in used:
            continue
        where = f"recompute: {pattern!r}: {mode!r}"
        if mode == "full" and not pattern:
            raise PlanError(f"{where}: what lies in no block is not made again as a whole; give a list of places in it")
        if (mode, pattern) != ("selective", "*"):
            check_fits([o for o in operations if o.block], wished, RECOMPUTE, pattern, mode)
        missing = "no attention (a softmax between two products of activations) and no gathered activation"
        raise PlanError(f"{where}: there is {missing} to make again; choose 'full' or 'none'")


def check_fits(
    operations: Sequence[Operation], wished: Mapping[str, Wish], field: Field, pattern: str, kind: Kind
) -> None:
    """Raise a `PlanError` for a pattern that decides about none of these operations."""
    if any(wished[o.name].pattern == pattern for o in operations):
        return
    there = ", ".join(dict.fromkeys(o.block for o in operations if o.block)) or "none, the model has none"
    problem = f"{field.name}: {pattern!r}: {kind!r}: no repeated block of the model is so named, nor a module in one"
    raise PlanError(f"{problem} (or an earlier pattern has it); expected one of: {there}")
