"""One layout problem within memory: a graph, a mesh whose axes have roles, and how it is run.

The exact optimum of the sum of compute and communication at given `Prices`, of which the timeline corrects that of a
byte: what only the finished graph shows, such as gathered weights, is made room for, and the problem solved again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple, TypeVar

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.moves import AFTER_THE_LOOP_S
from shardwright.cost.compute.compute import compute_on
from shardwright.cost.predict import Prediction, predicted
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
from shardwright.pcg.types import TensorType
from shardwright.search.choices.blocks import blocked_choices
from shardwright.search.choices.domain import CertifiedSplits, storage_domain
from shardwright.search.choices.problem import NoLayoutsError, Prices, Problem, Restrict, Solution, Way
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.exact.folding import Folded, unfolded
from shardwright.search.exact.least import least_s
from shardwright.search.exact.materialize import materialize
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
"""So many times the price of a byte in the problem before is tried first: at more than it has to be, layouts fit."""
_MOST_PROGRAMS = 8
"""That are kept; what operators and moves cost is kept of all."""
_MOST_NODES = 2**12
"""Of a whole graph that is solved as if nothing were known: of 7,500 nodes it was seen to take 24 seconds."""
NEARLY = 1.5
"""So many times what there is may be kept in sum: not all of it is there at once."""


Lifetimes = Zero | tuple[tuple[str, Zero], ...]
"""For how long gathered parameters stay: all alike, or each by the name of its leaf."""


@dataclass(frozen=True)
class Candidate:
    """A finished plan on one mesh.

    Attributes:
        bound_s: none whose gathered parameters stay as long as is `priced`, and that keeps no more than the memory, has
            a smaller sum on this mesh, with folded blocks laid out alike. For other lifetimes it says nothing:
            `Tuner.bound_s` is for all of them.
        graph: of the whole model, or of one whose blocks are `folded`.
        roles: of the axes of devices; `limits`: what else its layouts keep to.
        lifetimes: for how long gathered parameters stay; `priced`: the lifetime that the layouts were chosen for.
        is_tight: whether more memory could make it faster.
        solved: what it was made from: problem, solution and prices.
        rewrites: what was done to the graph before.
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


def rank(candidate: Candidate) -> tuple[bool, float]:
    """Plans that fit first, then the fastest by the timeline; of plans that do not fit, the smallest."""
    if candidate.fits:
        return (False, candidate.prediction.step_s)
    return (True, float(candidate.prediction.memory.total_bytes))


def over_time(mesh: Mesh, num_microbatches: int) -> Mesh:
    """A mesh of devices on which each step has so many microbatches."""
    if num_microbatches == 1:
        return mesh
    return Mesh((TIME, *mesh.names), (num_microbatches, *mesh.sizes))


_L = TypeVar("_L", Zero, Lifetimes)


class _Draft(NamedTuple):
    """What is known of a candidate before its graph is made."""

    name: str
    bound_s: float
    solved: tuple[Problem, Solution, Prices]
    roles: tuple[str, ...]
    execution: Execution
    priced: Zero
    limits: Limits


