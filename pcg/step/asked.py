"""What an execution asks of every operation: to be kept, or made again, and by which of its patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.operation import Operation
from shardwright.pcg.step.parameters import module_block
from shardwright.pcg.step.places import is_at, modules_of, places
from shardwright.pcg.step.recompute import Again, Recompute

_MOST_NAMED = 20


class Wish(NamedTuple):
    """The pattern that decides about an operation, and its word. `alone`: about it, not about its whole block."""

    pattern: str
    mode: Recompute
    alone: bool = False


def wishes(graph: Graph, operations: Sequence[Operation], execution: Execution) -> dict[str, Wish]:
    """By the names of operations. A `PlanError` for a place in a list that no operation is at."""
    blocks = {o.name: o.block for o in operations}
    where, found, used = places(graph, blocks), dict[str, Wish](), set[tuple[str, str]]()

    @cache
    def decided(block: str, place: str) -> Wish:
        inside = [f"{block}.{module}" for module in modules_of(place)] if block else []
        pattern, mode = execution.recompute_of(block)
        own, word = execution.recompute_of(block, inside)
        if isinstance(word, str):
            return Wish(own, word, own != pattern or not isinstance(mode, str))
        named = [listed for listed in word if is_at(place, listed)]
        used.update((own, listed) for listed in named)
        return Wish(own, "full" if named else "none", alone=True)

    for o in operations:
        found[o.name] = decided(o.block, where[o.name])
    others = {name: execution.recompute_of(_own_block(graph, name))[0] for name in where if name not in found}
    _check_places(execution, used, where, {n: wish.pattern for n, wish in found.items()} | others)
    return found


def _own_block(graph: Graph, name: str) -> str:
    return module_block(f"{graph.by_name[name].source.module}.")


def _check_places(
    execution: Execution,
    used: set[tuple[str, str]],
    where: Mapping[str, str],
    patterns: Mapping[str, str],
) -> None:
    """Changes of layout differ from plan to plan. What is computed once or first is there, but not made again."""
    for pattern, mode in execution.recomputes:
        for place in mode if isinstance(mode, tuple) else ():
            if (pattern, place) in used or "/" in place:
                continue
            there = list(dict.fromkeys(where[name] for name, by in patterns.items() if by == pattern))
            if any(is_at(other, place) for other in there):
                continue
            shown = ", ".join(there[:_MOST_NAMED]) + (", …" if len(there) > _MOST_NAMED else "")
            raise PlanError(
                f"recompute: {pattern!r}: {place!r}: no operation of such a block is there; expected one of: "
                f"{shown or 'none, no block of the model is so named'}"
            )


def still_there(graph: Graph, execution: Execution) -> Execution:
    """The same for a graph that was rewritten since: of lists, the places that it still has."""
    there = set(places(graph, {}).values())
    pairs = list[tuple[str, Again]]()
    for pattern, mode in execution.recomputes:
        own = (
            tuple(p for p in mode if "/" in p or any(is_at(place, p) for place in there))
            if isinstance(mode, tuple)
            else mode
        )
        pairs += [(pattern, own)] if own else []
    return execution if isinstance(execution.recompute, str) else replace(execution, recompute=tuple(pairs) or "none")


def check_used(operations: Sequence[Operation], execution: Execution, wished: Mapping[str, Wish]) -> None:
    """A `PlanError` for a pattern that no block fits, or for which there is nothing to make again."""
    used = {wished[o.name].pattern for o in operations if o.again is not None}
    blocks = list(dict.fromkeys(o.block for o in operations if o.block))
    for pattern, mode in execution.recomputes:
        if mode == "none" or isinstance(mode, tuple) or pattern in used:
            continue
        where = f"recompute: {pattern!r}: {mode!r}"
        if mode == "full" and not pattern:
            raise PlanError(f"{where}: what lies in no block is not made again as a whole; give a list of places in it")
        fits = any(wished[o.name].pattern == pattern for o in operations if o.block)
        if not fits and (mode, pattern) != ("selective", "*"):
            problem = f"{where}: no repeated block of the model is so named, nor a module in one"
            there = ", ".join(blocks) or "none, the model has none"
            raise PlanError(f"{problem} (or an earlier pattern has it); expected one of: {there}")
        missing = "no attention (a softmax between two products of activations) and no gathered activation"
        raise PlanError(f"{where}: there is {missing} to make again; choose 'full' or 'none'")
