"""accelerate on a compiled model: the losses of one process, and states that another plan loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

import shardwright as sw
from shardwright.integrations.accelerate import Accelerator
from shardwright.pcg.errors import CheckpointError, DistributedError, ShardwrightError
from tests.each import each, in_whole_grids
from tests.shardwright.integrations.loops import VOCAB, collated, example_batch, examples, launched, model_of

ROWS = 4
PLANS: dict[str, dict[str, Any]] = {
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
    "stages": {"stages": 2, "microbatches": 2, "schedule": "1f1b"},
}
pytestmark = pytest.mark.filterwarnings("ignore:GPT2LMHeadModel returns")
Found = dict[str, Any]


def trained(accelerator: Any, model: nn.Module, folder: Path, begin: int, epochs: int) -> Found:
    """The loop of accelerate's own documentation; two batches a step, a checkpoint after each epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    torch.manual_seed(3)  # of the order of data
    loader = DataLoader(cast("Dataset[Any]", examples(16)), batch_size=ROWS, shuffle=True, collate_fn=collated)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if begin:
        accelerator.load_state(str(folder))
    losses, norms, rates, words = list[float](), list[float](), list[float](), list[str]()
    for _ in range(begin, epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                found = model(**batch)
                loss = found if isinstance(found, Tensor) else found.loss
                accelerator.backward(loss)
                losses += accelerator.gather_for_metrics(loss.detach()[None]).tolist()
                words += accelerator.gather_for_metrics([str(first) for first in batch["input_ids"][:, 0].tolist()])
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                rates += scheduler.get_last_lr()
        accelerator.save_state(str(folder))
    return {"losses": losses, "norms": norms, "rates": rates, "words": words}


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)


def alone(folder: Path) -> Found:
    model, metric, batch = model_of(0.0), accuracy(), collated(examples(5))
    found = trained(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), model, folder, 0, 2)
    with torch.no_grad():
        metric.update(model.eval()(**batch).logits.flatten(0, 1), batch["labels"].flatten())
    return {**found, "accuracy": metric.compute()}


def together(folder: Path, plan: str, begin: int, epochs: int) -> Found:
    model, metric, batch = model_of(0.0), accuracy(), collated(examples(5))
    parallel = sw.compile(model, sw.Cluster.local(2), kwargs=example_batch(ROWS), timeout_s=60, check_capture="never",
                          **PLANS[plan])  # fmt: skip
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    found = trained(accelerator, parallel, folder, begin, epochs)

    def counted(result: Any, rows: dict[str, Tensor]) -> None:
        metric.update(result.logits.flatten(0, 1), rows["labels"].flatten())

    parallel.evaluate(metrics=counted, **batch)
    if plan == "stages":
        accelerator.save_model(parallel, folder / "weights")
        parallel(**example_batch(ROWS)).backward()
        with pytest.raises(CheckpointError, match="a parameter that is none of the compiled model's"):
            Accelerator(cpu=True).prepare(parallel, torch.optim.SGD(model.parameters(), 0.1))
        for call in (lambda: accelerator.prepare(nn.Linear(2, 2)), lambda: accelerator.get_state_dict(parallel),
                     lambda: accelerator.clip_grad_norm_(list(parallel.parameters())[1:], 1.0),
                     lambda: accelerator.register_save_state_pre_hook(print),
                     lambda: accelerator.register_load_state_pre_hook(print)):  # fmt: skip
            with pytest.raises(ShardwrightError, match="a compiled model does not take it"):
                call()
        if dist.get_rank() == 1:
            accelerator.set_trigger()
        with accelerator.split_between_processes(["a", "b"]) as own:
            assert (own, accelerator.check_trigger(), accelerator.check_trigger()) == (["a", "b"], True, False)
    return {**found, "accuracy": metric.compute()}


@in_whole_grids
def test_a_run_is_that_of_one_process_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    def body() -> tuple[Found, Found]:
        return together(tmp_path / "two", "tensor", 0, 1), together(tmp_path / "two", "stages", 1, 2)

    (expected,) = launched(lambda: alone(tmp_path / "one"), 1)
    for first, second in launched(body, 2):
        for name in ("losses", "norms", "rates"):
            torch.testing.assert_close(first[name] + second[name], expected[name], rtol=1e-4, atol=1e-6)
        assert first["words"] + second["words"] == expected["words"]
        torch.testing.assert_close(second["accuracy"], expected["accuracy"])
    assert list((tmp_path / "two" / "weights").glob("*.safetensors"))


@each("name", ["wait_for_everyone", "check_trigger"])
def test_waits_name_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    accelerator = object.__new__(Accelerator)
    accelerator.flag_tensor = torch.tensor(0)
    monkeypatch.setattr(accelerate.Accelerator, "wait_for_everyone", lost)
    monkeypatch.setattr(accelerate.utils, "reduce", lost)
    with pytest.raises(DistributedError, match=rf"a collective failed in Accelerator\.{name}"):
        getattr(accelerator, name)()


def test_what_the_plan_decides_is_refused() -> None:
    def body() -> None:
        with pytest.raises(ShardwrightError, match=r"mixed precision bf16.*precision='amp_bf16'"):
            Accelerator(cpu=True, mixed_precision="bf16")

    launched(body, 1)
