"""`load` and `weights=` read folders that plain FSDP2 and torchtitan have written, under any plan, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.lowering.store.dcp_folder import prefix_of
from shardwright.pcg.errors import CheckpointError, DistributedError, PlanError
from tests.each import each, some
from tests.shardwright.test_programs import batch_of, model_of
from tests.shardwright.test_saving import PLANS, joined

BATCH, RATE = batch_of(8, 6), 0.03125


def rate(step: int) -> float:
    return 0.5**step


class Trained:
    """A model under plain FSDP2 after two steps, and what a checkpoint of it should bring back."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = model_of(norm=False)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        for _ in range(2):
            self.model(**BATCH).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def write(self, folder: Path) -> None:
        """Write it as scripts of plain FSDP2 do, as torchtitan does, and in ways that are refused."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        flat = get_optimizer_state_dict(
            self.model, self.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
        beside = {
            "lr_scheduler": self.scheduler.state_dict(),
            "train_state": {"step": torch.tensor(2, dtype=torch.int32)},
            "dataloader": {"dp_rank_0": b"place"},
        }
        for name, state in {
            "plain": {"model": model, "optim": optimizer},
            "app": {"app": {"model": model, "optimizer": optimizer}},
            "titan/step-7": {"model": model, "optimizer": flat, **beside},
            "titan/step-10": {**model, "optimizer": flat, **beside},
            "weights": {**model},
            "numbers": {"model": model, "optimizer": self.optimizer.state_dict()},
            "two": {"ema": model, "teacher": model},
        }.items():
            state_dict_saver.save(state, checkpoint_id=folder / name)

    def state(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The values, moments and options that this rank has, whole and by name."""
    found = dict[str, Any]()
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter)
        found |= {f"{name} {key}": whole(value) for key, value in optimizer.state[parameter].items()}
    keys = ("lr", "betas", "weight_decay", "initial_lr")
    return found | {key: optimizer.param_groups[0][key] for key in keys if key in optimizer.param_groups[0]}


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compiled(plan: str, **words: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(2)
    words |= {**PLANS[plan], "timeout_s": 60, "check_capture": "never"}
    parallel = sw.compile(model_of(norm=False), sw.Cluster.local(2), kwargs=BATCH, **words)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=0.5)


def equal_to(expected: dict[str, Any], parallel: Any, optimizer: torch.optim.Optimizer) -> int:
    found = state_of(parallel, optimizer)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=0, atol=0)
    return len(found)


@pytest.mark.parametrize("plan", some(reversed(PLANS), 2))
def test_folders_of_others_are_loaded_bit_for_bit(plan: str) -> None:
    def body(folder: Path) -> None:
        trained = Trained()
        trained.write(folder)
        parallel, optimizer = compiled(plan)
        for name, step, found in (("plain", None, 2), ("app", None, 2), ("titan", 7, 7), ("titan", None, 10)):
            for parameter in parallel.parameters():
                nn.init.ones_(parameter)
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.5)
            assert sw.load(folder / name, parallel, optimizer, step=step) == found
            assert equal_to(trained.state(), parallel, optimizer) > 10
        parallel.forward_backward(**BATCH)  # and it goes on
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        sw.load(folder / "titan", parallel, optimizer, scheduler)
        assert (scheduler.last_epoch, scheduler.get_last_lr()) == (2, [RATE / 4])
        sw.save(folder / "titan", parallel, optimizer, step=11, keep=1)  # in the same folder
        assert sw.load(folder / "titan", parallel, optimizer) == 11
        assert sw.load(folder / "titan", parallel, optimizer, step=10) == 10
        assert sw.load(folder / "weights", parallel) == 0

    joined(body)


class Longer(nn.Module):
    """A model with the same names and others, and another vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(33, 16)
        self.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tok(ids)[..., :2]
        for layer in self.more:
            x = layer(x)
        return x.square().mean() + 0 * labels.sum()


def test_weights_of_others_and_what_is_refused() -> None:
    def body(folder: Path) -> None:
        trained = Trained()
        trained.write(folder)
        for name in ("plain", "titan/step-10"):
            parallel, optimizer = compiled("zero", weights=folder / name)
            values = {name: whole(p) for name, p in parallel.named_parameters()}
            torch.testing.assert_close(values, {name: trained.state()[name] for name in values}, rtol=0, atol=0)
        other_optimizer = torch.optim.SGD(parallel.parameters(), momentum=0.9)
        for text, call in refusals(folder, parallel, optimizer, other_optimizer).items():
            with pytest.raises((CheckpointError, PlanError, DistributedError), match=text):
                call()
            assert not optimizer.state
        other = sw.compile(Longer(), sw.Cluster.local(2), kwargs=BATCH, mesh={"x": 2}, roles="data", timeout_s=60)
        for name in ("plain", "titan"):
            with pytest.raises(CheckpointError, match="of another model or optimizer") as error:
                sw.load(folder / name, other, torch.optim.AdamW(other.parameters()))
            assert "tok.weight: float64[32, 16] in the checkpoint, float32[33, 16] here" in str(error.value)
            assert str(error.value).count(";") == 9
            assert "more; " not in str(error.value)

    joined(body)


def refusals(folder: Path, parallel: Any, optimizer: Any, other: Any) -> dict[str, Callable[[], object]]:
    return {
        "weights: it has no optimizer": lambda: sw.load(folder / "weights", parallel, optimizer),
        r"parameters by numbers.*get_optimizer_state_dict": lambda: sw.load(folder / "numbers", parallel, optimizer),
        r"not clear whether ema\.\* or teacher\.\* is": lambda: sw.load(folder / "two", parallel),
        r"two: it is not clear.*names=": lambda: compiled("zero", weights=folder / "two"),
        "momentum_buffer: not in the checkpoint": lambda: sw.load(folder / "plain", parallel, other),
        "saved without a scheduler": lambda: sw.load(folder / "plain", parallel, scheduler=Counting()),
        "saved without a sampler": lambda: sw.load(folder / "titan", parallel, sampler=Counting()),
        "what shardwright.save has saved": lambda: sw.load(folder / "titan", parallel, others={"x": 1}),
        "no checkpoint of step 8; there are 7, 10": lambda: sw.load(folder / "titan", parallel, step=8),
    }


class Counting:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        raise AssertionError


@each(
    "stored, prefix",
    [
        ([], ""),
        (["a.w", "b.w", "optimizer.state.a.w.exp_avg"], ""),
        (["model.a.w", "model.b.w", "ema.a.w", "ema.b.w"], "model."),
        (["x.a.w", "x.b.w", "y.a.w"], "x."),
        (["app.model.a.w", "app.model.b.w"], "app.model."),
        (["a.w", "b.w", "ema.a.w", "ema.b.w"], ""),
    ],
)
def test_what_stands_before_the_names(stored: list[str], prefix: str) -> None:
    assert prefix_of(stored, {"a.w", "b.w"}) == prefix
