"""Agreement of a run's ranks: on their number, on objects made by rank 0, and on errors, which end all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.lowering.ranks.waits import waiting
from shardwright.pcg.capture.capture import split_batch
from shardwright.pcg.capture.importing import flat_batch, names_by_first
from shardwright.pcg.errors import DistributedError, ShardwrightError
from shardwright.pcg.launcher import find_launch

T = TypeVar("T")


def world_size() -> int:
    """Return the number of ranks of this run: the process group's, the launcher's, or one."""
    if dist.is_initialized():
        return dist.get_world_size()
    launch = find_launch()
    return launch.world if launch else 1


def check_world(num_devices: int, why: str = "", instead: str = "") -> None:
    """Raise `DistributedError` unless the run has as many ranks as the plan or cluster has devices.

    `why` completes "the plan is for so many ranks"; `instead` is an alternative to starting as many.
    """
    world = world_size()
    if world != num_devices:
        raise DistributedError(
            f"the plan is for {num_devices} ranks{why}, but {world} {'is' if world == 1 else 'are'} running; start the "
            f"script with `torchrun --nproc-per-node {num_devices}` or "
            f"`shardwright run --cluster local:{num_devices}`, or {instead or f'plan for a cluster of {world}'}"
        )


def from_rank_0(make: Callable[[], T], what: str) -> T:
    """Return rank 0's object on every rank (pickled); if rank 0 fails to make `what`, every rank raises."""
    if world_size() == 1:
        return make()
    message: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            message[0] = make()
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
            failure, message[1] = error, f"{type(error).__name__}: {error}"
    try:
        with waiting(f"the wait for {what} of rank 0"):
            dist.broadcast_object_list(message, src=0)
    except (DistributedError, RuntimeError) as error:
        if failure is not None:
            raise failure from error
        raise
    if failure is not None:
        raise failure
    if message[1] is not None:
        raise DistributedError(f"rank 0 could not make {what}: {message[1]}")
    return message[0]


def model_facts(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of a model and its batch that must be the same on all ranks, in words, by their subject.

    Raises `CaptureError` where the model does not take the batch.
    """
    facts = {"the model": type(model).__name__}
    for name, module in model.named_modules(remove_duplicate=False):
        facts[f"module {name!r}"] = "in train mode" if module.training else "in eval mode"
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for names in names_by_first(values).values():
        for name in names:
            kind = "trained" if values[name].requires_grad else "not trained"
            facts[f"tensor {name!r}"] = ", ".join([_type(values[name]), kind, *sorted(n for n in names if n != name)])
    tensors, options = split_batch(model, args, kwargs)
    return facts | batch_facts(tensors | options)


def batch_facts(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of a batch that must be the same on all ranks, in words, by their subject."""
    return {f"batch: {name!r}": _type(value) for name, value in flat_batch(batch).items()}


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    plain = all(x is None or isinstance(x, (bool, int, float, str)) for x in tree_leaves(value))
    return repr(value) if plain else type(value).__name__  # an object's address in memory differs between ranks


def same_on_all_ranks(tell: Callable[[], Mapping[str, str]]) -> None:
    """Raise `DistributedError` on every rank if some rank's facts differ from rank 0's.

    `tell` runs on every rank and returns the facts by subject; if it fails on one rank, every rank raises.
    """
    facts = on_all_ranks(tell)
    first = from_rank_0(lambda: facts, "the facts")
    on_all_ranks(lambda: _compare(facts, first))


def _compare(facts: Mapping[str, str], first: Mapping[str, str]) -> None:
    for name in sorted(facts.keys() | first.keys()):
        mine, other = facts.get(name, "missing"), first.get(name, "missing")
        if mine != other:
            raise DistributedError(
                f"{name} is {mine} on rank {dist.get_rank()} and {other} on rank 0; build the same model, and pass a "
                "batch of the same shapes and options, on every rank"
            )


def from_all_ranks(value: T) -> list[T]:
    """Return every rank's object (pickled), in the order of ranks."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def made_by_all_ranks(make: Callable[[], T]) -> list[T]:
    """Return every rank's object (pickled), in the order of ranks; if one fails to make its own, every rank raises."""
    failure: ShardwrightError | None = None
    value: T | None = None
    try:
        value = make()
    except ShardwrightError as error:
        failure = error
    values = from_all_ranks((value, str(failure) if failure else None))
    failed = [(rank, text) for rank, (_, text) in enumerate(values) if text is not None]
    if failed and failure is None:
        failure = DistributedError(f"rank {failed[0][0]}: {failed[0][1]}")
    if failure is not None:
        raise failure
    return [cast(T, made) for made, _ in values]


def on_all_ranks(check: Callable[[], T]) -> T:
    """Run a check on every rank, and return its value there; if it fails on one rank, every rank raises."""
    values = list[T]()
    made_by_all_ranks(lambda: values.append(check()))
    return values[0]
