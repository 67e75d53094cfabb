"""Plans with pipeline stages: how many, the mesh of each, microbatches and the order in which they run.

Layouts are chosen once, on the mesh of one stage, for all blocks: as without stages, with a stage's share of the bytes.
A stage takes an equal share of the time, and the bubble is a factor that grows with the stages and falls with the
microbatches (`solving.share_of_step`). So one floor of a mesh says about what other numbers of microbatches take there.
Layouts are judged by the timeline in every order; where that comes near the best plan, blocks are spread by what each
takes, and what is kept is decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import ceil, inf, log

from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import DEFAULT
from shardwright.pcg.step.meshes import stage_meshes
from shardwright.pcg.step.parameters import blocks_of
from shardwright.pcg.step.pipelining import ScheduleName
from shardwright.pcg.step.recompute import RECOMPUTES, Recompute
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.effort import (
    AGAIN,
    ALIKE,
    BEHIND,
    CLOSE,
    DEEP,
    EXCESS,
    LITTLE,
    MOST_BY_HAND,
    NEAR,
    OTHER_LAYOUTS,
    SAVES,
    UNSPREAD,
    UNTRIED,
)
from shardwright.search.exact.solving import NEARLY, Candidate, over_time, rank, share_of_step
from shardwright.search.request.spaces import Pipeline, Space, machine_size, staged_by_hand
from shardwright.search.tree.attempts import Attempt, Neighbours, Queue
from shardwright.search.tree.fitting import Fitter, kept_s, may_keep_more
from shardwright.search.tree.spreading import spread_out
from shardwright.search.tree.ways import Way, Ways

_OTHERS: tuple[ScheduleName, ...] = ("zero-bubble", "eager-1f1b")
"""The schedules tried beside `1f1b` and `interleaved`; `gpipe` keeps more than `1f1b` does and saves nothing."""
_CHUNKS = (2, 4, 8)
"""The chunks of a stage, where stages are interleaved."""


class Orders:
    """The orders in which the stages of known layouts may be run."""

    def __init__(self, ways: Ways) -> None:
        self.ways = ways
        self.asked: ScheduleName | None = ways.pins.asked.schedule
        folded = ways.folded
        self.num_blocks = len(blocks_of(folded.graph)) + sum(times - 1 for times in folded.repeats.values())

    def of(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the same layouts in other orders, where none is asked for."""
        stages, devices = candidate.execution.schedule.num_stages, tuple[int, ...]()
        if candidate.execution.schedule.stage_sizes:
            devices = tuple(mesh.num_devices for mesh in stage_meshes(candidate.mesh, candidate.execution))
        if self.asked not in (None, "interleaved"):
            return
        divides, best = candidate.mesh.num_microbatches % stages == 0, None
        for chunks in reversed(_CHUNKS) if divides else ():  # more chunks shorten the bubble, and send more
            other = self.ordered(candidate, Pipeline(stages, "interleaved", chunks, devices))
            if other is not None:
                yield other
                if best is not None and rank(other) >= rank(best):
                    break
                best = other
        if self.asked is None:
            for schedule in _OTHERS:
                if (other := self.ordered(candidate, Pipeline(stages, schedule, 1, devices))) is not None:
                    yield other

    def interleaved(self, candidate: Candidate, space: Space) -> Iterator[Candidate]:
        """Yield the same layouts in the other order that Megatron-LM has."""
        pipeline = space.pipeline
        if self.asked is None and candidate.mesh.num_microbatches % pipeline.stages == 0:
            for order in (pipeline._replace(schedule="interleaved", chunks=chunks) for chunks in _CHUNKS):
                name = space.name.replace(str(pipeline), str(order))
                if (other := self.ordered(candidate, order, name)) is not None:
                    yield other

    def ordered(self, candidate: Candidate, pipeline: Pipeline, name: str | None = None) -> Candidate | None:
        """Return a plan with equal stages in this order; None where there are too few blocks.

        Operators between blocks are not counted: with a few blocks that stand for all, they may be cut otherwise.
        """
        if pipeline.stages * pipeline.chunks > self.num_blocks:
            return None
        name = name or f"{pipeline} x {candidate.name.partition(' x ')[2]}"
        solver, folded = self.ways.solver, self.ways.folded
        execution = candidate.execution.scheduled(
            name=pipeline.schedule, chunks_per_stage=pipeline.chunks, split=(), recompute_by_stage=()
        )
        try:
            prediction = solver.predicted(candidate.graph, execution, folded.repeats)
        except PlanError:
            return None
        return replace(candidate, name=name, execution=execution, prediction=prediction, fits=solver.fits(prediction))

    def share(self, way: Way) -> float:
        """Return the least share of its time alone that a step takes, over the orders that are allowed."""
        execution = way.space.run(DEFAULT, "none")
        execution = execution.scheduled(name="zero-bubble") if self.asked is None else execution
        return self.uneven(way.space.pipeline) * share_of_step(execution, over_time(way.space.mesh, way.many))

    def uneven(self, pipeline: Pipeline) -> float:
        """Return about the least work of the busiest of equal stages, as a part of an equal share of all work.

        Blocks are whole: of `times` equal ones, some stage has as many as an equal share, rounded up. It is 1 where
        devices are unlike, or stages have unlike numbers of them: the stage with more blocks may be the quicker one.
        """
        if pipeline.devices or self.ways.solver.cluster.parts:
            return 1.0
        stages, work_s = pipeline.stages, self.ways.work_by_block
        all_s = sum(work_s.values())
        busiest = (
            stages * ceil(times / stages) / times * work_s[block] / all_s
            for block, times in self.ways.folded.repeats.items()
        )
        return max([1.0, *busiest])

    def may_win(self, pipeline: Pipeline, fastest_s: float) -> bool:
        """Return whether equal shares of all work, with the least bubble of any order, beat the best plan by now."""
        stages = pipeline.stages
        chunks = [c for c in _CHUNKS if c * stages <= self.num_blocks]
        runs = [DEFAULT.scheduled(num_stages=stages, name="interleaved", chunks_per_stage=c) for c in chunks[-1:]]
        runs.append(DEFAULT.scheduled(num_stages=stages, name="zero-bubble"))
        many = Mesh((TIME,), (max(self.ways.counts),))
        ideal_s = self.ways.ideal_s(self.ways.modes[0]) / self.ways.solver.quicker(stages)
        return self.uneven(pipeline) * ideal_s * stages * min(share_of_step(run, many) for run in runs) < fastest_s


