"""transformers: a `Trainer` whose steps a compiled model takes, on all ranks together as on one device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker

from shardwright.exporting import export
from shardwright.integrations.accelerate import Accelerator, refuse
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random.states import set_states, states_of
from shardwright.pcg.errors import BatchError, CheckpointError
from shardwright.saving import load, save

_OF_THE_PLAN = "compile decides it"
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
        if not hasattr(self.parallel, "ranks"):
            return
        own = self.args.train_batch_size
        for name, shape in next(iter(self.parallel.entries)).batch.shapes.items():
            if shape[:1] != (own,):
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

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        return super().create_optimizer(self.parallel)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return super().get_decay_parameter_names(cast("nn.Module", self.model))  # its layers have their own classes

    # ---- steps ----

    def compute_loss(
        self,
        model: Any,  # noqa: ANN401 - the compiled model, or what gives whole results
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # noqa: ANN401
        if return_outputs:
            results = model(**inputs)
            return results["loss"] if isinstance(results, Mapping) else results[0], results
        loss = model(**inputs)
        own = self._get_num_items_in_batch([inputs], self.args.device)
        if own is None or num_items_in_batch is None:
            return loss
        share = torch.as_tensor(own / num_items_in_batch, device=loss.device)
        return (loss * share).where(share > 0, 0.0)  # the mean over no targets is NaN

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        if prediction_loss_only:
            with torch.no_grad():
                return self.parallel(**self._prepare_inputs(inputs)), None, None
        config: Any = getattr(self.model, "config", None)
        ignored = getattr(config, "keys_to_ignore_at_inference", []) if ignore_keys is None else ignore_keys
        results = partial(self._results, {"loss", *ignored})
        return super().prediction_step(results, inputs, prediction_loss_only, [*ignored])  # pyright: ignore[reportArgumentType]

    def _results(self, ignored: set[str], /, **batch: Any) -> Any:  # noqa: ANN401 - what the model returns
        """Return the model's results with whole tensors, or its loss and what `preprocess_logits_for_metrics` keeps."""
        if self._by_row is None:
            whole = self.parallel.evaluate(**batch)
            return tree_map_only(DTensor, lambda x: x.full_tensor(), whole)
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
            set_states(self._random, self.parallel.stream, own=True)


def _alone(values: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Return the one value of a tuple, or the tuple of several."""
    return values[0] if len(values) == 1 else values


def _run(checkpoint: str | os.PathLike[str]) -> Path:
    return Path(checkpoint) / "run"
