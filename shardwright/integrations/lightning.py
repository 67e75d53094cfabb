"""Lightning: a strategy for modules whose model is compiled. To Lightning, all ranks together are one device."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import _ModuleMode
from lightning.pytorch.utilities.model_summary import model_summary
from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwright.integrations.states import Kept, load_state, save_state
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.private import default_device
from shardwright.lowering.ranks.waits import waiting
from shardwright.lowering.store.moments import check_parameters
from shardwright.lowering.store.parts import Part
from shardwright.pcg.errors import ShardwrightError
from shardwright.ranks import from_rank_0

T = TypeVar("T")


class ShardwrightStrategy(SingleDeviceStrategy):
    """The strategy of a `lightning.pytorch.Trainer` whose module has one compiled model, and nothing else to train.

    `training_step` returns `self.parallel(**batch)` for the global batch, which every rank loads. Losses, clipping,
    schedules and callbacks are those of one process. A checkpoint is a folder, as `shardwright.save` writes it, with
    what Lightning keeps beside the model: it goes on under any other plan.

    Raises `ShardwrightError` for other precisions than "32-true", and for parameters outside of the compiled model.
    """

    strategy_name = "shardwright"

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ShardwrightError("ShardwrightStrategy: there are no ranks yet; call shardwright.compile first")
        super().__init__(default_device())

    @property
    def parallel(self) -> ParallelModule:
        """The compiled model in the Lightning module."""
        return self._named[1]

    @property
    def _named(self) -> tuple[str, ParallelModule]:
        """The compiled model, and its name in the Lightning module."""
        found = [each for each in self._module.named_modules() if isinstance(each[1], ParallelModule)]
        if len(found) != 1:
            raise ShardwrightError(
                f"{type(self._module).__name__} has {len(found)} compiled models; give it one, which "
                "shardwright.compile made, as an attribute"
            )
        return found[0]  # pyright: ignore[reportReturnType] - named_modules knows no classes

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "Lightning connects a module first"
        return self.lightning_module

    def setup(self, trainer: pl.Trainer) -> None:
        name, parallel = self._named
        if type(self.precision_plugin) not in (Precision, _Clipping):
            what = f"precision={self.precision_plugin.precision!r}"
            _refuse(what, "compile(precision=...) makes it part of the plan")
        if others := [own for own, _ in self._module.named_parameters() if not own.startswith(f"{name}.")]:
            _refuse(f"the parameter {others[0]!r} outside of {name}", "make it part of the model before compile")
        self.precision_plugin = _Clipping(parallel)
        warnings.filterwarnings(
            "ignore", r"It is recommended to use `self\.log\("
        )  # to sum up what every rank has whole
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop,
                     trainer.predict_loop):  # fmt: skip
            loop._module_mode = _Mode(parallel)
        super().setup(trainer)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_parameters(self.parallel, optimizer)

    # ---- ranks ----

    @property
    def is_global_zero(self) -> bool:
        """True on the rank that logs and writes."""
        return dist.get_rank() == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._waiting("a barrier of Lightning"):
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        with self._waiting("a broadcast of Lightning"):
            return from_rank_0(lambda: obj, "an object of Lightning")

    def _waiting(self, phase: str) -> AbstractContextManager[None]:
        return waiting(phase, self.parallel.ranks.timeout_s)

    # ---- checkpoints ----

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the optimizer is loaded with the model."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` has done it."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what the module has beside the compiled model, such as states of metrics."""
        inside = f"{self._named[0]}."
        return {name: value for name, value in self._module.state_dict().items() if not name.startswith(inside)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._module.load_state_dict(checkpoint["state_dict"], strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: the optimizer is saved with the model."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:  # noqa: ANN401 - as in the base
        if storage_options is not None:
            _refuse("storage_options", "checkpoints are folders that all ranks see")
        packed = io.BytesIO()
        torch.save(checkpoint, packed)
        beside = torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)
        optimizer = self._optimizer if "optimizer_states" in checkpoint else None
        save_state(self.broadcast(filepath), self.parallel, optimizer, Kept(beside))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        beside = Kept()
        load_state(self.broadcast(checkpoint_path), self.parallel, self._optimizer, beside)
        return torch.load(io.BytesIO(beside.value.numpy().tobytes()), weights_only=weights_only is not False)

    @property
    def _optimizer(self) -> Optimizer | None:
        if len(self.optimizers) > 1:
            _refuse("several optimizers in one checkpoint", "use one with several groups")
        return self.optimizers[0] if self.optimizers else None


class _Clipping(Precision):
    """The precision of the plan, and clipping by the norm over all ranks and stages."""

    def __init__(self, parallel: ParallelModule) -> None:
        self._parallel = parallel

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self._parallel.clip_grad_norm_(clip_val)


class _Mode(_ModuleMode):
    """The modes that evaluation brings back: the compiled model's own goes over all modules in it."""

    def __init__(self, parallel: ParallelModule) -> None:
        super().__init__()
        self._parallel, self._training = parallel, parallel.training

    def capture(self, module: nn.Module) -> None:
        self._training, inside = self._parallel.training, set(self._parallel.modules())
        self.mode = {name: each.training for name, each in module.named_modules() if each not in inside}

    def restore(self, module: nn.Module) -> None:
        self._parallel.train(self._training)
        for name, training in self.mode.items():
            module.get_submodule(name).training = training


class _Layer(LayerSummary):
    """A layer in Lightning's summary. Parts of a compiled model are never called: sizes around them are not known."""

    def _register_hook(self) -> RemovableHandle | None:
        return None if isinstance(self._module, Part) else super()._register_hook()


model_summary.LayerSummary = _Layer


def _refuse(what: str, remedy: str) -> NoReturn:
    raise ShardwrightError(f"{what}: the strategy for compiled models does not take it; {remedy}")
