"""Muon on a compiled model: each matrix is orthogonalized on one rank.

    parts of updates ──all-to-all──▶ whole matrices on their owners ──Newton-Schulz──▶ all-to-all ──▶ parts

Updates are sent in bfloat16, in which the iteration begins and ends, so the weights are those of one process in every
bit. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.lowering import private
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.movement import Axis, chunk, seen, take
from shardwright.lowering.ranks.waits import waiting
from shardwright.pcg.arguments import Argument, checked
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.mesh import TIME
from shardwright.pcg.step.muon import owners_of
from shardwright.planned import require_plan

Steps = Sequence[tuple[Axis, int, int]]
"""The successive slices from a matrix to a rank's part of it: axis, dim and blocks of each."""


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for parameters of a compiled model: equal to one process, and not computed everywhere.

    Where torch's own would gather every product of the iteration, each matrix is gathered once, to one rank of its
    stage. Ranks own matrices of about equal work. Every rank makes one, with the same parameters; its state is torch's.
    """

    @checked(ShardwrightError, params=Argument((Iterable,), "parameters, or groups of them", (str,)))
    def __init__(self, params: Iterable[Any], *, parallel: ParallelModule, **options: Any) -> None:
        """`params`: matrices of `parallel`, or groups of them; `options`: as of `torch.optim.Muon`.

        Raises `ShardwrightError` if the model has no plan yet, a parameter is not one of its own, or it is complex.
        """
        require_plan(parallel, "Muon", ShardwrightError)
        super().__init__(params, **options)
        parameters = set(parallel.parameters())
        if any(p not in parameters for group in self.param_groups for p in group["params"]):
            raise ShardwrightError("Muon: a parameter is not one of parallel.parameters(); pass some of these")
        if any(p.is_complex() for group in self.param_groups for p in group["params"]):
            raise ShardwrightError(
                "Muon: a parameter is of complex numbers, and Muon is for real ones; give it to AdamW"
            )
        ranks = parallel.ranks
        names = tuple(name for name in ranks.mesh.names if name != TIME)
        self._axis = ranks.merged(names) if names else Axis("one", 1, 0)
        self._shared: tuple[tuple[int, ...], _Shared] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Update the parameters that have gradients; they must be the same on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        todo = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not todo:
            return loss
        parts = [self._momentum(p, group).bfloat16() for p, group in todo]
        updates = self._of([p for p, _ in todo]).each(parts, lambda number, x: _orthogonal(x, todo[number][1]))
        for (p, group), update in zip(todo, updates, strict=True):
            local, rate = private.unwrap(p), float(group["lr"])
            local.mul_(1 - rate * group["weight_decay"])
            local.add_(update, alpha=-private.rate_of_muon(rate, group["adjust_lr_fn"], p.shape))
        return loss

    def _momentum(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Return this rank's part of the update before it is orthogonalized."""
        gradient = cast("Tensor", p.grad)
        if "momentum_buffer" not in (state := self.state[p]):
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        local, momentum = private.unwrap(gradient), private.unwrap(state["momentum_buffer"])
        momentum.lerp_(local, 1 - group["momentum"])
        return local.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _of(self, parameters: Sequence[Tensor]) -> _Shared:
        key = tuple(map(id, parameters))
        if self._shared is None or self._shared[0] != key:
            self._shared = key, _Shared.among(cast("Sequence[DTensor]", parameters), self._axis)
        return self._shared[1]


def _orthogonal(x: Tensor, group: dict[str, Any]) -> Tensor:
    return private.newton_schulz(x, group["ns_coefficients"], group["ns_steps"], group["eps"])


@dataclass(frozen=True)
class _Matrix:
    """A matrix as ranks share it: its owner, each rank's slices of it, and the ranks that send theirs to the owner."""

    shape: torch.Size
    owner: int
    steps: tuple[Steps, ...]
    senders: frozenset[int]

    def part(self, rank: int) -> list[int]:
        """Return the shape of a rank's part."""
        shape = list(self.shape)
        for axis, dim, _ in self.steps[rank]:
            start, stop = chunk(shape[dim], axis)
            shape[dim] = stop - start
        return shape


