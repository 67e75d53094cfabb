"""The tensors of this rank in a foreign module, for the time of a call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardwright.pcg.errors import ForeignError
from shardwright.pcg.foreign import Call


@contextmanager
def lent(module: nn.Module, call: Call, state: Sequence[Tensor]) -> Generator[Callable[[], list[Tensor]]]:
    """Lend a module its parameters and buffers; yield what gives the buffers' new values after the call."""
    places = [(_place(module, name), tensor) for names, tensor in zip(call.state, state, strict=True) for name in names]
    before = [dict_[key] for (dict_, key), _ in places]
    versions = [tensor._version for tensor in state]
    written = set(call.written)
    for (dict_, key), tensor in places:
        dict_[key] = tensor
    for name in written:  # the program reads the old value, and writes the new one itself
        dict_, key = _place(module, name)
        dict_[key] = dict_[key].detach().clone()

    def values() -> list[Tensor]:
        for names, tensor, version in zip(call.state, state, versions, strict=True):
            dict_, key = _place(module, names[0])
            if written.isdisjoint(names) and (tensor._version != version or dict_[key] is not tensor):
                raise ForeignError(f"{call.name} is foreign and {_written(module, names[0])}")
        return [_place(module, name)[0][name.rpartition(".")[2]].detach() for name in call.written]

    try:
        yield values
    finally:
        for ((dict_, key), _), tensor in zip(places, before, strict=True):
            dict_[key] = tensor


def _written(module: nn.Module, name: str) -> str:
    """Return what is wrong with a write into a tensor of a module."""
    dict_, key = _place(module, name)
    if dict_ is module.get_submodule(name.rpartition(".")[0])._buffers:
        return f"changes its buffer {key!r}, which it may not where it runs along the batch; let it run whole"
    return (
        f"changes its parameter {name!r}, and only optimizers change parameters; make it a buffer (register_buffer), "
        "or change it after the step"
    )


def _place(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return where a module holds a parameter or buffer: the dictionary, and the key."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if key in owner._parameters else owner._buffers), key
