"""Dimensions that the devices do not divide: split with padding, and the model is one process's in every respect."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import shardwright as sw
from shardwright.cost.clusters.local import default_cluster
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import DistributedError, PlanError

VOCAB, HEADS, HEAD, FFN = 51, 9, 2, 33
WIDTH = HEADS * HEAD
PINS = ("tok.weight=S(0)", "head=S(0)", "up=S(0)", "down.weight=S(1)", "q.weight=gathered")


class Net(nn.Module):
    """A transformer of one block in which 2 divides neither vocabulary nor heads nor hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tok(ids)
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        logits = self.head(x + self.down(F.gelu(self.up(x))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int, rows: int = 4) -> dict[str, Tensor]:
    ids = torch.arange(rows * 6).reshape(rows, 6) * 7 % VOCAB
    return {"ids": ids.roll(step), "labels": (ids + step) % VOCAB}


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: range, loss_of: Any) -> list[float]:
    found = list[float]()
    for step in steps:
        found.append(float(loss_of(**batch(step))))
        found.append(float(model.clip_grad_norm_(0.5) if isinstance(model, ParallelModule)
                           else nn.utils.clip_grad_norm_(model.parameters(), 0.5)))  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    return found


def alone() -> tuple[list[float], dict[str, Tensor], Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)

    def step(**given: Tensor) -> Tensor:
        loss = model(**given)["loss"]
        loss.backward()
        return loss.detach()

    found = trained(model, optimizer, range(4), step)
    return found, model.state_dict(), model(**batch(0, rows=2))["logits"].detach()


def on_a_rank(plan: sw.Plan, folder: Path) -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):  # of results beside the loss
        models = net(), net()
        first, second = (sw.compile(model, plan=plan, kwargs=batch(0)) for model in models)
    optimizers = [torch.optim.AdamW(p.parameters(), lr=1e-2, weight_decay=0.5) for p in (first, second)]
    found = trained(first, optimizers[0], range(2), first.forward_backward)
    sw.save(folder / "runs", first, optimizers[0], step=2)
    found += trained(first, optimizers[0], range(2, 4), first.forward_backward)
    sw.load(folder / "runs", second, optimizers[1])
    again = trained(second, optimizers[1], range(2, 4), second.forward_backward)
    sw.export(first, folder / "whole")
    held = first._store.held
    return {
        "found": found,
        "again": again,
        "state": {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in first.state_dict().items()},
        "shapes": {name: _shapes(p) for name, p in first._store.outside.items() if isinstance(p, DTensor)},
        "moments": {tuple(state["exp_avg"].shape) for state in optimizers[0].state.values()},
        "padding": [x.inside.detach()[x.trimmed(x.inside).shape[0] :].abs().sum().item() for x in held.values()],
        "logits": _whole(first.evaluate(**batch(0, rows=2))["logits"]),
    }  # fmt: skip


def _shapes(x: DTensor) -> tuple[Any, ...]:
    return tuple(x.shape), tuple(x.to_local().shape), x.placements


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def test_a_model_with_padding_is_the_model(tmp_path: Path) -> None:
    plan = sw.plan(net(), default_cluster(2), kwargs=batch(0), mesh={"x": 2}, pins=list(PINS), pad=True)
    plan.save(tmp_path / "plan.json")
    plan = sw.Plan.load(tmp_path / "plan.json")
    assert {node.split[0].factors for node in plan.graph.nodes if node.op == "embedding"} == {("v",)}
    ((want, state, logits),) = run_ranks(alone, 1, 60)
    ranks = run_ranks(on_a_rank, 2, 60, args=(plan, tmp_path))
    for rank, got in enumerate(ranks):
        assert got["found"] == pytest.approx(want, rel=1e-12)
        assert got["again"] == got["found"][4:]
        for name, value in state.items():
            torch.testing.assert_close(got["state"][name], value, rtol=1e-9, atol=1e-12)
        assert got["shapes"]["tok.weight"] == ((VOCAB, WIDTH), (26 - rank, WIDTH), (Shard(0),))
        assert got["shapes"]["down.weight"] == ((WIDTH, FFN), (WIDTH, 17 - rank), (Shard(1),))
        assert got["moments"] == {tuple(value.shape) for value in state.values()}
        assert not any(got["padding"])
        torch.testing.assert_close(got["logits"], logits, rtol=1e-9, atol=1e-12)
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "whole" / "model.safetensors")
    assert {n: tuple(x.shape) for n, x in exported.items()} == {n: tuple(x.shape) for n, x in state.items()}
    torch.testing.assert_close(exported["tok.weight"], state["tok.weight"], rtol=1e-9, atol=1e-12)


def test_a_plan_with_other_padding_is_refused() -> None:
    plan = sw.plan(net(), default_cluster(2), kwargs=batch(0), mesh={"x": 2}, pins=list(PINS), pad=2)
    other = replace(plan, report=replace(plan.report, padding=plan.report.padding[1:]))
    with pytest.raises(DistributedError, match="its graph is not the captured one"):
        run_ranks(_compiled, 2, 60, args=(other,))


def _compiled(plan: sw.Plan) -> None:
    sw.compile(net(), plan=plan, kwargs=batch(0))


def test_pins_that_need_padding_are_refused_without_it() -> None:
    with pytest.raises(PlanError, match=r"2 devices cannot have slices S\(0\); pad=2 may let them"):
        sw.plan(net(), default_cluster(2), kwargs=batch(0), mesh={"x": 2}, pins=list(PINS))


def test_what_is_no_number_of_devices_is_refused() -> None:
    for wrong in (-1, "2"):
        with pytest.raises(
            PlanError, match=f"pad={wrong!r}: expected a number of devices, or True for those of an axis"
        ):
            sw.plan(net(), default_cluster(2), kwargs=batch(0), pad=wrong)  # pyright: ignore[reportArgumentType]


class Normed(nn.Module):
    """A mean over rows that are not ignored, and statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(128, 256), nn.BatchNorm1d(256), nn.Linear(256, 128)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(torch.tanh(self.norm(self.up(x)))), y)


def rows_of(number: int) -> dict[str, Tensor]:
    y = torch.arange(number) * 7 % 128
    y[::5] = -100
    return {"x": torch.linspace(-1, 1, 128 * number, dtype=torch.float64).sin().view(number, 128).roll(3, 0), "y": y}


def test_a_first_batch_that_devices_do_not_share_evenly_gets_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normed().double()
    words: dict[str, Any] = {"kwargs": rows_of(1025), "mesh": {"x": 2}, "roles": "data", "check_capture": "never"}
    plan = sw.plan(model, default_cluster(2), pad=True, **words)
    assert plan.report.rows == (1025, 1026)
    assert sw.plan(model, default_cluster(2), **words).report.rows == ()
    plan.save(tmp_path / "plan.json")

    def steps(given: nn.Module) -> list[tuple[float, list[Tensor]]]:
        found = list[tuple[float, list[Tensor]]]()
        for number in (1025, 1023):
            given.zero_grad()
            loss = given.forward_backward if isinstance(given, ParallelModule) else given
            result = loss(**rows_of(number))
            if result.requires_grad:
                result.backward()
            gradients: list[Any] = [p.grad for p in given.parameters()]
            whole = [g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in gradients]
            found.append((result.item(), whole))
        return found

    def body() -> list[tuple[float, list[Tensor]]]:
        return steps(sw.compile(model, default_cluster(2), kwargs=rows_of(1025), plan=tmp_path / "plan.json"))

    got, (expected,) = run_ranks(body, 2, 60)[0], run_ranks(lambda: steps(model), 1, 60)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
