"""accelerate: all ranks together are one process.

A compiled model computes on every rank what one process would. So nothing is left to share out: every rank loads the
batches of one process, has the loss of one process, and gathers nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.exporting import export
from shardwright.integrations.states import load_state, save_state
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.waits import waiting
from shardwright.lowering.store.moments import check_parameters
from shardwright.pcg.errors import ShardwrightError
from shardwright.saving import Stateful

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """An `Accelerator` for a compiled model. To it, all ranks together are one process, with the global batch.

    `prepare` takes the compiled model, an optimizer, loaders and schedulers. Loaders give every rank the whole batches
    of one process, in its order. `save_state` and `load_state` are `shardwright.save` and `load`, `save_model` is
    `shardwright.export`.

    Raises `ShardwrightError` for a precision, a plugin or a model that is not compiled: these are the plan's.
    """

    parallel: ParallelModule | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.take_over()

    def take_over(self) -> None:
        """Leave precision and parallelism to the plan. Raises `ShardwrightError` where options ask for any."""
        if self.mixed_precision != "no":
            what = "amp_bf16" if self.mixed_precision == "bf16" else "amp_fp16"
            refuse(f"mixed precision {self.mixed_precision}", f"compile(precision={what!r}) makes it part of the plan")
        if self.state.distributed_type not in _PLAIN or self.parallelism_config is not None:
            refuse("FSDP, DeepSpeed, Megatron or a parallelism_config", "the plan says how ranks share the work")
        if (compiler := self.state.dynamo_plugin) is not None and compiler.backend.value != "NO":
            refuse("torch.compile by accelerate", "call parallel.compile()")
        self.dataloader_config.split_batches, self.dataloader_config.dispatch_batches = True, False

    @property
    def distributed_type(self) -> DistributedType:
        """No distribution that accelerate should see to."""
        return DistributedType.NO

    @property
    def num_processes(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - it never returns, to pyright
        """One: all ranks together."""
        return 1

    @property
    def use_distributed(self) -> bool:
        """False: nothing is left to wrap, to share out or to gather."""
        return False

    def prepare(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - what it is given
        """Prepare objects as accelerate does. Raises `CheckpointError` for an optimizer of other parameters."""
        prepared = super().prepare(*args, **options)
        if self.parallel is not None:
            for optimizer in self._optimizers:
                check_parameters(self.parallel, optimizer)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the compiled model as it is. Raises `ShardwrightError` for another, or for a second one."""
        if not isinstance(model, ParallelModule) or self.parallel not in (None, model):
            refuse(f"a {type(model).__name__}", "prepare one model, which shardwright.compile gave")
        self.parallel = model
        if model not in self._models:
            self._models.append(model)
        return model

    def gather(self, tensor: Any) -> Any:  # noqa: ANN401 - any nest of tensors
        """Return what every rank has already."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: ANN401 - any nest
        """Return what every rank has already. Of the last batch, only as many values as it has rows."""
        if not use_gather_object and all(isinstance(x, Tensor) for x in tree_leaves(input_data)):
            return super().gather_for_metrics(input_data)
        last, rows = self.gradient_state.end_of_dataloader, self.gradient_state.remainder
        return input_data[:rows] if last and rows > 0 and isinstance(input_data, Sequence | Tensor) else input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:  # noqa: ANN401
        """Return what every rank has already, times `scale`."""
        return tensor if scale == 1.0 else tree_map(lambda x: x * scale, tensor)

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Return what is as long on every rank."""
        return tensor

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:  # noqa: ANN401
        """Return a context with all inputs, as every rank takes the whole batch."""
        return nullcontext(inputs)

    def check_trigger(self) -> bool:
        """Return whether any rank has set the trigger. Every rank calls it, and all get the same answer."""
        own = self.flag_tensor if self.flag_tensor is not None else torch.tensor(0, device=self.device)
        with self._waiting("check_trigger"):
            self.flag_tensor = accelerate.utils.reduce(own, "sum")
        return super().check_trigger()

    def wait_for_everyone(self) -> None:
        """Wait for all ranks. Raises `DistributedError` that names those that do not come."""
        with self._waiting("wait_for_everyone"):
            super().wait_for_everyone()

    def _waiting(self, phase: str) -> AbstractContextManager[None]:
        parallel = self.parallel
        limit_s = parallel.ranks.timeout_s if parallel is not None and parallel.entries else None
        return waiting(f"Accelerator.{phase}", limit_s)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:  # noqa: ANN401
        """Clip the gradients of the whole compiled model, over all stages; return their norm before.

        Raises `ShardwrightError` where `parameters` leaves out one that has a gradient.
        """
        parallel = self._compiled("clip_grad_norm_")
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        if any(p.grad is not None and p not in given for p in parallel.parameters()):
            refuse("clip_grad_norm_ of some parameters", "clip all together, by parallel.parameters()")
        return parallel.clip_grad_norm_(max_norm, norm_type)

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike[str], *_: Any, **__: Any) -> None:
        """Write whole weights as safetensors, under the model's own names. Every rank calls it."""
        export(self._compiled("save_model"), save_directory)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> NoReturn:
        """Refuse: it would put the whole model into every rank."""
        refuse("get_state_dict", "use shardwright.export(parallel, folder), or parallel.state_dict() of DTensors")

    def register_save_state_pre_hook(self, hook: object) -> NoReturn:
        """Refuse: `save_state` gives no weights to a hook."""
        refuse("a hook of save_state", "register_for_checkpointing takes an object with a state")

    def register_load_state_pre_hook(self, hook: object) -> NoReturn:
        """Refuse: `load_state` gives no weights to a hook."""
        refuse("a hook of load_state", "register_for_checkpointing takes an object with a state")

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *_: Any, **__: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Save the run in a folder, in place of what was saved there before. Every rank calls it."""
        if output_dir is None:
            refuse("checkpoints with automatic names", "save_state(folder)")
        save_state(output_dir, self._compiled("save_state"), self._optimizer, self._others)
        return str(output_dir)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *_: Any, **__: Any) -> None:
        """Load what `save_state` has saved. Every rank calls it. Raises `CheckpointError` if there is nothing."""
        if input_dir is None:
            refuse("checkpoints with automatic names", "load_state(folder)")
        load_state(input_dir, self._compiled("load_state"), self._optimizer, self._others)

    def _compiled(self, what: str) -> ParallelModule:
        if self.parallel is None:
            raise ShardwrightError(f"{what}: no compiled model was prepared; call accelerator.prepare(parallel) first")
        return self.parallel

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        if len(self._optimizers) > 1:
            refuse("several optimizers in one checkpoint", "use one with several groups")
        return next((wrapped.optimizer for wrapped in self._optimizers), None)

    @property
    def _others(self) -> Stateful:
        return _Together([*self._schedulers, *self._custom_objects, *map(_Epoch, self._dataloaders)])


def refuse(what: str, remedy: str) -> NoReturn:
    """Raise a `ShardwrightError`: an adapter does not carry this over."""
    raise ShardwrightError(f"{what}: a compiled model does not take it; {remedy}")


class _Together:
    """Several objects with a state, as one."""

    def __init__(self, objects: Sequence[Stateful]) -> None:
        self.objects = objects

    def state_dict(self) -> dict[str, Any]:
        return {f"{number}": each.state_dict() for number, each in enumerate(self.objects)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        if len(state_dict) != len(self.objects):
            raise ShardwrightError(
                f"load_state: {len(state_dict)} schedulers, loaders and registered objects were saved, and "
                f"{len(self.objects)} are prepared; prepare and register the same"
            )
        for number, each in enumerate(self.objects):
            each.load_state_dict(state_dict[f"{number}"])


class _Epoch:
    """The number of epochs that a prepared loader has given, from which its order is drawn."""

    def __init__(self, loader: Any) -> None:  # noqa: ANN401 - a loader of accelerate
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.loader.iteration}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.loader.iteration = state_dict["epoch"]
