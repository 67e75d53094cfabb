"""Times of operators and collectives in real steps, by torch.profiler, under the names that a plan has for them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.waits import waiting
from shardwright.lowering.text.lines import BLOCK_MARK, MARK
from shardwright.reports.profile import ELSEWHERE, OPTIMIZER, PARAMETERS

Key = tuple[str, str, str]
"""Block, place and direction."""
_BACKWARD = "autograd::engine::evaluate_function: "
_SENT = ("c10d::", "gloo:", "nccl:")


def measure(parallel: ParallelModule, step: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """Return the mean seconds of a step by block, place and direction, over all ranks; the same on every rank.

    The seconds of a change of layout's messages include the wait for others. On GPUs, seconds are those of kernels.
    """
    parallel.mark()
    step()
    cuda, device = parallel.ranks.device.type == "cuda", ProfilerActivity.CPU
    start = time.perf_counter()
    with profile(activities=[device, *([ProfilerActivity.CUDA] if cuda else [])]) as profiled:
        for _ in range(num_steps):
            step()
        if cuda:
            torch.cuda.synchronize()
    whole_s = (time.perf_counter() - start) / num_steps
    by_place_s = {key: us / 1e6 / num_steps for key, us in by_place(profiled.events() or (), cuda=cuda).items()}
    every: list[Any] = [None] * dist.get_world_size()
    with waiting("the gathering of measurements", parallel.ranks.timeout_s):
        dist.all_gather_object(every, (by_place_s, whole_s))
    total = defaultdict[Key, float](float)
    for places, _ in every:
        for key, seconds in places.items():
            total[key] += seconds / len(every)
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "num_ranks": len(every),
        "num_steps": num_steps,
        "profiled_step_s": sum(seconds for _, seconds in every) / len(every),
        "parts": [[*key, seconds] for key, seconds in total.items()],
    }


def by_place(events: Iterable[FunctionEvent], *, cuda: bool) -> dict[Key, float]:
    """Return microseconds of events by place. An event of backward is for the operator whose number it has."""
    on_cpu = [(event, list(_around(event))) for event in events if event.device_type.name == "CPU"]
    forward = dict[int, tuple[str, str]]()
    for event, around in on_cpu:
        if event.sequence_nr >= 0 and not any(e.name.startswith(_BACKWARD) for e in around):
            block, place = _marked(around)
            if place:
                forward.setdefault(event.sequence_nr, (block, place))
    total = defaultdict[Key, float](float)
    for event, around in on_cpu:
        total[_key(around, forward)] += event.self_device_time_total if cuda else event.self_cpu_time_total
    return total


def _key(around: list[FunctionEvent], forward: dict[int, tuple[str, str]]) -> Key:
    block, place = _marked(around)
    engine = next((e for e in around if e.name.startswith(_BACKWARD)), None)
    home = forward.get(engine.sequence_nr, ("", "")) if engine else ("", "")
    if place:
        return (block or home[0], place, "again" if engine else "forward")
    if home[1]:
        return (home[0], home[1], "backward")
    if any(e.name.startswith("Optimizer.step") for e in around):
        return ("", OPTIMIZER, "step")
    if any(e.name.startswith(_SENT) for e in around):
        return ("", PARAMETERS, "backward" if engine else "forward")
    return (block, ELSEWHERE, "backward" if engine else "forward")


def _around(event: FunctionEvent) -> Iterator[FunctionEvent]:
    """Yield the event, and the events around it, from the inside."""
    parent: FunctionEvent | None = event
    while parent is not None:
        yield parent
        parent = parent.cpu_parent


def _marked(around: Iterable[FunctionEvent]) -> tuple[str, str]:
    block = place = ""
    for event in around:
        if event.name.startswith(BLOCK_MARK):
            block = block or event.name.removeprefix(BLOCK_MARK)
        elif event.name.startswith(MARK):
            place = place or event.name.removeprefix(MARK)
    return block, place
