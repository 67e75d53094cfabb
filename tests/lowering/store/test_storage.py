"""What a rank keeps of a model: its own parts, in memory of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.lowering.module import ParallelModule, lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.analysis import computed_once, kept_constants
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.layout import Layouts
from tests.lowering.runs import Case, entry_of
from tests.lowering.test_training import DATA, FUSED, MEGATRON, TWO, VOCAB_SPLIT, ZERO3, Net

STORAGES = [DATA, DATA | ZERO3, MEGATRON | FUSED | VOCAB_SPLIT]


@pytest.mark.parametrize("storage", STORAGES, ids=["data", "zero3", "tensor"])
def test_no_rank_holds_or_changes_more_than_its_part(storage: dict[str, Layouts]) -> None:
    """A slice is no view of the user's parameter, which it would keep alive whole and train along."""
    torch.manual_seed(0)
    case = Case(Net().double(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})
    users = {t.untyped_storage().data_ptr() for t in (*case.model.parameters(), *case.model.buffers())}

    def body(parallel: ParallelModule) -> int:
        for name, tensor in (*parallel.named_parameters(), *parallel.named_buffers()):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size(), name
            assert local.untyped_storage().data_ptr() not in users, name
        return dist.get_rank()

    assert case.on_ranks(case.graph(TWO, storage, data_axes=(0,)), body) == [0, 1]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))


def test_of_a_constant_only_what_is_read_stays() -> None:
    """Rows of a table of positions: a view would keep the whole of it."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (4, 8), "float32", "x")
    w = b.leaf("w", "parameter", (8,), "float32", "w", grad=True)
    table = b.op("cast", b.op("arange", start=0, stop=64, step=1, dtype="int64"), dtype="float32")
    rows = b.op("slice", b.op("reshape", table, shape=(8, 8)), dim=0, start=2, stop=6, step=1)
    few = b.op("cast", b.op("arange", start=1, stop=9, step=1, dtype="int64"), dtype="float32")
    wide = b.op("expand", b.op("reshape", few, shape=(1, 8)), shape=(4, 8))
    y = b.op("mul", b.op("add", b.op("mul", x, rows), wide), w)
    graph = b.graph([("loss", b.op("sum", y, dims=(0, 1), keepdim=False))])
    assert {graph.types[n].num_bytes for n in kept_constants(graph, computed_once(graph))} == {4 * 8 * 4, 8 * 4}

    def body() -> list[int]:
        module = lower(graph, Scaled())
        module.forward_backward(x=torch.ones(4, 8))
        constants = entry_of(module).runner.constants
        assert constants is not None
        return [value.untyped_storage().nbytes() for value in constants.values()]

    assert sorted(run_ranks(body, 1, 60.0)[0]) == [8 * 4, 4 * 8 * 4]
