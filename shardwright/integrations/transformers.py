"""transformers: a `Trainer` whose steps a compiled model takes, on all ranks together as on one device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import seed_worker, unwrap_peft_model

from shardwright.exporting import export
from shardwright.integrations.accelerate import Accelerator, refuse
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random.states import set_states, states_of
from shardwright.lowering.ranks.waits import waiting
from shardwright.pcg.errors import BatchError, CheckpointError
from shardwright.saving import load, save

_NUM_ITEMS = "num_items_in_batch"
_REFUSED = {
    "bf16": "compile(precision='amp_bf16') makes it part of the plan",
    "fp16": "compile(precision='amp_bf16') makes it part of the plan",
    "bf16_full_eval": "the plan says in which precision the model runs",
    "fp16_full_eval": "the plan says in which precision the model runs",
    "activation_checkpointing": "compile(recompute=...) makes it part of the plan, which chooses it where it pays",
    "torch_compile": "call parallel.compile()",
    "auto_find_batch_size": "compile for another batch",
    "label_smoothing_factor": "compile(loss_fn=...) takes the loss",
    "use_liger_kernel": "apply it to the model before compile",
    "neftune_noise_alpha": "it hooks the model's embedding, which is not called any more",
    "fsdp": "the plan says how ranks share the work",
    "deepspeed": "the plan says how ranks share the work",
    "parallelism_config": "the plan says how ranks share the work",
    "enable_jit_checkpoint": "ranks would save at unlike steps; let a callback ask shardwright.StopSignals",
    "debug": "it hooks the model's modules, which are not called any more",
    "push_to_hub": "push the folder that save_model writes",
}
"""Arguments of `TrainingArguments` that the adapter does not carry over, and what to do."""


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` for a compiled model. To it, all ranks together are one device.

    `per_device_train_batch_size` is therefore the global batch, which every rank loads, and which the model was
    compiled for. Losses, order of data, evaluation and schedule are those of one process with the same arguments. A
    checkpoint has weights for `from_pretrained`, and the run as `shardwright.save` writes it: it goes on under any
    other plan. Gradients of several batches (`gradient_accumulation_steps`) are weighted by their targets.

    Raises `ShardwrightError` for arguments that it does not carry over, and `BatchError` for another batch size.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, parallel: ParallelModule, **options: Any) -> None:
        """`model`: the one that was compiled; `parallel`: what `shardwright.compile` made of it.

        `options`: as of `transformers.Trainer`. `preprocess_logits_for_metrics` is called with rows of a rank's own.
        """
        for name, remedy in _REFUSED.items():
            if getattr(args, name, None):
                refuse(f"TrainingArguments({name}=...)", remedy)
        for name in ("model_init", "compute_loss_func"):
            if options.get(name) is not None:
                refuse(f"Trainer({name}=...)", "compile the model, with loss_fn=... for a loss of its results")
        if args.train_sampling_strategy == "batch_rebalance":
            refuse("train_sampling_strategy='batch_rebalance'", "all ranks take the same batches")
        if args.save_only_model and args.load_best_model_at_end:
            refuse("save_only_model with load_best_model_at_end", "the best weights are loaded from a whole run")
        self.parallel = parallel
        self._by_row, self._random = options.pop("preprocess_logits_for_metrics", None), None
        super().__init__(model, args, **options)
        self._check_batch()

    def _check_batch(self) -> None:
        own = self.args.train_batch_size
        shapes = next((entry.batch.shapes for entry in self.parallel.entries), {})
        for name, shape in shapes.items():
            if shape[:1] not in ((), (own,)):
                raise BatchError(
                    f"Trainer: per_device_train_batch_size={own}, and the model was compiled with {name} "
                    f"{list(shape)}; all ranks together are one device here, so make them equal"
                )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # the same object, to which all ranks are one process
        cast("Accelerator", self.accelerator).take_over()
        self.accelerator.prepare_model(self.parallel)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: only the compiled one computes."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: object = None) -> nn.Module:
        return self.parallel

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - a loader of accelerate
        """Seed the workers of all ranks alike, as ranks load the same batches."""
        loader = super()._get_dataloader(*args, **options)
        base = cast("Any", loader).base_dataloader
        if base.worker_init_fn is not None:
            base.worker_init_fn = partial(seed_worker, num_workers=self.args.dataloader_num_workers, rank=0)
        return loader

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps

    def store_flos(self) -> None:
        """Count the operations of all ranks together, as each of them counts those of the whole batch."""
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        return super().create_optimizer(self.parallel)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return super().get_decay_parameter_names(cast("nn.Module", self.model))  # its layers have their own classes

    # ---- steps ----

    def train(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as in the base
        with self._waiting("Trainer.train"):
            return super().train(*args, **options)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        with self._waiting("Trainer.evaluate"):
            return super().evaluate(*args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as in the base
        with self._waiting("Trainer.predict"):
            return super().predict(*args, **options)

    def _waiting(self, phase: str) -> AbstractContextManager[None]:
        """Name the missing ranks also where it is transformers that waits for all."""
        return waiting(phase, self.parallel.ranks.timeout_s if self.parallel.entries else None)

    def compute_loss(
        self,
        model: Any,  # noqa: ANN401 - the compiled model, or what gives whole results
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # noqa: ANN401
        passed = self._with_items(inputs, num_items_in_batch)
        results = model(**passed)
        loss = results if isinstance(results, Tensor) else results["loss" if isinstance(results, Mapping) else 0]
        if passed is inputs and num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            share = torch.as_tensor(self._num_targets(inputs) / num_items_in_batch, device=loss.device)
            loss = (loss * share).where(share > 0, 0.0)  # the mean over no targets is NaN
        return (loss, results) if return_outputs else loss

    def _with_items(self, inputs: dict[str, Any], num_items: Tensor | int | None) -> dict[str, Any]:
        """Add the number of targets that a step sums over, where the compiled batch has it."""
        dtypes = next((entry.batch.dtypes for entry in self.parallel.entries), {})
        if num_items is None or _NUM_ITEMS not in dtypes:
            return inputs
        return {**inputs, _NUM_ITEMS: torch.as_tensor(num_items, dtype=dtypes[_NUM_ITEMS], device=self.args.device)}

    def _num_targets(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return how many labels the model's loss is the mean over: a causal one drops the first of each row."""
        model = unwrap_peft_model(self.model)
        decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        shifts = getattr(model, "loss_function", None) is ForCausalLMLoss and not decodes
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][..., int(shifts) :]
        return labels.ne(-100).sum()

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        if prediction_loss_only:
            rows = self._prepare_inputs(inputs)
            num_items = self._get_num_items_in_batch([rows], self.args.device)
            with torch.no_grad():
                return self.compute_loss(self.parallel, rows, num_items_in_batch=num_items), None, None
        config: Any = getattr(self.model, "config", None)
        ignored = getattr(config, "keys_to_ignore_at_inference", []) if ignore_keys is None else ignore_keys
        results = partial(self._results, {"loss", *ignored})
        return super().prediction_step(results, inputs, prediction_loss_only, [*ignored])  # pyright: ignore[reportArgumentType]

    def _results(self, ignored: set[str], /, **batch: Any) -> Any:  # noqa: ANN401 - what the model returns
        """Return the model's results with whole tensors, or its loss and what `preprocess_logits_for_metrics` keeps."""
        if self._by_row is None:
            return self.parallel.evaluate(**batch, gather=True)
        loss = list[Any]()

        def kept(result: Any, rows: dict[str, Any]) -> Any:  # noqa: ANN401
            loss.append(result.get("loss"))
            labels = tuple(rows[name] for name in self.label_names if name in rows)
            others = tuple(x for name, x in result.items() if name not in ignored)
            return self._by_row(_alone(others), _alone(labels) if labels else None)

        found = self.parallel.evaluate(metrics=kept, **batch)
        return {"loss": loss[0], "logits": found} if loss[0] is not None else {"logits": found}

    # ---- checkpoints ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir or ".")
        export(self.parallel, folder)
        if self.args.should_save:
            if (config := getattr(self.model, "config", None)) is not None:
                config.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(_run(output_dir), self.parallel, *self._moving, step=self.state.global_step)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._load(checkpoint, *self._moving)
            self._random = states_of(self.parallel.stream)

    @property
    def _moving(self) -> tuple[Any, Any]:
        """The optimizer and the scheduler."""
        return getattr(self.optimizer, "optimizer", self.optimizer), self.lr_scheduler

    def _load(self, checkpoint: str, *moving: Any) -> None:
        if load(_run(checkpoint), self.parallel, *moving) is None:
            raise CheckpointError(
                f"{checkpoint}: it has no run of shardwright (save_only_model, or another Trainer's checkpoint); for "
                "its weights alone, compile the model that from_pretrained gives"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Leave the weights to `_load_optimizer_and_scheduler`, which loads the whole run."""

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load(self.state.best_model_checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        """Leave the generators to the run, which has them."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Put the generators back to where the run was saved; loaders have drawn from them since."""
        if self._random is not None:
            set_states(self._random, self.parallel.stream, is_own=True)


def _alone(values: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Return the one value of a tuple, or the tuple of several."""
    return values[0] if len(values) == 1 else values


def _run(checkpoint: str | os.PathLike[str]) -> Path:
    return Path(checkpoint) / "run"
