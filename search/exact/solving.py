"""A layout problem within memory: a graph, a mesh whose axes have roles, and how it is run.

The sum of compute and communication at given `Prices` is minimized exactly. The timeline corrects the price of a byte:
room is made for what only the finished graph shows, such as gathered weights, and the problem is solved again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple, TypeVar

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.moves import AFTER_THE_LOOP_S
from shardwright.cost.compute.compute import compute_on
from shardwright.cost.predict import predicted
from shardwright.cost.prediction import Prediction
from shardwright.cost.timeline.clock import SHARING
from shardwright.cost.timeline.memory import safe_bytes
from shardwright.cost.timeline.program import Programs
from shardwright.cost.timeline.steps import KnownCosts
from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.choice import Choices
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import R
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.lifetimes import Zero, with_lifetimes
from shardwright.pcg.step.meshes import first_ranks, stage_meshes
from shardwright.pcg.step.optimizers import Optimizer
from shardwright.pcg.types import TensorType
from shardwright.search.choices.blocks import blocked_choices
from shardwright.search.choices.domain import CertifiedSplits, storage_domain
from shardwright.search.choices.problem import NoLayoutsError, Prices, Problem, Restrict, RunFacts, Solution
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.exact.folding import Folded, Tie, unfolded
from shardwright.search.exact.least import least_s
from shardwright.search.exact.materialize import materialize
from shardwright.search.exact.striping import balanced
from shardwright.search.exact.within import (
    HULL_TOLERANCE,
    kept_bytes,
    least_bytes,
    stored_bytes,
    time_and_bytes,
    within_memory,
)
from shardwright.search.plan import Rewrite
from shardwright.search.request.asked import RecomputeMode
from shardwright.search.request.limited import Limited
from shardwright.search.request.limits import NO_LIMITS, Limits
from shardwright.search.request.restrict import DATA, FREE, role_restriction
from shardwright.search.request.spaces import LONGEST_FIRST

_MEMORY_TRIES = 3
_SAFE = 2.0
"""The factor on the last problem's price of a byte that is tried first: where it is too high, layouts fit."""
_MOST_PROGRAMS = 8
"""The number of programs that are kept; costs of operators and moves are kept of all."""
_MOST_NODES = 2**12
"""The most nodes of a whole graph that is solved without knowledge: 7,500 nodes were seen to take 24 seconds."""
NEARLY = 1.5
"""The factor on the memory up to which the sum of kept bytes may fit: not all of it is there at once."""


Lifetimes = Zero | tuple[tuple[str, Zero], ...]
"""The lifetimes of gathered parameters: one for all, or each by the name of its leaf."""
Identity = tuple[str, Mesh, Execution, tuple[Rewrite, ...]]
"""How a plan is run, apart from what it keeps and where its blocks lie."""


