"""A schedule of a collective on ranks of this machine: its result, and its time beside torch's collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import lcm
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.scheduled import ScheduledCollective, chunk_lengths
from shardwright.pcg.collectives.collective import Collective
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.collectives.timing import Timing

TIMEOUT_S = 60.0
REPEATS = 5


def on_this_machine(schedule: Schedule, sizes: Sequence[int]) -> list[Timing]:
    """Run a schedule on forked gloo ranks for several sizes in bytes, each rounded up to whole units of float32.

    Times are medians, and each repeat takes as long as its slowest rank. Raises `DistributedError` where it stops.
    """
    by_rank = run_ranks(lambda: [_timed(schedule, size) for size in sizes], schedule.num_ranks, TIMEOUT_S * len(sizes))
    return by_rank[0]


def _timed(schedule: Schedule, num_bytes: int) -> Timing:
    group, rank, whole = dist.group.WORLD, dist.get_rank(), schedule.collective
    assert isinstance(group, dist.ProcessGroup)
    num_elements = whole_elements(whole, num_bytes)
    lengths = chunk_lengths(whole, num_elements)
    given, expected = example_input(whole, lengths, rank), example_output(whole, lengths, rank)
    runs = ScheduledCollective(schedule, group, timeout_s=TIMEOUT_S)
    is_right = torch.tensor(float(torch.equal(runs.run(given, num_elements), expected)))
    dist.all_reduce(is_right, dist.ReduceOp.MIN)
    run = partial(runs.run, given, num_elements)
    other = _torchs(whole, given, expected, num_elements)
    seconds = [_slowest_s(run), *([] if other is None else [_slowest_s(other)])]
    return Timing(4 * num_elements, bool(is_right.item()), seconds[0], seconds[1] if other else None)


def whole_elements(whole: Collective, num_bytes: int) -> int:
    """Return the least number of float32 elements that has so many bytes, and a whole number in every chunk."""
    step = lcm(*(chunk.size.denominator for chunk in whole.chunks))
    return -(-num_bytes // (4 * step)) * step


def _slowest_s(do: Callable[[], object]) -> float:
    slowest_s = list[float]()
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        do()
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        slowest_s.append(taken.item())
    return median(slowest_s)


def example_input(whole: Collective, lengths: Sequence[int], rank: int) -> Tensor:
    """Return a rank's input: small whole numbers, whose sums are exact in any order."""
    sources = [rank if whole.reduces else chunk.sources[0] for chunk in whole.chunks]
    return torch.cat([torch.empty(0), *(_value(c, sources[c], lengths[c]) for c in whole.inputs[rank])])


def example_output(whole: Collective, lengths: Sequence[int], rank: int) -> Tensor:
    """Return what a rank is due to get of the inputs, by what the collective says."""
    cells = list[Tensor]()
    for chunk in whole.outputs[rank]:
        sources = whole.chunks[chunk].sources[: None if whole.reduces else 1]
        cells.append(torch.stack([_value(chunk, source, lengths[chunk]) for source in sources]).sum(0))
    return torch.cat([torch.empty(0), *cells])


def _value(chunk: int, source: int, length: int) -> Tensor:
    """Return a source's summand of a chunk."""
    return (torch.arange(length, dtype=torch.float32) * 7 + 31 * chunk + 3 * source) % 101


def _torchs(whole: Collective, given: Tensor, expected: Tensor, num_elements: int) -> Callable[[], object] | None:
    result = torch.empty_like(expected)
    buffer = torch.zeros(num_elements)
    match whole.kind:
        case "all_reduce":
            return lambda: dist.all_reduce(buffer)
        case "all_gather" if whole.is_even:
            return lambda: dist.all_gather_single(result, given)
        case "reduce_scatter" if whole.is_even:
            return lambda: dist.reduce_scatter_single(result, given)
        case "all_to_all" if whole.is_even:
            return lambda: dist.all_to_all_single(result, given)
        case "broadcast":
            return lambda: dist.broadcast(buffer, whole.root)
        case "reduce":
            return lambda: dist.reduce(buffer, whole.root)
        case _:
            return None
