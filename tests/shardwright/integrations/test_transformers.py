"""`transformers.Trainer` on a compiled model: the history of one process, checkpoints, another plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GPT2LMHeadModel, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

import shardwright as sw
from shardwright.integrations.transformers import Trainer
from shardwright.lowering.module import ParallelModule
from shardwright.pcg.errors import CheckpointError, DistributedError, ShardwrightError
from tests.each import each, in_whole_grids
from tests.shardwright.integrations.loops import collated, example_batch, examples, launched, model_of

ROWS = 4
SHOWN = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "total_flos")
PLANS: dict[str, dict[str, Any]] = {
    "zero": {"mesh": {"x": 2}, "roles": "zero"},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
    "unlike stages": {"stages": [2, 1], "microbatches": 2, "mesh": {"x": 2}},
}
pytestmark = pytest.mark.filterwarnings("ignore:GPT2LMHeadModel returns")


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    words: dict[str, Any] = {
        "per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "load_best_model_at_end": True, "save_total_limit": 4,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**words, **others})


def predicted(logits: Tensor, labels: Tensor | None) -> Tensor:
    assert labels is None or len(logits) == len(labels)
    return logits.argmax(-1)


def share_right(found: Any) -> dict[str, float]:
    return {"right": float((found.predictions[:, :-1] == found.label_ids[:, 1:]).mean())}


def options() -> dict[str, Any]:
    """22 examples make 6 batches an epoch, of which the last is smaller."""
    return {"train_dataset": examples(22), "eval_dataset": examples(6), "compute_metrics": share_right,
            "preprocess_logits_for_metrics": predicted}  # fmt: skip


def counted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the number of labels, by which transformers divides the sum of losses of this model, first ones too."""
    return {**batch, "num_items_in_batch": batch["labels"].ne(-100).sum()}


def history(trainer: transformers.Trainer, resume: Path | None = None) -> list[dict[str, float]]:
    """What was logged, and the best model's loss, which the end of training has loaded."""
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    found = [{name: row[name] for name in SHOWN if name in row} for row in trainer.state.log_history]
    trainer.compute_metrics = None
    return [*found, {"best": trainer.evaluate()["eval_loss"]}]


def trainer_of(folder: Path, plan: str, *, items: bool = False, stranger: bool = False) -> Trainer:
    """`items`: the model is compiled with the number of targets; `stranger`: with an optimizer of the model."""
    model, batch = model_of(), example_batch(ROWS)
    batch |= {"num_items_in_batch": torch.tensor(1)} if items else {}
    parallel = sw.compile(model, sw.Cluster.local(2), kwargs=batch, timeout_s=60, check_capture="never", **PLANS[plan])
    others = {"optimizers": (torch.optim.SGD(model.parameters(), 0.1), None)} if stranger else {}
    return Trainer(model, arguments(folder), parallel, **options(), **others)


def test_a_run_is_that_of_one_process_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    def alone() -> list[dict[str, float]]:
        return history(transformers.Trainer(model_of(), arguments(tmp_path / "one"), **options()))

    def body() -> tuple[Any, ...]:
        whole = history(trainer_of(tmp_path / "two", "zero"))
        resumed = history(trainer_of(tmp_path / "again", "tensor", items=True), tmp_path / "two" / "checkpoint-4")
        third = trainer_of(tmp_path / "again", "zero")
        with pytest.raises(CheckpointError, match="it has no run of shardwright"):
            history(third, tmp_path / "one" / "checkpoint-4")
        with pytest.raises(CheckpointError, match=r"a parameter that is none of the compiled model's; make it of par"):
            trainer_of(tmp_path / "stranger", "zero", stranger=True).train()
        unlabelled: list[Any] = [{"input_ids": row["input_ids"]} for row in examples(3)]
        assert len(third.predict(cast("Any", unlabelled)).predictions) == 3
        loader: Any = third.get_train_dataloader()
        return whole, resumed, loader.base_dataloader.worker_init_fn.keywords["rank"]

    (expected,) = launched(alone, 1)
    assert [row["step"] for row in expected if "loss" in row] == [1, 2, 3, 4, 5, 6]
    for whole, resumed, seeded_as in launched(body, 2):
        assert seeded_as == 0
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(resumed, whole, rtol=1e-4, atol=1e-6)
    last = GPT2LMHeadModel.from_pretrained(tmp_path / "two" / "checkpoint-6").eval()
    with torch.no_grad():
        rows = examples(6)
        batches = [rows[:ROWS], rows[ROWS:]]
        losses = [last(**counted(collated(rows))).loss for rows in batches]
    mean = (ROWS * losses[0] + (6 - ROWS) * losses[1]) / 6
    torch.testing.assert_close(mean.item(), expected[-3]["eval_loss"], rtol=1e-4, atol=1e-6)


