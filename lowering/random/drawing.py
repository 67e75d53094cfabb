"""Torch's generator as a lowered program draws from it: in the same state on every rank.

Ranks that are seeded alike draw from their default generators, as one process does. If the generators' states differ in
one of the first steps, for example because each rank has its own seed, the program continues in a stream of its own,
which starts in the state of rank 0's generator. The default generators are then left to the user, for each rank's data.
If the states begin to differ later, ranks have already trained with masks that do not fit together: this is an error,
raised at most `WATCH_EVERY` steps later.

On CPUs every rank draws the masks of whole tensors, as one process does. On other devices a step draws one number. A
rank then draws only its own part of each mask, from a generator seeded with this number, the mask's and the part's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
"""The steps from one comparison of states to the next, after the first steps."""


@dataclass
class Stream:
    """The stream of random numbers of one model's programs: a generator's state, or None for torch's default one."""

    state: Tensor | None = None


@contextmanager
def in_state(generator: torch.Generator | None, state: Tensor | None) -> Generator[None]:
    """Surround what draws from a generator in an earlier state; without a generator, do nothing."""
    if generator is None:
        yield
        return
    assert state is not None
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


class Drawing:
    """The source of a program's random numbers. `own`: the state of the model's own stream, if it has one."""

    def __init__(self, ranks: Ranks, graph: Graph, stream: Stream) -> None:
        self.ranks, self._stream = ranks, stream
        self.draws = any(node.may_draw for node in graph.nodes)
        self.by_part = not draws_whole(ranks.device.type)
        self._from_torch = any(node.may_draw and not node.is_random for node in graph.nodes)
        self._first: Tensor | None = None  # the state before the first microbatch
        self._step = Draw()  # where masks have numbers, the first draw of this step
        self.comparison: _Comparison | None = None
        self._history = self._num_watched = 0

    @property
    def own(self) -> Tensor | None:
        return self._stream.state

    @own.setter
    def own(self, state: Tensor) -> None:
        self._stream.state = state

    @property
    def generator(self) -> torch.Generator:
        """Torch's default generator of this device."""
        return private.default_generator(self.ranks.device)

    def state(self) -> list[int]:
        """Return the state that ranks must share: counter and seed of `seed_exactly`, and the generator's digest."""
        draw = current_draw()
        if not self.draws:
            return [0] * NUM_STATES
        exact = [draw.number, draw.seed - (1 << 63)] if draw.seed is not None else [-1, 0]
        drawn = self.own is None and (self._from_torch or draw.seed is None)
        return [*exact, _digest(self.generator.get_state()) if drawn else 0]

    def agree(self, states: Sequence[Sequence[int]]) -> None:
        """Compare every rank's state before a step; if the generators differ, go on in a stream of the program's own.

        Raises `ShardwrightError` if seed or counter of `seed_exactly` differ.
        """
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
        """Compare, every `WATCH_EVERY` steps, the states of all steps since the first; called before the later steps.

        If the states differed in a step, raises `ShardwrightError` on all ranks at most `WATCH_EVERY` steps later.
        """
        if not self.draws:
            return
        begun, self.comparison = self.comparison, None
        if begun is not None and not begun.is_same():
            raise ShardwrightError(_LATE)
        self._history, self._num_watched = hash((self._history, *self.state())), self._num_watched + 1
        if self._num_watched % WATCH_EVERY == 0:
            self.comparison = _Comparison(self._history, self.ranks)

    @contextmanager
    def by_number(self, num_draws: int) -> Generator[Draw]:
        """Surround a step in stages, each of which draws its own masks by their numbers; yield the first draw.

        Without `seed_exactly` the seed of a step is a number that torch's generator draws. What else draws from it is
        drawn by every stage, in `alike`.
        """
        self._first = None
        if current_draw().seed is not None or not self.draws:
            with step_draws(num_draws) as draw:
                yield draw
            return
        yield self.numbered()

    def numbered(self) -> Draw:
        """Return the first draw of a step with numbered masks; its seed is a number drawn by torch's generator."""
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
        """Surround the forward of one microbatch, in a step that draws `num_draws` masks; yield the first draw."""
        numbered = self.by_part and self.draws and current_draw().seed is None
        if numbered and first:
            self._step = self.numbered()
        with self._alike(first=first, last=last), step_draws(num_draws if last else 0) as draw:
            yield self._step if numbered else draw

    def alike(self) -> AbstractContextManager[None]:
        """Surround a forward in stages: each makes all draws of torch's generator, from its state before the first."""
        return self._alike(first=self._first is None, last=False) if self._from_torch else nullcontext()

    @contextmanager
    def _alike(self, *, first: bool, last: bool) -> Generator[None]:
        """Set the generator for a forward: every microbatch draws for the whole batch, and takes its part."""
        if not self.draws or (self.own is None and first and last):
            yield
            return
        generator, drawing_state = self.generator, self.own
        state = generator.get_state()
        if drawing_state is not None:
            generator.set_state(drawing_state)
        if first:
            self._first = generator.get_state()
        elif self._first is not None:
            generator.set_state(self._first)
        try:
            yield
        finally:
            if drawing_state is not None:
                self.own = generator.get_state()
                generator.set_state(state)


class _Comparison:
    """A comparison of one number over all ranks, which runs beside a step."""

    def __init__(self, digest: int, ranks: Ranks) -> None:
        self.ranks, cuda = ranks, ranks.device.type == "cuda"
        self.extremes = torch.tensor([digest, ~digest], pin_memory=cuda)  # the largest, the complement of the smallest
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
        """Wait until all ranks have begun the comparison, and return whether their numbers are equal."""
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
