"""One pipeline stage tells all others the loss and the model's results.

Where ranks of all stages have equal parts of a value, it is broadcast. Between stages of unlike sizes, parts are sent
in the pieces that each rank needs (`pcg.pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.channels import Incoming, Kind, Message, Outgoing, channels
from shardwright.lowering.ranks.groups import first_in
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.pcg import pieces
from shardwright.pcg.types import TensorType

_USE = "told"


class Told(NamedTuple):
    """A value that the ranks of a stage tell those of the others."""

    kind: TensorType
    stage: int


class Telling:
    """The groups and channels in which values are told. Every rank makes one, for the same values."""

    def __init__(self, ranks: Ranks, values: Iterable[Told]) -> None:
        self.ranks, everywhere, values_in_order = ranks, range(ranks.stages.size), list(values)
        ways = {
            (_USE, value.stage, other)
            for value in values_in_order
            if self._is_parted(value.kind)
            for other in everywhere
        }
        self.channels = channels(ranks, ways)
        rank = dist.get_rank()
        self.tellers = {stage: first_in(ranks.meshes, everywhere, rank, stage) for _, stage in values_in_order}

    def tell(self, value: Told, part: Tensor, what: str) -> Tensor:
        """Return this rank's part of a value: what it has, in the value's stage; elsewhere `part` is room for it.

        `what`: the value in words, for errors.
        """
        if not self._is_parted(value.kind):
            if self.ranks.stages.group is not None:
                broadcast(part, self.tellers[value.stage], self.ranks.stages.group)
            return part
        return self._tell_parts(value, part, what)

    def _is_parted(self, kind: TensorType) -> bool:
        """Return whether ranks of two stages have unlike parts of a value."""
        return len(set(self.ranks.meshes)) > 1 and any(layout.is_shard for layout in kind.layouts)

    def _tell_parts(self, value: Told, part: Tensor, what: str) -> Tensor:
        kind, source, stage = value.kind, value.stage, self.ranks.stages.rank
        meshes, tensor, place = self.ranks.meshes, pieces.Tensor(kind.shape, kind.layouts), self.ranks.place
        if stage != source:
            channel = self.channels[_USE, source, stage]
            assert isinstance(channel, Incoming)
            came = pieces.received(tensor, meshes[source], meshes[stage], place)
            channel.begin([Message(what, (Kind(kind.local_shape(meshes[stage]), getattr(torch, kind.dtype), came),))])
            (part,) = channel.take()
            return part
        for other, mesh in enumerate(meshes):
            if other != stage:
                channel = self.channels[_USE, stage, other]
                assert isinstance(channel, Outgoing)
                channel.send(what, [part], [pieces.sent(tensor, meshes[stage], mesh, place)])
                channel.finish()
        return part


def broadcast(x: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrite a contiguous tensor by that of `source`, a rank of the whole run."""
    dist.broadcast(x.view(torch.uint8) if x.dtype == torch.bool else x, source, group)
