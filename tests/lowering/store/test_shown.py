"""Masks that have changed, on every rank, against what the band of their first values allows, element by element."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf, nan
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.store import shown
from shardwright.lowering.store.shown import ShownMasks
from shardwright.lowering.store.storage import Held, part_of
from shardwright.pcg.bounds import Band
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.capture.showing import read
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import R
from shardwright.pcg.node import make_attrs
from shardwright.pcg.shown import LEAST, band_of
from tests.each import RANDOM_CASES


def graph_of(mask: Tensor) -> Graph:
    """A graph with a buffer "mask" that says what its values show."""
    b = GraphBuilder()
    name = b.leaf("mask", "buffer", tuple(mask.shape), str(mask.dtype).removeprefix("torch."), "mask")
    graph = b.graph([("loss", name)])
    (node,) = graph.nodes
    return replace(graph, nodes=(replace(node, attrs=make_attrs(**dict(node.attrs), **read(mask))),))


def told(graph: Graph, mask: Tensor, sizes: tuple[int, int] = (1, 1), places: tuple[int, ...] = (0, 0)) -> str:
    """What a rank says that has its part of queries and of keys; "": nothing."""
    slices = [(Axis(name, size, place), mask.ndim - 2 + n, 1)
              for n, (name, size, place) in enumerate(zip("qk", sizes, places, strict=True))]  # fmt: skip
    held = Held(("mask",), (R,), mask, part_of(mask, slices), slices, tuple(mask.shape))
    try:
        ShownMasks(graph, {"mask": held}, {}).check()
    except PlanError as error:
        return str(error)
    return ""


def drawn(rng: random.Random, shape: tuple[int, ...], hidden: float | None) -> Tensor:
    """A mask of one window or of two; `hidden`: the number that hides; None: it has truth values."""
    apart = torch.arange(shape[-1]) - torch.arange(shape[-2])[:, None]
    first = rng.randint(-6, 3)
    visible = ((apart >= first) & (apart <= first + rng.randint(0, 7))).expand(shape).clone()
    if rng.random() < 0.3:
        visible[..., rng.randrange(shape[-2]), :] = False
    if hidden is None:
        return ~visible if rng.random() < 0.4 else visible
    return torch.zeros(shape).masked_fill(~visible, hidden)


def is_within(before: Tensor, after: Tensor) -> bool:
    """Whether values hide all that lies outside of the band of what was shown, as the first ones did."""
    apart = (torch.arange(before.shape[-1]) - torch.arange(before.shape[-2])[:, None]).expand(before.shape)

    def outside(values: Tensor) -> Tensor:
        band: Band = band_of(values.numpy())
        return (apart < band.first) | (apart > band.last)

    if before.dtype == torch.bool:
        return not (outside(before) & after).any() and not (outside(~before) & ~after).any()
    beyond = after[outside(before > LEAST)]
    if ((before <= LEAST) & (before > -inf)).any():
        return bool((beyond <= LEAST).all() and (after[apart == 0] > LEAST).all())
    return bool((beyond == -inf).all())


def test_ranks_say_what_goes_beyond_the_band() -> None:
    rng, verdicts = random.Random(2), list[bool]()
    for number in range(RANDOM_CASES or 60):
        shape, hidden = (*[2] * rng.randint(0, 1), 12, rng.choice([12, 16])), rng.choice([None, -inf, -1e30])
        before, sizes = drawn(rng, shape, hidden), (rng.choice([1, 2, 3]), rng.choice([1, 2]))
        if not read(before):
            continue
        graph, after = graph_of(before), before.clone()
        place = tuple(rng.randrange(n) for n in shape)
        after[place] = ~after[place] if hidden is None else rng.choice([0.0, -inf, -1e30, nan])
        for values in (before, after):
            with mock.patch.object(shown, "TILE_ROWS", rng.choice([1, 3, 256])):
                said = [told(graph, values, sizes, at) for at in product(*map(range, sizes))]
            assert any(said) != is_within(before, values), (number, before, values)
        verdicts.append(any(said))
    assert {True, False} == set(verdicts)


@pytest.mark.parametrize(("hidden", "value", "expected"), [
    (-inf, 0.0, "buffer 'mask' shows an element outside of the band -1 to 1, but"),
    (-1e30, nan, "buffer 'mask' shows an element outside of the band -1 to 1, but"),
    (-inf, -1e30, "buffer 'mask' hides by a number that is no -inf, but"),
])  # fmt: skip
def test_what_is_said_of_values_that_torch_does_not_count(hidden: float, value: float, expected: str) -> None:
    mask = torch.full((6, 6), hidden).triu(2) + torch.full((6, 6), hidden).tril(-2)
    mask.nan_to_num_(nan=hidden, neginf=hidden)
    graph, version = graph_of(mask), mask._version
    held = Held(("mask",), (R,), mask, mask, (), tuple(mask.shape))
    masks = ShownMasks(graph, {"mask": held}, {})
    masks.check()
    mask.data[0, 5] = value
    assert mask._version == version
    with pytest.raises(PlanError, match="plan again, with these values") as caught:
        masks.check()
    assert str(caught.value).startswith(expected)
