"""The comparison of ranks' inputs to a step: one global batch, or each rank's shard of it; and of random states.

Under DDP every rank passes a batch of its own. Here a tensor of the captured shape is the global batch. It must be the
same on every rank, and each rank takes its part of it. Different values on another rank would be dropped, or would
train another model there.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shardwright.lowering.random.drawing import NUM_STATES, Drawing
from shardwright.lowering.ranks.agreement import digest, gathered, has_others
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime.batch import BatchCheck
from shardwright.pcg.errors import BatchError, ShardwrightError
from shardwright.pcg.layout import format_layouts

CheckInputs = Literal["first", "always", "never"]
"""The steps that compare inputs across ranks: the first `NUM_FIRST` (with gradients, and without), all, none."""
NUM_FIRST = 3
_WHOLE = -1  # the number of a shard when a rank passes the global tensor


class Inputs:
    """The inputs of every step; in the steps to check, they are compared across ranks.

    All ranks get the same result of the comparison. So all of them raise, even if only one cannot use its batch.
    """

    def __init__(self, batch: BatchCheck, drawing: Drawing, when: CheckInputs) -> None:
        if when not in get_args(CheckInputs):
            expected = ", ".join(map(repr, get_args(CheckInputs)))
            raise ShardwrightError(f"check_inputs={when!r}: expected one of {expected}")
        self.batch, self.drawing, self.ranks, self.when = batch, drawing, batch.ranks, when
        self.step, self.others = 0, has_others(batch.ranks)
        self._made = {True: 0, False: 0}  # steps with gradients, and without
        self.compares = False  # whether this step is one to compare

    def take(self, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Return this rank's part of every input for each microbatch. Raises `BatchError`."""
        self.step += 1
        self.compares = False
        if not self.others or _being_recorded():
            return self.batch.local(batch)
        self._made[torch.is_grad_enabled()] += 1
        is_first = self._made[torch.is_grad_enabled()] <= NUM_FIRST
        if self.when == "never" or not (is_first or self.when == "always"):
            self._watch(is_first=is_first)
            return self.batch.local(batch)
        self.compares = True
        try:
            values = self.batch.values(batch)
        except BatchError:
            self._compare(None)
            raise
        self._compare(values)
        return self.batch.parts(values)

    def _compare(self, values: Mapping[str, Tensor] | None) -> None:
        """Compare by one collective the ranks' failures, random states, and the numbers and digests of shards."""
        rows = gathered(self._row(values), self.ranks)
        if failed := [rank for rank, row in enumerate(rows) if row[0]]:
            if values is None:
                return
            raise BatchError(
                f"batch: {_ranks(failed)} cannot take what was passed there in step {self.step}; see there"
            )
        states, passed = [row[1 : 1 + NUM_STATES] for row in rows], [row[1 + NUM_STATES :] for row in rows]
        for number, key in enumerate(self.batch.inputs):
            self._check(key, [(row[2 * number], row[2 * number + 1]) for row in passed])
        self._warn_of_copies(passed)
        self.drawing.agree(states)

    def _watch(self, *, is_first: bool) -> None:
        """Compare the ranks' random states in a step that does not compare inputs."""
        if not is_first:
            self.drawing.watch()
        elif self.drawing.draws:
            self.drawing.agree(gathered(torch.tensor(self.drawing.state(), device=self.ranks.device), self.ranks))

    def _row(self, values: Mapping[str, Tensor] | None) -> Tensor:
        """Return this rank's numbers for the comparison, on its device."""
        row = [torch.tensor([values is None, *self.drawing.state()])]
        if values is None:
            row.append(torch.zeros(2 * len(self.batch.inputs), dtype=torch.int64))
        else:
            for key in self.batch.inputs:
                row += [torch.tensor([self._shard(key, values[key])]), digest(values[key])[None]]
        return torch.cat([numbers.to(self.ranks.device) for numbers in row])

    def _shard(self, key: str, value: Tensor) -> int:
        """Return the number of the shard that this rank passes, or `_WHOLE` if it passes the global tensor."""
        if value.shape == self.batch.inputs[key].shape:
            return _WHOLE
        number, many = 0, 1
        for axis, _, _ in self.batch.slices[key]:
            if isinstance(axis, Axis):
                number, many = number * axis.size + axis.rank, many * axis.size
        return number * self.ranks.world + many - 1  # unlike stages have other counts of shards

    def _check(self, key: str, passed: Sequence[tuple[int, int]]) -> None:
        """Raise unless ranks that pass the same part of an input pass the same values."""
        where = f"batch: {key!r} in step {self.step}"
        whole = [rank for rank, (shard, _) in enumerate(passed) if shard == _WHOLE]
        others = [rank for rank in range(len(passed)) if rank not in whole]
        whole = [rank for rank in whole if not others or not self.batch.is_whole(key, rank)]
        if whole and others:
            raise BatchError(
                f"{where}: {_ranks(whole)} passed the global tensor, {_ranks(others)} a shard of it; "
                "pass the same on every rank: the global tensor, or each rank's own shard"
            )
        first: dict[int, int] = {}
        for rank, (shard, value) in enumerate(passed):
            one = first.setdefault(shard, rank)
            if passed[one][1] != value:
                raise BatchError(f"{where} differs between {_ranks([one, rank])}: {self._advice(key, shard)}")

    def _warn_of_copies(self, passed: Sequence[Sequence[int]]) -> None:
        """Warn where ranks passed the same as their own rows of every input, as a global batch taken for them is."""
        numbered = {key: {tuple(row[2 * n : 2 * n + 2]) for row in passed} for n, key in enumerate(self.batch.inputs)}
        shards = {key: signatures for key, signatures in numbered.items() if len(signatures) > 1}
        are_rows = all(dim == 0 for key in shards for _, dim, _ in self.batch.slices[key])
        if shards and are_rows and all(len({value for _, value in signatures}) == 1 for signatures in shards.values()):
            key = next(iter(shards))
            shape, own = list(self.batch.inputs[key].shape), list(self.batch.own_shapes[key])
            warnings.warn(
                f"batch: all ranks passed the same {key!r} {own}, which is taken for their shards of {shape}, "
                "with copies of the same rows; if it is a global batch, pass global ones in all steps",
                stacklevel=2,
            )

    def _advice(self, key: str, shard: int) -> str:
        shape, own = list(self.batch.inputs[key].shape), list(self.batch.own_shapes[key])
        layouts = format_layouts(self.batch.layouts[key], self.ranks.mesh)
        if shard != _WHOLE:
            return (
                f"they hold the same shard {own} of the global tensor {shape} ({layouts}); pass equal values on ranks "
                "that differ along other axes only, e.g. give the sampler as many replicas as there are shards"
            )
        alike = "pass the same on every rank (no DistributedSampler, one seed for what shuffles)"
        if own == shape:
            return (
                f"a tensor of shape {shape} is the global batch, which this plan keeps whole on every rank; {alike}; "
                "to train on a batch of its own on each rank, compile with all of them as one batch"
            )
        return (
            f"a tensor of shape {shape} is the global batch, of which every rank takes its part {own} ({layouts}); "
            f"{alike}, or pass each rank's own part alone; if these are batches of their own, as with DDP, "
            "compile with all of them as one batch, and pass each rank its own"
        )


def _being_recorded() -> bool:
    """Return whether a CUDA graph is being captured, in which nothing may wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _ranks(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
