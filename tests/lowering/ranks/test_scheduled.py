"""Schedules that gloo ranks carry out give what torch's collectives give: all builders, on up to 8 ranks."""

from __future__ import annotations

import re
import time
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.scheduled import MOST_ROOMS, ScheduledCollective, chunk_lengths
from shardwright.lowering.trial.collectives import example_input, example_output
from shardwright.pcg.collectives.builders.table import BUILDERS, build
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.errors import DistributedError, ScheduleError
from tests.each import some

GRIDS = ((2,), (3,), (5,), (2, 2), (2, 4), (3, 2))


def schedules(num_ranks: int) -> list[Schedule]:
    """Of every builder, one for each collective and grid that it claims."""
    grids = [dims for dims in GRIDS if prod(dims) == num_ranks]
    return [
        build(name, kind, dims, pieces)
        for name, builder in BUILDERS.items()
        for kind in builder.makes
        for dims in grids
        for pieces in (1, 3)
        if builder.sizes.fit(dims)
    ]


@pytest.mark.parametrize("num_ranks", some([2, 3, 4, 5, 6, 8], 3))
def test_every_builder_does_what_its_collective_says(num_ranks: int) -> None:
    built = schedules(num_ranks)

    def body() -> list[str]:
        group, rank, wrong = dist.group.WORLD, dist.get_rank(), list[str]()
        assert isinstance(group, dist.ProcessGroup)
        for schedule in some(built, len(built) // 6):
            runs = ScheduledCollective(schedule, group, timeout_s=30)
            whole, size = schedule.collective, 7 * num_ranks * num_ranks
            lengths = chunk_lengths(whole, size)
            expected = example_output(whole, lengths, rank)
            for out in (None, torch.empty_like(expected)):
                result = runs.run(example_input(whole, lengths, rank), size, out)
                if not torch.equal(result if out is None else out, expected):
                    wrong.append(schedule.name)
        return wrong

    assert len(built) > 20
    assert run_ranks(body, num_ranks, 120) == [[]] * num_ranks


def test_it_is_torchs_collective() -> None:
    """Bit by bit, where the order of sums is the same."""

    def body() -> None:
        group: Any = dist.group.WORLD
        x = torch.randn(24, generator=torch.Generator().manual_seed(dist.get_rank()))
        total, parts = x.clone(), x.new_empty(4, 24)
        dist.all_reduce(total)
        dist.all_gather_single(parts.view(-1), x)
        found = ScheduledCollective(build("ring", "all_reduce", (4,)), group).run(x, 24)
        torch.testing.assert_close(found, total, rtol=1e-6, atol=1e-6)
        assert torch.equal(ScheduledCollective(build("bruck", "all_gather", (4,)), group).run(x, 96), parts.view(-1))
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, x)
        assert torch.equal(ScheduledCollective(build("direct", "all_to_all", (4,)), group).run(x, 96), swapped)
        pair = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            assert isinstance(pair, dist.ProcessGroup)
            both = x.clone()
            dist.all_reduce(both, group=pair)
            assert torch.equal(ScheduledCollective(build("direct", "all_reduce", (2,)), pair).run(x, 24), both)

    run_ranks(body, 4, 60)


def test_uneven_units_and_memory_that_is_used_again() -> None:
    whole = collective("all_gather", 3, 2, weights=[4, 0, 2])
    cells = [(c, s) for c, chunk in enumerate(whole.chunks) if chunk.targets for s in chunk.sources]
    transfers = tuple(Transfer(0, s, d, c) for c, s in cells for d in range(3) if d != s)
    schedule = Schedule("uneven", whole, transfers)

    def body() -> list[Tensor]:
        group: Any = dist.group.WORLD
        runs, own = ScheduledCollective(schedule, group), (4, 0, 2)[dist.get_rank()]
        return [runs.run(torch.arange(n * own) + 100.0 * dist.get_rank(), 6 * n) for n in (1, 3, 1)]

    for found in run_ranks(body, 3, 60):
        for n, result in zip((1, 3, 1), found, strict=True):
            assert torch.equal(result, torch.cat([torch.arange(4.0 * n), torch.arange(2.0 * n) + 200]))


def test_any_mode_of_autograd_and_memory_for_the_last_few_lengths() -> None:
    """Memory that one mode makes is used by the others, in any order."""
    modes = (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.enable_grad, torch.inference_mode)

    def body() -> int:
        group: Any = dist.group.WORLD
        runs = ScheduledCollective(build("ring", "all_reduce", (2,)), group, timeout_s=30)
        for size in (4, 4, 6, 8, 10, 12, 14, 4):
            for mode in modes:
                with mode():
                    x = torch.ones(size, requires_grad=True) * 2
                    found = runs.run(x, size)
                    assert not found.requires_grad
                    assert not found.is_inference()
                    assert torch.equal(found, torch.full((size,), 4.0))
        return len(runs._rooms)

    assert run_ranks(body, 2, 60) == [MOST_ROOMS] * 2


def test_what_does_not_fit_is_refused() -> None:
    def body() -> list[str]:
        group: Any = dist.group.WORLD
        texts = list[str]()

        def refused(kind: type[Exception], schedule: Schedule, *args: Any, **words: Any) -> None:
            with pytest.raises(kind) as error:
                ScheduledCollective(schedule, group, **words).run(*args)
            texts.append(str(error.value))

        ring = build("ring", "all_gather", (2,))
        refused(ScheduleError, build("ring", "all_gather", (3,)), torch.ones(2), 6)
        refused(ScheduleError, ring, torch.ones(3), 4)
        refused(ScheduleError, ring, torch.ones(4)[::2], 4)
        refused(ScheduleError, ring, torch.ones(2), 3)
        refused(ScheduleError, ring, torch.ones(2), 4, torch.ones(6))
        if dist.get_rank():  # the other rank never comes
            refused(DistributedError, ring, torch.ones(2), 4, timeout_s=0.5)
            refused(DistributedError, ring, torch.ones(2), 4, timeout_s=0.5)  # the connection is broken by now
        else:
            time.sleep(1.5)
        return texts

    for rank, texts in enumerate(run_ranks(body, 2, 60)):
        assert "it is for 3 ranks, and the group has 2" in texts[0]
        assert "expected a contiguous input of shape [2], got [3]" in texts[1]
        assert "got [2]" in texts[2]
        assert "3 elements make a unit of 3/2" in texts[3]
        assert "expected memory of shape [4] for the output, got [6]" in texts[4]
        if rank:
            words = r"rank 1 of the group, step 0: chunks \[(1\] to|0\] from) rank 0 did not go through"
            assert re.search(words, texts[5])
            assert "rank 1 of the group, step 0: " in texts[6]
