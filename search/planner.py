"""The search: every mesh, the exact optimum on each, memory as a hard limit, baselines on the same terms.

On a mesh the sum of compute and communication is minimized, to which bounds and cut-offs refer. The timeline, in which
they overlap, then judges what was found: plans of all meshes and baselines alike.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import Prediction, predict
from shardwright.cost.timeline.memory import safe_bytes
from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution, Precision
from shardwright.search.blocks import blocked_choices
from shardwright.search.domain import CertifiedSplits
from shardwright.search.eliminate import Eliminator, Solution
from shardwright.search.leaves import LeafSearch, replay
from shardwright.search.materialize import materialize
from shardwright.search.plan import Alternative, Plan, Rewrite, SearchReport, fingerprint
from shardwright.search.problem import Problem, ProblemBuilder, Restrict
from shardwright.search.restrict import DATA, FREE, TENSOR, ZERO, role_restriction
from shardwright.substitutions.equations import Equation

AXES = ("x", "y", "z", "w")
_HULL_STEPS = 8
_HULL_TOLERANCE = 1e-4
_HIGHEST_PRICE = 1e6
_MEMORY_TRIES = 3
Progress = Callable[[str], None]


@contextmanager
def _collector_paused() -> Generator[None]:
    """A search makes millions of objects that stay and hardly a cycle; to look for those took a quarter of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Candidate:
    """A finished plan on one mesh. `bound_s` is a lower bound of the best serial time on that mesh within memory.

    `solved` is what it was made from: problem, solution and the price of a byte.
    """

    name: str
    graph: Graph
    prediction: Prediction
    bound_s: float
    fits: bool
    solved: tuple[Problem, Solution, float]


