"""Compiling at the first call: a module that has the model's parameters until it has seen a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from shardwright.lowering import private
from shardwright.lowering.dtensors import mend_dtensors
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.parts import bake, mirror, names_of
from shardwright.lowering.storage import refuse_replaced, whole_state
from shardwright.pcg.importing import tied_names
from shardwright.ranks import from_rank_0

_AFTER_THE_FIRST_CALL = {"graph", "ranks", "execution", "program", "source", "input_layouts", "_held"}
Build = Callable[[Sequence[Any], Mapping[str, Any]], ParallelModule]


class LazyParallelModule(ParallelModule):
    """Captures, plans and lowers at its first call, and is an ordinary `ParallelModule` from then on.

    Its parameters are there from the start and stay the same objects, so that an optimizer may be made before the first
    call: until then they are replicated and share the model's storage, afterwards they are laid out as the plan says.
    """

    def __init__(self, model: nn.Module, build: Build) -> None:
        nn.Module.__init__(self)
        mend_dtensors()
        self.training, self.scaler = model.training, None
        self._pending = (model, build)  # in a tuple, so that the model is not a submodule
        self._standins = _standins(model)
        self._memory = [(n, p, private.memory_of(p)) for n, p in self._standins.items() if isinstance(p, nn.Parameter)]
        self._compiled_with: dict[str, Any] | None = None
        order = from_rank_0(lambda: names_of(model), "the order of its modules")
        mirror(self, model, self._standins, order)
        bake(self, model)

    def forward(self, **batch: Any) -> Tensor:
        return self._become(batch).forward(**batch)

    def forward_backward(self, **batch: Any) -> Tensor:
        """As `ParallelModule.forward_backward`; the first call captures, plans and lowers."""
        return self._become(batch).forward_backward(**batch)

    def compile(self, **options: Any) -> None:
        """As `ParallelModule.compile`, once there is a program."""
        self._compiled_with = options

    @property
    def _place(self) -> tuple[int, Collection[str]]:
        return 0, ()

    def _load(self, name: str, value: Tensor) -> None:
        own = self._standins[name]
        with torch.no_grad():
            (private.unwrap(own) if isinstance(own, DTensor) else own).copy_(whole_state(value))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _AFTER_THE_FIRST_CALL:
                raise
        raise AttributeError(
            f"{name.strip('_')}: a model that is compiled without a batch has no plan before its first call; call it "
            "first, or give compile the batch, as kwargs=batch"
        )

    def extra_repr(self) -> str:
        return "to be planned at its first call"

    def _become(self, batch: Mapping[str, Any]) -> ParallelModule:
        """Turn into the parallel module for this batch."""
        model, build = self._pending
        standins = self._standins
        refuse_replaced(self._memory)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(standins[name].requires_grad)
        made = build((), batch)
        for held in {id(h): h for h in made._held.values()}.values():
            if isinstance(held.outside, nn.Parameter):
                standin = standins[held.name]
                standin.grad = None
                torch.utils.swap_tensors(standin, held.outside)
                held.outside = standin
        made.scaler = self.scaler
        own = {name: value for name, value in self.__dict__.items() if "hook" in name or name not in made.__dict__}
        self.__dict__ = made.__dict__ | own
        compiled_with = self._compiled_with
        del self._pending, self._standins, self._memory, self._compiled_with
        object.__setattr__(self, "__class__", ParallelModule)  # as others may not (`Fixed`)
        mirror(self, model, {name: held.outside for name, held in made._held.items()}, names_of(self))
        if compiled_with is not None:
            self.compile(**compiled_with)
        return self


def _standins(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of our own on the model's storage, tied where the model's are."""
    found: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    values = dict(model.named_parameters(remove_duplicate=False))
    for first, names in tied_names(model).items():
        value = values[first]
        mesh = init_device_mesh(value.device.type, (dist.get_world_size(),))
        whole = DTensor.from_local(value.detach(), mesh, [Replicate()], run_check=False)
        found.update(dict.fromkeys(names, nn.Parameter(whole, requires_grad=value.requires_grad)))
    return found
