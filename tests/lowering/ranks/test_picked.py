"""The moves of a rank give the same by schedules as by torch's collectives, at once and beside other work.

What NCCL does otherwise is played by gloo here: a schedule runs where it is started, and many messages are one work.
`tests/lowering/test_cuda.py` runs on NCCL itself, where there are two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks import movement as m
from shardwright.lowering.ranks.launch import connect, run_ranks
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.ranks.picked import AxisSchedules, Picked
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.ranks.rows import exchange_rows, tell_counts
from shardwright.lowering.ranks.scheduled import unit_lengths
from shardwright.lowering.ranks.untraced import leave_untraced
from shardwright.lowering.runtime.collectives import finish_sum, start_sum
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.encodings import ENCODINGS
from shardwright.pcg.errors import DistributedError, ScheduleError
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.stages import ALL_RANKS, of_stages

NUM_RANKS = 4
LEAST_BYTES = 64.0
BY_KIND = {
    "all_reduce": build("halving-doubling", "all_reduce", (4,)),
    "all_gather": build("bruck", "all_gather", (4,)),
    "reduce_scatter": build("hierarchical", "reduce_scatter", (2, 2)),
    "all_to_all": build("hierarchical", "all_to_all", (2, 2)),
}
PICKED: Picked = {kind: [(0.0, None), (LEAST_BYTES, one)] for kind, one in BY_KIND.items()}


def moves(axis: Axis) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Every move of a tensor [8, 12], by name."""

    def scattered(x: Tensor) -> Tensor:
        work, summands = m.launch_scatter(x.view(4, 2, 12).contiguous(), axis, torch.empty(4, 2, 12).to(x))
        return _waited(work, m.added(summands)) if work is None else m.added(_waited(work, summands))

    def gathered(x: Tensor) -> Tensor:
        return _waited(m.launch_gather(whole := x.new_empty(4, 8, 12), x, axis), whole)

    def summed(x: Tensor) -> Tensor:
        return _waited(m.launch_sum(own := x.clone(), axis), own)

    def both_ways(x: Tensor) -> Tensor:
        """Two that run beside each other, waited for in the other order."""
        first, second = x.clone(), x.new_empty(4, 8, 12)
        works = [m.launch_sum(first, axis), m.launch_gather(second, x, axis)]
        return _waited(works[1], second).sum(0) + _waited(works[0], first)

    def encoded(x: Tensor) -> Tensor:
        """A gather, a sum and a sum of pieces, of codes."""
        by, whole, total = ENCODINGS["int8"], x.new_empty(4, 8, 12), x.clone()
        scatter, summands = m.launch_scatter(x.view(4, 2, 12).contiguous(), axis, encoding=by)
        works = [m.launch_gather(whole, x, axis, by), m.launch_sum(total, axis, by), scatter]
        for work in works:
            _waited(work, whole)
        return torch.cat([whole.flatten(), total.flatten(), m.added(summands).flatten()])

    return {
        "encoded": encoded,
        "sum": lambda x: m.all_sum(x, axis),
        "gather": lambda x: m.gather(x, axis, 1, 3),
        "scatter": lambda x: m.sum_scatter(x, axis, 0, 2),
        "exchange": lambda x: m.exchange(x, axis, (0, 1), (1, 1)),
        "scattered": scattered,
        "gathered": gathered,
        "summed": summed,
        "both": both_ways,
    }


class OneWork:
    """What NCCL gives for a batch of messages: one that waits for all."""

    def __init__(self, works: list[dist.Work]) -> None:
        self.works = works

    def wait(self, timeout: timedelta) -> None:
        for work in self.works:
            work.wait(timeout)


def in_one_work(ops: list[dist.P2POp], batched: Any = dist.batch_isend_irecv) -> list[OneWork]:
    return [OneWork(batched(ops))]


def _waited(work: Any, result: Tensor) -> Tensor:
    if work is not None:
        work.wait()
    return result


def test_moves_by_schedules_are_moves() -> None:
    def body() -> list[str]:
        (plain,) = connect(Mesh.of(a=NUM_RANKS), 30).axes
        assert isinstance(plain, Axis)
        group: Any = dist.new_group(list(range(NUM_RANKS)))
        axis = replace(plain, schedules=AxisSchedules(PICKED, group, 30))
        with mock.patch.object(dist, "get_backend", return_value="nccl"):
            as_nccl = replace(plain, schedules=AxisSchedules(PICKED, group, 30))
        wrong, generator = list[str](), torch.Generator().manual_seed(plain.rank)
        kinds = [torch.float64, torch.bfloat16, torch.int32, torch.bool]  # torch's sum of integers is of int64
        for (name, by_torch), ours in zip(moves(plain).items(), moves(axis).values(), strict=True):
            for dtype in kinds if name in ("gather", "exchange") else kinds[:2]:
                x = torch.randint(-4, 5, (8, 12), generator=generator).to(dtype)
                with torch.inference_mode(name == "sum"):
                    expected, found = by_torch(x), ours(x)
                    if name != "encoded":  # its own sum of pieces asks torch for the backend
                        with mock.patch.object(dist, "batch_isend_irecv", in_one_work):
                            assert torch.equal(moves(as_nccl)[name](x), found), name
                if not torch.equal(expected, found) or found.dtype != expected.dtype:
                    wrong.append(f"{name}, {dtype}")
        small = torch.ones(4)  # 16 bytes: the library's
        assert axis.schedules is not None
        assert not axis.schedules.has("all_reduce", 16)
        assert not axis.schedules.has("broadcast", 1e6)
        assert torch.equal(m.all_sum(small, axis), small * 4)
        leave_untraced()
        compiled = torch.compile(lambda x: m.all_sum(x * 2, axis) + 1, backend="eager")
        assert torch.equal(compiled(torch.ones(99)), torch.full((99,), 9.0))
        assert torch.equal(finish_sum(start_sum(torch.ones(99), axis)), torch.full((99,), 4.0))
        return wrong

    assert run_ranks(body, NUM_RANKS, 60) == [[]] * NUM_RANKS


