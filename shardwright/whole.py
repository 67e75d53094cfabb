"""The model that was compiled, whole and in memory, with the weights that its compiled form has by now.

user's model ──deepcopy, with new tensors in the place of old ones──▶ copy ◀──one tensor at a time── ranks
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.checking import free_bytes
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.waits import waiting
from shardwright.lowering.store.deferred import is_unreal
from shardwright.pcg.errors import CheckpointError
from shardwright.pcg.launcher import find_launch
from shardwright.pcg.units import size
from shardwright.ranks import from_all_ranks, on_all_ranks


class _Kind(NamedTuple):
    """A tensor that a rank has, under its first name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def whole_model(parallel: ParallelModule, *, everywhere: bool) -> nn.Module | None:
    """Return a copy of the user's model with the values of `parallel`, on rank 0 or everywhere; None on other ranks.

    A tensor is gathered when its turn comes. Of several pipeline stages that have one, the first gives it.
    """
    ranks = parallel.ranks
    with waiting("export", ranks.timeout_s), torch.no_grad():
        given = dict(first_names(_named(parallel)))
        kinds = [_Kind(name, tuple(value.shape), value.dtype) for name, value in given.items()]
        by_rank = from_all_ranks((ranks.stages.rank, kinds))
        owners = dict[str, tuple[int, _Kind]]()
        for rank, (_, of_rank) in sorted(enumerate(by_rank), key=lambda item: (item[1][0], item[0])):
            for kind in of_rank:
                owners.setdefault(kind.name, (rank, kind))
        kinds_of_all = [kind for _, kind in owners.values()]
        takes = everywhere or dist.get_rank() == 0
        made = on_all_ranks(lambda: _copied(parallel, kinds_of_all, everywhere=everywhere) if takes else None)
        several = len({stage for stage, _ in by_rank}) > 1
        filled, unlike = dict[int, str](), list[tuple[str, str]]()
        for name, (owner, kind) in owners.items():
            value = _gathered(given[name]) if by_rank[owner][0] == ranks.stages.rank else None
            if several:
                value = _sent(value, kind, owner, ranks.device)
            if made is not None and value is not None:
                room = made.tensors[name]
                if (first := filled.setdefault(id(room), name)) != name and not _alike(room, value):
                    unlike.append((first, name))
                room.copy_(value)
        on_all_ranks(partial(_refuse_tied_later, unlike))
    return None if made is None else made.model


class _Copy(NamedTuple):
    """A copy of the user's model, and its tensors that are to be filled, by name."""

    model: nn.Module
    tensors: Mapping[str, Tensor]


def first_names(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, each under the first of its names."""
    seen = set[int]()
    for name, value in named:
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value.detach()


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under all of their names; those that are not saved too."""
    parameters = module.named_parameters(remove_duplicate=False)
    return chain(parameters, module.named_buffers(remove_duplicate=False))


def _copied(parallel: ParallelModule, kinds: Collection[_Kind], *, everywhere: bool) -> _Copy:
    """Copy the user's model, without the values of the given tensors. Raises `CheckpointError` where that cannot be."""
    if parallel.maker is None or (model := parallel.maker.model()) is None:
        raise CheckpointError(
            "export: the model that was compiled is gone, so there is none to copy; keep a reference to it, or export "
            "into a folder"
        )
    old = {kind.name: _tensor_at(model, kind) for kind in kinds}
    distinct = {id(old[kind.name]): (old[kind.name], kind.dtype) for kind in kinds}
    _check_room(distinct.values(), everywhere=everywhere)
    memo = {key: _room_for(value, dtype) for key, (value, dtype) in distinct.items()}
    tensors = {name: memo[id(value)] for name, value in old.items()}
    try:
        made = copy.deepcopy(model, dict(memo))
    except Exception as error:
        raise CheckpointError(
            f"export: {type(model).__name__} cannot be copied: {error}; export into a folder, and load that"
        ) from error
    if odd := next((name for name, value in _all_tensors(made) if is_unreal(value)), None):
        raise CheckpointError(
            f"export: {odd!r} of {type(model).__name__} has no values, and the compiled model has none of it; export "
            "into a folder, and load that into a model built outside of shardwright.fake()"
        )
    return _Copy(made, tensors)


def _tensor_at(model: nn.Module, kind: _Kind) -> Tensor:
    """Return a parameter, a buffer, or what forward changes although it is none."""
    name = kind.name
    path, _, attribute = name.rpartition(".")
    try:
        value = getattr(model.get_submodule(path), attribute)
    except AttributeError:
        value = None
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"export: {type(model).__name__} has no tensor {name!r} that could be replaced; export into a folder"
        )
    if tuple(value.shape) != kind.shape:
        raise CheckpointError(
            f"export: {name!r} of {type(model).__name__} was {list(kind.shape)} when it was compiled, and is "
            f"{list(value.shape)} now; export into a folder, or compile the model anew"
        )
    return value


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from _named(model)
    for path, module in model.named_modules():
        yield from (
            (f"{path}.{name}".removeprefix("."), value)
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        )


def _room_for(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for a tensor on its device, of its own for each element; on the host, where it had none."""
    device = "cpu" if is_unreal(value) else value.device
    like = torch.empty_strided(value.size(), value.stride(), dtype=dtype, device="meta")
    room = torch.empty_like(like, device=device)
    return nn.Parameter(room, value.requires_grad) if isinstance(value, nn.Parameter) else room


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ by rounding at most, as copies that pipeline stages have of one may."""
    is_rounded = other.is_floating_point() or other.is_complex()
    other = other.to(one)
    return torch.allclose(one, other, 1e-3, 1e-6, equal_nan=True) if is_rounded else torch.equal(one, other)


def _refuse_tied_later(unlike: Sequence[tuple[str, str]]) -> None:
    for first, name in unlike:
        raise CheckpointError(
            f"export: {first!r} and {name!r} are one tensor in the model, and were two when it was compiled, which "
            "training has made unlike; export into a folder, or untie them"
        )


def _check_room(values: Iterable[tuple[Tensor, torch.dtype]], *, everywhere: bool) -> None:
    """Raise `CheckpointError` if a device has no room for what ranks of this machine take."""
    needed = dict[torch.device, int]()
    for value, dtype in values:
        device = torch.device("cpu") if is_unreal(value) else value.device
        needed[device] = needed.get(device, 0) + value.numel() * dtype.itemsize
    launch = find_launch()
    local = (launch and launch.local_world) or dist.get_world_size()
    for device, num_bytes in needed.items():
        many = local if everywhere and device.type == "cpu" else 1
        if many * num_bytes > (free := free_bytes(device)):
            times = f" on each of {many} ranks of this machine" if many > 1 else ""
            raise CheckpointError(
                f"export: the whole model takes {size(num_bytes)}{times}, and {device} has {size(int(free))} free; "
                "export into a folder, which takes one file's tensors at a time"
            )


def _gathered(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _sent(value: Tensor | None, kind: _Kind, owner: int, device: torch.device) -> Tensor:
    """Send a whole tensor from its owner to all ranks."""
    if value is None or dist.get_rank() != owner:
        whole = torch.empty(kind.shape, dtype=kind.dtype, device=device)
    else:
        whole = value.contiguous()
    dist.broadcast(whole, owner)
    return whole
