"""Plans with pipeline stages: how many, the mesh of each, microbatches and the order in which they run.

Layouts are chosen once, on the mesh of one stage, for all blocks: as without stages, with a stage's share of the bytes.
A stage takes an equal share of the time, and the bubble is a factor that grows with the stages and falls with the
microbatches (`solving.share_of_step`). So the floors of steps say which numbers of stages and which meshes are worth a
try. The timeline judges these; in it, the blocks are spread by what each takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import inf, log
from typing import NamedTuple, TypeVar

from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import DEFAULT
from shardwright.pcg.step.meshes import stage_meshes
from shardwright.pcg.step.parameters import blocks_of
from shardwright.pcg.step.pipelining import ScheduleName
from shardwright.pcg.step.recompute import RECOMPUTES, Recompute
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.exact.solving import Candidate, over_time, rank, share_of_step
from shardwright.search.request.spaces import Pipeline, Space, divided, machine_size, staged_by_hand
from shardwright.search.tree.spreading import spread_out
from shardwright.search.tree.tuning import UNTRIED, Tuner

_DEEP = 4
"""The microbatches per stage that are tried first: the bubble is a fifth of the step."""
_PATIENCE = 1
"""The meshes in a row that are no better than the best of their number of stages, after which no others are tried."""
_LIKELY = 1.05
"""The factor on the least floor up to which meshes are likely in other numbers of stages too."""
_CLOSE = 1.02
"""The factor on the best step up to which meshes may be better in other numbers of stages."""
_AGAIN = 4 / 3
"""The factor on a step, about, where there is no room for values: forward is a third of its work."""
_MOST_BY_HAND = 4
"""The most meshes by hand with a number of microbatches, over all numbers of stages."""
_OTHERS: tuple[ScheduleName, ...] = ("zero-bubble", "eager-1f1b")
"""The schedules tried beside `1f1b` and `interleaved`; `gpipe` keeps more than `1f1b` does and saves nothing."""
_CHUNKS = (2, 4, 8)
"""The chunks of a stage, where stages are interleaved."""
_NEARLY = 1.5
"""The factor on the memory up to which a plan may fit once blocks are moved to stages that have room, or once a little
more is recomputed.
"""
_WITHOUT = 0.7
"""The part of a step that is left, at least, once stages that have room for it recompute nothing."""

_A = TypeVar("_A")
_B = TypeVar("_B")


class _Way(NamedTuple):
    """A mesh with one of its numbers of microbatches, and about the least time of its plans."""

    floor_s: float
    space: Space
    number: int


class Stager:
    """A search for stages for the graph of a tuner.

    Attributes:
        tried: all candidates that were solved.
    """

    def __init__(self, tuner: Tuner, fastest_s: float) -> None:
        """`fastest_s`: the step of the best plan by now."""
        self.tuner, self.fastest_s, self.tried = tuner, fastest_s, list[Candidate]()
        tuner.fastest_s = fastest_s
        self.modes = list(tuner.modes)
        del self.modes[1:-1]  # modes in between are found value by value
        folded = tuner.folded
        self._num_blocks = len(blocks_of(folded.graph)) + sum(times - 1 for times in folded.repeats.values())
        self._bests: dict[tuple[int, tuple[int, ...]], Candidate] = {}  # by number of stages, and devices of each
        self._over = inf  # the least factor on its floor that a step took where all is kept
        self._inner = machine_size(tuner.solver.cluster)  # the size of the inner axis of the likeliest mesh
        self._unlikely: list[int] | None = None  # the inner axes of unlikely meshes, once they are known
        self._fewer = 0  # the number of steps down from the count tried first to the least floor

    def plans(self) -> Iterator[Candidate]:
        """Yield plans that are the best of their number of stages by then.

        Stages of unlike sizes come first. Of equal ones, the number of the least floor is tried; then more stages, or
        fewer, while steps get shorter. Then every number is judged once more by its own steps: how steps compare with
        floors differs where they overlap otherwise. A large model has one number only.
        """
        staged = [own for own in self.tuner.pins.staged.values() if self._divides(own[0])]
        able = [own for own in staged if self._may_win(own[0].pipeline.stages)]
        for own in able:
            if own[0].pipeline.devices:  # they have no neighbours among equal ones
                yield from self._of(self._least(own))
        promising = [own for own in able if not own[0].pipeline.devices]
        if not promising:
            return
        promising.sort(key=lambda own: own[0].pipeline.stages)
        known = _while_less(promising, len(promising) // 2, self._outlook, _least_s)
        best, left, start = list[Candidate](), set(range(len(promising))), 0
        for start in sorted(known, key=lambda i: _least_s(known[i])):
            left.remove(start)
            best = yield from self._of([*known[start], *self._least(self._likely(promising[start]))])
            if self.tuner.folded.is_large:
                return
            if best and best[0].fits:
                break
        for step in sorted((1, -1), key=lambda step: _least_s(known.get(start + step, ()))):
            i, before = start + step, best
            while best and best[0].fits and i in left:
                close = [c for c in best if rank(c) <= (False, _CLOSE * rank(best[0])[1])]
                like = [way for c in close for way in self._like(c, promising[i])]
                found = yield from self._of(like, known.get(i, ()), best[0])
                if not found or rank(found[0]) >= rank(best[0]):
                    break
                best, i = found, i + step
            if best is not before:  # then there is nothing to find on the other side
                break
        for own in promising:
            self._over, self._inner = inf, machine_size(self.tuner.solver.cluster)
            yield from self._of(self._less_idle(self._least(own)))

    def _of(
        self, first: Sequence[_Way], others: Sequence[_Way] = (), rival: Candidate | None = None
    ) -> Generator[Candidate, None, list[Candidate]]:
        """Yield plans of one number of stages, each the best by then; return the best of each mesh, the best first.

        The mesh of the least floor is tried first, then others until they are no better; none is tried beyond a mesh
        that is worse than its neighbour. `rival`: the best of another number, against which one of the `first` has to
        win.
        """
        ahead, found, missed = list({way[1:]: way for way in (*first, *others)}.values()), list[Candidate](), 0
        while missed < _PATIENCE and (ahead := [way for way in ahead if not self._loses(way)]):
            way, own = min([way for way in first if way in ahead] or ahead, key=_floor_s), None
            number = way.space.pipeline.stages, way.space.pipeline.devices
            for plan in self._on(way):
                own = plan if own is None else min(own, plan, key=rank)
                if number not in self._bests or rank(plan) < rank(self._bests[number]):
                    self._bests[number] = plan
                    yield self.tuner.told(plan)
            ahead = [w for w in ahead if w.space != way.space]
            if own is None:
                continue
            found = sorted([*found, own], key=rank)
            is_behind = rival is not None and rank(found[0]) >= rank(rival) and not any(w in ahead for w in first)
            if self.tuner.folded.is_large or is_behind:
                break
            worse = [c.mesh.sizes[-1] for c in found[1:]]
            ahead = [w for w in ahead if not _is_beyond(_inner(w.space), found[0].mesh.sizes[-1], worse)]
            missed += found[0] is not own and found[0].fits
        return found

    def _on(self, way: _Way) -> Iterator[Candidate]:
        """Yield plans on a mesh, from a number of microbatches to the next ones while that is better.

        Where memory decides, more are tried; else more or fewer, the least floor first.
        """
        ahead, best, tried = [way], None, set[int]()
        while ahead := [way for way in ahead if not self._loses(way)]:
            way = min(ahead, key=_floor_s)
            ahead.remove(way)
            floor_s, space, number = way
            tried.add(number)
            try:
                found = self._best(way)
            except PlanError as error:  # also of a schedule that the microbatches or the blocks do not allow
                self.tuner.refused = NoLayoutsError(str(error))
                continue
            yield found
            if not self.tuner.folded.is_large and (best is None or rank(found) < rank(best)):
                best = found
                is_short = (
                    not found.fits or found.execution.recompute != "none" or found.execution.schedule.recompute_by_stage
                )
                beside = [number + 1] if is_short else [number - 1, number + 1]
                more = [self._way(space, n) for n in self._able(space, beside, number) if n not in tried]
                ahead += [w for w in more if w.number > number or w.floor_s < floor_s or not found.is_tight]

    def _less_idle(self, ways: Sequence[_Way]) -> list[_Way]:
        """Return these ways and, while the floor falls, the best one in more microbatches, as stages idle less."""
        found = list(ways)
        best = min(found, key=_floor_s)
        while best.number + 1 < len(self._counts(best.space)):
            if (more := self._way(best.space, best.number + 1)).floor_s >= best.floor_s:
                break
            found.append(best := more)
        return found

    def _like(self, rival: Candidate, spaces: Sequence[Space]) -> Iterator[_Way]:
        """Yield the ways in which each device has as much of a microbatch as in a plan of another number of stages.

        They are on a mesh of as many axes, and on the mesh whose inner axis is as large.
        """
        sizes, many = rival.mesh.devices.sizes, rival.mesh.num_microbatches
        by_inner = sorted(spaces, key=lambda own: abs(log(_inner(own) / sizes[-1])))
        for space in dict.fromkeys((min(by_inner, key=lambda own: len(own.mesh) != len(sizes)), by_inner[0])):
            counts = self._counts(space)
            share = many * rival.mesh.num_devices / space.mesh.num_devices
            yield self._way(space, min(range(len(counts)), key=lambda n: abs(log(counts[n] / share))))

    def by_hand(self) -> Iterator[Candidate]:
        """Yield plans as people make them, in as many equal stages as were tried, each better than the last.

        They have ZeRO-1, tensor parallelism within a machine, the least recomputation that fits, equal stages, and only
        the orders that Megatron-LM has. Whether other plans are faster does not count: these are what those are
        compared with.
        """
        asked, best, over = self.tuner.pins.asked.schedule, None, inf
        own, ahead = Pipeline(1, asked or "1f1b", 2 if asked == "interleaved" else 1), list[_Way]()
        schedules = [candidate.execution.schedule for candidate in self.tried]
        for stages in dict.fromkeys(one.num_stages for one in schedules if not one.stage_sizes):
            ahead += self._least(staged_by_hand(self.tuner.solver.cluster, own._replace(stages=stages)))
        seen = {way[1:] for way in ahead}
        for _ in range(_MOST_BY_HAND):
            way = min(ahead, key=_floor_s, default=None)
            if way is None or way.floor_s == inf:
                break
            if best and best.fits and _usual(over) * way.floor_s >= best.prediction.step_s:
                break
            ahead.remove(way)
            _, space, number = way
            try:
                found = min(self._ways_by_hand(space, self._counts(space)[number]), key=rank)
            except PlanError:
                continue
            over = min(over, found.prediction.step_s / way.floor_s)
            if not found.fits:
                ahead = [other for other in ahead if not self._needs_more(other, way)]
            if best is None or rank(found) < rank(best):
                best = found
                yield found
                beside = [n for n in (number - 1, number + 1) if 0 <= n < len(self._counts(space))]
                ahead += [self._way(space, n) for n in beside if (space, n) not in seen]
                seen |= {(space, n) for n in beside}

    def _ways_by_hand(self, space: Space, count: int) -> Iterator[Candidate]:
        """Yield plans in every order, with the least recomputation with which the first of them fits."""
        solver, pipeline, modes = self.tuner.solver, space.pipeline, list(self.tuner.modes)
        del modes[: self._is_crowded(space, count)]  # the first mode keeps too much then
        while modes:
            found = solver.solve(
                self.tuner.folded, over_time(space.mesh, count), space.roles, space.name,
                space.run(self.tuner.execution, modes.pop(0)), space.zeros, space.zeros[-1],
            )  # fmt: skip
            yield found
            if self._is_far_too_large(found):
                del modes[:-1]
            interleaved = (pipeline._replace(schedule="interleaved", chunks=chunks) for chunks in _CHUNKS)
            free = self.tuner.pins.asked.schedule is None and count % pipeline.stages == 0
            for order in interleaved if free and found.fits else ():  # other orders keep no less
                name = space.name.replace(str(pipeline), str(order))
                if (own := self._ordered(found, order, name)) is not None:
                    yield own
            if found.fits:
                break

    def _needs_more(self, way: _Way, other: _Way) -> bool:
        """Return whether a plan by hand of as many stages has no smaller parts of weights and batch on a device."""
        if way.space.pipeline != other.space.pipeline:
            return False
        (groups, parts), (other_groups, other_parts) = (
            (own.space.data_degree, self._counts(own.space)[own.number] * own.space.data_degree) for own in (way, other)
        )
        return groups >= other_groups and parts <= other_parts

    def _divides(self, space: Space) -> bool:
        """Return whether some number of microbatches is a multiple of the stages, where these are interleaved."""
        stages = space.pipeline.stages
        if space.pipeline.chunks == 1 or any(count % stages == 0 for count in self.tuner.counts):
            return True
        self.tuner.refused = NoLayoutsError(
            f"schedule='interleaved': the batch of {self.tuner.pins.size} is cut into no number of microbatches that "
            f"is a multiple of the {stages} stages; choose another schedule or other stages"
        )
        return False

    def _may_win(self, stages: int) -> bool:
        """Return whether equal shares of all work, with the least bubble of any schedule, beat the best plan by now."""
        chunks = [c for c in _CHUNKS if c * stages <= self._num_blocks]
        runs = [DEFAULT.scheduled(num_stages=stages, name="interleaved", chunks_per_stage=c) for c in chunks[-1:]]
        runs.append(DEFAULT.scheduled(num_stages=stages, name="zero-bubble"))
        many = Mesh((TIME,), (max(self.tuner.counts),))
        ideal_s = self.tuner.ideal_s(self.modes[0]) / self.tuner.solver.quicker(stages)
        return ideal_s * stages * min(share_of_step(run, many) for run in runs) < self.fastest_s

    def _best(self, way: _Way) -> Candidate:
        """Return the plan of a way in the order in which it is the fastest."""
        plain = self._fitting(way.space, self._counts(way.space)[way.number])
        others = list(self._scheduled(plain))
        self.tried += others
        found = min([plain, *others], key=rank)
        for own in sorted({id(c): c for c in (found, plain)}.values(), key=rank):
            found = min(found, self._spread(own, found), key=rank)
        if not found.execution.schedule.split:
            found = spread_out(self.tuner.solver, found, self.tuner.folded.repeats)
        self.fastest_s = min(self.fastest_s, found.prediction.step_s if found.fits else inf)
        run = found.execution  # where something is recomputed, memory decides, and some blocks may keep more
        if run.recompute == "none" and not run.schedule.recompute_by_stage:
            self._over = min(self._over, found.prediction.step_s / way.floor_s)
        return found

    def _spread(self, found: Candidate, rival: Candidate) -> Candidate:
        """Return a plan whose stages use their room, if memory decides: they have different microbatches in flight."""
        run, prediction, solver = found.execution, found.prediction, self.tuner.solver
        if run.schedule.chunks_per_stage > 1 or (found.fits and run.recompute == "none"):
            return found
        rival_s = min(self.fastest_s, rival.prediction.step_s if rival.fits else inf)
        if _WITHOUT * prediction.step_s >= rival_s:
            return found
        if self._is_far_too_large(found):
            return found
        modes: list[Recompute] = [mode for mode in RECOMPUTES if mode in self.tuner.modes]
        own = spread_out(solver, found, self.tuner.folded.repeats, modes if len(modes) > 1 else ())
        self.tried.append(own)
        return own

    def _is_far_too_large(self, found: Candidate) -> bool:
        prediction = found.prediction
        return prediction.memory.total_bytes > _NEARLY * self.tuner.solver.limit_of(prediction.device_bytes)

    def _way(self, space: Space, number: int) -> _Way:
        count = self._counts(space)[number]
        floor_s = self._floor_s(space, count)
        return _Way(_AGAIN * floor_s if self._is_crowded(space, count) else floor_s, space, number)

    def _is_crowded(self, space: Space, count: int) -> bool:
        """Return whether something has to be recomputed, and may be."""
        return len(self.modes) > 1 and self.tuner.crowding(space, self.modes[0], count) > 1

    def _loses(self, way: _Way) -> bool:
        """Return whether a way loses, by how steps compare with floors; half of their excess may be saved."""
        return way.floor_s == inf or way.floor_s * _usual(self._over) >= self.fastest_s

    def _outlook(self, spaces: Sequence[Space]) -> list[_Way]:
        """Return the likeliest mesh of a number of stages; once that is known, the mesh that is like it."""
        return self._likeliest(spaces) if self._unlikely is None else self._first(_near(spaces, self._inner))

    def _likely(self, spaces: Sequence[Space]) -> list[Space]:
        """Return the spaces without those that lie where meshes of another number of stages are unlikely."""
        return [space for space in spaces if not _is_beyond(_inner(space), self._inner, self._unlikely or ())]

    def _least(self, spaces: Sequence[Space]) -> list[_Way]:
        """Return the ways on the mesh of the least floor, and on the meshes that lead to it.

        The first mesh has a machine as its inner axis, or is like the likeliest mesh by now. Go on to the next smaller
        or larger inner axis while the floor falls. No spaces give no ways.
        """
        if not spaces:
            return []
        line = sorted(spaces, key=_inner)
        start = line.index(_near(line, self._inner))
        return list(chain.from_iterable(_while_less(line, start, self._first, _least_s).values()))

    def _likeliest(self, spaces: Sequence[Space]) -> list[_Way]:
        """Return `_least`, and ways with fewer microbatches while the floor falls. Other numbers of stages begin so."""
        found = self._least(spaces)
        best = min(found, key=_floor_s)
        while best.number and not self._is_crowded(best.space, self._counts(best.space)[best.number - 1]):
            if (fewer := self._way(best.space, best.number - 1)).floor_s >= best.floor_s:
                break
            found.append(best := fewer)
            self._fewer += 1
        likely = {_inner(way.space) for way in found if way.floor_s <= _LIKELY * best.floor_s}
        self._inner, self._unlikely = _inner(best.space), [i for way in found if (i := _inner(way.space)) not in likely]
        return found

    def _first(self, space: Space) -> list[_Way]:
        """Return ways with the number of microbatches to try first, or fewer, so that all devices have examples."""
        counts, size = self._counts(space), self.tuner.pins.size
        deep = roomy = self._deep(space, _DEEP)
        while self._is_crowded(space, counts[roomy]) and roomy + 1 < len(counts):
            needed = self.tuner.crowding(space, self.modes[0], counts[roomy]) * counts[roomy]  # at least so many
            roomy = max(roomy + 1, self._deep(space, needed / space.pipeline.stages))
        first = max(0, (deep if self._is_crowded(space, counts[roomy]) else roomy) - self._fewer)
        even = [i for i in range(first + 1) if size // counts[i] % space.mesh.sizes[0] == 0]
        likely = list(dict.fromkeys([first, *even[-1:]]))
        return [self._way(space, number) for number in self._able(space, likely) or likely]

    def _able(self, space: Space, numbers: Sequence[int], number: int | None = None) -> list[int]:
        """Return the numbers that leave room for what is kept and, if `number` does, examples for all devices.

        Room counts only if `number` leaves it: where none does, more microbatches need less of it.
        """
        counts, size, outer = self._counts(space), self.tuner.pins.size, space.mesh.sizes[0]
        is_even = number is not None and size // counts[number] % outer == 0
        is_short = number is not None and self._is_crowded(space, counts[number])
        there = [n for n in numbers if 0 <= n < len(counts) and (is_short or not self._is_crowded(space, counts[n]))]
        return [n for n in there if not is_even or size // counts[n] % outer == 0]

    def _deep(self, space: Space, deep: float) -> int:
        """Return the fewest microbatches that are `deep` for each stage, or the most there are."""
        counts = self._counts(space)
        return next((i for i, c in enumerate(counts) if c >= deep * space.pipeline.stages), len(counts) - 1)

    def _counts(self, space: Space) -> list[int]:
        """Return the numbers of microbatches to try: at least one for each stage, if the batch can be cut so far."""
        stages, chunks = space.pipeline.stages, space.pipeline.chunks
        found = divided(space, self.tuner.counts, self.tuner.pins.size)
        return [c for c in found if c >= stages and (chunks == 1 or c % stages == 0)] or found[-1:]

    def _floor_s(self, space: Space, count: int) -> float:
        """Return `Tuner.floor_s` of the schedule with the least bubble, if none is asked for."""
        own, floor_s = space.run(DEFAULT, "none"), self.tuner.floor_s(space, self.modes[0], count)
        if self.tuner.pins.asked.schedule is not None:
            return floor_s
        mesh, best = over_time(space.mesh, count), own.scheduled(name="zero-bubble")
        return floor_s * share_of_step(best, mesh) / share_of_step(own, mesh)

    def _fitting(self, space: Space, count: int) -> Candidate:
        """Return the plan with the least recomputation with which it fits."""
        best: Candidate | None = None
        for mode in self.modes[-1 if self._is_crowded(space, count) else 0 :]:
            found = self.tuner.tried_with(space, mode, count)
            self.tried.append(found)
            best = found if best is None else min(best, found, key=rank)
            if found.fits:
                break
        assert best is not None
        return best

    def _scheduled(self, found: Candidate) -> Iterator[Candidate]:
        """Yield the same layouts in other orders, where none is asked for."""
        stages, devices = found.execution.schedule.num_stages, tuple[int, ...]()
        if found.execution.schedule.stage_sizes:
            devices = tuple(mesh.num_devices for mesh in stage_meshes(found.mesh, found.execution))
        if self.tuner.pins.asked.schedule not in (None, "interleaved"):
            return
        divides, best = found.mesh.num_microbatches % stages == 0, None
        for chunks in reversed(_CHUNKS) if divides else ():  # more chunks shorten the bubble, and send more
            own = self._ordered(found, Pipeline(stages, "interleaved", chunks, devices))
            if own is not None:
                yield own
                if best is not None and rank(own) >= rank(best):
                    break
                best = own
        if self.tuner.pins.asked.schedule is None:
            for schedule in _OTHERS:
                if (own := self._ordered(found, Pipeline(stages, schedule, 1, devices))) is not None:
                    yield own

    def _ordered(self, found: Candidate, pipeline: Pipeline, name: str | None = None) -> Candidate | None:
        """Return a plan with equal stages in this order; None where there are too few blocks.

        Operators between blocks are not counted: with a few blocks that stand for all, they may be cut otherwise.
        """
        if pipeline.stages * pipeline.chunks > self._num_blocks:
            return None
        name = name or f"{pipeline} x {found.name.partition(' x ')[2]}"
        solver, folded = self.tuner.solver, self.tuner.folded
        execution = found.execution.scheduled(
            name=pipeline.schedule, chunks_per_stage=pipeline.chunks, split=(), recompute_by_stage=()
        )
        try:
            prediction = solver.predicted(found.graph, execution, folded.repeats)
        except PlanError:
            return None
        return replace(found, name=name, execution=execution, prediction=prediction, fits=solver.fits(prediction))


def _while_less(
    line: Sequence[_A], start: int, known: Callable[[_A], _B], measure: Callable[[_B], float]
) -> dict[int, _B]:
    """Return results of `known` from the entry at `start` onwards while they get less, or else backwards.

    The keys are places in `line`.
    """
    found = dict[int, _B]()

    def at(i: int) -> float:
        if i not in found:
            found[i] = known(line[i])
        return measure(found[i])

    for step in (1, -1):
        i = start
        while 0 <= i + step < len(line) and at(i + step) < at(i):
            i += step
        if i != start:
            break
    if line:
        at(start)
    return found


def _least_s(ways: Sequence[_Way]) -> float:
    return min(map(_floor_s, ways), default=inf)


def _floor_s(way: _Way) -> float:
    return way.floor_s


def _usual(over: float) -> float:
    """Return the factor on its floor that a step may take, where others took `over` or more: half may be saved."""
    return (1 + max(1.0, over)) / 2 if over < inf else UNTRIED


def _inner(space: Space) -> int:
    return space.mesh.sizes[-1]


def _near(spaces: Sequence[Space], inner: int) -> Space:
    """Return the space whose inner axis is nearest to this size."""
    return min(spaces, key=lambda space: abs(_inner(space) - inner))


def _is_beyond(inner: int, best: int, worse: Sequence[int]) -> bool:
    """Return whether an inner axis has one of these sizes or, as seen from the best, lies beyond it."""
    least, most = sorted((inner, best))
    return any(least <= size <= most and size != best for size in worse)
