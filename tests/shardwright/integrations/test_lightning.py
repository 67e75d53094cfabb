"""Lightning on a compiled model: what one process logs, and checkpoints that go on under another plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import shardwright as sw
from shardwright.integrations.lightning import ShardwrightStrategy
from shardwright.pcg.errors import CheckpointError, ShardwrightError
from tests.shardwright.integrations.loops import collated, example_batch, examples, launched, model_of

ROWS = 4
PLANS: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2, "microbatches": 2, "schedule": "1f1b"},
    "zero": {"mesh": {"x": 2}, "roles": "zero"},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:GPT2LMHeadModel returns"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Lit(pl.LightningModule):
    """The same for both: the model gives a loss, or what has one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.seen = model, list[tuple[str, float]]()

    def step(self, name: str, batch: dict[str, Tensor]) -> Tensor:
        found = self.model(**batch)
        loss = found if isinstance(found, Tensor) else found.loss
        self.log(name, loss, batch_size=len(batch["labels"]), sync_dist=True)
        self.seen.append((name, loss.item()))
        return loss

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.step("loss", batch)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.step("val", batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fitted(model: nn.Module, folder: Path, epochs: int, resume: Path | None = None, **options: Any) -> Any:
    keeping = ModelCheckpoint(folder, filename="{epoch}", monitor="val", save_top_k=2)
    trainer = pl.Trainer(max_epochs=epochs, callbacks=[keeping, ModelSummary(-1)], logger=False,
                         accumulate_grad_batches=2, gradient_clip_val=0.5, enable_progress_bar=False,
                         num_sanity_val_steps=0, **options)  # fmt: skip
    torch.manual_seed(3)
    data, held_out = cast("list[Dataset[Any]]", [examples(16), examples(6)])
    train = DataLoader(data, batch_size=ROWS, collate_fn=collated)
    module = Lit(model)
    trainer.fit(module, train, DataLoader(held_out, batch_size=ROWS, collate_fn=collated), ckpt_path=resume)
    best = Path(keeping.best_model_path).stem
    return (
        module.seen,
        trainer.callback_metrics["val"].item(),
        float(best.removeprefix("epoch=")),
        trainer.optimizers[0].param_groups[0]["lr"],
    )


def together(folder: Path, plan: str, epochs: int, resume: Path | None = None) -> Any:
    model = model_of(0.0)
    parallel = sw.compile(model, sw.Cluster.local(2), kwargs=example_batch(ROWS), timeout_s=60, check_capture="never",
                          **PLANS[plan])  # fmt: skip
    return fitted(parallel, folder, epochs, resume, accelerator="cpu", strategy=ShardwrightStrategy())


def stranger() -> None:
    """Train with an optimizer of the model that was compiled."""
    model = model_of(0.0)
    parallel = sw.compile(model, sw.Cluster.local(2), kwargs=example_batch(ROWS), timeout_s=60, check_capture="never",
                          **PLANS["zero"])  # fmt: skip
    module, loader = Lit(parallel), DataLoader(cast("Dataset[Any]", examples(4)), batch_size=ROWS, collate_fn=collated)
    module.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), 0.1)
    trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu",
                         strategy=ShardwrightStrategy())  # fmt: skip
    trainer.fit(module, loader, loader)


def test_a_run_is_that_of_one_process_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    def body() -> Any:
        first = together(tmp_path / "two", "stages", 1)
        second = together(tmp_path / "two", "zero", 2, tmp_path / "two" / "epoch=0.ckpt")
        with pytest.raises(ShardwrightError, match="Lit has 0 compiled models"):
            fitted(model_of(), tmp_path / "plain", 1, accelerator="cpu", strategy=ShardwrightStrategy())
        with pytest.raises(CheckpointError, match="a parameter that is none of the compiled model's"):
            stranger()
        return first, second

    (expected,) = launched(lambda: fitted(model_of(0.0), tmp_path / "one", 2, accelerator="cpu", devices=1), 1)
    for first, second in launched(body, 2):
        assert [name for name, _ in first[0] + second[0]] == [name for name, _ in expected[0]]
        values = [[value for _, value in seen] for seen in (first[0] + second[0], expected[0])]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-6)
        assert second[1:] == pytest.approx(expected[1:])
    assert (tmp_path / "two" / "epoch=1.ckpt").is_dir()


def test_ranks_come_before_the_strategy() -> None:
    with pytest.raises(ShardwrightError, match=r"call shardwright\.compile first"):
        ShardwrightStrategy()
