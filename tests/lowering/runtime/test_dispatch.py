"""Tokens that are sent to their experts on gloo ranks in double precision, unevenly routed: the same as one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime import dispatch
from shardwright.lowering.runtime.dispatch import Sent, To
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import R, S
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.types import TensorType
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.experts import EXPERTS, SIZE, Routed, Sorted, mixture
from tests.lowering.parallelize import follow
from tests.lowering.runs import Case, Step, assert_same_step, parallel_step, serial_step, whole
from tests.lowering.test_experts import ERROR, ROWS, chosen
from tests.search.graphs import cluster

SENT, BATCH = "e>_0", "_0"


def dispatching(case: Case, split: Sequence[str]) -> Graph:
    """The rows of experts split in this way, everything else along the batch; experts are stored as they are used."""
    serial, mesh = case.captured.graph, Mesh.of(**dict.fromkeys("xy"[: len(split)], 2))
    others = follow(serial, mesh)

    def choose(node: Node, axis: int, operands: list[TensorType]) -> str:
        return split[axis] if node.op in ROWS else others(node, axis, operands)

    held = tuple(S(0) if choice in (SENT, "e") else R for choice in split)
    batch = tuple(S(0) if choice in (SENT, BATCH) else R for choice in split)
    return case.graph(mesh, {"x": batch, "up": held, "down": held}, choose)


def three_steps(module: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights after as many steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        if isinstance(module, ParallelModule):
            module.forward_backward(**batch)
        else:
            module(**batch).backward()
        optimizer.step()
    return {name: whole(p.detach()) for name, p in module.named_parameters()}


def assert_as_one_process(plans: Sequence[tuple[Case, Graph]], execution: Execution = DEFAULT) -> None:
    """A step, and weights after three."""

    def run(case: Case, graph: Graph) -> tuple[Step, dict[str, Tensor]]:
        step, steps = (case.lower(graph, execution) for _ in range(2))
        return parallel_step(step, case.batch), three_steps(steps, case.batch)

    ranks = run_ranks(lambda: [run(*plan) for plan in plans], plans[0][1].mesh.num_devices, 60)
    for number, (case, _) in enumerate(plans):
        step, weights = serial_step(case), three_steps(copy.deepcopy(case.model), case.batch)
        for found in ranks:
            assert_same_step(found[number][0], step, ERROR)
            for name, weight in weights.items():
                torch.testing.assert_close(found[number][1][name], weight, rtol=1e-9, atol=1e-9, msg=name)


def all_to(expert: int) -> Case:
    """Every token chooses this expert and the next one, so that the other rank gets no row at all."""
    model, batch = mixture("sorted")
    assert isinstance(model, Routed)
    with torch.no_grad():
        model.router.bias.zero_()[expert : expert + 2] = torch.tensor([80.0, 79.0])
    return Case(model, batch)


def test_tokens_are_sent_to_experts_and_back_on_two_ranks() -> None:
    """One expert has most tokens, one none; or one rank has all."""
    cases = [Case(*mixture("sorted")), Case(*mixture("biased")), Case(*mixture("first")), all_to(6)]
    assert_as_one_process([(case, dispatching(case, (SENT,))) for case in cases])


def test_beside_and_along_other_splits_on_four_ranks() -> None:
    """Also from axis to axis, and among the experts of a part of them."""
    case = Case(*mixture("sorted"))
    splits = ((SENT, BATCH), (BATCH, SENT), (SENT, SENT), ("e", SENT), (SENT, "e"), ("f", SENT))
    assert_as_one_process([(case, dispatching(case, split)) for split in splits])


def test_each_rank_gets_the_rows_that_name_its_experts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is dropped, and none is sent twice that names two of them."""
    case, found, real = Case(*mixture("sorted")), list[Sent](), dispatch.sent_rows
    graph, index = dispatching(case, (SENT,)), chosen(case)

    def spy(index: Tensor, to: To) -> Sent:
        found.append(real(index, to))
        return found[-1]

    def step() -> list[tuple[list[int], list[int], Tensor]]:
        monkeypatch.setattr(dispatch, "sent_rows", spy)
        parallel_step(case.lower(graph), case.batch)
        return [(*sent.counts[:2], sent.rows) for sent in found]

    half, ranks = len(index) // 2, run_ranks(step, 2, 60)
    named = [(index // (EXPERTS // 2) == rank).any(1) for rank in range(2)]
    for rank, ((there, back, rows),) in enumerate(ranks):
        mine = slice(rank * half, (rank + 1) * half)
        assert there == [int(part[mine].sum()) for part in named]
        assert back == [int(named[rank][:half].sum()), int(named[rank][half:].sum())]
        assert torch.equal(rows, torch.cat([part[mine].nonzero()[:, 0] for part in named]))
    assert sum(sum(there) for ((there, *_),) in ranks) < index.numel()


class Layer(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.before(x).reshape(-1, SIZE)
        return x + self.experts(tokens, *self.route(tokens)).view(x.shape)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_searched_plan_with_microbatches_gathered_weights_and_recomputation() -> None:
    """Collectives run again in backward, on all ranks alike."""
    torch.manual_seed(0)
    case = Case(Deep().double(), {"x": torch.randn(8, 12, SIZE).double()})
    run, mesh = Execution(recompute="full"), Mesh.of(**{TIME: 2}, x=2, y=2)
    planner = Planner(cluster(4), certified_choices())
    graph = planner.solve(case.captured.graph, mesh, ("zero", "expert"), "test", execution=run).graph
    assert [node.split[1:] for node in graph.leaves("experts")] == [(BATCH, SENT)] * 2
    assert_as_one_process([(case, graph)], run)
