"""A step of a model in one process, run eagerly and by the program of its captured graph.

A step is a forward and its backward, and a second forward. The second shows what the first has changed: buffers, and
state that is not in the graph. Parameters are not updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.lowering import private
from shardwright.lowering.random.exact import num_draws, step_draws
from shardwright.lowering.store.foreign import ForeignCalls, ForeignParts
from shardwright.lowering.store.storage import as_real, by_block
from shardwright.lowering.text.emit import emit
from shardwright.lowering.text.program import compile_source
from shardwright.lowering.trial.putback import random_states
from shardwright.pcg.capture.capture import Captured, find_loss, split_batch
from shardwright.pcg.capture.importing import flat_batch, names_by_first
from shardwright.pcg.capture.modules import in_own_precision
from shardwright.pcg.capture.places import is_same
from shardwright.pcg.precision import low_dtype
from shardwright.pcg.step.late import LOSS
from shardwright.pcg.step.precisions import PrecisionMode, base_of


@dataclass(frozen=True)
class Trial:
    """The results of a step.

    losses      of the first forward and of the second
    gradients   by the first name of each parameter that has one; of complex numbers as pairs of real ones
    buffers     afterwards, by all of their names, of complex numbers likewise
    moved       parameters that forward itself has changed
    random      digests of the states of generators afterwards, by the generator's name
    """

    losses: tuple[float, float]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    moved: tuple[str, ...]
    random: Mapping[str, str]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer; the CPU if there is none."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def eager_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    precision: PrecisionMode | None,
    before: Mapping[str, Tensor],
) -> Trial:
    """Take a step of the model itself, in its precision; this changes the model's state.

    `before`: the values of its parameters.
    """
    device, low = device_of(model).type, low_dtype(base_of(precision), "autocast")

    def forward(*, backward: bool = False) -> Tensor:
        given, named = private.tree_map_only(Tensor, lambda x: x.detach().clone(), (list(args), dict(kwargs)))
        region = torch.autocast(device, getattr(torch, low)) if low else nullcontext()
        with in_own_precision(model, precision, device, in_backward=True):
            with region:
                loss = find_loss(model(*given, **named))
            assert loss is not None
            if backward and loss.requires_grad:
                loss.backward()
        return loss

    for parameter in model.parameters():
        parameter.grad = None
    first = forward(backward=True)
    gradients = {name: as_real(_dense(p.grad)) for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    losses = _number(first), _number(forward())
    buffers = {name: as_real(b.detach()).clone() for name, b in model.named_buffers(remove_duplicate=False)}
    moved = tuple(name for name, p in model.named_parameters() if name in before and not is_same(p, before[name]))
    return Trial(losses, gradients, buffers, moved, random_states())


class SerialProgram:
    """The program of a whole captured graph on one device."""

    def __init__(self, captured: Captured, device: torch.device) -> None:
        self.graph, self.device = captured.graph, device
        self._made = compile_source(emit(captured.graph))
        self._constants = {name: value.to(device) for name, value in captured.constants.items()}
        self._num_draws = num_draws(captured.graph)

    def step(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trial:
        """Take a step on the model's values, which do not change."""
        parts = ForeignParts()
        parts.take(self.graph, model)
        foreign = ForeignCalls(parts, self.graph, training=model.training)
        leaves, tied = _leaves(model)
        batch = {k: v.detach() for k, v in flat_batch(split_batch(model, args, kwargs)[0]).items() if _is_tensor(v)}
        first = self._forward(leaves, batch, foreign)
        loss = first.pop(LOSS)
        if loss.requires_grad:
            loss.backward()
        trained = {name: leaves[name].grad for name, _ in model.named_parameters()}
        _renew(leaves, tied, first)
        second = self._forward(leaves, batch, foreign)
        losses = _number(loss), _number(second.pop(LOSS))
        _renew(leaves, tied, second)
        values = {**self._constants, **leaves}
        made = [str(leaf.attr("target")) for leaf in self.graph.leaves("buffer")]
        names = [*made, *second, *(name for name, _ in model.named_buffers(remove_duplicate=False))]
        buffers = {name: values[name].detach() for name in names}
        gradients = {name: gradient for name, gradient in trained.items() if gradient is not None}
        return Trial(losses, gradients, buffers, (), random_states())

    def _forward(
        self, leaves: Mapping[str, Tensor], batch: Mapping[str, Tensor], foreign: ForeignCalls
    ) -> dict[str, Any]:
        with torch.no_grad():
            constants = self._made.constants(self.device)
        given = by_block({**self._constants, **leaves}), batch, constants, [], None, self.device
        with step_draws(self._num_draws) as draw:
            return self._made.forward(*given, draw=draw, **foreign.given(self.graph))


def _leaves(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Return new leaves on the model's memory, tied as the model's are, by all names; and, by each name, its ties."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    leaves, tied = dict[str, Tensor](), dict[str, tuple[str, ...]]()
    for names in names_by_first(tensors).values():
        value = tensors[names[0]]
        leaves.update(dict.fromkeys(names, as_real(value.detach()).requires_grad_(value.requires_grad)))
        tied.update(dict.fromkeys(names, names))
    return leaves, tied


def _renew(leaves: dict[str, Tensor], tied: Mapping[str, Sequence[str]], buffers: Mapping[str, Tensor]) -> None:
    """Replace buffers by their values after a forward."""
    for name, value in buffers.items():
        for leaf in tied.get(name, (name,)):  # a tensor that the graph carries is not a buffer of the model
            leaves[leaf] = value.detach()


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient with all its elements, as programs give it; lookups may give rows of it (`sparse=True`)."""
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _number(loss: Tensor) -> float:
    return float(loss.detach().double())
