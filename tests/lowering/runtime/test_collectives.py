"""The parallel operators on forked ranks: each against its definition, and each fusion against what it fuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.launch import connect, run_ranks
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime import collectives as c
from shardwright.pcg.mesh import Mesh

SHAPE = (8, 12, 16)


def everyones(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def on_axis(num_ranks: int, body: Callable[[Axis], Any]) -> list[Any]:
    """`body` on every rank of a one-axis mesh; each rank seeded by its number."""

    def rank() -> Any:
        (axis,) = connect(Mesh.of(a=num_ranks), 30).axes
        assert isinstance(axis, Axis)
        torch.manual_seed(axis.rank)
        return body(axis)

    return run_ranks(rank, num_ranks, 30)


def vjp(fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fn(x), a random cotangent, and the gradient that it gives."""
    x = x.clone().requires_grad_()
    y = fn(x * 1)  # not a leaf, as in a program
    cotangent = torch.randn_like(y)
    y.backward(cotangent.clone())
    assert x.grad is not None
    return y.detach(), cotangent, x.grad


def sliced(x: Tensor, axis: Axis, dim: int, blocks: int) -> Tensor:
    """My slice of each block, by index."""
    extent = x.shape[dim] // (blocks * axis.size)
    index = [b * extent * axis.size + axis.rank * extent + i for b in range(blocks) for i in range(extent)]
    return x.index_select(dim, torch.tensor(index))


PLACES = [(0, 1), (1, 1), (2, 1), (0, 2), (1, 3), (2, 4)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_replicate_and_reduce(num_ranks: int) -> None:
    def body(axis: Axis) -> None:
        for inplace in (False, True):
            x = torch.randn(SHAPE, dtype=torch.float64)
            y, g, grad = vjp(lambda x, i=inplace: c.replicate(x, axis, inplace=i), x)
            torch.testing.assert_close(y, x)
            torch.testing.assert_close(grad, sum(everyones(g)))
            y, g, grad = vjp(lambda x, i=inplace: c.reduce(x, axis, inplace=i), x)
            torch.testing.assert_close(y, sum(everyones(x)))
            torch.testing.assert_close(grad, g)
            y, g, grad = vjp(lambda x, i=inplace: c.reduce_copy(x, axis, inplace=i), x)
            torch.testing.assert_close(y, sum(everyones(x)))
            torch.testing.assert_close(grad, sum(everyones(g)))

    on_axis(num_ranks, body)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_partition_and_combine(num_ranks: int) -> None:
    def body(axis: Axis) -> None:
        for dim, blocks in PLACES:
            if SHAPE[dim] % (blocks * axis.size):
                continue
            whole = everyones(torch.randn(SHAPE, dtype=torch.float64))[0]
            y, _, grad = vjp(lambda x, d=dim, b=blocks: c.partition(x, axis, d, b), whole)
            torch.testing.assert_close(y, sliced(whole, axis, dim, blocks))
            y, g, grad = vjp(lambda x, d=dim, b=blocks: c.combine(x, axis, d, b), sliced(whole, axis, dim, blocks))
            torch.testing.assert_close(y, whole)
            torch.testing.assert_close(grad, sliced(g, axis, dim, blocks))
            _, g, grad = vjp(lambda x, d=dim, b=blocks: c.partition(x, axis, d, b), whole)
            torch.testing.assert_close(sliced(grad, axis, dim, blocks), g)
            torch.testing.assert_close(grad, everyones(grad)[0])

    on_axis(num_ranks, body)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_fused_are_their_compositions(num_ranks: int) -> None:
    def body(axis: Axis) -> None:
        pairs: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = []
        for d, b in PLACES:
            if SHAPE[d] % (b * axis.size):
                continue
            pairs.append(
                (
                    lambda x, d=d, b=b: c.reduce_scatter(x, axis, d, b),
                    lambda x, d=d, b=b: c.partition(c.reduce(x, axis), axis, d, b),
                )
            )
            pairs.append(
                (
                    lambda x, d=d, b=b: c.gather_copy(x, axis, d, b),
                    lambda x, d=d, b=b: c.replicate(c.combine(x, axis, d, b), axis),
                )
            )
            for e, n in PLACES:
                if e != d and not SHAPE[e] % (n * axis.size):
                    old, new = (d, b), (e, n)
                    pairs.append(
                        (
                            lambda x, old=old, new=new: c.all_to_all(x, axis, old, new),
                            lambda x, old=old, new=new: c.partition(c.combine(x, axis, *old), axis, *new),
                        )
                    )
        for fused, composed in pairs:
            x = torch.randn(SHAPE, dtype=torch.float64)
            state = torch.get_rng_state()
            found = vjp(fused, x)
            torch.set_rng_state(state)
            for a, b in zip(found, vjp(composed, x), strict=True):
                torch.testing.assert_close(a, b)

    on_axis(num_ranks, body)


def test_integers_and_bools_move() -> None:
    def body(axis: Axis) -> None:
        for whole in (torch.arange(96).reshape(8, 12), torch.arange(96).reshape(8, 12) % 3 == 0):
            part = c.partition(whole, axis, 1)
            assert torch.equal(c.combine(part, axis, 1), whole)
            assert torch.equal(c.all_to_all(part, axis, (1, 1), (0, 1)), c.partition(whole, axis, 0))

    on_axis(2, body)


def test_a_sum_in_place_leaves_other_readers_alone() -> None:
    def body(axis: Axis) -> None:
        x = torch.ones(4, requires_grad=True)
        y = c.replicate(x, axis)
        shared = torch.ones(4)
        torch.autograd.backward([y], [shared])
        assert torch.equal(shared, torch.ones(4))
        z = torch.ones(4)
        c.reduce(z, axis)
        assert torch.equal(z, torch.ones(4))

    on_axis(2, body)
