"""All ranks draw alike: also where they are seeded differently, or stop being alike."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwright as sw
from shardwright.lowering.module import ParallelModule, lower
from shardwright.lowering.random.drawing import WATCH_EVERY, Drawing, Stream
from shardwright.lowering.ranks.launch import connect, run_ranks
from shardwright.lowering.runtime.inputs import NUM_FIRST
from shardwright.pcg.errors import ShardwrightError
from tests.lowering.runs import Case, entry_of, hang, whole
from tests.lowering.runtime.test_inputs import Regression
from tests.lowering.test_microbatches import planned
from tests.lowering.test_training import DATA, MEGATRON, TWO, Net

STEPS = NUM_FIRST + 2


@pytest.fixture(scope="module")
def net() -> Case:
    torch.manual_seed(0)
    return Case(Net().double(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})


def losses(module: torch.nn.Module, batch: dict[str, Tensor]) -> Iterator[float]:
    """Of some steps of SGD."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(STEPS):
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def test_ranks_of_different_seeds_draw_what_rank_0_draws(net: Case) -> None:
    """In a stream of the program's own: the data of each rank's own come from a generator that it does not touch."""
    torch.manual_seed(5)
    model = copy.deepcopy(net.model)
    expected = list(losses(model, net.batch))

    def body(parallel: ParallelModule) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(5 + dist.get_rank())
        found = list[float]()
        for loss in losses(parallel, net.batch):
            found.append(loss)
            torch.rand(1 + dist.get_rank())
        used = torch.rand(1)
        torch.manual_seed(5 + dist.get_rank())
        for _ in range(STEPS):
            torch.rand(1 + dist.get_rank())
        assert torch.equal(used, torch.rand(1))
        return found, [whole(p).detach() for p in parallel.parameters()]

    for storage in ({}, DATA, MEGATRON):
        graph = net.graph(TWO, storage, data_axes=(0,) if "ids" in storage else ())
        for found, parameters in net.on_ranks(graph, body):
            assert found == pytest.approx(expected, rel=1e-11)
            torch.testing.assert_close(parameters, [p.detach() for p in model.parameters()])


def test_how_ranks_draw_is_compared_where_their_inputs_are_not(net: Case) -> None:
    torch.manual_seed(5)
    expected = list(losses(copy.deepcopy(net.model), net.batch))
    graph = net.graph(TWO, {})

    def body() -> None:
        parallel = lower(graph, copy.deepcopy(net.model), timeout_s=30, check_inputs="never")
        torch.manual_seed(5 + dist.get_rank())
        assert list(losses(parallel, net.batch)) == pytest.approx(expected, rel=1e-11)

    run_ranks(body, 2, 60)


def test_microbatches_of_ranks_of_different_seeds() -> None:
    torch.manual_seed(0)
    found = Case(Regression().double(), {"labels": torch.randn(8, 4).double()})
    model = copy.deepcopy(found.model)
    torch.manual_seed(5)
    expected = list(losses(model, found.batch))

    def body(parallel: ParallelModule) -> list[float]:
        torch.manual_seed(5 + dist.get_rank())
        return list(losses(parallel, found.batch))

    for own in found.on_ranks(planned(found, ("data",), many=2), body):
        assert own == pytest.approx(expected, rel=1e-11)


def test_ranks_that_stop_to_be_alike_in_the_first_steps_go_on_as_rank_0(net: Case) -> None:
    def body(parallel: ParallelModule) -> list[Tensor]:
        torch.manual_seed(5)
        for _ in losses(parallel, net.batch):
            torch.rand(1 + dist.get_rank())
        return [whole(p).detach() for p in parallel.parameters()]

    one, other = net.on_ranks(net.graph(TWO, {}), body)
    for own, others in zip(one, other, strict=True):
        assert torch.equal(own, others)


def test_ranks_that_stop_to_be_alike_later_all_raise(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        torch.manual_seed(5)
        for _ in range(2 * WATCH_EVERY + NUM_FIRST):  # what all draw is no harm
            torch.rand(1)
            parallel.forward_backward(**net.batch)
        torch.rand(dist.get_rank())
        for _ in range(WATCH_EVERY):
            torch.rand(1)
            parallel.forward_backward(**net.batch)
        with pytest.raises(
            ShardwrightError, match=r"some ranks need \(data, samples\) from a torch.Generator of its own"
        ):
            parallel.forward_backward(**net.batch)

    net.on_ranks(net.graph(TWO, {}), body)


def test_programs_that_do_not_draw_do_not_care() -> None:
    model = Net().double().eval()
    case = Case(model, {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})

    def body(parallel: ParallelModule) -> None:
        torch.manual_seed(dist.get_rank())
        for _ in losses(parallel, case.batch):
            torch.rand(1 + dist.get_rank())
        assert entry_of(parallel).drawing.own is None
        assert entry_of(parallel).drawing.comparison is None

    case.on_ranks(case.graph(TWO, {}), body)


def test_exact_seeds_must_be_equal(net: Case) -> None:
    """Torch's generator is the user's then, and each rank may use it as it likes."""
    graph = net.graph(TWO, {})

    def body() -> None:
        rank = dist.get_rank()
        with sw.seed_exactly(3):
            for _ in losses(net.lower(graph), net.batch):
                torch.rand(1 + rank)
        for seeds in ((1, 2), (1, None)):
            parallel, seed = net.lower(graph), seeds[rank]
            random = None if seed is None else sw.seed_exactly(seed)
            with pytest.raises(ShardwrightError, match="with the same seed on every rank"):
                parallel.forward_backward(**net.batch)
            if random is not None:
                random.close()

    run_ranks(body, 2, 60)


def test_a_rank_that_draws_from_another_waits_for_no_longer_than_its_timeout(net: Case, tmp_path: Path) -> None:
    done = tmp_path / "done"

    def body() -> float:
        ranks = replace(connect(TWO, 30), timeout_s=1.0)
        drawing = Drawing(ranks, net.captured.graph, Stream())
        began = time.monotonic()
        if dist.get_rank() == 0:
            hang(done, 4)  # and sends nothing
        else:
            with pytest.raises(RuntimeError):
                drawing.agree([[-1, 0, 1], [-1, 0, 2]])
            done.touch()
        return time.monotonic() - began

    assert run_ranks(body, 2, 30)[1] < 3.5
