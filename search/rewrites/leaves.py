"""Backtracking on the leaves (MetaFlow, Unity): best-first search over certified algebraic rules.

Every leaf (`search.rewrites.splits`) is costed by the exact solver with the layouts around it held as the incumbent
plan has them, so one candidate costs milliseconds. Equal leaves are searched once and rewritten alike. A candidate
dearer than α times the best is dropped; so is one seen before.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.choice import Choices
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layouts
from shardwright.pcg.step.again import NOTHING
from shardwright.search.choices.blocks import blocked_choices
from shardwright.search.choices.problem import NoLayoutsError, Prices, Problem, Restrict, RunFacts, Solution
from shardwright.search.choices.reshard import replicated
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.exact.folding import Folded
from shardwright.search.request.limited import Limited
from shardwright.search.rewrites.promise import Promise, held
from shardwright.search.rewrites.replay import degrees
from shardwright.search.rewrites.splits import LeafPart, leaves, signature
from shardwright.substitutions.apply import apply
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.match import each_place

ALPHA = 1.01
_LESS = 1 - 1e-6
BUDGET = 32
"""The number of candidates that are costed per distinct leaf."""
MOST_PLACES = 128
"""The most places of one rule in a leaf: many readers of many values make thousands of pairs."""

Steps = tuple[tuple[str, int], ...]
"""The steps of a rewrite: for each the rule and the number of its match."""


@dataclass(frozen=True)
class LeafStep:
    """A rule application: the rule and the number of its match, its place, and the graph that it makes."""

    step: tuple[str, int]
    place: Hashable
    graph: Graph


def expand(graph: Graph, rules: Sequence[Equation], parameters: Sequence[int] = ()) -> Iterator[LeafStep]:
    """Yield every rule application that a graph has a place for; rules' parameters are among `parameters`."""
    there = {node.op for node in graph.nodes}
    for rule in rules:
        if not rule.needs <= there:
            continue
        for number, match in enumerate(islice(each_place(rule, graph, parameters), MOST_PLACES)):
            place = rule.name, match.roots, tuple(match.sizes[name] for name in rule.parameters)
            rewritten = apply(rule, graph, match)
            if rewritten.draws == graph.draws:  # other draws may not change, and they depend on the draws before
                yield LeafStep((rule.name, number), place, rewritten)


@dataclass(frozen=True)
class Rewritten:
    """A leaf, the steps that were found for it, the graph that they make of it, and their gain in the sum."""

    part: LeafPart
    steps: Steps
    graph: Graph
    gain: float


class Leaves:
    """The leaves of a graph, those that are equal up to names together, and what rules make of them on any mesh.

    `places` counts, by rule, the places that were found in the graphs that a search visited, in every copy of a leaf.
    """

    def __init__(self, folded: Folded, rules: Sequence[Equation]) -> None:
        self.folded, self.rules = folded, rules
        self.places: Counter[str] = Counter()
        self.blocked = lru_cache(maxsize=None)(_blocked)
        self._next: dict[tuple[Graph, tuple[int, ...]], list[LeafStep]] = {}
        self._stuck: dict[tuple[int, ...], Stuck] = {}

    @cached_property
    def groups(self) -> list[list[LeafPart]]:
        by_signature: dict[Hashable, list[LeafPart]] = defaultdict(list)
        for part in leaves(self.folded.graph, self.folded.home):
            by_signature[signature(part.graph)].append(part)
        return list(by_signature.values())

    def next(self, graph: Graph, parameters: tuple[int, ...]) -> list[LeafStep]:
        """Return every step from a leaf."""
        key = graph, parameters
        if key not in self._next:
            self._next[key] = list(expand(graph, self.rules, parameters))
        return self._next[key]

    def stuck(self, parameters: tuple[int, ...]) -> Stuck:
        """Return the operators that steps could free, before any layouts are known."""
        if parameters not in self._stuck:
            operators, inside = set[str](), set[str]()
            for copies in self.groups:
                graph = copies[0].graph
                freed = [step.graph for step in self.next(graph, parameters) if held(step.graph) < held(graph)]
                gone = [i for i, node in enumerate(graph.nodes) if any(node not in new.nodes for new in freed)]
                for part in copies if freed else ():
                    inside |= part.operators
                    operators |= {name for i in gone for name in _seen_through(part.graph, part.graph.nodes[i])}
            self._stuck[parameters] = Stuck(frozenset(operators), frozenset(inside))
        return self._stuck[parameters]


def _seen_through(graph: Graph, node: Node) -> Iterator[str]:
    """Yield an operator and the views before it, of which its needs may be asked."""
    yield node.name
    for name in node.inputs:
        before = graph.by_name[name]
        if before.row is not None and before.row.view:
            yield from _seen_through(graph, before)


class Stuck(NamedTuple):
    """The operators that hold a dimension whole and that some step removes, with the views before them.

    `inside` has all operators of their leaves.
    """

    operators: frozenset[str]
    inside: frozenset[str]