class _Staged(Queue):
    """A queue of ways with stages: it has floors of the shortest order, and estimates from other counts."""

    def __init__(self, ways: Ways, fitter: Fitter | None, fastest_s: float) -> None:
        super().__init__(ways, fitter, fastest_s)
        self.orders = Orders(ways)
        ways.fastest_s = fastest_s

    def _least_s(self, attempt: Attempt) -> float:
        if attempt.floor_s is None and attempt.dimension == "microbatches":
            return attempt.about_s  # from the step of another attempt
        ratio = self._least_ratio(attempt.way.space.pipeline)
        return attempt.about_s * (max(UNTRIED, ratio) if ratio < 1 else 1 + EXCESS * (ratio - 1))

    def floor_s(self, way: Way) -> float:
        floor_s, plain = super().floor_s(way), way.space.run(DEFAULT, "none")
        floor_s *= self.orders.share(way) / share_of_step(plain, over_time(way.space.mesh, way.many))
        return AGAIN * floor_s if self.is_crowded(way) else floor_s

    def is_crowded(self, way: Way) -> bool:
        """Return whether something has to be recomputed, and may be."""
        return len(self.ways.modes) > 1 and self.ways.crowding(way._replace(mode=self.modes[0])) > 1

    def likely_s(self, attempt: Attempt) -> float:
        step_s = super().likely_s(attempt)
        return step_s if attempt.is_judged and step_s < inf else attempt.about_s

    def _of_as_many(self, pipeline: Pipeline) -> list[Attempt]:
        """Return the attempts that have layouts, of as many stages."""
        return [attempt for attempt in self.solved if attempt.way.space.pipeline == pipeline]

    def _least_ratio(self, pipeline: Pipeline) -> float:
        """Return the least ratio of a step to its floor, where nothing is made again; about the least if none is known.

        Where something is, memory decides, and some blocks may keep more.
        """
        plain = (a for a in self._of_as_many(pipeline) if a.best.execution.recompute == "none")
        return min((self.likely_s(a) / a.floor_s for a in plain if a.floor_s), default=UNTRIED)

    def _best_s(self, pipeline: Pipeline) -> float:
        """Return the step of the best attempt of as many stages, about."""
        return min(map(self.likely_s, self._of_as_many(pipeline)), default=inf)

    def _refined(self, attempt: Attempt) -> Attempt:
        try:
            refined = super()._refined(attempt)
        except PlanError as error:  # also of a schedule that the microbatches or the blocks do not allow
            raise NoLayoutsError(str(error)) from error
        if not refined.plans and refined.floor_s and self.is_crowded(refined.way):
            self._propose_roomier(refined, refined.floor_s)
        elif not refined.plans and refined.floor_s and self._loses(refined):
            self._propose_fewer(refined, refined.floor_s)
        return refined

    def _propose_fewer(self, attempt: Attempt, floor_s: float) -> None:
        """Propose fewer microbatches in place of those that lose, while that helps."""
        way, origin = attempt.way, self.attempts.get(attempt.origin) if attempt.origin is not None else None
        if attempt.dimension == "fewer" and origin is not None and floor_s >= (origin.floor_s or 0.0):
            return
        for fewer, about_s in self._fewer(way, floor_s):
            self.propose(fewer, about_s, "fewer", way)

    def _fewer(self, way: Way, floor_s: float) -> Iterator[tuple[Way, float]]:
        """Yield the next fewer microbatches.

        They halve, at best, what a step takes above an equal share of the work, but for the bubble.
        """
        counts, stages = self.ways.counts_on(way.space), way.space.pipeline.stages
        ideal_s = stages * self.ways.ideal_s(self.modes[0]) / self.ways.solver.quicker(stages)
        for many in counts[: counts.index(way.many)][-1:]:
            fewer, alone_s = way._replace(many=many), floor_s / self.orders.share(way)
            yield fewer, self.orders.share(fewer) * (ideal_s + max(0.0, alone_s - ideal_s) / 2)

    def _propose_roomier(self, attempt: Attempt, floor_s: float) -> None:
        """Propose more microbatches in place of those that turn out to leave no room."""
        way, counts = attempt.way, self.ways.counts_on(attempt.way.space)
        for many in counts[counts.index(way.many) + 1 :][:1]:
            more = way._replace(many=many)
            ratio = self.orders.share(more) / self.orders.share(way)
            self.propose(more, floor_s / AGAIN * ratio, attempt.dimension, attempt.origin)

    def _deep(self, space: Space) -> int:
        """Return the index of the fewest microbatches that are enough for each stage, or of the most there are."""
        counts = self.ways.counts_on(space)
        return next((i for i, c in enumerate(counts) if c >= DEEP * space.pipeline.stages), len(counts) - 1)

    def _is_even(self, space: Space, many: int) -> bool:
        """Return whether all devices along the first axis have equally many examples."""
        return self.ways.pins.size // many % space.mesh.sizes[0] == 0

    def _begin_on(self, space: Space) -> None:
        for way, about_s in self.starts(space):
            self.propose(way, about_s)

    def starts(self, space: Space) -> Iterator[tuple[Way, float]]:
        """Yield a mesh in as many microbatches as fill the stages and leave room, and with examples for all devices.

        Both are estimated from one floor: the bubble shrinks with microbatches, as does what each of them keeps.
        """
        counts, deep = self.ways.counts_on(space), self._deep(space)
        known = next((i for i in range(deep, -1, -1) if self._is_even(space, counts[i])), deep)
        way = Way(space, self.modes[0], counts[known])
        floor_s = self.floor_s(way)
        if floor_s == inf:
            return
        roomy = self.fewest_roomy(space, self.modes[0], counts[known:]) if len(self.ways.modes) > 1 else counts[0]
        first = deep if roomy is None else max(deep, counts.index(roomy))
        even = [i for i in range(first + 1) if self._is_even(space, counts[i])]
        plain_s = floor_s / (AGAIN if self.is_crowded(way) else 1.0)
        for i in dict.fromkeys([first, *even[-1:]]):
            other = way._replace(many=counts[i])
            about_s = plain_s * self.orders.share(other) / self.orders.share(way)
            is_short = roomy is None or counts[i] < roomy
            yield other, about_s * (AGAIN if is_short else 1.0)
        if UNTRIED * floor_s >= self.fastest_s and not self.is_crowded(way):
            yield from self._fewer(way, floor_s)