def late(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Only the last block and the last norm train, which are in the last stage; there is no dropout."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("transformer.h.1.", "transformer.ln_f.")))
    return model


@in_whole_grids
def test_stages_of_unlike_sizes_of_which_one_trains_nothing(tmp_path: Path) -> None:
    def words(folder: str) -> TrainingArguments:
        return arguments(tmp_path / folder, num_train_epochs=1, optim="adafactor", save_steps=1, eval_steps=1)

    def alone() -> list[dict[str, float]]:
        return history(transformers.Trainer(late(model_of(0.0)), words("one"), **options()))

    def trainer_of(folder: str) -> Trainer:
        model = late(model_of(0.0))
        parallel = sw.compile(model, sw.Cluster.local(3), kwargs=example_batch(ROWS), timeout_s=60,
                              check_capture="never", **PLANS["unlike stages"])  # fmt: skip
        return Trainer(model, words(folder), parallel, **options())

    def body() -> tuple[list[dict[str, float]], list[dict[str, float]], bool]:
        whole = trainer_of("two")
        found = history(whole), history(trainer_of("again"), tmp_path / "two" / "checkpoint-2")
        return *found, any(p.requires_grad for p in whole.parallel.parameters())

    (expected,) = launched(alone, 1)
    by_rank = launched(body, 3)
    assert [trains for *_, trains in by_rank] == [False, False, True]
    for whole, resumed, _ in by_rank:
        torch.testing.assert_close(whole, expected, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(resumed, whole, rtol=1e-4, atol=1e-6)


@each("words", [{"bf16": True}, {"torch_compile": True}, {"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 1.0},
                {"activation_checkpointing": True}, {"auto_find_batch_size": True}, {"enable_jit_checkpoint": True},
                {"debug": "underflow_overflow"}])  # fmt: skip
def test_what_is_not_carried_over_is_refused_by_name(words: dict[str, Any]) -> None:
    (name,) = words
    with pytest.raises(ShardwrightError, match=name):
        Trainer(model_of(), arguments(Path("unused"), **words), cast("ParallelModule", None))


def test_what_would_fail_later_is_refused_at_once() -> None:
    with pytest.raises(ShardwrightError, match="save_only_model"):
        Trainer(model_of(), arguments(Path("unused"), save_only_model=True), cast("ParallelModule", None))


def test_a_batch_without_targets_adds_nothing() -> None:
    weight, counts = torch.tensor(2.0, requires_grad=True), iter(torch.tensor([0, 3]))
    trainer = SimpleNamespace(_with_items=lambda inputs, _: inputs, model_accepts_loss_kwargs=True,
                              _num_targets=lambda _: next(counts))  # fmt: skip
    empty, full = (lambda: weight * torch.nan, lambda: weight * 5)
    losses = [
        Trainer.compute_loss(cast("Trainer", trainer), model, {}, num_items_in_batch=6) for model in (empty, full)
    ]
    assert [loss.item() for loss in losses] == [0, 5]


def test_a_function_of_logits_is_given_all_results_and_all_labels() -> None:
    seen: list[Any] = []
    batch = {name: torch.ones(2) for name in ("input_ids", "start_positions", "end_positions")}
    given = {"loss": torch.ones(()), "start_logits": torch.zeros(2), "end_logits": torch.ones(2), "cache": None}
    trainer = SimpleNamespace(
        _by_row=lambda logits, labels: seen.append((logits, labels)) or logits[0],
        parallel=SimpleNamespace(evaluate=lambda metrics, **rows: metrics(given, rows)),
        label_names=["start_positions", "end_positions"],
    )
    found = Trainer._results(cast("Trainer", trainer), {"loss", "cache"}, **batch)
    assert found == {"loss": given["loss"], "logits": given["start_logits"]}
    assert seen == [((given["start_logits"], given["end_logits"]), (batch["start_positions"], batch["end_positions"]))]


def test_targets_are_counted_as_the_model_counts_them() -> None:
    """A causal loss drops the first label of each row; that of an encoder and decoder drops none."""
    labels = torch.tensor([[1, 2, -100], [-100, 4, 5]])
    causal = SimpleNamespace(loss_function=ForCausalLMLoss, config=SimpleNamespace(is_encoder_decoder=False))
    decoder = SimpleNamespace(loss_function=ForCausalLMLoss, config=SimpleNamespace(is_encoder_decoder=True))
    for model, inputs, many in [
        (causal, {"labels": labels}, 3), (decoder, {"labels": labels}, 4), (SimpleNamespace(), {"labels": labels}, 4),
        (causal, {"labels": labels, "shift_labels": labels[:1]}, 2),
    ]:  # fmt: skip
        assert Trainer._num_targets(cast("Trainer", SimpleNamespace(model=model)), inputs) == many


@each("name", ["train", "evaluate", "predict"])
def test_waits_of_transformers_itself_name_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    trainer = object.__new__(Trainer)
    trainer.parallel = cast("ParallelModule", SimpleNamespace(entries=[]))
    monkeypatch.setattr(transformers.Trainer, name, lost)
    with pytest.raises(DistributedError, match=rf"a collective failed in Trainer\.{name}"):
        getattr(trainer, name)()