def test_rows_by_schedules_are_rows() -> None:
    """Any numbers, none at all too; of expected sizes that no schedule is picked for, torch sends them."""

    def body() -> list[str]:
        (plain,) = connect(Mesh.of(a=NUM_RANKS), 30).axes
        assert isinstance(plain, Axis)
        group: Any = dist.new_group(list(range(NUM_RANKS)))
        wrong = list[str]()
        for name, kind in (("hierarchical", "all_to_all"), ("bruck", "all_to_all"), ("direct", "all_to_all")):
            picked: Picked = {kind: [(0.0, None), (1000.0, build(name, kind, (2, 2), 3))]}
            axis = replace(plain, schedules=AxisSchedules(picked, group, 30))
            assert axis.schedules is not None
            for seed, expected in ((0, 100), (1, 100), (2, 1)):
                generator = torch.Generator().manual_seed(seed)
                table = torch.randint(0, 5, (4, 4), generator=generator) * torch.randint(
                    0, 2, (4, 4), generator=generator
                )
                counts = tell_counts(table[plain.rank].clone(), axis)
                by_torch = tell_counts(table[plain.rank].clone(), plain)
                assert (counts.every, by_torch.every, counts[:2]) == (table.tolist(), None, by_torch[:2])
                x = torch.randn(sum(counts.there), 3)
                with mock.patch.object(axis.schedules, "start_uneven", wraps=axis.schedules.start_uneven) as started:
                    there = exchange_rows(x, axis, counts, expected)
                    back = exchange_rows(there, axis, counts.reversed, expected)
                assert started.call_count == (2 if expected > 1 else 0)
                if not torch.equal(there, exchange_rows(x, plain, by_torch, expected)) or not torch.equal(x, back):
                    wrong.append(f"{name} {seed}")
        return wrong

    assert run_ranks(body, NUM_RANKS, 60) == [[]] * NUM_RANKS
    with pytest.raises(ScheduleError, match="expected an all_to_all, got a all_gather; only its ranks may have uneven"):
        unit_lengths(BY_KIND["all_gather"].collective, [[1] * 4] * 4)


def _assert_sums(ranks: Ranks) -> None:
    """Sums along several axes, across stages and over all ranks are right, by schedules where these are picked."""
    across = ranks.across([0, 1])
    assert across is not None
    assert ranks.across([0, 1]) is across
    for axis, total, is_run in (
        (ranks.merged(("a", "b")), {0: 1.0, 1: 1.0, 2: 5.0, 3: 5.0}, dist.get_rank() < 2),
        (across, {0: 2.0, 1: 4.0, 2: 2.0, 3: 4.0}, True),
        (ranks.everyone, dict.fromkeys(range(4), 6.0), True),
    ):
        assert axis.schedules is not None
        assert axis.schedules.has("all_reduce", 1) == is_run
        assert m.all_sum(torch.tensor(float(dist.get_rank())), axis).item() == total[dist.get_rank()]


def test_ranks_take_the_schedules_of_their_plan() -> None:
    """By stage and axis; each has a group of its own, and what never comes ends with an error that says where."""
    two: Picked = {"all_reduce": [(0.0, build("direct", "all_reduce", (2,)))]}
    four: Picked = {"all_reduce": [(0.0, BY_KIND["all_reduce"])]}
    everywhere = {of_stages([0, 1]): two, ALL_RANKS: four}

    def body() -> tuple[list[bool], str]:
        ranks = connect([Mesh.of(a=2, b=1)] * 2, 30)
        ranks.run_by([{("a",): two, ("b",): {}, ("a", "b"): two, **everywhere}, everywhere])
        axis = ranks.axes[0]
        _assert_sums(ranks)
        assert isinstance(axis, Axis)
        has = [isinstance(own, Axis) and own.schedules is not None for own in ranks.axes]
        assert axis.schedules is not None
        first_stage = dist.get_rank() < 2
        assert axis.schedules.has("all_reduce", 1) == first_stage
        assert torch.equal(m.all_sum(torch.ones(3), axis), torch.full((3,), 2.0))
        text = ""
        if dist.get_rank() == 1:  # rank 0 never comes
            axis.schedules = AxisSchedules(two, axis.group, 0.5)  # pyright: ignore[reportArgumentType]
            with pytest.raises(DistributedError) as error:
                _waited(m.launch_sum(torch.ones(3), axis), torch.ones(1))
            text = str(error.value)
        dist.barrier()
        ranks.forget_groups()
        assert axis.schedules is None
        return has, text

    for rank, (has, text) in enumerate(run_ranks(body, 4, 60)):
        assert has == [True, False]
        assert ("direct all_reduce 2: rank 1 of the group, step 0" in text) == (rank == 1)


def test_stages_without_a_weight_take_part_in_making_its_groups() -> None:
    picked: Picked = {"all_reduce": [(0.0, build("direct", "all_reduce", (2,)))]}

    def body() -> float | None:
        ranks = connect([Mesh.of(a=1)] * 3, 10)
        ranks.run_by([{of_stages([0, 2]): picked}] * 3)
        axis = ranks.across([0, 2])
        total = None if axis is None else m.all_sum(torch.tensor(1.0 + dist.get_rank()), axis).item()
        assert m.all_sum(torch.tensor(1.0), ranks.everyone).item() == 3.0
        return total

    assert run_ranks(body, 3, 30) == [4.0, None, 4.0]