def meshes(num_devices: int, max_axes: int = 2) -> Iterator[Mesh]:
    """Every mesh of this many devices with up to `max_axes` axes of at least two devices (one axis for one device)."""

    def factorizations(n: int, axes: int) -> Iterator[tuple[int, ...]]:
        yield (n,)
        if axes > 1:
            for first in _degrees(n)[:-1]:
                yield from ((first, *rest) for rest in factorizations(n // first, axes - 1))

    for sizes in factorizations(num_devices, max_axes):
        yield Mesh(AXES[: len(sizes)], sizes)


def _degrees(n: int) -> list[int]:
    """The divisors of n but 1, in order; found without trying every number up to n."""
    from sympy import divisors  # takes longer to import than this module

    return list(divisors(n))[1:]


class Planner:
    """Searches plans for serial graphs on one cluster. Only certified choices and certified `rules` enter.

    `places` counts, by rule, the places that backtracking found: what `reports.coverage` asks for. `precision`: the one
    that the graphs were captured under.
    """

    def __init__(
        self,
        cluster: Cluster,
        certified: CertifiedSplits,
        progress: Progress | None = None,
        rules: Mapping[str, Equation] | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.cluster, self.certified, self.rules = cluster, certified, rules or {}
        self.execution = Execution(precision)
        self.progress = progress or (lambda message: None)
        self.limit_bytes = safe_bytes(cluster.device.memory_bytes)
        self.places: Counter[str] = Counter()
        self._builders: dict[tuple[int, ...], tuple[ProblemBuilder, Eliminator]] = {}
        self._blocked: dict[Graph, Mapping[str, tuple[str, ...]]] = {}

    def solve(self, graph: Graph, mesh: Mesh, roles: Sequence[str], name: str, cutoff_s: float = inf) -> Candidate:
        """The best plan on one mesh whose axes keep to their roles, within memory if any choice found fits.

        What provably takes `cutoff_s` or longer is not pursued further; the result may then not fit, or not be the
        best.
        """
        if len(roles) != len(mesh):
            raise PlanError(f"{len(roles)} axis roles for mesh {mesh}; give one role per axis")
        if mesh.num_devices != self.cluster.num_devices:
            raise PlanError(
                f"mesh {mesh} has {mesh.num_devices} devices, cluster {self.cluster.name} has "
                f"{self.cluster.num_devices}"
            )
        builder, eliminator = self._builder(mesh)
        problem = builder.build(graph, _restriction(graph, roles, mesh), blocked=self._blocked_choices(graph))
        problem.mesh = mesh
        best: Candidate | None = None
        limit: float = self.limit_bytes - self.cluster.device.context_bytes
        for _ in range(_MEMORY_TRIES):
            solution, bound_s, feasible, price = _within_memory(problem, eliminator, limit, cutoff_s)
            if best is not None:
                bound_s = best.bound_s  # that of the true limit
            found = self._finish(problem, solution, name, bound_s, price)
            best = found if best is None else min(best, found, key=_rank)
            only_in_the_graph = found.prediction.memory.total_bytes - _kept_bytes(problem, solution)
            limit = self.limit_bytes - only_in_the_graph
            if best.fits or not feasible or bound_s >= cutoff_s or limit <= 0:
                break
        assert best is not None
        return best

    def _builder(self, mesh: Mesh) -> tuple[ProblemBuilder, Eliminator]:
        """One for all meshes of these sizes: the names of the axes play no part."""
        if mesh.sizes not in self._builders:
            builder = ProblemBuilder(self.cluster, mesh, self.certified)
            self._builders[mesh.sizes] = (builder, Eliminator(builder.interner))
        return self._builders[mesh.sizes]

    def _blocked_choices(self, graph: Graph) -> Mapping[str, tuple[str, ...]]:
        """Once per graph."""
        if graph not in self._blocked:
            self._blocked[graph] = blocked_choices(graph, constant_nodes(graph))
        return self._blocked[graph]

    def _finish(self, problem: Problem, solution: Solution, name: str, bound_s: float, price: float) -> Candidate:
        graph = materialize(problem, solution, self.certified)
        prediction = predict(graph, self.cluster, self.execution)
        fits = prediction.memory.total_bytes <= self.limit_bytes
        return Candidate(name, graph, prediction, bound_s, fits, (problem, solution, price))

    def baselines(self, graph: Graph) -> Iterator[Candidate]:
        """Plans that people choose by hand, each tuned by the same search within its restriction."""
        n = self.cluster.num_devices
        flat = Mesh(("dp",), (n,))
        yield self.solve(graph, flat, (DATA,), "data parallel")
        yield self.solve(graph, flat, (ZERO,), "ZeRO-3")
        inner = self.cluster.levels[0].size if self.cluster.levels else 1
        for degree in (d for d in _degrees(n) if d <= inner):
            if degree == n:
                yield self.solve(graph, Mesh(("tp",), (n,)), (TENSOR,), f"tensor parallel {n}")
            else:
                mesh = Mesh(("dp", "tp"), (n // degree, degree))
                yield self.solve(graph, mesh, (DATA, TENSOR), f"data {n // degree} x tensor {degree}")

    @_collector_paused()
    def plan(
        self, graph: Graph, model: str = "model", *, mesh: Mesh | None = None, roles: Sequence[str] | None = None
    ) -> Plan:
        """The best plan over all meshes, or on the given mesh and with the given roles only.

        Raises `PlanError` where a given mesh does not fit the cluster.
        """
        start = time.perf_counter()
        alternatives: list[Candidate] = []
        if self.cluster.num_devices > 1:
            for candidate in self.baselines(graph):
                self.progress(f"{candidate.name}: {candidate.prediction.step_s * 1e3:.1f} ms")
                alternatives.append(candidate)
        tried = [mesh] if mesh is not None else list(meshes(self.cluster.num_devices))
        found: list[Candidate] = []
        for candidate_mesh in tried:
            known = [c.prediction.serial_s for c in [*found, *alternatives] if c.fits and mesh is None]
            own_roles, name = roles or (FREE,) * len(candidate_mesh), f"search on {candidate_mesh}"
            found.append(self.solve(graph, candidate_mesh, own_roles, name, min(known, default=inf)))
            self.progress(f"mesh {candidate_mesh}: {found[-1].prediction.step_s * 1e3:.1f} ms")
        pool = found if roles is not None or mesh is not None else [*found, *alternatives]
        plain = min(pool, key=_rank)
        best, rewrites = self._rewritten(graph, plain, roles)
        report = SearchReport(
            round(time.perf_counter() - start, 3),
            len(tried),
            min(*(c.prediction.serial_s for c in pool if c.fits or c is plain), *(c.bound_s for c in found)),
            self.limit_bytes,
            tuple(rewrites),
        )
        pursued = [c for c in found if c.fits or c.bound_s < best.prediction.serial_s]
        others = tuple(
            Alternative(c.name, c.graph.mesh, c.prediction, c.fits) for c in [*alternatives, *pursued] if c is not best
        )
        digest = fingerprint(graph)
        return Plan(best.graph, self.cluster, model, digest, best.prediction, others, report, self.execution.precision)

    def _rewritten(
        self, graph: Graph, best: Candidate, roles: Sequence[str] | None
    ) -> tuple[Candidate, Sequence[Rewrite]]:
        """The best plan after backtracking over algebraic rules on its leaves, if that is better."""
        roles = roles or (FREE,) * len(best.graph.mesh)
        mesh = best.graph.mesh
        if not self.rules or mesh.sizes not in self._builders:
            return best, ()
        builder, eliminator = self._builder(mesh)
        leaf_search = LeafSearch(
            builder, eliminator, list(self.rules.values()), lambda part: _restriction(part, roles, mesh)
        )
        rewrites = leaf_search.improve(*best.solved)
        self.places.update(leaf_search.places)
        if not rewrites:
            return best, ()
        new = replay(graph, rewrites, self.rules, mesh)
        _, solution, price = best.solved
        problem = builder.build(new, _restriction(new, roles, mesh), blocked=self._blocked_choices(new))
        if eliminator.solve(problem, price).objective >= solution.objective:
            return best, ()
        rewritten = self.solve(new, mesh, roles, best.name, best.prediction.serial_s)
        self.progress(f"after {len(rewrites)} rewrites: {rewritten.prediction.step_s * 1e3:.1f} ms")
        return (rewritten, rewrites) if _rank(rewritten) < _rank(best) else (best, ())


def _restriction(graph: Graph, roles: Sequence[str], mesh: Mesh) -> Restrict | None:
    return None if set(roles) == {FREE} else role_restriction(graph, roles, mesh.sizes)


def _kept_bytes(problem: Problem, solution: Solution) -> float:
    return sum(float(kept.value[choice]) for kept, choice in zip(problem.kept_bytes, solution.choices, strict=True))


def _time_and_bytes(problem: Problem, solution: Solution) -> tuple[float, float]:
    own = sum(float(t.value[c]) for t, c in zip(problem.time_s, solution.choices, strict=True))
    chosen = solution.choices
    between = sum(float(table.value[chosen[i], chosen[j]]) for (i, j), table in problem.edges.items())
    return own + between, _kept_bytes(problem, solution)


def _within_memory(
    problem: Problem, eliminator: Eliminator, limit: float, cutoff_s: float
) -> tuple[Solution, float, bool, float]:
    """The fastest solution found within `limit` bytes, a lower bound of any, whether there is one, its price of a byte.

    Lagrange: at each price of a byte the solution is optimal for the bytes it keeps, and objective - price * limit
    bounds every solution within the limit from below. The price walks along the lower hull of (bytes, seconds) to the
    edge that crosses the limit. The walk ends early where the bound reaches `cutoff_s`, the time of a plan that is
    known already. A limit of nothing or less only leaves the smallest.
    """
    over = eliminator.solve(problem)
    bound_s = over.objective
    if _kept_bytes(problem, over) <= limit or bound_s >= cutoff_s:
        return over, bound_s, _kept_bytes(problem, over) <= limit, 0.0
    price = _HIGHEST_PRICE * over.objective / max(limit, 1.0)
    best = eliminator.solve(problem, price)
    bound_s = max(bound_s, best.objective - price * limit)
    if _kept_bytes(problem, best) > limit:
        return best, bound_s, False, price
    for _ in range(_HULL_STEPS):
        (over_s, over_bytes), (best_s, best_bytes) = (_time_and_bytes(problem, s) for s in (over, best))
        price = (best_s - over_s) / (over_bytes - best_bytes)
        found = eliminator.solve(problem, price)
        bound_s = max(bound_s, found.objective - price * limit)
        if found.objective >= over_s + price * over_bytes - _HULL_TOLERANCE * over_s or bound_s >= cutoff_s:
            break
        if _kept_bytes(problem, found) <= limit:
            best = found
        else:
            over = found
    return best, bound_s, True, price


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Plans that fit first, then the fastest by the timeline; of plans that do not fit, the smallest."""
    if candidate.fits:
        return (False, candidate.prediction.step_s)
    return (True, float(candidate.prediction.memory.total_bytes))
