"""Backtracking on the leaves (MetaFlow, Unity): best-first search over certified algebraic rules.

Every leaf is costed by the exact solver with the layouts of its cuts held as the incumbent plan has them, so one
candidate costs milliseconds. Equal leaves are searched once and rewritten alike. A candidate dearer than α times the
best is dropped; so is one seen before. The rewritten graph is then solved whole, and kept only if it is better.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from shardwright.pcg.errors import GraphError, PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts
from shardwright.pcg.mesh import Mesh
from shardwright.search.building import ProblemBuilder
from shardwright.search.eliminate import Eliminator
from shardwright.search.limited import Limited
from shardwright.search.plan import Rewrite
from shardwright.search.problem import NoLayoutsError, Prices, Problem, Restrict, Solution, Way
from shardwright.search.reshard import replicated
from shardwright.search.splits import Leaf, extract, leaves, transplant
from shardwright.substitutions.apply import apply
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.match import places

ALPHA = 1.05
BUDGET = 32
"""Candidates costed per distinct leaf."""


def degrees(mesh: Mesh) -> tuple[int, ...]:
    """Among how many devices axes of the mesh can divide something: what the parameters of a rule are chosen from."""
    found = {1}
    for size in mesh.device_sizes:
        found |= {size * d for d in found}
    return tuple(sorted(found - {1}))


def expand(
    graph: Graph, rules: Sequence[Equation], parameters: Sequence[int] = ()
) -> Iterator[tuple[tuple[str, int], Graph]]:
    """Every graph that is one rule application away, the parameters of rules being among these."""
    for rule in rules:
        for number, match in enumerate(places(rule, graph, parameters)):
            yield (rule.name, number), apply(rule, graph, match)


def replay(graph: Graph, rewrites: Sequence[Rewrite], rules: Mapping[str, Equation], mesh: Mesh) -> Graph:
    """The graph after the rewrites of a plan on this mesh.

    Raises `PlanError` where a step does not apply or its rule is not certified.
    """
    parts = [_part(graph, rewrite) for rewrite in rewrites]
    for part, rewrite in zip(parts, rewrites, strict=True):
        graph = transplant(graph, part, _rewritten(part.graph, rewrite, rules, degrees(mesh)))
    return graph.validate()


def _part(graph: Graph, rewrite: Rewrite) -> Leaf:
    known = rewrite.end in graph.by_name and (not rewrite.start or rewrite.start in graph.by_name)
    part = extract(graph, rewrite.start, rewrite.end) if known else None
    if part is None:
        where = f"{rewrite.start!r} .. {rewrite.end!r}"
        raise PlanError(f"rewrite of {where}: the model has no such part; make the plan again")
    return part


def _rewritten(graph: Graph, rewrite: Rewrite, rules: Mapping[str, Equation], parameters: Sequence[int]) -> Graph:
    for name, number in rewrite.steps:
        if name not in rules:
            raise PlanError(f"rewrite of {rewrite.end!r}: rule {name!r} is not certified here; make the plan again")
        found = places(rules[name], graph, parameters)
        if number >= len(found):
            raise PlanError(
                f"rewrite of {rewrite.end!r}: rule {name!r} has no match number {number}; make the plan again"
            )
        graph = apply(rules[name], graph, found[number])
    return graph


class LeafSearch:
    """Looks for rewrites of a solved problem's leaves that make the plan cheaper.

    `restriction` and `limited` say what the axes may do to a graph, `way` how it is run. `places` counts, by rule, the
    places that were found in the graphs that it came by, in every copy of a leaf.
    """

    def __init__(
        self,
        builder: ProblemBuilder,
        eliminator: Eliminator,
        rules: Sequence[Equation],
        restriction: Callable[[Graph], Restrict | None] = lambda graph: None,
        way: Callable[[Graph], Way | None] = lambda graph: None,
        limited: Callable[[Graph], Limited | None] = lambda graph: None,
    ) -> None:
        self.builder, self.eliminator, self.rules = builder, eliminator, rules
        self.restriction, self.way, self.limited = restriction, way, limited
        self.degrees = degrees(builder.mesh)
        self.places: Counter[str] = Counter()

    def improve(self, problem: Problem, solution: Solution, prices: Prices) -> list[Rewrite]:
        """Rewrites that lower the cost of their leaf at these prices, for every copy of the leaf."""
        groups: dict[Hashable, list[Leaf]] = defaultdict(list)
        for part in leaves(problem.graph):
            groups[part.signature].append(part)
        rewrites: list[Rewrite] = []
        for copies in groups.values():
            first = copies[0]
            boundary = {name: _chosen(problem, solution, name) for name in _read(first)}
            end = _chosen(problem, solution, first.end)
            known = Counter(self.places)
            steps = self._best_first(first.graph, lambda g, b=boundary, e=end: self._cost(g, b, e, prices))
            self.places.update({rule: n * (len(copies) - 1) for rule, n in (self.places - known).items()})
            if steps:
                rewrites += [Rewrite(part.start, part.end, steps) for part in copies]
        return rewrites

    def _cost(self, graph: Graph, boundary: Mapping[str, Layouts], end: Layouts, prices: Prices) -> float:
        held = {**boundary, graph.loss: end}
        way, limited = self.way(graph), self.limited(graph)
        problem = self.builder.build(graph, self.restriction(graph), held, way=way, limited=limited)
        return self.eliminator.solve(problem, prices).objective

    def _best_first(self, graph: Graph, cost: Callable[[Graph], float]) -> tuple[tuple[str, int], ...]:
        """The steps to the cheapest graph found, none if the given one is."""
        best, best_steps = cost(graph), ()
        seen = {_key(graph)}
        queue: list[tuple[float, int, tuple[tuple[str, int], ...], Graph]] = [(best, 0, (), graph)]
        costed = 0
        while queue and costed < BUDGET:
            value, _, steps, current = heapq.heappop(queue)
            if value > ALPHA * best:
                break
            for step, new in expand(current, self.rules, self.degrees):
                self.places[step[0]] += 1
                if _key(new) in seen or costed >= BUDGET:
                    continue
                seen.add(_key(new))
                costed += 1
                try:
                    new_value = cost(new)
                except (GraphError, NoLayoutsError):
                    continue
                if new_value < best * (1 - 1e-6):
                    best, best_steps = new_value, (*steps, step)
                if new_value <= ALPHA * best:
                    heapq.heappush(queue, (new_value, costed, (*steps, step), new))
        return best_steps


def _key(graph: Graph) -> Hashable:
    return Leaf("", "", graph).signature


def _read(part: Leaf) -> list[str]:
    """What a leaf reads from outside that carries a gradient."""
    return [n.name for n in part.graph.leaves("input") if part.graph.types[n.name].grad]


def _chosen(problem: Problem, solution: Solution, name: str) -> Layouts:
    """The layouts in which the incumbent plan hands a tensor on."""
    found = (problem.chosen(solution.choices, kind, name) for kind in ("hub", "node"))
    return next((layouts for layouts in found if layouts is not None), replicated(len(problem.mesh)))
