"""The ways to run one graph: a space, a recomputation and a number of microbatches; their floors, and their layouts.

Blocks that repeat are folded, so that solving a way takes a fraction of a second. A floor is an estimate of the least
step of a way, with any memory; its problem is built for that, and solved once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain, product
from math import inf, prod
from typing import NamedTuple

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.recompute import Recompute
from shardwright.pcg.step.time import check_time
from shardwright.pcg.types import ITEM_BYTES
from shardwright.search.choices.problem import NoLayoutsError, Prices, Problem, Solution
from shardwright.search.effort import LITTLE, OTHER_LAYOUTS, UNTRIED, Effort
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.solving import Candidate, Solver, different, over_time, rank
from shardwright.search.exact.within import stored_bytes, time_and_bytes
from shardwright.search.request.asked import RecomputeMode
from shardwright.search.request.limits import Limits
from shardwright.search.request.pins import Pins
from shardwright.search.request.restrict import DATA, FREE, ZERO
from shardwright.search.request.spaces import Space, divided, microbatch_counts

Progress = Callable[[str], None]
_MODES: dict[Recompute, str] = {
    "none": "", "selective": ", selective recomputation", "full": ", full recomputation",
}  # fmt: skip


def named(candidate: Candidate) -> str:
    """Return a candidate's name, with its recomputation."""
    mode = candidate.execution.recompute
    return candidate.name + (_MODES[mode] if isinstance(mode, str) else ", recomputation by block")


_Asked = tuple[Folded, Mesh, tuple[str, ...], Execution, Zero, Limits]
"""The arguments that identify a problem."""


class Way(NamedTuple):
    """One way to run a graph: `many` microbatches, and `mode`, the recomputation that its layouts are chosen for."""

    space: Space
    mode: RecomputeMode
    many: int


