"""The counter-based generator: published vectors, statistics, and that a part is the part of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.lowering.random.philox import Slice, keep_mask, philox, stretches
from shardwright.lowering.ranks.movement import Axis, take
from tests.each import each

CPU = torch.device("cpu")
ONES = 2**32 - 1
SIGMAS = 4.5

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ALL = (ONES, ONES, ONES, ONES), (ONES, ONES)
NONE = (0, 0, 0, 0), (0, 0)

# Random123, tests/kat_vectors, philox4x32: rounds, counter, key, result
PUBLISHED = [
    (7, *NONE, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, *ALL, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, *PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, *NONE, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, *ALL, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, *PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@each(("num_rounds", "counter", "key", "words"), PUBLISHED)
def test_published_vectors(num_rounds: int, counter: Sequence[int], key: tuple[int, int], words: str) -> None:
    counters, scratch = torch.tensor(counter).view(4, 1).expand(4, 3).clone(), torch.empty(2, 3, dtype=torch.int64)
    found = [word.tolist() for word in philox(counters, scratch, key, num_rounds)]
    assert found == [[int(word, 16)] * 3 for word in words.split()]


def mask(shape: Sequence[int], keep: float = 0.5, seed: int = 0, number: int = 0, cuts: object = None) -> Tensor:
    return keep_mask(shape, keep, seed, number, CPU, cuts)  # pyright: ignore[reportArgumentType]


def test_a_mask_is_what_the_docs_say_it_is() -> None:
    """Four words for each four elements of the padded last dimension; the draw's number above, the seed as key."""
    seed, number, keep = 0x123456789ABCDEF0, 0x10000000F, 0.7
    found = mask((3, 1, 2, 6), keep, seed, number)
    for row in range(6):
        for column in range(6):
            place = row * 2 + column // 4
            counter = torch.tensor([[place], [0], [number % 2**32], [number >> 32]])
            words = philox(counter, torch.empty(2, 1, dtype=torch.int64), (seed % 2**32, seed >> 32))
            assert bool(found.view(6, 6)[row, column]) == (int(words[column % 4]) < round(keep * 2**32))


# ---- statistics ----


def deviation(samples: Tensor, p: float) -> float:
    """How many standard deviations the mean of some independent samples is from their probability."""
    return abs(float(samples.double().mean()) - p) / (p * (1 - p) / samples.numel()) ** 0.5


@each("keep", [0.9, 0.5, 0.1, 0.999, 1e-4])
def test_mean(keep: float) -> None:
    draws = torch.stack([mask((96, 40, 50), keep, seed, number) for seed, number in ((0, 0), (1, 0), (0, 1), (7, 9))])
    assert deviation(draws, keep) < SIGMAS
    variance = keep * (1 - keep)
    of_rows = draws.double().mean(-1).sub(keep).pow(2).mean() / (variance / 50)  # the variance of the means of rows
    spread = ((2 + (1 - 6 * variance) / (50 * variance)) / (draws.numel() / 50)) ** 0.5
    assert abs(float(of_rows) - 1) < SIGMAS * spread
    for d in range(4):  # no slice of any dimension stands out
        means = draws.double().mean([other for other in range(4) if other != d])
        spread = (variance * means.numel() / draws.numel()) ** 0.5
        assert float((means - keep).abs().max()) < SIGMAS * spread


@each("keep", [0.5, 0.9])
def test_neighbours_seeds_and_layers_are_independent(keep: float) -> None:
    whole = mask((64, 64, 60), keep)
    pairs = {
        "next column": (whole[..., 1:], whole[..., :-1]),
        "next group of words": (whole[..., 4:], whole[..., :-4]),
        "next row": (whole[:, 1:], whole[:, :-1]),
        "next matrix": (whole[1:], whole[:-1]),
        "next layer": (whole, mask((64, 64, 60), keep, 0, 1)),
        "layer 2³² later": (whole, mask((64, 64, 60), keep, 0, 2**32)),
        "next seed": (whole, mask((64, 64, 60), keep, 1)),
        "seed 2³² later": (whole, mask((64, 64, 60), keep, 2**32)),
        "seed and layer exchanged": (mask((64, 64, 60), keep, 3, 5), mask((64, 64, 60), keep, 5, 3)),
    }
    for name, (first, second) in pairs.items():
        assert deviation(first & second, keep * keep) < 2 * SIGMAS, name  # neighbours share elements: a wider bound


def test_patterns_of_eight_elements_are_equally_frequent() -> None:
    bits = mask((4096, 64)).view(-1, 8).long()
    counts = (bits * 2 ** torch.arange(8)).sum(1).bincount(minlength=256).double()
    expected = len(bits) / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - 255) < SIGMAS * (2 * 255) ** 0.5


def test_what_is_kept_with_less_probability_is_kept_with_more() -> None:
    masks = [mask((32, 32), keep) for keep in (0.0, 0.2, 0.5, 0.8, 1.0)]
    assert all(not (less & ~more).any() for less, more in pairwise(masks))
    assert not masks[0].any()
    assert masks[-1].all()


# ---- parts ----


@st.composite
def cut_dims(draw: st.DrawFn) -> list[tuple[int, list[Slice]]]:
    """The extents of a tensor and how each is cut, up to three times."""
    dims = list[tuple[int, list[Slice]]]()
    for _ in range(draw(st.integers(1, 4))):
        extent, cuts = draw(st.integers(1, 5)), list[Slice]()
        for _ in range(draw(st.integers(0, 2))):
            size, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
            cuts.append(Slice(size, draw(st.integers(0, size - 1)), blocks))
            extent *= size * blocks
        dims.append((extent, cuts))
    return dims


@settings(max_examples=150, deadline=None)
@given(cut_dims(), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_part_is_that_of_the_whole(dims: list[tuple[int, list[Slice]]], seed: int, number: int) -> None:
    shape = [extent for extent, _ in dims]
    if prod(shape) > 50_000:
        return
    expected = mask(shape, 0.6, seed, number)
    for d, (_, cuts) in enumerate(dims):
        for size, rank, blocks in cuts:
            expected = take(expected, Axis("a", size, rank), d, blocks)
    assert torch.equal(mask(shape, 0.6, seed, number, [cuts for _, cuts in dims]), expected)


def test_a_part_costs_no_more_than_its_share() -> None:
    """Of a dimension that is cut, only what is held is looked at."""
    assert stretches(32, [Slice(4, 1, 1)]) == [(8, 16)]
    assert stretches(32, [Slice(4, 1, 2)]) == [(4, 8), (20, 24)]
    assert stretches(32, [Slice(2, 1, 2), Slice(2, 1, 1)]) == [(24, 32)]
    assert stretches(32, [Slice(2, 1, 2), Slice(2, 0, 4)]) == [(8, 10), (12, 14), (24, 26), (28, 30)]


def test_dimensions_of_size_one_do_not_matter() -> None:
    expected = mask((6, 10))
    for shape in ((6, 10, 1), (1, 6, 1, 10), (6, 1, 1, 10, 1)):
        assert torch.equal(mask(shape).view(6, 10), expected)
    assert mask(()).shape == ()
    assert mask((1, 1)).shape == (1, 1)
    assert mask((3, 0)).shape == (3, 0)