class Stages(_Staged):
    """A queue of ways with stages, whose meshes may do anything."""

    def __init__(self, ways: Ways, fitter: Fitter, fastest_s: float) -> None:
        """`fastest_s`: the step of the best plan by now."""
        super().__init__(ways, fitter, fastest_s)
        self.lines = dict[Pipeline, list[Space]]()  # the meshes of each number of stages, by their inner axis
        for spaces in ways.pins.staged.values():
            pipeline = spaces[0].pipeline
            if self._divides(pipeline) and self.orders.may_win(pipeline, fastest_s):
                self.lines[pipeline] = sorted(spaces, key=_inner)
        machine = machine_size(ways.solver.cluster)
        for line in self.lines.values():
            space = min(line, key=lambda space: abs(_inner(space) - machine))
            self._to_begin.append(partial(self._begin_on, space))

    def _divides(self, pipeline: Pipeline) -> bool:
        """Return whether some number of microbatches is a multiple of the stages, where these are interleaved."""
        stages = pipeline.stages
        if pipeline.chunks == 1 or any(many % stages == 0 for many in self.ways.counts):
            return True
        self.ways.refused = NoLayoutsError(
            f"schedule='interleaved': the batch of {self.ways.pins.size} is cut into no number of microbatches that "
            f"is a multiple of the {stages} stages; choose another schedule or other stages"
        )
        return False

    def plans(self, way: Way) -> list[Candidate]:
        """Return the layouts with the least recomputation with which they fit, in all orders."""
        best: Candidate | None = None
        for mode in self.modes[-1 if self.is_crowded(way) else 0 :]:
            new = self.ways.solved(way._replace(mode=mode))
            best = new if best is None else min(best, new, key=rank)
            if best.fits:
                break
        assert best is not None
        return [best, *self.orders.of(best)]

    def judged(self, attempt: Attempt, fitter: Fitter) -> Attempt:
        """Return the attempt with its blocks spread, and with what it keeps in each order that may win."""
        plans, best, solver = list(attempt.plans), attempt.best, self.ways.solver
        for plan in sorted({id(c): c for c in (best, attempt.plans[0])}.values(), key=rank):
            if (spread := self._spread(plan, best)) is not plan:
                plans.append(spread)
                best = min(best, spread, key=rank)
        if not best.execution.schedule.split:
            plans.append(spread_out(solver, best, self.ways.folded.repeats))
        self._count([c.prediction.step_s for c in plans if c.fits])
        able = {(id(c.solved), c.execution): c for c in plans if may_keep_more(c)}
        is_best = any(c.fits and c.prediction.step_s <= self.fastest_s for c in plans)
        near = NEAR if is_best else 1.0  # the best is improved in other orders too
        fitted, ratio = list(attempt.fitted), 1.0  # the least ratio of what came of the layouts to the estimate
        for plan in sorted(able.values(), key=kept_s):
            most_s = near * self.fastest_s
            if kept_s(plan) * (1.0 if is_best else ratio) >= most_s or (self.fastest_s < inf and fitter.is_far(plan)):
                continue
            fitted_plan = fitter.fitted(plan, most_s)
            step_s = most_s if fitted_plan is None else fitted_plan.mixed_s(self.limit_bytes)
            ratio = max(1.0, ALIKE * step_s / kept_s(plan)) if 0 < kept_s(plan) < inf > step_s else ratio
            if fitted_plan is not None:
                fitted.append(fitted_plan)
                self._count([step_s] if fitted_plan.candidate.fits else [])
        return replace(attempt, plans=tuple(plans), fitted=tuple(fitted))

    def _spread(self, candidate: Candidate, rival: Candidate) -> Candidate:
        """Return a plan whose stages use their room, if memory decides: they have different microbatches in flight."""
        run, prediction, solver = candidate.execution, candidate.prediction, self.ways.solver
        if run.schedule.chunks_per_stage > 1 or (candidate.fits and run.recompute == "none"):
            return candidate
        rival_s = min(self.fastest_s, rival.prediction.step_s if rival.fits else inf)
        if UNSPREAD * prediction.step_s >= rival_s or _is_far_too_large(candidate, self.ways):
            return candidate
        modes: list[Recompute] = [mode for mode in RECOMPUTES if mode in self.ways.modes]
        return spread_out(solver, candidate, self.ways.folded.repeats, modes if len(modes) > 1 else ())

    @property
    def dimensions(self) -> Mapping[str, Neighbours]:
        return {"microbatches": self._microbatches, "mesh": self._meshes, "stages": self._stages}

    def is_followed(self, attempt: Attempt, dimension: str) -> bool:
        """Follow slow attempts where memory is short: more microbatches may leave room."""
        if dimension == "fewer" or (dimension == "microbatches" and _is_short(attempt.best)):
            return True
        return self.likely_s(attempt) <= NEAR * self._best_s(attempt.way.space.pipeline)

    def _microbatches(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield more microbatches; where memory does not decide, fewer too."""
        if not self.is_followed(attempt, "microbatches"):
            return
        way, counts, best = attempt.way, self.ways.counts_on(attempt.way.space), attempt.best
        number, likely_s, floor_s = counts.index(way.many), self.likely_s(attempt), attempt.floor_s or 0.0
        is_short = _is_short(best)
        if number + 1 < len(counts):
            more = way._replace(many=counts[number + 1])
            ratio = self.orders.share(more) / self.orders.share(way)
            yield more, ratio * (floor_s if is_short else max(floor_s, likely_s))
        if number and not is_short:
            fewer = way._replace(many=counts[number - 1])
            yield fewer, max(floor_s, SAVES * likely_s)

    def _meshes(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield the meshes with the next smaller and larger inner axis, each where it begins."""
        likely_s = self.likely_s(attempt)
        if self.is_followed(attempt, "mesh") and likely_s <= OTHER_LAYOUTS * self.fastest_s:
            line = self.lines[attempt.way.space.pipeline]
            i = line.index(attempt.way.space)
            for space in line[max(0, i - 1) : i + 2]:
                if all(way.space != space for way in self.attempts):
                    yield from self.starts(space)

    def _stages(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield half and twice as many stages, such that each device has as much of a microbatch."""
        pipeline = attempt.way.space.pipeline
        if self.likely_s(attempt) > CLOSE * self.fastest_s or pipeline.devices:
            return
        mesh, many = attempt.way.space.mesh, attempt.way.many
        for other, line in self.lines.items():
            if other.devices or max(other.stages, pipeline.stages) != 2 * min(other.stages, pipeline.stages):
                continue
            by_inner = sorted(line, key=lambda space: abs(log(_inner(space) / mesh.sizes[-1])))
            alike = min(by_inner, key=lambda space: len(space.mesh) != len(mesh))
            for space in dict.fromkeys((alike, by_inner[0])):
                share = many * mesh.num_devices / space.mesh.num_devices
                count = min(self.ways.counts_on(space), key=lambda n: abs(log(n / share)))
                like = Way(space, attempt.way.mode, count)
                yield like, self.floor_s(like)


class StagesByHand(_Staged):
    """A queue of plans with stages as people make them, against each other alone.

    They have ZeRO-1, tensor parallelism within a machine, the least recomputation that fits, equal stages, and only the
    orders that Megatron-LM has. Whether other plans are faster does not count: these are what those are compared with.
    """

    def __init__(self, ways: Ways, likely: Queue) -> None:
        """`likely`: what was tried freely; these have as many stages as what came near there."""
        super().__init__(ways, None, inf)
        schedule, cluster = self.orders.asked, ways.solver.cluster
        plain = Pipeline(1, schedule or "1f1b", 2 if schedule == "interleaved" else 1)
        near_s = BEHIND * min((attempt.about_s for attempt in likely.solved), default=inf)
        near = [attempt.way.space.pipeline for attempt in likely.solved if attempt.about_s <= near_s]
        self._solved = 0
        for stages in dict.fromkeys(pipeline.stages for pipeline in near if not pipeline.devices):
            for space in staged_by_hand(cluster, plain._replace(stages=stages)):
                self._to_begin.append(partial(self._begin_on, space))

    @property
    def dimensions(self) -> Mapping[str, Neighbours]:
        return {"microbatches": self._microbatches}

    def plans(self, way: Way) -> list[Candidate]:
        """Return plans in every order, with the least recomputation with which the first of them fits."""
        space, ways, tried = way.space, self.ways, list[Candidate]()
        modes = list(ways.modes)
        del modes[: self.is_crowded(way)]  # the first mode keeps too much then
        while modes:
            new = ways.solver.solve(
                ways.folded, over_time(space.mesh, way.many), space.roles, space.name,
                space.run(ways.execution, modes.pop(0)), space.zeros, space.zeros[-1],
            )  # fmt: skip
            tried.append(new)
            if _is_far_too_large(new, ways):
                del modes[:-1]
            if new.fits:
                tried += self.orders.interleaved(new, space)  # other orders keep no less
                break
        self._solved += 1
        return tried

    def _loses(self, attempt: Attempt) -> bool:
        return not attempt.plans and (self._solved >= MOST_BY_HAND or super()._loses(attempt))

    def is_followed(self, attempt: Attempt, dimension: str) -> bool:
        return dimension == "fewer" or self.likely_s(attempt) <= self._best_s(attempt.way.space.pipeline)

    def _microbatches(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield more and fewer microbatches."""
        way, counts, floor_s = attempt.way, self.ways.counts_on(attempt.way.space), attempt.floor_s or 0.0
        number = counts.index(way.many)
        for i in (number - 1, number + 1):
            if 0 <= i < len(counts):
                neighbour = way._replace(many=counts[i])
                yield (
                    neighbour,
                    floor_s * min(1.0, self.orders.share(neighbour) / self.orders.share(way)) * (1 - LITTLE),
                )


def _is_far_too_large(candidate: Candidate, ways: Ways) -> bool:
    """Return whether a plan cannot fit once blocks are moved to stages with room, or a little more is made again."""
    prediction = candidate.prediction
    return prediction.memory.total_bytes > NEARLY * ways.solver.limit_of(prediction.device_bytes)


def _is_short(candidate: Candidate) -> bool:
    """Return whether a plan keeps less than it might with more memory."""
    run = candidate.execution
    return not candidate.fits or run.recompute != "none" or bool(run.schedule.recompute_by_stage)


def _inner(space: Space) -> int:
    return space.mesh.sizes[-1]