@dataclass(frozen=True)
class Candidate:
    """A finished plan on one mesh.

    Attributes:
        bound_s: a lower bound of the sum on this mesh, over layouts within the memory for the `priced` lifetime, with
            folded blocks laid out alike. It says nothing of other lifetimes: `Ways.bound_s` is for all of them.
        graph: of the whole model, or of one whose blocks are `folded`.
        roles: of the axes of devices; `limits`: what else its layouts keep to.
        lifetimes: of gathered parameters; `priced`: the lifetime that the layouts were chosen for.
        is_tight: whether more memory could make it faster.
        solved: the problem, the solution and the prices that it was made from.
        rewrites: those of the graph, before it was laid out.
    """

    name: str
    graph: Graph
    prediction: Prediction
    bound_s: float
    fits: bool
    solved: tuple[Problem, Solution, Prices]
    roles: tuple[str, ...] = ()
    execution: Execution = DEFAULT
    lifetimes: Lifetimes = "zero-3"
    priced: Zero = "zero-3"
    folded: bool = False
    is_tight: bool = False
    limits: Limits = NO_LIMITS
    rewrites: tuple[Rewrite, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.graph.mesh

    @property
    def identity(self) -> Identity:
        """Return name, mesh, execution, rewrites. Plans of one graph that agree in these differ in what they keep."""
        return self.name, self.mesh, self.execution.scheduled(split=()), self.rewrites

    @property
    def order(self) -> tuple[str, int]:
        """The schedule of its microbatches, and the chunks of a stage."""
        return self.execution.schedule.name, self.execution.schedule.chunks_per_stage


def rank(candidate: Candidate) -> tuple[bool, float]:
    """Return a sort key: plans that fit come first, by their step; plans that do not fit follow, by their size."""
    if candidate.fits:
        return (False, candidate.prediction.step_s)
    return (True, float(candidate.prediction.memory.total_bytes))


def over_time(mesh: Mesh, num_microbatches: int) -> Mesh:
    """Return the mesh of devices on which each step has so many microbatches."""
    if num_microbatches == 1:
        return mesh
    return Mesh((TIME, *mesh.names), (num_microbatches, *mesh.sizes))


_L = TypeVar("_L", Zero, Lifetimes)


class _Draft(NamedTuple):
    """A candidate before its graph is made."""

    name: str
    bound_s: float
    solved: tuple[Problem, Solution, Prices]
    roles: tuple[str, ...]
    execution: Execution
    priced: Zero
    limits: Limits


class Ending:
    """Ends the search that runs. It knows nothing else, so that tables that ask it are in no cycle.

    `stop`: raises where the search has to end.
    """

    def __init__(self) -> None:
        self.stop: Callable[[], None] = lambda: None

    def check(self) -> None:
        """Call `stop`, as long work does often."""
        self.stop()


class Known:
    """The results that solvers for one cluster share.

    Attributes:
        ending: of the search that goes on.
        blocked: the choices of a graph's parameters in blocks.
        again: what backward makes again of a graph.
        restricted: what roles leave of a graph's choices.
        programs: the programs of a graph whose blocks occur so often; the last few.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.ending = Ending()
        self.builders: dict[tuple[object, ...], tuple[ProblemBuilder, Eliminator]] = {}
        self.problems: dict[tuple[object, ...], Problem] = {}
        self.predictions: dict[tuple[object, ...], Prediction] = {}
        costs: KnownCosts = {}
        self.programs = lru_cache(maxsize=_MOST_PROGRAMS)(partial(_programs, cluster, costs))
        self.blocked = lru_cache(maxsize=None)(_blocked_choices)
        self.again = lru_cache(maxsize=None)(made_again)
        self.restricted = lru_cache(maxsize=None)(restriction)


class Solver:
    """A solver of layout problems for one cluster; what they have in common is made once."""

    def __init__(
        self,
        cluster: Cluster,
        certified: CertifiedSplits,
        limit_bytes: int | None = None,
        known: Known | None = None,
    ) -> None:
        """`limit_bytes`: of memory on each device, if that is less than there is; `known`: by another solver."""
        self.cluster, self.certified = cluster, certified
        safe = safe_bytes(cluster.device.memory_bytes)
        self.limit_bytes = safe if limit_bytes is None else limit_bytes
        self.besides = tuple(dict.fromkeys((1.0, SHARING[cluster.device.kind].least)))
        self.known = known or Known(cluster)
        self._usual: dict[RecomputeMode, float] = {}  # the last price of a byte, as a part of the least sum

    def until(self, check: Callable[[], None]) -> Solver:
        """Return a solver for one search, which `check` ends: it knows the same, but no prices of other searches."""
        self.known.ending.stop = check
        return type(self)(self.cluster, self.certified, self.limit_bytes, self.known)

    def within(self, limit_bytes: int) -> Solver:
        """Return a solver that knows the same, for less memory on each device, if `limit_bytes` is less."""
        smaller = min(self.limit_bytes, limit_bytes)
        return type(self)(self.cluster, self.certified, smaller, self.known)

    def limit_of(self, device_bytes: int) -> int:
        """Return the bytes that plans may use on devices with this memory: all devices, or those of one stage."""
        return self.limit_bytes if device_bytes == self.cluster.device.memory_bytes else safe_bytes(device_bytes)

    def fits(self, prediction: Prediction) -> bool:
        """Return whether no stage needs more than it may use."""
        return prediction.memory.total_bytes <= self.limit_of(prediction.device_bytes)

    def stage_limits(self, execution: Execution, mesh: Mesh) -> list[int]:
        """Return the bytes that plans may use on each stage's devices; `mesh` is that of the largest stage."""
        if execution.schedule.num_stages == 1 or not self.cluster.parts:
            return [self.limit_bytes] * execution.schedule.num_stages
        ends = pairwise(first_ranks(stage_meshes(mesh, execution)))
        return [self.limit_of(self.cluster.part(range(*ranks)).device.memory_bytes) for ranks in ends]

    def builder(self, mesh: Mesh, execution: Execution = DEFAULT) -> tuple[ProblemBuilder, Eliminator]:
        """Return one builder for all meshes of these sizes, and its eliminator: names of device axes play no part."""
        by_microbatch = bool(execution.per_microbatch)
        key = mesh.num_microbatches, mesh.sizes, by_microbatch
        if key not in self.known.builders:
            builder = ProblemBuilder(
                self.cluster, mesh, self.certified, by_microbatch=by_microbatch, check=self.known.ending.check
            )
            self.known.builders[key] = (builder, Eliminator(builder.interner))
        return self.known.builders[key]

    def problem(
        self,
        folded: Folded,
        mesh: Mesh,
        roles: Sequence[str],
        execution: Execution,
        zero: Zero,
        limits: Limits = NO_LIMITS,
        *,
        relaxed: bool = False,
    ) -> tuple[Problem, Eliminator]:
        """Return the problem of a graph on a mesh whose device axes have these roles, and the eliminator for it.

        Raises `NoLayoutsError` where an operator cannot take a parameter as `limits` want it.
        """
        builder, eliminator = self.builder(mesh, execution)
        key = folded.graph, (folded.repeated, folded.ties), mesh, tuple(roles), execution, zero, limits, relaxed
        if key in self.known.problems:
            return self.known.problems[key], eliminator
        self.known.ending.check()
        way = RunFacts(self.known.again(folded.graph, execution), zero, execution, relaxed)
        restrict = self.known.restricted(folded.graph, tuple(roles), mesh)
        limited, blocked = limited_to(limits, folded.graph, mesh), self.known.blocked(folded.graph)
        if limited is not None:
            limited.check(lambda node: builder.certified_of(node, folded.graph, blocked))
        problem = builder.build(folded, restrict, blocked=blocked, way=way, limited=limited)
        if limited is not None:
            limited.check_met(problem.domains)
        problem = self.known.problems[key] = replace(problem, mesh=mesh)
        return problem, eliminator

    def floor_s(
        self,
        folded: Folded,
        mesh: Mesh,
        roles: Sequence[str],
        execution: Execution,
        priced: Zero,
        limits: Limits = NO_LIMITS,
    ) -> float:
        """Return an estimate of the least step of any layouts, with any memory, where as much overlaps as can.

        It is not a bound: a resharding that readers share counts for each, and messages that are sent together count
        one by one.
        """
        problem, eliminator = self.problem(folded, mesh, roles, execution, priced, limits)
        serial_s = eliminator.solve(problem, Prices(overlap_weight=self.besides[-1])).bound
        return serial_s * share_of_step(execution, mesh) / self.quicker(execution.schedule.num_stages)

    def least_s(
        self, folded: Folded, mesh: Mesh, roles: Sequence[str], execution: Execution, limits: Limits = NO_LIMITS
    ) -> float:
        """Return a time that no layouts on a mesh beat by the timeline, with any memory.

        It holds for every lifetime of gathered parameters, as the longest one sends least often. Equal blocks are laid
        out alike. It is 0, which says nothing, where kernels run at rates of their own (tf32, fp8), or where stages
        have devices of their own or meshes of unlike sizes, which the problem does not know. In pieces, every move may
        run beside compute.
        """
        if (
            execution.rates
            or execution.schedule.stage_sizes
            or (self.cluster.parts and execution.schedule.num_stages > 1)
        ):
            return 0.0
        longest = different(LONGEST_FIRST, mesh)[0]
        whole = replace(execution, pieces=1)
        problem, eliminator = self.problem(folded, mesh, roles, whole, longest, limits, relaxed=True)
        if execution.pieces > 1:
            problem = replace(problem, overlapped=set(problem.edges), solved={})
        device = self.cluster.device  # the busiest of several stages has no less than an equal share
        return (
            least_s(problem, eliminator, SHARING[device.kind]) / execution.schedule.num_stages + device.step_overhead_s
        )

    def quicker(self, num_stages: int) -> float:
        """Return about how much faster devices are on average than the binding one; 1 where all work at its pace."""
        if num_stages == 1 or not self.cluster.parts:
            return 1.0
        size = self.cluster.num_devices
        return sum(p.num_devices / size * p.device.times_as_quick(self.cluster.device) for p in self.cluster.parts)

    def work_s(self, folded: Folded, execution: Execution, mesh: Mesh | None = None) -> dict[str, float]:
        """Return the seconds of operators on one device, sending nothing, by repeated block; "": of those in none.

        n devices take at least an n-th of all.

        `mesh`: on its devices, with each operator split in any way; n times as many devices take at least an n-th of
        it, if n has no prime in common with their number.
        """
        one = Mesh(("x",), (1,))
        roles = (DATA,) if mesh in (None, one) else (FREE,) * len(mesh or one)
        problem, _ = self.problem(folded, mesh or one, roles, execution, "zero-3")
        seconds = defaultdict[str, float](float)
        for (_, name), variable in problem.index.items():
            seconds[folded.home.get(name, "")] += float(problem.time_s[variable].value.min())
        return seconds

    def crowding(self, problem: Problem, execution: Execution) -> float:
        """Return the least that layouts keep beside parameters, gradients and moments, as a share of the room for it.

        Above 1, all layouts keep too much at once.
        """
        stored = stored_bytes(problem)
        room = self._usable(execution, problem.mesh) - self.cluster.device.context_bytes - stored
        return (least_bytes(problem) - stored) / room if room > 0 else inf

    def _usable(self, execution: Execution, mesh: Mesh) -> float:
        """Return the bytes that plans may use on an average stage."""
        return sum(self.stage_limits(execution, mesh)) / execution.schedule.num_stages

    def all_stored_bytes(self, folded: Folded, optimizer: Optimizer = "adam") -> float:
        """Return the bytes of all parameters, their gradients and moments, as one device would keep them."""
        graph, counts = folded.graph, Counter[TensorType]()
        for leaf in graph.leaves("parameter"):
            counts[graph.types[leaf.name]] += folded.times(leaf.name)
        one, compute = ((R,),), compute_on(self.cluster.device)
        domains = ((storage_domain(kind, one, (1,), compute, optimizer), times) for kind, times in counts.items())
        return sum(times * float(domain.kept_bytes.min()) for domain, times in domains)

    def excess_bytes(self, stored_bytes: float, device_bytes: int | None = None) -> float:
        """Return by how much these bytes are too many, whatever else a step keeps; 0 where they may fit.

        `device_bytes`: the memory of the devices that keep them, if those are the devices of a stage.
        """
        limit = self.limit_bytes if device_bytes is None else self.limit_of(device_bytes)
        return max(0.0, stored_bytes + self.cluster.device.context_bytes - limit)

    def solve(
        self,
        folded: Folded,
        mesh: Mesh,
        roles: Sequence[str],
        name: str,
        execution: Execution = DEFAULT,
        zeros: Sequence[Lifetimes] = ("zero-3",),
        priced: Zero = "zero-3",
        cutoff_s: float = inf,
        weight: float = 1.0,
        limits: Limits = NO_LIMITS,
        near: float = 0.0,
    ) -> Candidate:
        """Return the best plan on one mesh, within memory if any choice found fits.

        Layouts are chosen for the `priced` lifetime of parameters; of the lifetimes `zeros`, the first that fits
        counts. `weight`: `Prices.overlap_weight`; `near`: as in `within_memory`. A plan that provably takes `cutoff_s`
        or longer is not pursued further; the result may then not fit, or not be the best. Raises `NoLayoutsError` where
        no layouts can be run so.
        """
        problem, eliminator = self.problem(folded, mesh, roles, execution, priced, limits)
        usable = self._usable(execution, mesh)
        limit = usable - self.cluster.device.context_bytes
        free = Prices(overlap_weight=weight)
        fastest = eliminator.solve(problem, free)
        _check_finite(problem, fastest, roles, priced)
        is_near = limit < kept_bytes(problem, fastest) <= NEARLY * limit
        if is_near and not self.excess_bytes(stored_bytes(problem)):
            draft = _Draft(name, fastest.bound, (problem, fastest, free), tuple(roles), execution, priced, limits)
            candidate = self.finished(draft, folded, different(zeros, mesh))
            if candidate.fits:
                return candidate
        best: Candidate | None = None
        near = near or _SAFE * fastest.objective * self._usual.get(execution.recompute, 0.0)
        for _ in range(_MEMORY_TRIES):
            solution, bound_s, feasible, prices = within_memory(
                problem, eliminator, limit, cutoff_s, weight, hull=bool(folded.repeated), near=near
            )  # equal blocks are laid out alike, and mixed later
            if best is not None:
                bound_s = best.bound_s  # the bound for the true limit
            if feasible and prices.byte:
                near, self._usual[execution.recompute] = prices.byte, prices.byte / fastest.objective
            draft = _Draft(name, bound_s, (problem, solution, prices), tuple(roles), execution, priced, limits)
            candidate = self.finished(draft, folded, different(zeros, mesh)[0 if feasible else -1 :])
            best = candidate if best is None else min(best, candidate, key=rank)
            only_in_the_graph = candidate.prediction.memory.total_bytes - kept_bytes(problem, solution)
            limit = usable - only_in_the_graph
            if best.fits or not feasible or bound_s >= cutoff_s or limit < least_bytes(problem):
                break
        assert best is not None
        return best

    def fastest_layouts(
        self, folded: Folded, mesh: Mesh, roles: Sequence[str], execution: Execution = DEFAULT
    ) -> Graph:
        """Return the parallel graph of the smallest sum on one mesh, with any memory. Raises as `solve` does."""
        problem, eliminator = self.problem(folded, mesh, roles, execution, "zero-3")
        fastest = eliminator.solve(problem)
        _check_finite(problem, fastest, roles, "zero-3")
        return materialize(problem, fastest, self.certified, folded.ties)

    def predicted(self, graph: Graph, execution: Execution, repeats: Mapping[str, int]) -> Prediction:
        """Return the result of `predict`, remembered: several lifetimes or plans often have the same graph."""
        key = graph, execution, tuple(repeats.items())
        if key not in self.known.predictions:
            self.known.ending.check()
            self.known.predictions[key] = predicted(self.programs(graph, repeats), execution)
        return self.known.predictions[key]

    def programs(self, graph: Graph, repeats: Mapping[str, int]) -> Programs:
        """Return the programs of a graph whose blocks occur so often; the last few are remembered."""
        return self.known.programs(graph, tuple(repeats.items()))

    def again_whole(self, graph: Graph, folded: Folded, candidate: Candidate, *, judged: bool = True) -> Candidate:
        """Return a candidate for the whole graph, from one for a few blocks: equal blocks are laid out alike.

        If that does not fit, the whole graph is solved without knowledge, unless that takes too long. The stages keep
        their blocks, unless the whole graph has other sections as well, or another order of them. Without `judged`, the
        graph is only laid out, and the prediction stays that of a few blocks.
        """
        run = candidate.execution
        anew = replace(candidate, execution=run.scheduled(split=(), recompute_by_stage=()))
        if run.schedule.split and folded.is_mixed:
            return self._again_whole(graph, folded, anew, judged)
        try:
            return self._again_whole(graph, folded, candidate, judged)
        except PlanError:
            if not run.schedule.split:
                raise
            return self._again_whole(graph, folded, anew, judged)

    def _again_whole(self, graph: Graph, folded: Folded, candidate: Candidate, judged: bool) -> Candidate:
        c, whole, solved = candidate, Folded(graph), candidate.solved
        problem, solution, at = solved
        if (all_blocks := unfolded(problem, folded, graph)) is None:
            all_blocks, eliminator = self.problem(whole, c.mesh, c.roles, c.execution, c.priced, c.limits)
            at = at._replace(byte=at.byte * (1 + HULL_TOLERANCE))  # the smaller end of the hull's edge at the limit
            solution = eliminator.solve(all_blocks, at)
            solved = all_blocks, solution, at
        made = _Draft(c.name, c.bound_s, solved, c.roles, c.execution, c.priced, c.limits)
        laid_out = self._laid_out(all_blocks, solution)
        if not judged:
            return replace(c, graph=laid_out, solved=solved, folded=False)
        candidate_of_all = self._stored(made, laid_out, {}, (c.lifetimes,))
        if candidate_of_all.fits or not c.fits or len(graph.nodes) > _MOST_NODES:
            return candidate_of_all
        return self.solve(
            whole,
            c.mesh,
            c.roles,
            c.name,
            c.execution,
            (c.lifetimes, "zero-3"),
            c.priced,
            weight=at.overlap_weight,
            limits=c.limits,
        )

    def finished(self, draft: _Draft, folded: Folded, zeros: Sequence[Lifetimes]) -> Candidate:
        """Return `_stored` for the graph that the problem is of."""
        problem, solution, _ = draft.solved
        graph = self._laid_out(problem, solution, folded.ties)
        return self._stored(draft, graph, folded.repeats, zeros, first=folded.effort.is_least)

    def _laid_out(self, problem: Problem, solution: Solution, ties: Sequence[Tie] = ()) -> Graph:
        """Return the parallel graph of a solution, with balanced rings; `ties`: as in `materialize`."""
        return balanced(materialize(problem, solution, self.certified, ties), self.certified)

    def _stored(
        self, draft: _Draft, solved: Graph, repeats: Mapping[str, int], zeros: Sequence[Lifetimes], *,
        first: bool = False,
    ) -> Candidate:  # fmt: skip
        """Return the better of the first lifetime that fits and the last one; with `first`, the first that fits.

        The longer a gathered parameter stays, the more is there: where the last lifetime does not fit, no other does.
        """
        problem, solution, prices = draft.solved
        in_loop = time_and_bytes(problem, solution)[0] < AFTER_THE_LOOP_S
        parameters = [leaf.name for leaf in solved.leaves("parameter")]

        def stored(zero: Lifetimes) -> tuple[Graph, Prediction]:
            known = zero == "zero-3" == draft.priced
            chosen: dict[str, Zero] = dict.fromkeys(parameters, zero) if isinstance(zero, str) else dict(zero)
            graph = (
                solved
                if known
                else with_lifetimes(solved, {leaf: chosen[leaf] for leaf in parameters if leaf in chosen})
            )
            return graph, self.predicted(graph, draft.execution, repeats)

        is_too_much = self.excess_bytes(kept_bytes(problem, solution, problem.stored))
        if is_too_much or not (first or self.fits(stored(zeros[-1])[1])):
            zeros = zeros[-1:]
        candidates: list[Candidate] = []
        for zero in zeros:
            if any(c.fits for c in candidates) and (zero != zeros[-1] or first):
                continue
            graph, prediction = stored(zero)
            if any(c.graph == graph for c in candidates):
                continue
            candidates.append(Candidate(
                draft.name, graph, prediction, draft.bound_s,
                in_loop and self.fits(prediction), draft.solved, draft.roles,
                draft.execution, zero, draft.priced, bool(repeats),
                prices.byte > 0 or any(not c.fits for c in candidates),
                draft.limits,
            ))  # fmt: skip
        return min(candidates, key=rank)


def _programs(cluster: Cluster, costs: KnownCosts, graph: Graph, repeats: tuple[tuple[str, int], ...]) -> Programs:
    return Programs(graph, cluster, dict(repeats), costs)


def _check_finite(problem: Problem, solution: Solution, roles: Sequence[str], zero: Zero) -> None:
    if isfinite(solution.objective):
        return
    names = {variable: name for (_, name), variable in problem.index.items()}
    choices = solution.choices
    exclusive = [
        f" of {names[i]!r} and {names[j]!r}"
        for (i, j), table in problem.edges.items()
        if not isfinite(table.value[choices[i], choices[j]])
    ]
    raise NoLayoutsError(
        f"mesh {problem.mesh} with roles {', '.join(roles)} and {zero}: no layouts of this model can be run so, as the "
        f"choices{(exclusive or [''])[0]} exclude each other; use one microbatch, or other roles"
    )


def different(zeros: Sequence[_L], mesh: Mesh) -> list[_L | Zero]:
    """Return the lifetimes that differ on this mesh: with one microbatch, a parameter is kept, or gathered again."""
    if mesh.num_microbatches > 1:
        return list(zeros)
    return list(dict.fromkeys(zero if zero == "zero-3" or isinstance(zero, tuple) else "kept" for zero in zeros))


def share_of_step(execution: Execution, mesh: Mesh) -> float:
    """Return a step's share of the time of all microbatches through all stages, one after the other.

    Devices have equal parts of that time. Each stage waits for the first microbatch and after the last one; `schedules`
    says how long.
    """
    stages, many = execution.schedule.num_stages, mesh.num_microbatches
    shorter = 3 if execution.schedule.name == "zero-bubble" else execution.schedule.chunks_per_stage
    return (1 + (stages - 1) / (many * shorter)) * execution.schedule.share_of_largest


def _blocked_choices(graph: Graph) -> Mapping[str, Choices]:
    return blocked_choices(graph, constant_nodes(graph))


def restriction(graph: Graph, roles: Sequence[str], mesh: Mesh) -> Restrict | None:
    """Return the restriction of a graph on a mesh: device axes have their roles, the axis of time cuts the batch."""
    if set(roles) == {FREE} and TIME not in mesh.names:
        return None
    return role_restriction(graph, (DATA, *roles) if TIME in mesh.names else roles, mesh.sizes)


def limited_to(limits: Limits, graph: Graph, mesh: Mesh) -> Limited | None:
    """Return the choices that limits leave of a graph's on a mesh; None: all."""
    return Limited(limits, graph, mesh) if limits else None
