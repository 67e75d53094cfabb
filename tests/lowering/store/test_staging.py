"""Copies of a checkpoint's tensors: made once, written over by the next save, and apart from what trains on."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.lowering.store.staging import HostStager


def test_a_later_save_writes_over_the_copies_of_the_one_before() -> None:
    stager, weight = HostStager(), nn.Parameter(torch.ones(3))
    state = {"model": {"weight": weight}, "others": {"rates": [torch.zeros(2), 0.5]}}
    first = stager.stage(state)
    with torch.no_grad():
        weight += 1
    assert first["model"]["weight"].tolist() == [1, 1, 1]
    second = stager.stage(state)
    assert second["model"]["weight"] is first["model"]["weight"]
    assert second["model"]["weight"].tolist() == [2, 2, 2]
    assert not second["model"]["weight"].requires_grad
    assert second["others"]["rates"][1] == 0.5


def test_a_tensor_of_another_kind_has_another_copy() -> None:
    stager = HostStager()
    first = stager.stage({"step": torch.tensor([1.0, 2.0])})["step"]
    for changed in (torch.tensor([3.0]), torch.tensor([3.0, 4.0], dtype=torch.float64)):
        copied = stager.stage({"step": changed})["step"]
        assert copied is not first
        assert copied.dtype == changed.dtype
        assert copied.tolist() == changed.tolist()
        first = copied
