"""Masks of which each rank draws its own part, as on GPUs; here the same code draws on CPUs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, cycle, product

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from bench.plans import CERTIFIED, fast_links
from examples.zoo import GPT
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random import drawing
from shardwright.lowering.random.drawing import Drawing
from shardwright.lowering.random.exact import Draw
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime import kernels
from shardwright.lowering.runtime import kernels as rt
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution, draws_whole
from shardwright.search.tree.planner import Planner
from tests.each import in_whole_grids
from tests.lowering.runs import Case, Step, assert_same_step, outcome

SEED, NUM_STEPS, NUM_DRAWS = 77, 3, 7
PLANS = (
    (("data",), {"dp": 2}), (("tensor",), {"tp": 2}), (("zero", "tensor"), {"dp": 2, "tp": 2}),
    (("zero",), {"mb": 2, "dp": 2}),
)  # fmt: skip


@pytest.fixture(scope="module")
def gpt() -> Case:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(24, (4, 8)), "targets": torch.randint(24, (4, 8))}
    return Case(GPT(vocab=24, max_seq=8, hidden=16, num_heads=4, num_layers=2).double(), batch)


@pytest.fixture(autouse=True)
def by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "draws_whole", lambda kind: False)


def planned(case: Case, roles: tuple[str, ...], sizes: dict[str, int]) -> Graph:
    mesh = Mesh.of(**sizes)
    return Planner(fast_links(mesh.devices.num_devices), CERTIFIED).solve(case.captured.graph, mesh, roles, "GPT").graph


def train(module: nn.Module, step: Callable[[], Tensor]) -> list[Step]:
    """Some steps of SGD, with gradients as whole tensors."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), list[Step]()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        found.append(copy.deepcopy(outcome(module, step())))
        optimizer.step()
    return found


def under_all(case: Case, *executions: Execution) -> list[list[list[Step]]]:
    """Of each plan under each execution, the steps on every rank."""

    def body(parallel: ParallelModule) -> list[Step]:
        torch.manual_seed(5)
        return train(parallel, lambda: parallel.forward_backward(**case.batch))

    graphs = [planned(case, *plan) for plan in PLANS]
    return case.on_ranks_of(list(product(graphs, executions)), body)


def test_where_masks_are_drawn_by_part() -> None:
    assert draws_whole("cpu")
    assert not draws_whole("cuda")


@in_whole_grids
def test_parts_are_what_exact_draws_say(gpt: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and cuts: with the masks of `seed_exactly` in their place, steps are those of one process."""
    numbers = cycle(range(0, NUM_STEPS * NUM_DRAWS, NUM_DRAWS))  # anew for each plan
    by_place = kernels.own_mask

    def own(x: Tensor, p: float, drawn: Tensor | Draw, shard: rt.Shard | None) -> Tensor:
        assert isinstance(drawn, Draw)
        assert drawn.by_part
        return by_place(x, p, replace(drawn, by_part=False), shard)

    monkeypatch.setattr(kernels, "own_mask", own)
    monkeypatch.setattr(Drawing, "numbered", lambda self: Draw(SEED, next(numbers), by_part=True))
    model = copy.deepcopy(gpt.model)

    def step() -> Tensor:
        loss = model(**gpt.batch)["loss"]
        loss.backward()
        return loss

    torch.manual_seed(5)
    with sw.seed_exactly(SEED) as random:
        expected = train(model, step)
        assert random.counter == NUM_STEPS * NUM_DRAWS
    for steps in chain(*under_all(gpt, DEFAULT)):
        for found, one in zip(steps, expected, strict=True):
            assert_same_step(found, one, 1e-10)


def test_ranks_agree_and_what_is_made_again_is_the_same(gpt: Case) -> None:
    by_plan = under_all(gpt, DEFAULT, Execution(recompute="full"))
    for once, again in zip(by_plan[::2], by_plan[1::2], strict=True):
        first, *others = once
        for steps in (*others, *again):
            for found, one in zip(steps, first, strict=True):
                assert_same_step(found, one, 1e-10)


def test_a_step_takes_one_number_of_torchs_generator(gpt: Case) -> None:
    graph = planned(gpt, *PLANS[-1])

    def body(parallel: ParallelModule) -> bool:
        torch.manual_seed(5)
        for _ in range(NUM_STEPS):
            parallel.forward_backward(**gpt.batch)
        found = torch.get_rng_state()
        torch.manual_seed(5)
        for _ in range(NUM_STEPS):
            torch.randint(1 << 62, ())
        return torch.equal(found, torch.get_rng_state())

    assert gpt.on_ranks(graph, body) == [True, True]


def test_a_part_has_one_mask_and_other_parts_others() -> None:
    x, before = torch.ones(64, 256), torch.get_rng_state()

    def mask(draw: Draw, rank: int | None = None, dim: int = 0) -> Tensor:
        shard = None
        if rank is not None:
            shape = [n * (2 if d == dim else 1) for d, n in enumerate(x.shape)]
            shard = rt.Shard(shape, (Axis("x", 2, rank), dim, 1))
        return rt.dropout(x, 0.25, draw, shard) != 0

    draw = Draw(SEED, 3, by_part=True)
    for place in ((), (0,), (1,), (1, 1)):
        assert torch.equal(mask(draw, *place), mask(draw, *place))
        assert abs(mask(draw, *place).double().mean() - 0.75) < 0.02
    others = [mask(draw), mask(draw, 0), mask(draw, 1), mask(draw, 1, 1), mask(draw + 1), mask(Draw(SEED + 1, 3, True))]
    for i, own in enumerate(others):
        for other in others[:i]:
            assert 0.3 < (own != other).double().mean() < 0.45  # independent ones differ in 2 × 3/4 × 1/4 of places
    assert torch.equal(torch.get_rng_state(), before)


def test_what_several_dropouts_share_is_not_drawn_by_part() -> None:
    drawn = rt.ahead((4, 4), 0.5, Draw(SEED, 1, by_part=True), torch.float32, torch.device("cpu"))
    assert drawn == Draw(SEED, 1)