class _Shared:
    """Matrices that are shared out among the ranks of a group."""

    def __init__(self, matrices: Sequence[_Matrix], axis: Axis) -> None:
        self.matrices, self.axis = matrices, axis

    @classmethod
    def among(cls, parameters: Sequence[DTensor], axis: Axis) -> _Shared:
        members = [0] if axis.group is None else dist.get_process_group_ranks(axis.group)
        owners, matrices = owners_of([p.shape for p in parameters], axis.size), list[_Matrix]()
        for p, owner in zip(parameters, owners, strict=True):
            places = [_place(p, rank) if axis.size > 1 else (0,) * p.device_mesh.ndim for rank in members]
            is_kept = [private.shard_dim(placement) is None for placement in p.placements]
            senders = {
                rank
                for rank, place in enumerate(places)
                if all(not is_exact or a == b for is_exact, a, b in zip(is_kept, place, places[owner], strict=True))
            }
            steps = tuple(tuple(_steps(p, place)) for place in places)
            matrices.append(_Matrix(p.shape, owner, steps, frozenset(senders)))
        return cls(matrices, axis)

    def each(self, parts: Sequence[Tensor], compute: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        """Return this rank's parts of what `compute` makes of each whole matrix, by its number, on its owner."""
        me, every = self.axis.rank, range(self.axis.size)
        there = [[m for m in self._of(rank) if me in self.matrices[m].senders] for rank in every]
        here = [[m for m in self._of(me) if rank in self.matrices[m].senders] for rank in every]
        shapes = [[self.matrices[m].part(rank) for m in here[rank]] for rank in every]
        came = self._sent([[parts[m] for m in numbers] for numbers in there], shapes, parts[0])
        wholes = {m: parts[m].new_empty(self.matrices[m].shape) for m in self._of(me)}
        for rank in every:
            for m, part in zip(here[rank], came[rank], strict=True):
                put(wholes[m], part, self.matrices[m].steps[rank])
        made = {m: compute(m, whole) for m, whole in wholes.items()}
        back = [[part_of(made[m], self.matrices[m].steps[rank]) for m in made] for rank in every]
        shapes = [[self.matrices[m].part(me) for m in self._of(rank)] for rank in every]
        came = self._sent(back, shapes, parts[0])
        by_number = {m: part for rank in every for m, part in zip(self._of(rank), came[rank], strict=True)}
        return [by_number[m] for m in range(len(parts))]

    def _of(self, rank: int) -> list[int]:
        """Return the numbers of the matrices that a rank owns."""
        return [number for number, matrix in enumerate(self.matrices) if matrix.owner == rank]

    def _sent(
        self, given: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[list[int]]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send each rank some tensors, and return what came from each, in these shapes."""
        if self.axis.group is None:
            return [list(tensors) for tensors in given]
        flat = [x.reshape(-1) for tensors in given for x in tensors]
        sent = torch.cat(flat) if flat else like.new_empty(0)
        sizes = [[torch.Size(shape).numel() for shape in listed] for listed in shapes]
        counts = [sum(x.numel() for x in tensors) for tensors in given]
        room = like.new_empty(sum(map(sum, sizes)))
        with waiting("the exchange of Muon's matrices"):
            dist.all_to_all_single(room, sent, [*map(sum, sizes)], counts, group=self.axis.group)
        pieces = iter(room.split([size for listed in sizes for size in listed]))
        return [[next(pieces).view(shape) for shape in listed] for listed in shapes]


def _place(p: DTensor, rank: int) -> tuple[int, ...]:
    """Return the coordinates of a rank of the run in a parameter's mesh."""
    (place,) = (p.device_mesh.mesh == rank).nonzero().tolist()
    return tuple(place)


def _steps(p: DTensor, place: Sequence[int]) -> Iterator[tuple[Axis, int, int]]:
    for number, (placement, at) in enumerate(zip(p.placements, place, strict=True)):
        if (dim := private.shard_dim(placement)) is not None:
            yield Axis("", p.device_mesh.size(number), at), dim, private.num_blocks(placement)


def part_of(whole: Tensor, steps: Steps) -> Tensor:
    """Return a rank's part of a whole tensor."""
    for axis, dim, blocks in steps:
        whole = take(whole, axis, dim, blocks)
    return whole


def put(whole: Tensor, part: Tensor, steps: Steps) -> None:
    """Write a rank's part into a whole tensor: the inverse of `part_of`."""
    if not steps:
        whole.copy_(part)
        return
    (axis, dim, blocks), *others = steps
    inner = seen(whole, axis, dim, blocks)
    put(inner, part, others)
    if blocks > 1:  # it may be a copy
        view = whole.unflatten(dim, (blocks, axis.size, -1)).select(dim + 1, axis.rank)
        view.copy_(inner.unflatten(dim, (blocks, -1)))