class Ways:
    """The ways to run one graph on one cluster, within what is asked for.

    Attributes:
        effort: how much is tried.
        modes: the recomputations that there are, the one that takes least time first.
        counts: the numbers of microbatches.
        spaces: the meshes that are searched: all, the one that is given, or those that keep to the pins.
        obstacle: why the batch cannot be cut into microbatches, or "".
        fastest_s: the step of the fastest plan that was solved and fits.
        known: the best candidate of each way that was solved.
        refused: why the last way without layouts had none.
    """

    def __init__(self, solver: Solver, graph: Graph, execution: Execution, pins: Pins, progress: Progress) -> None:
        self.solver, self.execution, self.pins, self.progress = solver, execution, pins, progress
        self.folded = folded(graph, pins)
        self.effort = self.folded.effort
        self.modes = self._modes()
        self.spaces = pins.spaces
        self.obstacle = ""
        self.refused = NoLayoutsError(f"no mesh of {solver.cluster.num_devices} devices keeps to all that is asked for")
        self.counts = self._counts()
        self.fastest_s = inf
        self.known: dict[Way, Candidate] = {}
        self._like: dict[RecomputeMode, float] = {}  # the step of the fastest plan by what is made again
        self._ideal: dict[RecomputeMode, float] = {}
        self._least_ratios: dict[Hashable, float] = {}  # least step / floor; below 1 as shared moves count twice

    def _modes(self) -> list[RecomputeMode]:
        """Return the recomputations that may be tried. Raises `PlanError` where the requested one is not there."""
        modes = list[RecomputeMode]()
        for mode in self.pins.recomputes:
            try:
                self.solver.known.again(self.folded.graph, replace(self.execution, recompute=mode))
            except PlanError:
                if self.pins.recompute is not None:
                    raise
                continue
            modes.append(mode)
        return modes

    def _counts(self) -> list[int]:
        """Return the numbers of microbatches to try. Raises `PlanError` where the requested one cannot be run."""
        if self.pins.microbatches == 1 or self.pins.size < 2:
            return [1]
        counts = microbatch_counts(self.pins.size) if self.pins.microbatches is None else [self.pins.microbatches]
        count = counts[min(1, len(counts) - 1)]
        in_turn = Mesh((TIME,), (count,))  # how devices share a microbatch is checked elsewhere, and takes longer
        try:
            check_time(self.solver.fastest_layouts(self.folded, in_turn, (), self.execution), self.execution)
        except PlanError as error:
            if self.pins.microbatches is not None:
                raise
            self.obstacle = str(error)
            return [1]
        return counts

    @property
    def searched(self) -> Sequence[Space]:
        """The meshes without stages that are searched, with those of three axes that were cut from them."""
        finer = self.pins.nested.values()
        return (*self.spaces, *dict.fromkeys(way.space for way in self.known if way.space in finer))

    def counts_on(self, space: Space) -> list[int]:
        """Return the numbers of microbatches on a space: with stages at least one for each, if the batch allows."""
        stages, chunks = space.pipeline.stages, space.pipeline.chunks
        counts = divided(space, self.counts, self.pins.size)
        if stages == 1:
            return counts
        return [c for c in counts if c >= stages and (chunks == 1 or c % stages == 0)] or counts[-1:]

    def report(self, candidate: Candidate) -> Candidate:
        """Report the candidate and return it."""
        p = candidate.prediction
        unfit = "" if candidate.fits else ", does not fit"
        self.progress(f"{named(candidate)} on {candidate.mesh}: {p.step_s * 1e3:.1f} ms{unfit}")
        return candidate

    # ---- what is known before a way is solved ----

    def floor_s(self, way: Way) -> float:
        """Return `Solver.floor_s`, or inf where the longest lifetime has no layouts."""
        try:
            return self.solver.floor_s(*self._longest(way))
        except NoLayoutsError:
            return inf

    def least_layouts(self, way: Way) -> tuple[Problem, Solution]:
        """Return the problem and the layouts that the floor is of. Raises `NoLayoutsError` where there are none."""
        problem, eliminator = self.solver.problem(*self._longest(way))
        return problem, eliminator.solve(problem, Prices(overlap_weight=self.solver.besides[-1]))

    def crowding(self, way: Way) -> float:
        """Return `Solver.crowding`, or 0, which says nothing, where the longest lifetime has no layouts."""
        try:
            problem, _ = self.solver.problem(*self._longest(way))
        except NoLayoutsError:
            return 0.0
        return self.solver.crowding(problem, way.space.run(self.execution, way.mode))

    def ratio_to_floor(self, space: Space) -> float:
        """Return the least ratio of a step to its floor on these devices, or about the least of all."""
        return self._least_ratios.get(_kind_of_floor(space), UNTRIED)

    def _longest(self, way: Way) -> _Asked:
        """Return the arguments of a way's problem with the longest lifetime that is likely.

        Stages seldom have room for what stays longest, as all are in use at once.
        """
        space = way.space
        execution, mesh = space.run(self.execution, way.mode), over_time(space.mesh, way.many)
        zeros = different(space.zeros, mesh)
        likely = zeros[-1] if space.pipeline.stages > 1 else zeros[0]
        return self.folded, mesh, space.roles, execution, likely, space.limits

    def ideal_s(self, mode: RecomputeMode) -> float:
        """Return a lower bound: every device has an equal part of all operators' work, and nothing is sent."""
        if mode not in self._ideal:
            execution = replace(self.execution, recompute=mode)
            self._ideal[mode] = (
                sum(self.solver.work_s(self.folded, execution).values()) / self.solver.cluster.num_devices
            )
        return self._ideal[mode]

    @cached_property
    def work_by_block(self) -> Mapping[str, float]:
        """Seconds of `Solver.work_s`, with nothing made again."""
        return self.solver.work_s(self.folded, replace(self.execution, recompute=self.modes[0]))

    # ---- layouts ----

    def solved(self, way: Way) -> Candidate:
        """Return the best plan of a way: at first with layouts without overlap, for the likeliest lifetime.

        If that comes near the best plan by now, layouts for full overlap are tried too. The better of the two is then
        tried with the other lifetime, if by their sum a faster plan is likely. With the least effort, one plan that
        fits is enough.
        """
        if (known := self.known.get(way)) is not None:
            return known
        space, mode, many = way
        execution, mesh = space.run(self.execution, mode), over_time(space.mesh, many)
        best: Candidate | None = None
        zeros, once = _priced(space.zeros, mesh), self.effort.is_least
        if space.pipeline.stages > 1:  # stages seldom have room for the longest lifetime
            zeros = zeros[-1:]
        elif once:  # the floor's lifetime first
            zeros = list(dict.fromkeys((*different(space.zeros, mesh)[:1], *zeros)))
        for priced, weight in product(zeros, self.solver.besides[-self.effort.layouts :]):
            request = self.folded, mesh, space.roles, execution, priced, space.limits
            if best is not None:
                if best.fits == once:  # only a fitting plan is improved; once: one is enough
                    break
                if priced != zeros[0] and weight != best.solved[2].overlap_weight:  # worse for the other lifetime
                    continue
                if not self._may_gain(best, request, way, weight):
                    continue
            near = best.solved[2].byte if best is not None else 0.0
            candidate = self._with_layouts(way, priced, weight, near)
            best = candidate if best is None else min(best, candidate, key=rank)
            self.fastest_s = min(self.fastest_s, best.prediction.step_s if best.fits else inf)
            self._like[mode] = min(self._like.get(mode, inf), best.prediction.step_s if best.fits else inf)
        assert best is not None
        if 0 < (floor_s := self.floor_s(way)) < inf:
            alike = _kind_of_floor(space)
            self._least_ratios[alike] = min(self._least_ratios.get(alike, 1.0), best.prediction.step_s / floor_s)
        self.known[way] = best
        return best

    def _with_layouts(self, way: Way, priced: Zero, weight: float, near: float = 0.0) -> Candidate:
        space = way.space
        return self.solver.solve(
            self.folded, over_time(space.mesh, way.many), space.roles, space.name,
            space.run(self.execution, way.mode), space.zeros, priced, weight=weight, limits=space.limits, near=near,
        )  # fmt: skip

    def between(self, way: Way) -> Candidate:
        """Return the best plan of a way with layouts for prices between no overlap and full overlap as well.

        With few examples a step is short, and what is summed at its end is much of it. The least effort leaves it.
        """
        best, weight = self.solved(way), prod(self.solver.besides) ** 0.5
        candidates = [best]
        for priced in _priced(way.space.zeros, best.mesh) if weight < 1 and self.effort.layouts > 1 else ():
            with suppress(NoLayoutsError):
                candidates.append(self._with_layouts(way, priced, weight))
        return min(candidates, key=rank)

    def _may_gain(self, best: Candidate, request: _Asked, way: Way, weight: float) -> bool:
        """Return whether layouts of another lifetime, or for another share of communication, may be faster.

        With stages, their floor alone decides: what stages send beside compute is often most of what a step waits for.
        """
        fastest_s = self._like.get(way.mode, inf)
        rival_s = best.prediction.step_s if weight == 1 else fastest_s
        if way.space.pipeline.stages > 1:
            return UNTRIED * self.floor_s(way) < rival_s
        if best.prediction.step_s > OTHER_LAYOUTS * fastest_s:
            return False
        return self.effort.is_least or self._expected_s(best, request, weight) < rival_s * (1 - LITTLE)

    def _expected_s(self, candidate: Candidate, request: _Asked, weight: float) -> float:
        """Return an estimate of a plan's step with layouts of another lifetime, or share of communication.

        It is less by the share of the plan's sum that these save at most, if they keep no more than the plan does.
        """
        problem, eliminator = self.solver.problem(*request)
        _, solution, prices = candidate.solved
        own_s, own_bytes = time_and_bytes(problem, solution, weight)
        least_s = eliminator.solve(problem, Prices(prices.byte, weight)).bound - prices.byte * own_bytes
        return candidate.prediction.step_s * (least_s / own_s if 0 < own_s < inf else float(own_s == 0))

    # ---- bounds ----

    def bound_s(self, num_microbatches: int, execution: Execution) -> float:
        """Return a step that no layouts of the operators as written beat, so run on the meshes that are searched.

        `Solver.least_s` has the conditions.
        """
        spaces = self.spaces_like(execution)
        return min(self._bound_s(space, over_time(space.mesh, num_microbatches), execution) for space in spaces)

    def spaces_like(self, execution: Execution) -> Sequence[Space]:
        """Return all spaces that are searched in as many stages."""
        if execution.schedule.num_stages == 1:
            return self.searched
        staged = chain.from_iterable(self.pins.staged.values())
        return [space for space in staged if space.pipeline.stages == execution.schedule.num_stages]

    def _bound_s(self, space: Space, mesh: Mesh, execution: Execution) -> float:
        """Return `Solver.least_s`, or inf where the longest lifetime has no layouts."""
        try:
            return self.solver.least_s(self.folded, mesh, space.roles, execution, space.limits)
        except NoLayoutsError:
            return inf

    # ---- what is stored whatever is kept ----

    @property
    def nothing_fits(self) -> bool:
        """Return whether an equal share of what is stored is too much for a device, however a step is run."""
        return self._share_is_too_much(self.solver.cluster.num_devices)

    def _share_is_too_much(self, num_shares: int) -> bool:
        """Return whether so many devices cannot store parameters, gradients and moments; False where devices differ."""
        solver = self.solver
        return not solver.cluster.parts and bool(solver.excess_bytes(self._stored_bytes / num_shares))

    @cached_property
    def _stored_bytes(self) -> float:
        return self.solver.all_stored_bytes(self.folded, self.execution.assumed.optimizer)

    def cannot_hold(self, space: Space) -> bool:
        """Return whether parameters, gradients and moments alone are too much.

        For the least effort, equal shares are checked first, which takes one problem for all spaces.
        """
        shared = prod(size for role, size in zip(space.roles, space.mesh.sizes, strict=True) if role != DATA)
        if self.effort.is_least and self._share_is_too_much(shared * space.pipeline.stages):
            return True
        return bool(self.excess_bytes(space))

    def excess_bytes(self, space: Space) -> float:
        """Return by how many bytes what is always there is too much for these devices; 0 where it may fit."""
        try:
            problem, _ = self.solver.problem(*self._longest(Way(space, self.modes[0], self.counts_on(space)[0])))
        except NoLayoutsError:
            return 0.0
        return self.solver.excess_bytes(stored_bytes(problem) + self._gathered_bytes(space))

    def _gathered_bytes(self, space: Space) -> float:
        """Return the least bytes of parameters beside the stored parts, where all have to stay gathered at once."""
        if "zero-3" in space.zeros or FREE in space.roles:
            return 0.0
        axes = list(zip(space.roles, space.mesh.sizes, strict=True))
        used = prod(size for role, size in axes if role not in (DATA, ZERO)) * space.pipeline.stages
        return self._parameter_bytes / used * (1 - 1 / prod(size for role, size in axes if role == ZERO))

    @cached_property
    def _parameter_bytes(self) -> float:
        """The bytes of all parameters in the dtype in which they are gathered, or less."""
        graph = self.folded.graph
        kinds = [(graph.types[leaf.name], self.folded.times(leaf.name)) for leaf in graph.leaves("parameter")]
        return sum(times * kind.num_elements * min(2, ITEM_BYTES[kind.dtype]) for kind, times in kinds)


def _kind_of_floor(space: Space) -> Hashable:
    """Return a key of how steps compare with floors: the roles, if they leave no choice, whatever the degrees."""
    return space if FREE in space.roles else space.roles


def folded(graph: Graph, pins: Pins) -> Folded:
    """Return the graph with its equal blocks folded, where all of them are run and pinned alike."""
    folded_graph = Folded(graph) if pins.by_block else fold(graph)
    folded_graph = Folded(graph) if pins.limits.tell_apart(graph, folded_graph.alike) else folded_graph
    return replace(folded_graph, effort=Effort.of(len(folded_graph.graph.nodes)))


def _priced(zeros: Sequence[Zero], mesh: Mesh) -> Sequence[Zero]:
    """Return the shortest and the longest lifetime, in the order in which they are likely to be the best."""
    differing = different(zeros, mesh)
    ends = dict.fromkeys((differing[0], differing[-1]))
    return list(ends) if mesh.num_microbatches > 1 else list(reversed(ends))
