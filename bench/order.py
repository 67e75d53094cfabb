"""Sums of gradients in the order in which the next forward needs them, over a slow link: a model of such a runtime.

Two gloo ranks, each in a network namespace of its own; the kernel keeps the link between them to a rate
(`bench.throttled`). Compute is slept, so only the link and the order decide. A step has forward and backward of equal
layers. Each layer's gradient is summed by one all-reduce, or by one for each of its pieces. One is in flight at a time.
Run it with `python -m bench.order`; it ends docs/order.md with its table.

Sources: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (2019).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from threading import Condition, Thread
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from bench.over_link import command
from bench.throttled import as_nodes, enter
from shardwright.lowering.ranks.launch import run_ranks

LAYERS, LAYER_BYTES = 8, 2 << 20
FORWARD_S, BACKWARD_S = 0.04, 0.08
"""The seconds of a layer."""
RATES = (40e6, 20e6, 10e6)
STEPS, MAX_S = 6, 300.0
END = (-1, -1)


class Way(NamedTuple):
    """An order of sending: the size of pieces in bytes, the next piece, and the sums that forward waits for.

    barrier    forward waits for all sums of the step before, as an optimizer does that updates all weights at once
    by_need    what forward needs first goes first; else what is ready first
    """

    name: str
    barrier: bool
    by_need: bool
    piece_bytes: int = LAYER_BYTES


WAYS = (
    Way("all sums before the next step", True, False),
    Way("each layer waits for its own", False, False),
    Way("what is needed first is sent first", False, True),
    Way("the same in pieces of 512 KB", False, True, 1 << 19),
    Way("the same in pieces of 128 KB", False, True, 1 << 17),
)
Piece = tuple[int, int]
"""A layer, and the number of a piece of its gradient."""


@dataclass
class Sums:
    """The sums of one rank. Rank 0 decides the order and tells the others, as collectives must agree in it."""

    way: Way
    gradients: list[torch.Tensor] = field(default_factory=lambda: [torch.ones(LAYER_BYTES // 4) for _ in range(LAYERS)])
    changed: Condition = field(default_factory=Condition)

    def __post_init__(self) -> None:
        self.control, self.data = (cast("dist.ProcessGroup", dist.new_group()) for _ in range(2))
        self.queue, self.numbers = list[tuple[tuple[int, ...], Piece]](), count()
        self.ready, self.missing = set[Piece](), [0] * LAYERS
        self.thread = Thread(target=self._send)
        self.thread.start()

    def add(self, layer: int) -> None:
        """Let a layer's gradient be summed."""
        pieces = [(layer, i) for i in range(LAYER_BYTES // self.way.piece_bytes)]
        with self.changed:
            self.missing[layer] = len(pieces)
            self._put(pieces)

    def end(self) -> None:
        """Wait for the thread."""
        with self.changed:
            self._put([END])
        self.thread.join()

    def wait(self, layers: Sequence[int]) -> None:
        """Wait for the sums of layers."""
        with self.changed:
            self.changed.wait_for(lambda: not any(self.missing[layer] for layer in layers))

    def _put(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.ready.add(piece)
            heapq.heappush(self.queue, (piece if self.way.by_need and piece != END else (next(self.numbers),), piece))
        self.changed.notify_all()

    def _send(self) -> None:
        while (piece := self._agreed()) != END:
            layer, number = piece
            length = self.way.piece_bytes // 4
            dist.all_reduce(self.gradients[layer][number * length :][:length], group=self.data)
            with self.changed:
                self.missing[layer] -= 1
                self.changed.notify_all()

    def _agreed(self) -> Piece:
        """Return the next piece, once this rank has it, too."""
        told = torch.zeros(2, dtype=torch.long)
        if dist.get_rank() == 0:
            with self.changed:
                self.changed.wait_for(lambda: self.queue)
                told = torch.tensor(heapq.heappop(self.queue)[1])
        dist.broadcast(told, 0, group=self.control)
        layer, number = told.tolist()
        with self.changed:
            self.changed.wait_for(lambda: (layer, number) in self.ready)
            self.ready.discard((layer, number))
        return layer, number


def seconds(other: int, way: Way) -> float:
    """One rank's part: the seconds of a step."""
    enter(dist.get_rank(), other, per_node=1)
    sums = Sums(way)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        for layer in range(LAYERS):
            sums.wait(range(LAYERS) if way.barrier else [layer])
            time.sleep(FORWARD_S)
        for layer in reversed(range(LAYERS)):
            time.sleep(BACKWARD_S)
            sums.add(layer)
    sums.wait(range(LAYERS))
    taken = time.perf_counter() - start
    sums.end()
    return taken / STEPS


def inside(case: str, bytes_per_s: float, num_rounds: int) -> list[float]:
    """The median seconds of a step of each way; this process is the first node."""
    other = as_nodes(bytes_per_s)
    try:
        rounds = [[max(run_ranks(seconds, 2, MAX_S, args=(other.pid, way))) for way in WAYS] for _ in range(num_rounds)]
    finally:
        other.kill()
    return [median(own) for own in zip(*rounds, strict=True)]


def section(found: Sequence[Any], num_rounds: int) -> str:
    """The section of the page."""
    sent_s = [LAYERS * LAYER_BYTES / rate for rate in RATES]
    rows = [
        f"| {way.name} | {' | '.join(f'{own[number]:.2f} s ({own[number] / own[0]:.2f})' for own in found)} |"
        for number, way in enumerate(WAYS)
    ]
    links = " | ".join(f"{rate / 1e6:.0f} MB/s; {s:.2f} s" for rate, s in zip(RATES, sent_s, strict=True))
    return f"""{LAYERS} layers, whose
gradients are {LAYER_BYTES >> 20} MB each; a layer's forward sleeps {FORWARD_S * 1e3:.0f} ms, its backward
{BACKWARD_S * 1e3:.0f} ms. Seconds of a step over {STEPS} steps, on the slower rank; in brackets, to the first row's.
Medians over {num_rounds} interleaved rounds.

| link; sums of a step take | {links} |
|---|{"--:|" * len(RATES)}
{chr(10).join(rows)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    cases = [("layers", rate) for rate in RATES]
    return command("order", cases, inside, section, arguments, about=__doc__, rounds=3)


if __name__ == "__main__":
    raise SystemExit(main())
