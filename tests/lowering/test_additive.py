"""Buffers that add up over the batch have the values of a single process, however many microbatches a step has."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.lowering.module import ParallelModule
from shardwright.pcg.step.execution import Execution
from tests.lowering.pipelines import evenly, of_one_stage
from tests.lowering.runs import Case, whole

BATCH = {"x": torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
STEPS = 3


class Experts(nn.Module):
    """Each token goes to one of them; counts of tokens, in integers and floats, and running sums."""

    tokens: Tensor
    load: Tensor
    weight: Tensor
    total: Tensor
    num_tokens: Tensor
    num_steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 16, dtype=torch.float64)
        self.register_buffer("tokens", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("load", torch.ones(4, dtype=torch.float64))
        self.register_buffer("weight", torch.ones(4, dtype=torch.float64))
        self.register_buffer("total", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("num_tokens", torch.tensor(5))
        self.register_buffer("num_steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), 4)
        tokens = chosen.sum((0, 1))
        self.tokens += tokens
        self.load = self.load + 0.5 * tokens
        self.num_tokens.add_(tokens.sum())
        self.weight = self.weight - gates.detach().mean((0, 1))
        self.total.add_((x * gates).detach().sum((0, 1)), alpha=2)
        self.num_steps = self.num_steps + 1
        y = self.experts(x).unflatten(-1, (4, 4)).tanh()
        return x + ((gates * chosen)[..., None] * y).sum(-2) / self.num_steps


class Counting(nn.Module):
    """One of its modules runs twice, and one buffer counts what lies in the batch alone."""

    num_examples: Tensor
    positive: Tensor
    outputs: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("num_examples", torch.tensor(0))
        self.register_buffer("positive", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("outputs", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_examples += x.shape[0]
        self.positive += (x > 0).sum((0, 1))
        for block in (self.blocks[0], *self.blocks):
            x = block(x)
        y = self.head(self.head(x).tanh())
        self.outputs = self.outputs.detach() + y.sum((0, 1))
        return y.pow(2).mean()


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Losses, buffers and parameters of some steps. One forward is for its loss alone."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), dict[str, Tensor]()
    for step in range(STEPS):
        optimizer.zero_grad()
        if isinstance(model, ParallelModule):
            loss = model.forward_backward(**BATCH)
        else:
            (loss := model(**BATCH)).backward()
        found[f"loss {step}"] = loss.detach()
        optimizer.step()
    with torch.no_grad():
        found["loss alone"] = model(**BATCH)
    tensors = (*model.named_buffers(), *model.named_parameters())
    return {**found, **{name: whole(t.detach()).clone() for name, t in tensors}}


def test_sums_over_the_batch_are_those_of_one_process() -> None:
    case = Case(Counting(), BATCH)
    wanted = trained(Counting())
    for name, value in case.model.named_buffers():
        assert not value.equal(wanted[name]), name
    graphs = [of_one_stage(case, (role,), many) for role, many in (("data", 2), ("zero", 4), ("tensor", 4))]
    plans = [(graph, Execution(recompute="full")) for graph in graphs]
    alone = of_one_stage(case, (), 4)
    plans += [(alone, evenly(alone, 2)), (alone, evenly(alone, 2, "gpipe", recompute="full"))]
    for (graph, execution), by_rank in zip(plans, case.on_ranks_of(plans, trained), strict=True):
        assert set().union(*by_rank) == wanted.keys()
        for name, value in (pair for found in by_rank for pair in found.items()):
            told = f"{graph.mesh}, {execution}, {name}"
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12, msg=told)
