"""Torch's generator as a lowered program draws from it: in the same state on every rank.

Ranks that are seeded alike draw from their default generator, as one process does. Where they are found to differ in
one of the first steps, as with a seed for each rank, the program has a stream of its own from then on, which starts in
the state of rank 0's generator; the default ones are the user's, for data of each rank's own. Where they begin to
differ later, steps have been made with different masks: an error, at most `WATCH_EVERY` steps later.

On CPUs every rank draws the masks of whole tensors, as one process does. On other devices a step draws one number, and
of each mask a rank draws its own part from a generator whose state follows from that number, the mask's and the part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering import private
from shardwright.lowering.random.exact import Draw, current_draw, step_draws
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import draws_whole

NUM_STATES = 3
WATCH_EVERY = 16
"""Steps from one comparison to the next, once the first steps are over."""


@dataclass
class Stream:
    """Where programs of one model draw from: a generator's state; None: torch's default one."""

    state: Tensor | None = None


class Drawing:
    """What the random operators of a program draw from. `own`: the state of the model's own stream, if it has one."""

    def __init__(self, ranks: Ranks, graph: Graph, stream: Stream) -> None:
        self.ranks, self._stream = ranks, stream
        self.draws = any(node.may_draw for node in graph.nodes)
        self.by_part = not draws_whole(ranks.device.type)
        self._from_torch = any(node.may_draw and not node.is_random for node in graph.nodes)
        self._first: Tensor | None = None  # the state before the first microbatch
        self._step = Draw()  # where masks have numbers, the first draw of this step
        self._begun: _Comparison | None = None
        self._history = self._num_watched = 0

    @property
    def own(self) -> Tensor | None:
        return self._stream.state

    @own.setter
    def own(self, state: Tensor) -> None:
        self._stream.state = state

    @property
    def generator(self) -> torch.Generator:
        """Torch's default one of this device."""
        return private.default_generator(self.ranks.device)

    def state(self) -> list[int]:
        """What ranks must have in common to draw alike: seed and counter of `seed_exactly`, the generator's digest."""
        draw = current_draw()
        if not self.draws:
            return [0] * NUM_STATES
        exact = [draw.number, draw.seed - (1 << 63)] if draw.seed is not None else [-1, 0]
        drawn = self.own is None and (self._from_torch or draw.seed is None)
        return [*exact, _digest(self.generator.get_state()) if drawn else 0]

    def agree(self, states: Sequence[Sequence[int]]) -> None:
        """Before a step, with every rank's state: where they differ, go on in a stream of the program's own."""
        if len({tuple(state[:2]) for state in states}) > 1:
            raise ShardwrightError(_EXACT)
        if all(state == states[0] for state in states):
            return
        sent = self.generator.get_state().to(self.ranks.device)
        work = dist.broadcast(sent, src=0, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self.ranks.timeout_s))
        self.own = sent.cpu()

    def watch(self) -> None:
        """Before a step that compares nothing else: now and then, compare the states of all steps since the first.

        Raises on all ranks where they have differed, at most `WATCH_EVERY` steps after the first that did.
        """
        if not self.draws:
            return
        begun, self._begun = self._begun, None
        if begun is not None and not begun.is_same():
            raise ShardwrightError(_LATE)
        self._history, self._num_watched = hash((self._history, *self.state())), self._num_watched + 1
        if self._num_watched % WATCH_EVERY == 0:
            self._begun = _Comparison(self._history, self.ranks)

    @contextmanager
    def by_number(self, num_draws: int) -> Generator[Draw]:
        """Around a step in stages, which draw what they have alone: every mask by its number; yields the first draw.

        Without `seed_exactly` the seed of a step is a number that torch's generator draws.
        """
        if current_draw().seed is not None or not self.draws:
            with step_draws(num_draws) as draw:
                yield draw
            return
        yield self._numbered()

    def _numbered(self) -> Draw:
        """The first draw of a step whose masks have numbers; its seed is a number that torch's generator draws."""
        if self.ranks.is_dry:
            return Draw(0, 0, self.by_part)
        generator = self.generator
        if self.own is not None:
            generator = torch.Generator(self.ranks.device)
            generator.set_state(self.own)
        seed = torch.randint(1 << 62, (), generator=generator, device=generator.device)
        if self.own is not None:
            self.own = generator.get_state()
        return Draw(int(seed), 0, self.by_part)

    @contextmanager
    def microbatch(self, num_draws: int, *, first: bool, last: bool) -> Generator[Draw]:
        """Around a forward of a step that draws so many masks; yields the first draw."""
        numbered = self.by_part and self.draws and current_draw().seed is None
        if numbered and first:
            self._step = self._numbered()
        with self._alike(first=first, last=last), step_draws(num_draws if last else 0) as draw:
            yield self._step if numbered else draw

    @contextmanager
    def _alike(self, *, first: bool, last: bool) -> Generator[None]:
        """Around a forward. Every microbatch draws what one process draws for the whole batch, and takes its part."""
        if not self.draws or (self.own is None and first and last):
            yield
            return
        generator, own = self.generator, self.own
        outside = generator.get_state()
        if own is not None:
            generator.set_state(own)
        if first:
            self._first = generator.get_state()
        elif self._first is not None:
            generator.set_state(self._first)
        try:
            yield
        finally:
            if own is not None:
                self.own = generator.get_state()
                generator.set_state(outside)


class _Comparison:
    """Whether a number is the same on all ranks, found out while a step runs."""

    def __init__(self, own: int, ranks: Ranks) -> None:
        self.ranks, cuda = ranks, ranks.device.type == "cuda"
        self.extremes = torch.tensor([own, ~own], pin_memory=cuda)  # the largest, the complement of the smallest
        self.work: dist.Work | None = None
        self.event: torch.cuda.Event | None = None
        if not cuda:
            self.work = dist.all_reduce(self.extremes, dist.ReduceOp.MAX, async_op=True)
            return
        with private.world_timeout(ranks.timeout_s), torch.cuda.stream(private.side_stream(ranks.device)):
            sent = self.extremes.to(ranks.device, non_blocking=True)
            dist.all_reduce(sent, dist.ReduceOp.MAX)
            self.extremes.copy_(sent, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def is_same(self) -> bool:
        """Waits until all ranks have begun it."""
        if self.work is not None:
            self.work.wait(timedelta(seconds=self.ranks.timeout_s))
        if self.event is not None:
            self.event.synchronize()
        high, low = self.extremes.tolist()
        return high == ~low


def _digest(state: Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little", signed=True)


_EXACT = (
    "shardwright.seed_exactly has another seed or counter on some ranks, or was called on some alone; "
    "call it with the same seed on every rank"
)
_LATE = (
    "ranks drew alike in the first steps, and in one of the last "
    f"{WATCH_EVERY + 1} they did not, so their masks did not fit together; go back to a checkpoint, and draw what only "
    "some ranks need (data, samples) from a torch.Generator of its own, or call shardwright.seed_exactly with one seed "
    "on all ranks"
)
