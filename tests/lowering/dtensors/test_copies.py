"""Writes into parts of sharded tensors: they reach the tensor, or they are refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwright.lowering.dtensors.mending import mend_dtensors
from shardwright.lowering.ranks.launch import connect, run_ranks
from shardwright.pcg.errors import ShardwrightError
from tests.lowering.dtensors.test_mending import held
from tests.lowering.runs import whole
from tests.lowering.test_training import TWO

# pyright: reportPrivateImportUsage=false

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda p: p[:3],
    "a row": lambda p: p[0],
    "a column": lambda p: p[:, 1],
    "an element": lambda p: p[1, 2],
    "a part of a part": lambda p: p[:3][:, :2],
    "with another dimension": lambda p: p[None, 1],
    "select": lambda p: p.select(1, 2),
    "narrow": lambda p: p.narrow(1, 0, 2),
    "split": lambda p: p.split(3)[0],
    "chunk": lambda p: p.chunk(2, dim=1)[1],
    "tensor_split": lambda p: p.tensor_split(2)[1],
    "unbind": lambda p: p.unbind()[1],
    "diagonal": lambda p: p.diagonal(),
    "t": lambda p: p.t()[:2],
    "view": lambda p: p.view(-1)[:5],
    "flatten": lambda p: p.flatten()[5:],
    "unflatten": lambda p: p.unflatten(0, (2, 2))[0],
    "data": lambda p: p.data[0],
    "detach": lambda p: p.detach()[:, 1],
    "all": lambda p: p[:],
    "all in one row": lambda p: p.view(-1),
    "itself": lambda p: p,
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda part: part.zero_(),
    "mul_": lambda part: part.mul_(3.0),
    "copy_": lambda part: part.copy_(2 * part),
    "setitem": lambda part: part.__setitem__(..., 7.0),
    "normal_": lambda part: part.normal_(generator=torch.Generator().manual_seed(3)),
    "foreach": lambda part: torch._foreach_mul_([part], 2.0),
    "out": lambda part: torch.mul(part, 2.0, out=part),
}
CASES = [*product(PARTS, ("zero_", "setitem")), *product(("rows", "a column", "t", "itself"), WRITES)]


def _outcome(write: Callable[[Tensor], Any], part: Callable[[Tensor], Tensor], p: Tensor, expected: Tensor) -> str:
    try:
        write(part(p))
    except ShardwrightError as error:
        return str(error)
    except RuntimeError as error:
        return "torch: " + str(error)
    return "written" if torch.equal(whole(p).detach(), expected) else "LOST"


def _outcomes() -> dict[str, int]:
    """How often what came of a write, but for what is wrong, which is named."""
    mend_dtensors()
    ranks, found = connect(TWO, 30), dict[str, int]()
    start = torch.arange(16.0).reshape(4, 4)
    for name, how in CASES:
        part, write, expected = PARTS[name], WRITES[how], start.clone()
        write(part(expected))
        for p in held(start, ranks):
            with torch.no_grad():
                said = _outcome(write, part, p, expected)
            if said == "LOST":
                said = f"{how} of {name} of {p.placements} is lost"  # pyright: ignore[reportAttributeAccessIssue]
            said = "refused" if "the write would be lost. Do it before" in said else said
            found[said] = found.get(said, 0) + 1
    return found


def test_writes_into_parts_reach_the_tensor_or_are_refused() -> None:
    found, other = run_ranks(_outcomes, 2, 60)
    assert found == other
    assert not [said for said in found if "is lost" in said], found
    assert found["written"] > 90
    assert found["refused"] > 90


def _message() -> str:
    mend_dtensors()
    (p, *_) = held(torch.ones(4, 4), connect(TWO, 30))
    assert float(p[:3].sum()) == 12  # reading is as ever
    try:
        with torch.no_grad():
            p[:3].zero_()
    except ShardwrightError as error:
        return str(error)
    return ""


def test_the_message_has_the_remedy() -> None:
    for text in run_ranks(_message, 2, 60):
        assert text.startswith("zero_ writes to a part [3, 4] of a tensor [4, 4] with placements (Shard(dim=0),); ")
        assert "whole = p.detach().full_tensor().clone(); whole[...] = ...; p.copy_(distribute_tensor(" in text


def _beside() -> list[Any]:
    """What others' DTensors of this process give before ours are there, and after."""
    found, value = list[Any](), torch.arange(16.0).reshape(4, 4)
    mesh = init_device_mesh("cpu", (2,))

    def look() -> list[Any]:
        torch.manual_seed(dist.get_rank())
        x = distribute_tensor(value.clone(), mesh, [Shard(0)])
        alone = x.sum().item() if dist.get_rank() == 0 else math.nan  # a number that one rank reads alone
        x[:3].zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of draws on CPUs
            drawn = torch.randn_like(x)
        assert isinstance(drawn, DTensor)
        return [x.to_local().tolist(), repr(alone), repr(x.norm()), drawn.to_local().tolist(), float(x.argmax())]

    found.append(look())
    ranks = connect(TWO, 30)
    mend_dtensors()
    found.append(look())
    assert ranks.world == 2
    return found


def test_dtensors_of_others_are_as_torch_has_them() -> None:
    for before, after in run_ranks(_beside, 2, 60):
        assert before == after
