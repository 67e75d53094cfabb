"""The loading of a state dict: all ranks load the same names in the same order, or nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.lowering import private
from shardwright.lowering.store.storage import check_state
from shardwright.pcg.errors import ShardwrightError

Row = TypeVar("Row")


def load(
    state: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    copy: Callable[[str, Tensor], None],
    *,
    elsewhere: Collection[str] = (),
    strict: bool = True,
    stage: int = 0,
) -> private.IncompatibleKeys:
    """Copy a state's tensors that the model has, in the order of `own`; return the names that either side lacks.

    The ranks of a DTensor gather it together. So, before anything is copied, all ranks learn whether each can load its
    state, and whether the ranks of a stage were given the same. If not, all raise a `ShardwrightError`. `elsewhere`:
    names that other stages have.
    """
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own and name not in elsewhere]
    given = {name: state[name] for name in own if name in state}
    problem: ShardwrightError | None = None
    try:
        if strict and (missing or unexpected):
            raise ShardwrightError(f"load_state_dict: missing keys {missing}, unexpected keys {unexpected}")
        for name, value in given.items():
            check_state(name, value, own[name])
    except ShardwrightError as error:
        problem = error
    if dist.get_world_size() > 1 and dist.get_backend() != private.FAKE:
        _agree({name: _kind(value) for name, value in given.items()}, problem, stage)
    if problem is not None:
        raise problem
    for name, value in given.items():
        copy(name, value)
    return private.IncompatibleKeys(missing, unexpected)


def _kind(value: Tensor) -> str:
    if not isinstance(value, DTensor):
        return "a whole tensor"
    return f"a DTensor {list(value.placements)} on the ranks {value.device_mesh.mesh.tolist()}"


def _agree(given: Mapping[str, str], problem: ShardwrightError | None, stage: int) -> None:
    """Raise if another rank has a problem, or if ranks of one stage were given states that differ."""
    digest = hashlib.blake2b(repr(given).encode(), digest_size=16).hexdigest()
    rows = _from_all((stage, digest, str(problem or "")))
    failed = [(rank, text) for rank, (_, _, text) in enumerate(rows) if text]
    if failed and problem is None:
        raise ShardwrightError(f"load_state_dict: rank {failed[0][0]} cannot take its state: {failed[0][1]}")
    if not failed and len({row[:2] for row in rows}) > len({stage for stage, _, _ in rows}):
        raise ShardwrightError(_difference(_from_all((stage, given))))


def _difference(every: Sequence[tuple[int, Mapping[str, str]]]) -> str:
    """Return a message on the first name that ranks of one stage were given in different ways."""
    first: dict[int, int] = {}
    for rank, (stage, given) in enumerate(every):
        before = first.setdefault(stage, rank)
        other = every[before][1]
        for name in sorted(given.keys() | other.keys()):
            if given.get(name) != other.get(name):
                return (
                    f"load_state_dict: {name!r} is {other.get(name, 'missing')} on rank {before} and "
                    f"{given.get(name, 'missing')} on rank {rank}; pass the same names on every rank, each as a whole "
                    "tensor or as the same DTensor"
                )
    raise AssertionError("states of ranks differ in nothing")


def _from_all(row: Row) -> list[Row]:
    rows = [row] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    return rows
