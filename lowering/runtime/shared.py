"""Parameters that several pipeline stages have; their gradients are summed over these stages at the end of a step.

Stages with equal meshes hold equal parts, which are summed over the ranks at the same place. With unlike meshes, each
rank receives its part from every other stage, in pieces, and adds all up in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.channels import Kind, joined, part_of
from shardwright.lowering.ranks.movement import Axis, all_sum
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.runtime.reducer import Finished
from shardwright.pcg import pieces
from shardwright.pcg.step.meshes import first_ranks


class Holders(NamedTuple):
    """The stages that have a parameter, ranks that together have all of it, and its layout on a stage."""

    stages: tuple[int, ...]
    axis: Axis
    tensor: pieces.Tensor


class Shared:
    """The parameters that a rank's stage shares with others, by name."""

    def __init__(self, ranks: Ranks, holders: Mapping[str, Holders]) -> None:
        self.ranks, self.holders = ranks, dict(sorted(holders.items()))
        self.found: dict[str, list[Finished]] = {}

    def hold_back(self, finished: Finished) -> bool:
        """Keep the gradient of a shared parameter until the end of the step; return whether it is one."""
        name = finished[0].name
        if name in self.holders:
            self.found.setdefault(name, []).append(finished)
        return name in self.holders

    def summed(self, like: Mapping[str, Any]) -> Iterator[Finished]:
        """Yield every shared gradient, summed over the stages. `like`: this rank's parameters, by name."""
        finished, self.found = self.found, {}
        for name, holders in self.holders.items():
            held, parts = like[name], [part for _, part, _ in finished.get(name, [])]
            total = parts[0].contiguous() if parts else torch.zeros_like(held.inside)
            for part in parts[1:]:
                total += part
            if len({self.ranks.meshes[stage] for stage in holders.stages}) == 1:
                total = all_sum(total, holders.axis, inplace=True)
            else:
                total = self._exchanged(total, holders)
            yield held, total, None

    def _exchanged(self, own: Tensor, holders: Holders) -> Tensor:
        """Return the sum over stages with unlike meshes."""
        meshes, place, me = self.ranks.meshes, self.ranks.place, self.ranks.stages.rank
        todo, shape, rooms = list[dist.P2POp](), tuple(own.shape), dict[int, tuple[Kind, list[Tensor]]]()
        for stage in holders.stages:
            if stage == me:
                continue
            first = first_ranks(meshes)[stage]
            for piece in pieces.sent(holders.tensor, meshes[me], meshes[stage], place):
                todo.append(dist.P2POp(dist.isend, part_of(own, piece), first + piece.place, holders.axis.group))
            kind = Kind(shape, own.dtype, pieces.received(holders.tensor, meshes[stage], meshes[me], place))
            rooms[stage] = kind, [own.new_empty(piece.shape) for piece in kind.pieces]
            for piece, room in zip(kind.pieces, rooms[stage][1], strict=True):
                todo.append(dist.P2POp(dist.irecv, room, first + piece.place, holders.axis.group))
        for work in dist.batch_isend_irecv(todo) if todo else ():
            work.wait()
        total = torch.zeros_like(own)
        for stage in holders.stages:
            total += own if stage == me else joined(*rooms[stage], self.ranks.device)
        return total
