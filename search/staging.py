"""Plans with pipeline stages: how many, the mesh of each, microbatches and the order in which they run.

Layouts are chosen once, on the mesh of one stage, for all blocks: as without stages, with a stage's share of the bytes.
A stage takes an equal share of the time, and the bubble is a factor that grows with the stages and falls with the
microbatches (`solving.share_of_step`). So floors of what a step takes say which numbers of stages and which meshes are
worth a try; the timeline judges these, in which the blocks are spread by what each takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from shardwright.pcg.errors import PlanError
from shardwright.search.problem import NoLayoutsError
from shardwright.search.solving import Candidate, rank
from shardwright.search.spaces import Pipeline, Space, divided, machine_size
from shardwright.search.tuning import Tuner

_DEEP = 4
"""So many microbatches a stage are tried first: the bubble is a fifth of the step."""
_MOST_MESHES = 3
_MOST_MISSED = 2
_CHUNKS = (2, 4, 8)


class Stager:
    """Tries stages for the graph of a tuner.

    Attributes:
        tried: all that was solved.
    """

    def __init__(self, tuner: Tuner, fastest_s: float) -> None:
        """`fastest_s`: the step of the best plan by now."""
        self.tuner, self.fastest_s, self.tried = tuner, fastest_s, list[Candidate]()
        tuner.fastest_s = fastest_s
        self._mode = 0  # what is made again where that fitted last

    def plans(self) -> Iterator[Candidate]:
        """The best plan of each number of stages that may win, the fewest first.

        The bubble grows with their number: where few of them win nothing, no larger one is tried, but for memory.
        """
        missed = 0
        for spaces in self.tuner.pins.staged.values():
            if missed >= _MOST_MISSED and self.fastest_s < inf:
                return
            best = min(self._on(spaces), key=rank, default=None)
            if best is None:
                missed += 1
                continue
            best = min([best, *self._scheduled(best)], key=rank)
            missed = 0 if best.fits and best.prediction.step_s < self.fastest_s else missed + 1
            self.fastest_s = min(self.fastest_s, best.prediction.step_s if best.fits else inf)
            yield self.tuner.told(best)

    def _on(self, spaces: Sequence[Space]) -> Iterator[Candidate]:
        """The best of each mesh that may win, of the likeliest few."""
        best_s, floors = self.fastest_s, sorted(self._floors(spaces), key=lambda entry: entry[0])
        for floor_s, space in floors[:_MOST_MESHES]:
            if floor_s * self.tuner.over(space) >= best_s:
                continue
            try:
                found = self._counted(space)
            except NoLayoutsError as error:
                self.tuner.refused = error
                continue
            best_s = min(best_s, found.prediction.step_s if found.fits else inf)
            yield found

    def _floors(self, spaces: Sequence[Space]) -> Iterator[tuple[float, Space]]:
        """About what no plan takes less than, of the mesh where that is least and of those that lead to it.

        From the mesh whose inner axis is a machine to the next smaller or larger inner axis, while that is less.
        """
        line, machine = sorted(spaces, key=_inner), machine_size(self.tuner.solver.cluster)
        near = min(range(len(line)), key=lambda i: abs(_inner(line[i]) - machine))
        known = dict[int, float]()

        def floor_s(i: int) -> float:
            if i not in known:
                counts = self._counts(line[i])
                known[i] = self.tuner.floor_s(line[i], self.tuner.modes[0], counts[_first(counts, line[i])])
            return known[i]

        for way in (1, -1):
            at = near
            while 0 <= at + way < len(line) and floor_s(at + way) < floor_s(at):
                at += way
        floor_s(near)
        yield from ((s, line[i]) for i, s in known.items() if s < inf)

    def _counts(self, space: Space) -> list[int]:
        """Numbers of microbatches: as many as stages, where the batch has so many."""
        stages, chunks = space.pipeline.stages, space.pipeline.chunks
        found = divided(space, self.tuner.counts, self.tuner.pins.size)
        return [c for c in found if c >= stages and (chunks == 1 or c % stages == 0)] or found[-1:]

    def _counted(self, space: Space) -> Candidate:
        """With the best number of microbatches: from the first one on, up or down while that is faster."""
        counts = self._counts(space)
        first = _first(counts, space)
        start = best = self._fitting(space, counts[first])
        for way in (1, -1):
            at = first + way
            while 0 <= at < len(counts):
                if not self._may_win(space, counts[at], best):
                    break
                found = self._fitting(space, counts[at])
                if rank(found) >= rank(best):
                    break
                best, at = found, at + way
            if best is not start:
                break
        return best

    def _may_win(self, space: Space, count: int, best: Candidate) -> bool:
        """Whether a floor is below what is there."""
        if not best.fits:
            return True
        floor_s = self.tuner.floor_s(space, self.tuner.modes[0], count)
        return floor_s * self.tuner.over(space) < min(best.prediction.step_s, self.fastest_s)

    def _fitting(self, space: Space, count: int) -> Candidate:
        """With the least that is made again with which it fits, from what fitted last."""
        best: Candidate | None = None
        for number in range(self._mode, len(self.tuner.modes)):
            found = self.tuner.tried_with(space, self.tuner.modes[number], count)
            self.tried.append(found)
            best = found if best is None else min(best, found, key=rank)
            if found.fits:
                self._mode = number
                break
        assert best is not None
        return best

    def _scheduled(self, found: Candidate) -> Iterator[Candidate]:
        """The same layouts in other orders, where none is asked for."""
        stages = found.execution.num_stages
        if self.tuner.pins.asked.schedule not in (None, "interleaved"):
            return
        divides = found.mesh.num_microbatches % stages == 0
        ways = [Pipeline(stages, "interleaved", chunks) for chunks in _CHUNKS if divides]
        if self.tuner.pins.asked.schedule is None:
            ways.append(Pipeline(stages, "zero-bubble"))
        for pipeline in ways:
            own = self._in_order(found, pipeline)
            if own is not None:
                self.tried.append(own)
                yield own

    def _in_order(self, found: Candidate, pipeline: Pipeline) -> Candidate | None:
        """None where there are too few blocks."""
        solver, folded = self.tuner.solver, self.tuner.folded
        execution = replace(found.execution, schedule=pipeline.schedule, chunks_per_stage=pipeline.chunks)
        try:
            prediction = solver.predicted(found.graph, execution, folded.repeats)
        except PlanError:
            return None
        name = f"{pipeline} x {found.name.partition(' x ')[2]}"
        fits = prediction.memory.total_bytes <= solver.limit_bytes
        return replace(found, name=name, execution=execution, prediction=prediction, fits=fits)


def _inner(space: Space) -> int:
    return space.mesh.sizes[-1]


def _first(counts: Sequence[int], space: Space) -> int:
    """The place of the number of microbatches that is tried first."""
    return next((i for i, c in enumerate(counts) if c >= _DEEP * space.pipeline.stages), len(counts) - 1)
