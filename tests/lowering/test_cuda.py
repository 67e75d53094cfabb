"""What only a GPU shows: its kernels draw by themselves, want strides of their own, and NCCL sends between two.

`make cuda` runs these tests. Others see no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from examples import zoo as examples
from shardwright.api import compile as compile_model
from shardwright.lowering import private
from shardwright.lowering.ranks import movement
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.ranks.picked import AxisSchedules, Picked
from shardwright.lowering.ranks.rows import exchange_rows, tell_counts
from shardwright.lowering.runtime.ahead import ahead, link_to
from shardwright.lowering.runtime.kernels import grouped_mm
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.step.precisions import PrecisionMode
from tests.models import zoo

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU, or it was not asked for")


def rank_of_nccl(rank: int, store: str) -> None:
    """Every kind of collective by a schedule, on NCCL's point-to-point messages, beside torch's own; also rows."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=private.FileStore(store, 2), rank=rank, world_size=2)
    axis = Axis("a", 2, rank, dist.group.WORLD)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    picked: Picked = {kind: [(0.0, build("hierarchical", kind, (2,), 2))] for kind in kinds}
    group: Any = dist.new_group([0, 1])
    ours = replace(axis, schedules=AxisSchedules(picked, group, 60))
    x = torch.randint(-4, 5, (8, 12), device="cuda").float()
    moves: list[Callable[[Axis], Tensor]] = [
        lambda own: movement.all_sum(x, own),
        lambda own: movement.gather(x, own, 1, 3),
        lambda own: movement.sum_scatter(x, own, 0, 2),
        lambda own: movement.exchange(x, own, (0, 1), (1, 1)),
        lambda own: exchange_rows(x, own, tell_counts(torch.tensor([8 - rank, rank], device="cuda"), own), 4),
    ]
    for move in moves:
        assert torch.equal(move(axis), move(ours))
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL has a GPU for each rank, and there are fewer than two")
def test_schedules_run_on_nccl(tmp_path: Path) -> None:
    spawn(rank_of_nccl, (str(tmp_path / "store"),), nprocs=2)


@pytest.mark.parametrize("precision", [None, "amp_bf16"])
@pytest.mark.parametrize("name", zoo())
def test_captured_graphs_are_the_models(name: str, precision: PrecisionMode | None) -> None:
    """Dropout inside of attention and outside of it, experts of any width."""
    torch.manual_seed(0)
    model, batch = getattr(examples, name)()
    batch = {key: value.cuda() for key, value in batch.items()}
    parallel = compile_model(model.cuda(), kwargs=batch, precision=precision)
    assert parallel.forward_backward(**batch).isfinite()
    assert parallel.capture_check is not None
    assert parallel.capture_check.equal


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_are_copied_ahead(pinned: bool) -> None:
    """Beside kernels that still run when a copy is launched, and with memory of one batch used again for another."""
    device = torch.device("cuda", torch.cuda.current_device())
    link = link_to(device)
    assert link is not None
    x, sums = torch.ones(2048, 2048, device=device), list[Tensor]()
    made: Iterator[dict[str, Any]] = ({"x": torch.full((1 << 20,), float(n)), "n": n} for n in range(8))
    for n, batch in enumerate(ahead(({**b, "x": b["x"].pin_memory()} if pinned else b for b in made), link, device)):
        assert (batch["x"].device, batch["n"]) == (device, n)
        for _ in range(20):
            x = (x @ x).clamp(max=1)
        sums.append(batch["x"].double().sum())
        del batch
    assert [float(own) for own in sums] == [float(n << 20) for n in range(8)]


@pytest.mark.parametrize("width", [32, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups(width: int, dtype: torch.dtype) -> None:
    """With and without the strides that torch's kernel wants; a group has no rows."""
    torch.manual_seed(0)
    x, w = torch.randn(24, width, device="cuda", dtype=dtype), torch.randn(3, width, 40, device="cuda", dtype=dtype)
    x.requires_grad_()
    y = grouped_mm(x, w, torch.tensor([8, 8, 24], device="cuda"))
    y.float().sum().backward()
    expected = torch.cat([x[:8].float() @ w[0].float(), x[8:].float() @ w[2].float()])
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-1)
    assert x.grad is not None
    torch.testing.assert_close(x.grad[:8].float(), w[0].float().sum(1).expand(8, -1), rtol=2e-2, atol=2e-1)
