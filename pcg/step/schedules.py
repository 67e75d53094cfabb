"""Pipeline schedules: in which order a stage runs the forward and backward of microbatches through its chunks.

p stages, v chunks on each, m microbatches; chunk c of stage s is virtual stage c·p + s.

gpipe         all forwards, then all backwards. In flight: m. Bubble over ideal: (p − 1) / m
1f1b          p − 1 − s forwards, then one forward and one backward in turn. In flight: min(m, p − s). Bubble as gpipe
interleaved   1f1b over chunks, p microbatches through one chunk after the other. Bubble: (p − 1) / (v·m)
zero-bubble   1f1b whose backward is in two parts; the part that makes weights' gradients fills what would be idle,
              delayed such that no more microbatches are in flight than in 1f1b (ZB-H1). Bubble with equal parts: (p −
              1) / (3·m)

Sources: Huang et al., "GPipe" (2019); Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (2021), section 2.2, and its forward_backward_pipelining_with_interleaving; Qi et al., "Zero Bubble
Pipeline Parallelism" (2023), section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from shardwright.pcg.step.execution import Execution, Schedule

Phase = Literal["forward", "backward", "weights"]
"""Where backward is in two parts, "backward" is the first and "weights" the second."""


class Item(NamedTuple):
    """One microbatch through one chunk of a stage."""

    chunk: int
    microbatch: int
    direction: Phase


def orders(execution: Execution) -> list[list[Item]]:
    """The items of every stage, in order."""
    make = _ORDERS[execution.schedule]
    stages = range(execution.num_stages)
    return [
        make(stage, execution.num_stages, execution.chunks_per_stage, execution.num_microbatches) for stage in stages
    ]


def in_flight(execution: Execution) -> float:
    """How many microbatches the first stage keeps at most, of all of its chunks."""
    two, now, most = execution.schedule == "zero-bubble", 0, 0
    last: Phase = "weights" if two else "backward"
    make = _ORDERS[execution.schedule]
    for item in make(0, execution.num_stages, execution.chunks_per_stage, execution.num_microbatches):
        now += (item.direction == "forward") - (item.direction == last)
        most = max(most, now)
    return most / execution.chunks_per_stage


def _gpipe(stage: int, num_stages: int, num_chunks: int, num_microbatches: int) -> list[Item]:
    return [Item(0, i, d) for d in ("forward", "backward") for i in range(num_microbatches)]


def _one_forward_one_backward(stage: int, num_stages: int, num_chunks: int, num_microbatches: int) -> list[Item]:
    ahead = min(num_stages - 1 - stage, num_microbatches)
    return _alternate([(0, i) for i in range(num_microbatches)], [(0, i) for i in range(num_microbatches)], ahead)


def _interleaved(stage: int, num_stages: int, num_chunks: int, num_microbatches: int) -> list[Item]:
    """Megatron's order. `ahead`: the forwards before the first backward."""
    total = num_chunks * num_microbatches
    ahead = min(total, 2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages)
    if num_microbatches == num_stages:
        ahead = total

    def place(number: int) -> tuple[int, int]:
        round_, within = divmod(number, num_stages * num_chunks)
        chunk, offset = divmod(within, num_stages)
        return chunk, round_ * num_stages + offset

    forward = [place(number) for number in range(total)]
    backward = [(num_chunks - 1 - chunk, microbatch) for chunk, microbatch in forward]
    return _alternate(forward, backward, ahead)


def _zero_bubble(stage: int, num_stages: int, num_chunks: int, num_microbatches: int) -> list[Item]:
    """ZB-H1: stage s delays the weights' part by s microbatches, and so has as many in flight as stage 0 of 1f1b."""
    items: list[Item] = []
    waiting: list[int] = []
    for item in _one_forward_one_backward(stage, num_stages, num_chunks, num_microbatches):
        items.append(item)
        if item.direction == "backward":
            waiting.append(item.microbatch)
            if len(waiting) > stage:
                items.append(Item(0, waiting.pop(0), "weights"))
    return items + [Item(0, microbatch, "weights") for microbatch in waiting]


def _alternate(forward: list[tuple[int, int]], backward: list[tuple[int, int]], ahead: int) -> list[Item]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    items = [Item(c, i, "forward") for c, i in forward[:ahead]]
    for done, (chunk, microbatch) in enumerate(forward[ahead:]):
        items += [Item(chunk, microbatch, "forward"), Item(*backward[done], "backward")]
    return items + [Item(c, i, "backward") for c, i in backward[len(forward) - ahead :]]


_ORDERS: dict[Schedule, Callable[[int, int, int, int], list[Item]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}
