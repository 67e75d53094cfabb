"""The predicted bytes of optimizers' states are those that real optimizers keep on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardwright as sw
from shardwright.cost.predict import predict
from shardwright.cost.timeline.memory import Stored, in_flight_bytes
from shardwright.lowering import private
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.optimizers import AT_ONCE_BYTES, OPTIMIZERS, Optimizer, optimizer_named
from shardwright.reports.facts import PlanFacts, fits
from shardwright.reports.rounding import precision
from shardwright.search.plan import Plan
from shardwright.search.request.restrict import FREE
from shardwright.search.tree.planner import Planner
from tests.search.graphs import cluster, every_choice, mlp

BATCH = {"x": torch.arange(32).view(8, 4) % 16}


class Net(nn.Module):
    """An embedding, linears, and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.norm = nn.Embedding(16, 8), nn.Linear(8, 32), nn.LayerNorm(32)
        self.experts = nn.Parameter(torch.randn(2, 32, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(self.words(x)).relu())
        return torch.einsum("bsi,eio->bseo", h, self.experts).square().mean()


class Lion(optim.Optimizer):
    """The sign of a momentum."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            p.sub_(kept.lerp(p.grad, 0.1).sign(), alpha=1e-3)
            kept.lerp_(p.grad, 0.01)


Parameters = list[nn.Parameter]
MADE: dict[Optimizer, Callable[[Parameters], list[optim.Optimizer]]] = {
    "adam": lambda own: [optim.AdamW(own, fused=True)],
    "momentum": lambda own: [optim.SGD(own, 0.1, momentum=0.9)],
    "sgd": lambda own: [optim.SGD(own, 0.1)],
    "lion": lambda own: [Lion(own)],
    "adafactor": lambda own: [optim.Adafactor(own)],
    "muon": lambda own: [optim.Muon([p for p in own if p.ndim == 2]), optim.AdamW([p for p in own if p.ndim != 2])],
}


def kept_bytes(optimizers: list[optim.Optimizer]) -> int:
    """The bytes of states on this rank, but for the numbers of steps."""
    states = (private.unwrap(x) for own in optimizers for state in own.state.values() for x in state.values()
              if isinstance(x, Tensor) and x.ndim)  # fmt: skip
    return sum(x.numel() * x.element_size() for x in states)


def measured(plan: Plan) -> dict[str, int]:
    parallel = sw.compile(Net(), kwargs=BATCH, plan=plan, check_capture="never")
    found = dict[str, int]()
    for name, make in MADE.items():
        optimizers = make(list(parallel.parameters()))
        parallel.forward_backward(**BATCH)
        for own in optimizers:
            own.step()
            own.zero_grad()
        found[name] = kept_bytes(optimizers)
    return found


@pytest.mark.parametrize("roles", ["zero", "tensor"])
def test_states_on_shards_take_the_predicted_bytes(roles: str) -> None:
    assert MADE.keys() == OPTIMIZERS.keys() - {"adam8bit", "adam@host", "momentum@host"}  # not here; not on the device
    plan = sw.plan(Net(), sw.Cluster.local(2), kwargs=BATCH, mesh={"x": 2}, roles=roles)

    def predicted(name: Optimizer) -> int:
        return PlanFacts(
            replace(plan, execution=plan.execution.having(optimizer=name))
        ).prediction.memory.optimizer_bytes

    for found in run_ranks(partial(measured, plan), 2, 60):
        assert found == {name: predicted(name) for name in MADE}


def test_a_plan_counts_the_states_of_the_optimizer_that_is_asked_for() -> None:
    plan = sw.plan(Net(), sw.Cluster.local(2), kwargs=BATCH, optimizer=optim.Adafactor)
    assert plan.execution.assumed.optimizer == "adafactor"
    assert PlanFacts(plan).prediction.memory == plan.prediction.memory
    assert precision(PlanFacts(plan)).endswith("; optimizer states are those of adafactor")


def test_the_host_has_names_for_adamw_too() -> None:
    assert optimizer_named("AdamW@host", "", "optimizer") == "adam@host"


def test_the_search_cuts_what_does_not_fit_with_this_optimizer() -> None:
    graph = mlp(8, 1024, 1024)
    num_bytes = sum(4 * graph.types[leaf.name].num_elements for leaf in graph.leaves("parameter"))

    def parts(name: Optimizer) -> set[bool]:
        small = cluster(2, memory_bytes=int(3.6 * num_bytes), link_bytes_per_s=1e7)
        plan = Planner(small, every_choice, optimizer=name).plan(
            graph, mesh=Mesh.of(x=2), roles=(FREE,), recompute="none", stages=1
        )
        assert fits(plan), name
        return {x.is_shard for leaf in plan.graph.leaves("parameter") for x in plan.graph.types[leaf.name].layouts}

    assert parts("adafactor") == {False}
    assert True in parts("adam")


def on_the_host(memory_share: float, optimizer: Optimizer, host_bytes_per_s: float = 1e8) -> Plan:
    """The plan of an MLP on two devices, whose memory is this share of the bytes of its weights."""
    graph = mlp(8, 8192, 8192, layers=8)
    num_bytes = sum(4 * graph.types[leaf.name].num_elements for leaf in graph.leaves("parameter"))
    small = cluster(
        2, memory_bytes=int(memory_share * num_bytes), link_bytes_per_s=1e7, host_bytes_per_s=host_bytes_per_s
    )
    return Planner(small, every_choice, optimizer=optimizer).plan(
        graph, mesh=Mesh.of(x=2), roles=(FREE,), recompute="none", stages=1
    )


def test_states_on_the_host_leave_room_and_take_the_time_of_their_copies() -> None:
    plan = on_the_host(100, "adam")
    num_bytes = plan.prediction.memory.optimizer_bytes
    same = predict(plan.graph, plan.cluster, plan.execution.having(optimizer="adam@host"))
    assert num_bytes > 0
    assert same.memory.optimizer_bytes == 0
    assert same.optimizer_s - plan.prediction.optimizer_s == pytest.approx(2 * num_bytes / 1e8)
    assert same.step_s - plan.prediction.step_s == pytest.approx(2 * num_bytes / 1e8)
    on_host = on_the_host(100, "adam@host").prediction
    assert plan.prediction.step_s < on_host.step_s <= same.step_s


def test_states_in_flight_are_counted() -> None:
    large = Stored(1 << 26, "float32", True, False, "float32", (1 << 26,))
    small = large._replace(num_elements=1 << 20)
    execution = Execution.of(optimizer="adam@host")
    assert in_flight_bytes({(large, 1): 3}, execution) == 2 * (1 << 29)
    assert in_flight_bytes({(large, 2): 3}, execution) == 2 * (1 << 28)  # ZeRO-1
    assert in_flight_bytes({(small, 1): 1000}, execution) == 2 * 2 * AT_ONCE_BYTES
    assert in_flight_bytes({(small, 1): 3}, execution) == 3 * (1 << 23)  # all of them
    assert in_flight_bytes({(large, 1): 3}, Execution.of(optimizer="adam")) == 0


def test_where_nothing_fits_the_plan_says_what_the_host_would_hold() -> None:
    plan = on_the_host(1.6, "adam")
    assert not fits(plan)
    assert any("optimizer='adam@host'" in remedy.what for remedy in plan.report.remedies)
    assert fits(on_the_host(1.6, "adam@host"))
    assert not any("@host" in remedy.what for remedy in on_the_host(1.6, "adafactor").report.remedies)
    with pytest.raises(PlanError, match=r"optimizer 'adam@host': device 'test' has no host_bytes_per_s.*take 'adam'"):
        on_the_host(1.6, "adam@host", 0.0)
