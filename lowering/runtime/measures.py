"""Values that a function makes of the model's results, row by row, so that nothing gathers the results themselves.

Each rank calls the function once, with rows of its own as plain tensors. Each row is given to one rank: ranks that have
the same rows share them out, so one may get none. Tensors without a row for each of the batch's come as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.lowering.private import tree_flatten, tree_map_only, tree_unflatten
from shardwright.lowering.ranks.agreement import has_others
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.ranks.waits import waiting
from shardwright.pcg.capture.importing import flat_batch
from shardwright.pcg.errors import BatchError, DistributedError, ShardwrightError
from shardwright.pcg.results import by_rows

Metrics = Callable[[Any, dict[str, Any]], Any]
"""`metrics(result, batch)` returns tensors with a row for each row given, such as losses of examples, in any nest.

Or it updates an object that adds up over ranks by itself, such as one of torchmetrics, and returns None.
"""


def measured(metrics: Metrics | None, result: object, batch: Mapping[str, Any], ranks: Ranks) -> object:
    """Return what `metrics` makes of all rows of a result and its global batch, in their order, on every rank.

    Without `metrics`, return the result as it is.

    Raises `BatchError` if the batch's tensors have different numbers of rows. Raises the error of `metrics` on every
    rank, and a `ShardwrightError` if what it returns does not have a row for each of the given ones.
    """
    if metrics is None:
        return result
    rows = _Rows.of(batch, ranks)
    failure: Exception | None = None
    leaves, spec = list[Tensor](), tree_flatten(None)[1]
    try:
        with torch.no_grad():
            leaves, spec = _checked(metrics(rows.own(result), rows.own(dict(batch))), rows.many)
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
        failure = error
    forms = _from_all((str(spec), [(x.dtype, x.shape[1:]) for x in leaves], failure and repr(failure)), ranks)
    if failure is not None:
        raise failure
    for rank, (*form, error) in enumerate(forms):
        if error is not None:
            raise DistributedError(f"evaluate: metrics failed on rank {rank}: {error}")
        if form != list(forms[0][:2]):
            raise ShardwrightError(
                f"evaluate: metrics gave {form} on rank {rank} and {list(forms[0][:2])} on rank 0; return tensors of "
                "the same dtypes and shapes for all rows"
            )
    return tree_unflatten([rows.whole(x.to(ranks.device), ranks) for x in leaves], spec) if leaves else None


@dataclass(frozen=True)
class _Rows:
    """This rank's own rows of a batch: `many` from `first` on. Its parts of results begin at row `start` of `all`."""

    all: int
    start: int
    first: int
    many: int

    @classmethod
    def of(cls, batch: Mapping[str, Any], ranks: Ranks) -> _Rows:
        """Share out the rows of this rank's part among the ranks, and stages, that have the same part.

        Of stages of unlike sizes, the first of the largest ones shares out its rows alone.
        """
        counts = {x.shape[0] for x in flat_batch(batch).values() if isinstance(x, Tensor) and x.dim()}
        if len(counts) != 1:
            raise BatchError(
                f"evaluate: metrics= is for a batch whose tensors have the same number of rows; these have "
                f"{sorted(counts)}; leave metrics= out, and reduce the DTensors that evaluate returns"
            )
        (rows,) = counts
        is_alike, stage = len(set(ranks.meshes)) == 1, ranks.stages.rank
        start, size, copies, number = 0, rows, *((ranks.stages.size, stage) if is_alike else (1, 0))
        for layout, axis in zip(by_rows((rows,), ranks.mesh), ranks.axes, strict=True):
            if layout.is_shard:
                size //= axis.size
                start += axis.rank * size
            elif isinstance(axis, Axis):
                copies, number = copies * axis.size, number * axis.size + axis.rank
        first, last = (start + size * place // copies for place in (number, number + 1))
        if not is_alike and stage != ranks.meshes.index(max(ranks.meshes, key=lambda mesh: mesh.num_devices)):
            last = first
        return cls(rows, start, first, last - first)

    def own(self, nest: object) -> Any:  # noqa: ANN401
        """Return a nest with this rank's rows of its tensors; those that have other rows stay as they are."""
        return tree_map_only(Tensor, self._own, nest)

    def _own(self, x: Tensor) -> Tensor:
        if not x.dim() or x.shape[0] != self.all:
            return x
        start = self.start if isinstance(x, DTensor) else 0
        local = x.to_local() if isinstance(x, DTensor) else x
        return local.narrow(0, self.first - start, self.many)

    def whole(self, own: Tensor, ranks: Ranks) -> Tensor:
        """Return the rows of all ranks. Each is a summand among zeros, so that sums are exact."""
        x = own.new_zeros((self.all, *own.shape[1:]))
        x[self.first : self.first + self.many] = own
        if has_others(ranks):
            with waiting("the gathering of metrics", ranks.timeout_s):
                dist.all_reduce(x.view(torch.uint8) if x.dtype == torch.bool else x)
        return x


def _checked(returned: object, many: int) -> tuple[list[Tensor], Any]:
    """Return the tensors of what a function returned, and the form of their nest. None has no tensors."""
    leaves, spec = tree_flatten(returned)
    if returned is None:
        return [], spec
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or leaf.shape[:1] != (many,):
            kind = type(leaf).__name__ + (f" {list(leaf.shape)}" if isinstance(leaf, Tensor) else "")
            raise ShardwrightError(
                f"evaluate: metrics returned a {kind} for {many} rows; return tensors with a row for each row that it "
                "was given, such as the loss of each example, and sum up what evaluate returns; or None"
            )
    return leaves, spec


def _from_all(value: tuple[Any, ...], ranks: Ranks) -> list[tuple[Any, ...]]:
    of_ranks = [value] * ranks.world
    if has_others(ranks):
        with waiting("metrics", ranks.timeout_s):
            dist.all_gather_object(of_ranks, value)
    return of_ranks