class LeafSearch:
    """A search for rewrites of a solved problem's leaves that make the plan cheaper.

    `restriction` and `limited` say what the axes may do to a graph, `way` how it is run, `promise` which steps can pay.
    """

    def __init__(
        self,
        builder: ProblemBuilder,
        eliminator: Eliminator,
        leaves: Leaves,
        promise: Promise,
        restriction: Callable[[Graph], Restrict | None] = lambda graph: None,
        way: Callable[[Graph], RunFacts | None] = lambda graph: None,
        limited: Callable[[Graph], Limited | None] = lambda graph: None,
    ) -> None:
        self.builder, self.eliminator, self.leaves = builder, eliminator, leaves
        self.restriction, self.way, self.limited = restriction, way, limited
        self.promise, self.degrees = promise, degrees(builder.mesh)
        self._costs: dict[Hashable, tuple[float, bool]] = {}

    def improve(self, problem: Problem, solution: Solution, prices: Prices) -> list[Rewritten]:
        """Return the rewrites that lower the cost of their leaf at these prices, for every copy of the leaf."""
        rewrites = list[Rewritten]()
        for copies in self.leaves.groups:
            first = copies[0]
            if not self.leaves.next(first.graph, self.degrees):
                continue
            starts = {name: _chosen(problem, solution, name) for name in _read(first)}
            ends = [_chosen(problem, solution, name) for name in first.ends]
            steps, gain = self._best_first(
                first.graph, lambda g, s=starts, e=ends: self._cost(g, s, e, prices), len(copies)
            )
            if steps:
                rewrites += [
                    Rewritten(part, steps, self._made(part.graph, steps), gain * self.leaves.folded.times(part.ends[0]))
                    for part in copies
                ]
        return rewrites

    def _made(self, graph: Graph, steps: Steps) -> Graph:
        for step in steps:
            graph = next(
                next_step.graph for next_step in self.leaves.next(graph, self.degrees) if next_step.step == step
            )
        return graph

    def _cost(
        self, graph: Graph, starts: Mapping[str, Layouts], ends: Sequence[Layouts], prices: Prices
    ) -> tuple[float, bool]:
        """Return the cost of a leaf, and whether it loses time (`Promise.loses`)."""
        results = (name for _, name in graph.outputs)
        boundary = {**dict(zip(results, ends, strict=True)), **starts}
        key = graph, tuple(boundary.items()), prices
        if key not in self._costs:
            way, limited, blocked = self.way(graph), self.limited(graph), self.leaves.blocked(graph)
            problem = self.builder.build(graph, self.restriction(graph), boundary, blocked, way, limited)
            solution = self.eliminator.solve(problem, prices)
            self._costs[key] = solution.objective, self.promise.loses(problem, solution)
        return self._costs[key]

    def _makes_again(self, graph: Graph) -> bool:
        """Return whether backward recomputes part of a leaf; a rewrite must leave that, such as attention, in place."""
        way = self.way(graph)
        return way is not None and way.again != NOTHING

    def _best_first(self, graph: Graph, cost: Callable[[Graph], tuple[float, bool]], times: int) -> tuple[Steps, float]:
        """Return the steps to the cheapest graph found, none if that is the given one, and their gain.

        A step that does not pay at a place is not tried there again after other steps.
        """
        (first, loses), recomputes = cost(graph), self._makes_again(graph)
        best = _State(first, 0, (), graph, loses)
        seen, queue, costed = {signature(graph)}, [best], 0
        while queue:
            current = heapq.heappop(queue)
            if current.cost > ALPHA * best.cost:
                break
            states, vain = list[_State](), set(current.vain)
            for next_step in self.leaves.next(current.graph, self.degrees):
                self.leaves.places[next_step.step[0]] += times
                if next_step.place in current.vain or costed >= BUDGET:
                    continue
                pays = self.promise.pays(current.graph, next_step.graph, loses=current.loses)
                if not pays or (recomputes and not self._makes_again(next_step.graph)):
                    vain.add(next_step.place)
                    continue
                if (key := signature(next_step.graph)) in seen:
                    continue
                seen.add(key)
                costed += 1
                try:
                    value, loses = cost(next_step.graph)
                except (GraphError, NoLayoutsError):
                    continue
                states.append(_State(value, costed, (*current.steps, next_step.step), next_step.graph, loses))
                if value >= current.cost * _LESS:
                    vain.add(next_step.place)
            for state in states:
                best = state if state.cost < best.cost * _LESS else best
                if state.cost <= ALPHA * best.cost:
                    heapq.heappush(queue, replace(state, vain=frozenset(vain)))
        return best.steps, first - best.cost


@dataclass(frozen=True, order=True)
class _State:
    """A graph that steps lead to. `loses`: whether it loses time; `vain`: places of steps that did not pay before."""

    cost: float
    number: int
    steps: Steps = field(compare=False)
    graph: Graph = field(compare=False)
    loses: bool = field(compare=False)
    vain: frozenset[Hashable] = field(default=frozenset(), compare=False)


def _blocked(graph: Graph) -> Mapping[str, Choices]:
    return blocked_choices(graph, constant_nodes(graph))


def _read(part: LeafPart) -> list[str]:
    """Return the values with a gradient that a leaf reads from outside."""
    return [node.name for node in part.graph.leaves("input") if part.graph.types[node.name].grad]


def _chosen(problem: Problem, solution: Solution, name: str) -> Layouts:
    """Return the layouts in which the incumbent plan hands a tensor on."""
    states = (problem.chosen(solution.choices, kind, name) for kind in ("hub", "node"))
    return next((layouts for layouts in states if layouts is not None), replicated(len(problem.mesh)))