class Solver:
    """Solves layout problems for one cluster; what they have in common is made once.

    `check` is called before a problem is made and before a program is judged: a search that has to end raises there.
    """

    def __init__(self, cluster: Cluster, certified: CertifiedSplits) -> None:
        self.cluster, self.certified = cluster, certified
        self.limit_bytes = safe_bytes(cluster.device.memory_bytes)
        self.besides = tuple(dict.fromkeys((1.0, SHARING[cluster.device.kind].least)))
        self._builders: dict[tuple[object, ...], tuple[ProblemBuilder, Eliminator]] = {}
        self._problems: dict[tuple[object, ...], Problem] = {}
        self._predictions: dict[tuple[object, ...], Prediction] = {}
        self._usual: dict[RecomputeMode, float] = {}  # the last price of a byte, as a part of the least sum
        costs: KnownCosts = {}
        self._programs = lru_cache(maxsize=_MOST_PROGRAMS)(partial(_programs, cluster, costs))
        self.blocked = lru_cache(maxsize=None)(_blocked_choices)
        self.again = lru_cache(maxsize=None)(made_again)
        self.restricted = lru_cache(maxsize=None)(restriction)
        self.check: Callable[[], None] = lambda: None

    def until(self, check: Callable[[], None]) -> Solver:
        """The same for one search, which `check` ends, with what it knows but the prices of others."""
        own = copy(self)
        own.check, own._usual = check, {}
        return own

    def within(self, limit_bytes: int) -> Solver:
        """The same, with what it knows already, for less memory on each device, if that is less."""
        smaller = copy(self)
        smaller.limit_bytes = min(self.limit_bytes, limit_bytes)
        return smaller

    def limit_of(self, device_bytes: int) -> int:
        """What plans may use on devices of so much memory: those of all, or of a stage of unlike ones."""
        return self.limit_bytes if device_bytes == self.cluster.device.memory_bytes else safe_bytes(device_bytes)

    def fits(self, prediction: Prediction) -> bool:
        """Whether no stage needs more than it may use."""
        return prediction.memory.total_bytes <= self.limit_of(prediction.device_bytes)

    def stage_limits(self, execution: Execution, mesh: Mesh) -> list[int]:
        """What plans may use on the devices of each stage; the mesh is that of the largest."""
        if execution.schedule.num_stages == 1 or not self.cluster.parts:
            return [self.limit_bytes] * execution.schedule.num_stages
        ends = pairwise(first_ranks(stage_meshes(mesh, execution)))
        return [self.limit_of(self.cluster.part(range(*own)).device.memory_bytes) for own in ends]

    def builder(self, mesh: Mesh, execution: Execution = DEFAULT) -> tuple[ProblemBuilder, Eliminator]:
        """One for all meshes of these sizes: the names of axes of devices play no part."""
        by_microbatch = bool(execution.per_microbatch)
        key = mesh.num_microbatches, mesh.sizes, by_microbatch
        if key not in self._builders:
            builder = ProblemBuilder(self.cluster, mesh, self.certified, by_microbatch=by_microbatch)
            self._builders[key] = (builder, Eliminator(builder.interner))
        return self._builders[key]

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
        """The problem of a graph on a mesh whose axes of devices have these roles, and what was solved of it.

        A `NoLayoutsError` where an operator cannot take a parameter as `limits` want it.
        """
        builder, eliminator = self.builder(mesh, execution)
        key = folded.graph, folded.repeated, mesh, tuple(roles), execution, zero, limits, relaxed
        if key in self._problems:
            return self._problems[key], eliminator
        self.check()
        way = Way(self.again(folded.graph, execution), zero, execution, relaxed)
        restrict = self.restricted(folded.graph, tuple(roles), mesh)
        limited, blocked = limited_to(limits, folded.graph, mesh), self.blocked(folded.graph)
        if limited is not None:
            limited.check(lambda node: builder.certified_of(node, folded.graph, blocked))
        problem = builder.build(folded, restrict, blocked=blocked, way=way, limited=limited)
        if limited is not None:
            limited.check_met(problem.domains)
        problem.mesh = mesh
        self._problems[key] = problem
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
        """About what no layouts take less than, within any memory, where as much overlaps as can.

        Not a bound: a resharding that readers share counts for each, and messages that are sent together one by one.
        """
        problem, eliminator = self.problem(folded, mesh, roles, execution, priced, limits)
        serial_s = eliminator.solve(problem, Prices(beside=self.besides[-1])).bound
        return serial_s * share_of_step(execution, mesh) / self.quicker(execution.schedule.num_stages)

    def least_s(
        self, folded: Folded, mesh: Mesh, roles: Sequence[str], execution: Execution, limits: Limits = NO_LIMITS
    ) -> float:
        """No layouts on a mesh take a shorter step by the timeline, within any memory.

        However long gathered parameters stay: what stays longest is sent least often. Equal blocks are laid out alike.
        0, which says nothing, where kernels run at rates of their own (tf32, fp8), or stages on devices of their
        own or meshes of unlike sizes, which the problem does not know.
        """
        if (
            execution.rates
            or execution.schedule.stage_sizes
            or (self.cluster.parts and execution.schedule.num_stages > 1)
        ):
            return 0.0
        longest = different(LONGEST_FIRST, mesh)[0]
        problem, eliminator = self.problem(folded, mesh, roles, execution, longest, limits, relaxed=True)
        device = self.cluster.device  # the busiest of several stages has no less than an equal share
        return (
            least_s(problem, eliminator, SHARING[device.kind]) / execution.schedule.num_stages + device.step_overhead_s
        )

    def quicker(self, num_stages: int) -> float:
        """About how many times as quick devices are on average as the binding one; 1 where all work at its pace."""
        if num_stages == 1 or not self.cluster.parts:
            return 1.0
        size = self.cluster.num_devices
        return sum(p.num_devices / size * p.device.times_as_quick(self.cluster.device) for p in self.cluster.parts)

    def work_s(self, folded: Folded, execution: Execution, mesh: Mesh | None = None) -> float:
        """What all operators take on one device, nothing being sent: n devices take no less than an n-th of it.

        `mesh`: on its devices, each operator split in any way; n times as many take no less than an n-th of it, if n
        has no prime in common with their number.
        """
        one = Mesh(("x",), (1,))
        roles = (DATA,) if mesh in (None, one) else (FREE,) * len(mesh or one)
        problem, _ = self.problem(folded, mesh or one, roles, execution, "zero-3")
        return sum(float(time_s.value.min()) for time_s in problem.time_s)

    def crowding(self, problem: Problem, execution: Execution) -> float:
        """What layouts keep at least beside parameters, gradients and moments, as a part of the room that these leave.

        Above 1, no layouts keep little enough at once.
        """
        stored = stored_bytes(problem)
        room = self._usable(execution, problem.mesh) - self.cluster.device.context_bytes - stored
        return (least_bytes(problem) - stored) / room if room > 0 else inf

    def _usable(self, execution: Execution, mesh: Mesh) -> float:
        """What plans may use, of the share of an average stage."""
        return sum(self.stage_limits(execution, mesh)) / execution.schedule.num_stages

    def all_stored_bytes(self, folded: Folded) -> float:
        """What one device would keep of all parameters, their gradients and moments."""
        graph, counts = folded.graph, Counter[TensorType]()
        for leaf in graph.leaves("parameter"):
            counts[graph.types[leaf.name]] += folded.times(leaf.name)
        one, compute = ((R,),), compute_on(self.cluster.device)
        found = ((storage_domain(kind, one, (1,), compute), times) for kind, times in counts.items())
        return sum(times * float(domain.kept_bytes.min()) for domain, times in found)

    def excess_bytes(self, stored_bytes: float, device_bytes: int | None = None) -> float:
        """By how much these are too many, whatever else a step keeps; 0 where they may fit.

        `device_bytes`: the memory of the devices that keep them, if they are those of a stage.
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
        beside: float = 1.0,
        limits: Limits = NO_LIMITS,
        near: float = 0.0,
    ) -> Candidate:
        """The best plan on one mesh, within memory if any choice found fits.

        Layouts are chosen for parameters that stay as long as is `priced`; of the lifetimes `zeros`, the first that
        fits counts. `beside`: as in `Prices`; `near`: as in `within_memory`. What provably takes `cutoff_s` or longer
        is not pursued further; the result may then not fit, or not be the best. A `NoLayoutsError` where no layouts can
        be run so.
        """
        problem, eliminator = self.problem(folded, mesh, roles, execution, priced, limits)
        usable = self._usable(execution, mesh)
        limit = usable - self.cluster.device.context_bytes
        free = Prices(beside=beside)
        fastest = eliminator.solve(problem, free)
        _check_finite(problem, fastest, roles, priced)
        is_near = limit < kept_bytes(problem, fastest) <= NEARLY * limit
        if is_near and not self.excess_bytes(stored_bytes(problem)):
            draft = _Draft(name, fastest.bound, (problem, fastest, free), tuple(roles), execution, priced, limits)
            found = self._finish(draft, folded, different(zeros, mesh))
            if found.fits:
                return found
        best: Candidate | None = None
        near = near or _SAFE * fastest.objective * self._usual.get(execution.recompute, 0.0)
        for _ in range(_MEMORY_TRIES):
            solution, bound_s, feasible, prices = within_memory(
                problem, eliminator, limit, cutoff_s, beside, hull=bool(folded.repeated), near=near
            )  # equal blocks are laid out alike, and mixed later
            if best is not None:
                bound_s = best.bound_s  # that of the true limit
            if feasible and prices.byte:
                near, self._usual[execution.recompute] = prices.byte, prices.byte / fastest.objective
            draft = _Draft(name, bound_s, (problem, solution, prices), tuple(roles), execution, priced, limits)
            found = self._finish(draft, folded, different(zeros, mesh)[0 if feasible else -1 :])
            best = found if best is None else min(best, found, key=rank)
            only_in_the_graph = found.prediction.memory.total_bytes - kept_bytes(problem, solution)
            limit = usable - only_in_the_graph
            if best.fits or not feasible or bound_s >= cutoff_s or limit < least_bytes(problem):
                break
        assert best is not None
        return best

    def fastest_layouts(
        self, folded: Folded, mesh: Mesh, roles: Sequence[str], execution: Execution = DEFAULT
    ) -> Graph:
        """The parallel graph of the smallest sum on one mesh, whatever memory it takes. Errors as in `solve`."""
        problem, eliminator = self.problem(folded, mesh, roles, execution, "zero-3")
        fastest = eliminator.solve(problem)
        _check_finite(problem, fastest, roles, "zero-3")
        return materialize(problem, fastest, self.certified)

    def predicted(self, graph: Graph, execution: Execution, repeats: Mapping[str, int]) -> Prediction:
        """As `predict`; what was chosen for several lifetimes, or comes from several plans, is often the same."""
        key = graph, execution, tuple(repeats.items())
        if key not in self._predictions:
            self.check()
            self._predictions[key] = predicted(self.programs(graph, repeats), execution)
        return self._predictions[key]

    def programs(self, graph: Graph, repeats: Mapping[str, int]) -> Programs:
        """Of a graph whose blocks occur so often; those that were asked for last are known."""
        return self._programs(graph, tuple(repeats.items()))

    def again_whole(self, graph: Graph, folded: Folded, candidate: Candidate, *, judged: bool = True) -> Candidate:
        """The same for the whole graph, of which a candidate has a few blocks: all that are alike are laid out alike.

        What does not fit so is solved as if nothing were known, if that does not take too long. Its stages have the
        same blocks, if those are all its sections. Not `judged`: it is only laid out, and its prediction stays that of
        a few blocks.
        """
        try:
            return self._again_whole(graph, folded, candidate, judged)
        except PlanError:
            if not (run := candidate.execution).schedule.split:
                raise
            anew = run.scheduled(split=(), recompute_by_stage=())
            return self._again_whole(graph, folded, replace(candidate, execution=anew), judged)

    def _again_whole(self, graph: Graph, folded: Folded, candidate: Candidate, judged: bool) -> Candidate:
        c, whole, solved = candidate, Folded(graph), candidate.solved
        problem, solution, at = solved
        if (all_blocks := unfolded(problem, folded, graph)) is None:
            all_blocks, eliminator = self.problem(whole, c.mesh, c.roles, c.execution, c.priced, c.limits)
            at = at._replace(byte=at.byte * (1 + HULL_TOLERANCE))  # the smaller end of the hull's edge at the limit
            solution = eliminator.solve(all_blocks, at)
            solved = all_blocks, solution, at
        made = _Draft(c.name, c.bound_s, solved, c.roles, c.execution, c.priced, c.limits)
        laid_out = materialize(all_blocks, solution, self.certified)
        if not judged:
            return replace(c, graph=laid_out, solved=solved, folded=False)
        found = self._stored(made, laid_out, {}, (c.lifetimes,))
        if found.fits or not c.fits or len(graph.nodes) > _MOST_NODES:
            return found
        return self.solve(
            whole,
            c.mesh,
            c.roles,
            c.name,
            c.execution,
            (c.lifetimes, "zero-3"),
            c.priced,
            beside=at.beside,
            limits=c.limits,
        )

    def _finish(self, draft: _Draft, folded: Folded, zeros: Sequence[Lifetimes]) -> Candidate:
        """As `_stored`, of the graph that the problem is of."""
        problem, solution, _ = draft.solved
        graph = materialize(problem, solution, self.certified)
        return self._stored(draft, graph, folded.repeats, zeros, first=folded.is_large)

    def _stored(
        self, draft: _Draft, solved: Graph, repeats: Mapping[str, int], zeros: Sequence[Lifetimes], *,
        first: bool = False,
    ) -> Candidate:  # fmt: skip
        """With the first lifetime that fits or with the last one, whichever is better; or with the `first` alone.

        The longer a gathered parameter stays, the more is there: where the last one does not fit, no other does.
        """
        problem, solution, prices = draft.solved
        in_loop = time_and_bytes(problem, solution)[0] < AFTER_THE_LOOP_S
        parameters = [leaf.name for leaf in solved.leaves("parameter")]

        def stored(zero: Lifetimes) -> tuple[Graph, Prediction]:
            known = zero == "zero-3" == draft.priced
            own: dict[str, Zero] = dict.fromkeys(parameters, zero) if isinstance(zero, str) else dict(zero)
            graph = solved if known else with_lifetimes(solved, {leaf: own[leaf] for leaf in parameters if leaf in own})
            return graph, self.predicted(graph, draft.execution, repeats)

        is_too_much = self.excess_bytes(kept_bytes(problem, solution, problem.stored))
        if is_too_much or not (first or self.fits(stored(zeros[-1])[1])):
            zeros = zeros[-1:]
        found: list[Candidate] = []
        for zero in zeros:
            if any(c.fits for c in found) and (zero != zeros[-1] or first):
                continue
            graph, prediction = stored(zero)
            if any(c.graph == graph for c in found):
                continue
            found.append(Candidate(
                draft.name, graph, prediction, draft.bound_s,
                in_loop and self.fits(prediction), draft.solved, draft.roles,
                draft.execution, zero, draft.priced, bool(repeats), prices.byte > 0 or any(not c.fits for c in found),
                draft.limits,
            ))  # fmt: skip
        return min(found, key=rank)


def _programs(cluster: Cluster, costs: KnownCosts, graph: Graph, repeats: tuple[tuple[str, int], ...]) -> Programs:
    return Programs(graph, cluster, dict(repeats), costs)


def _check_finite(problem: Problem, solution: Solution, roles: Sequence[str], zero: Zero) -> None:
    if isfinite(solution.objective):
        return
    names = {variable: name for (_, name), variable in problem.index.items()}
    choices = solution.choices
    apart = [
        f" of {names[i]!r} and {names[j]!r}"
        for (i, j), table in problem.edges.items()
        if not isfinite(table.value[choices[i], choices[j]])
    ]
    raise NoLayoutsError(
        f"mesh {problem.mesh} with roles {', '.join(roles)} and {zero}: no layouts of this model can be run so, as the "
        f"choices{(apart or [''])[0]} exclude each other; use one microbatch, or other roles"
    )


def different(zeros: Sequence[_L], mesh: Mesh) -> list[_L | Zero]:
    """Those that differ on this mesh: with one microbatch, a parameter is kept, or gathered again."""
    if mesh.num_microbatches > 1:
        return list(zeros)
    return list(dict.fromkeys(zero if zero == "zero-3" or isinstance(zero, tuple) else "kept" for zero in zeros))


def share_of_step(execution: Execution, mesh: Mesh) -> float:
    """What a step takes of the time of all microbatches through all stages, one after the other.

    Devices have equal parts of it, each stage waits for the first microbatch and after the last one; `schedules` says
    how long.
    """
    stages, many = execution.schedule.num_stages, mesh.num_microbatches
    shorter = 3 if execution.schedule.name == "zero-bubble" else execution.schedule.chunks_per_stage
    return (1 + (stages - 1) / (many * shorter)) * execution.schedule.share_of_largest


def _blocked_choices(graph: Graph) -> Mapping[str, Choices]:
    return blocked_choices(graph, constant_nodes(graph))


def restriction(graph: Graph, roles: Sequence[str], mesh: Mesh) -> Restrict | None:
    """What the axes of a mesh may do to a graph: those of devices by their roles, that of time cuts the batch."""
    if set(roles) == {FREE} and TIME not in mesh.names:
        return None
    return role_restriction(graph, (DATA, *roles) if TIME in mesh.names else roles, mesh.sizes)


def limited_to(limits: Limits, graph: Graph, mesh: Mesh) -> Limited | None:
    """What limits leave of a graph's choices on a mesh; None: all."""
    return Limited(limits, graph, mesh) if limits else None
