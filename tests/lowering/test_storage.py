"""What a rank keeps of a model: its own parts, in memory of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwright.lowering.module import ParallelModule
from shardwright.pcg.layout import Layouts
from tests.lowering.runs import Case
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
