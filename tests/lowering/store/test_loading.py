"""`load_state_dict`: one order on all ranks, and one outcome."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import PlanError, ShardwrightError
from tests.lowering.runs import Case, whole
from tests.lowering.test_module import TENSOR
from tests.lowering.test_training import TWO, ZERO3, Net

State = dict[str, Any]


@pytest.fixture(scope="module")
def net() -> Case:
    torch.manual_seed(0)
    return Case(Net().double(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})


def other_values(net: Case) -> dict[str, Tensor]:
    """Of all parameters and buffers."""
    state = copy.deepcopy(net.model.state_dict())
    return {name: value + 1 for name, value in state.items()}


def in_order(state: State, rank: int) -> State:
    """Another order on each rank."""
    names = sorted(state, reverse=bool(rank))
    return {name: state[name] for name in names}


def test_names_may_come_in_any_order(net: Case) -> None:
    """DTensors are gathered by all ranks together, and mixed with whole tensors."""
    expected = other_values(net)
    dtensors = net.graph(TWO, ZERO3)

    def body(parallel: ParallelModule) -> None:
        source = net.lower(dtensors)
        source.load_state_dict(in_order(expected, dist.get_rank()))
        state: State = dict(source.state_dict())
        state["up.bias"] = expected["up.bias"]
        parallel.load_state_dict(in_order(state, dist.get_rank()))
        for name, value in parallel.state_dict().items():
            assert torch.equal(whole(value), expected[name]), name

    net.on_ranks(net.graph(TWO, TENSOR), body)


def test_a_transformer_encoder_loads_its_own_state() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).double()
    case = Case(Loss(model), {"x": torch.randn(4, 3, 8).double()})

    def body(parallel: ParallelModule) -> None:
        before = {name: whole(value).clone() for name, value in parallel.state_dict().items()}
        state = parallel.state_dict()
        parallel.load_state_dict({name: state[name] for name in sorted(state, reverse=dist.get_rank() == 1)})
        assert all(torch.equal(whole(value), before[name]) for name, value in parallel.state_dict().items())

    case.on_ranks(case.graph(TWO, {}, data_axes=(0,)), body)


class Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).pow(2).mean()


def test_where_one_rank_cannot_load_no_rank_does(net: Case) -> None:
    """Each is told, and nothing is changed; without agreement the others would wait, or go on alone."""
    values, graph = other_values(net), net.graph(TWO, ZERO3)

    def body() -> None:
        parallel, rank = net.lower(graph), dist.get_rank()
        before = {name: whole(value).clone() for name, value in parallel.state_dict().items()}
        dtensors = parallel.state_dict()
        less = {name: value for name, value in values.items() if name != "up.bias"}

        def refused(own: State, match: str, kind: type[Exception] = ShardwrightError, **options: Any) -> None:
            with pytest.raises(kind, match=match):
                parallel.load_state_dict(own, **options)

        refused(less if rank else values, ["rank 1 cannot take its state: .*missing keys", "missing keys"][rank])
        refused(values if rank else less, ["missing keys", "rank 0 cannot take its state: .*missing"][rank])
        refused(less if rank else values, "'up.bias' is a whole tensor on rank 0 and missing on rank 1", strict=False)
        mixed = values | {"up.bias": dtensors["up.bias"]}
        refused(mixed if rank else values, "'up.bias' is a whole tensor on rank 0 and a DTensor .* on rank 1; pass")
        shaped = values | {"up.bias": torch.zeros(7)}
        refused(shaped if rank else values, ["rank 1 cannot", "shape"][rank], PlanError if rank else ShardwrightError)
        refused(values | {"up.bias": 3}, r"up.bias: the state has a int, the model \[24\]", PlanError)
        for name, value in parallel.state_dict().items():
            assert torch.equal(whole(value), before[name]), name

    run_ranks(body, 2, 60)
