"""Bands that are read from how a mask is made hold every pair that the mask shows, and no more than its hull."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.pcg.bounds import ALL, Band
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.search.check import difference
from shardwright.search.plan import fingerprint
from tests.each import RANDOM_CASES, each

LENGTH = 12
Mask = Callable[[Tensor, Tensor], Tensor]
"""Makes a mask from positions of queries [12, 1] and of keys [12]."""


class Attending(nn.Module):
    def __init__(self, mask: Mask, causal: bool = False) -> None:
        super().__init__()
        self.mask, self.causal = mask, causal

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-2])
        mask = self.mask(places[:, None], places)
        return F.scaled_dot_product_attention(x, x, x, mask).sum()


def derived(mask: Mask) -> Band:
    graph = capture(Attending(mask), {"x": torch.randn(1, 2, LENGTH, 4)}).graph
    return next(graph.band(node) for node in graph.leaves("sdpa"))


def hull(mask: Mask) -> Band:
    """The differences of the pairs that a mask shows."""
    places = torch.arange(LENGTH)
    own = mask(places[:, None], places)
    shown = (own if own.dtype == torch.bool else own != -inf).reshape(-1, LENGTH, LENGTH)[0].nonzero()
    apart = shown[:, 1] - shown[:, 0]
    return Band(int(apart.min()), int(apart.max())) if len(apart) else Band(inf, -inf)


def filled(hidden: Tensor, value: float = -inf) -> Tensor:
    return torch.zeros(LENGTH, LENGTH).masked_fill(hidden, value)


EXACT: dict[str, Mask] = {
    "causal": lambda q, k: k <= q,
    "window": lambda q, k: (k <= q) & (k > q - 4),
    "ahead": lambda q, k: (q - k <= 2) & (k - q < 5),
    "lower": lambda q, k: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1).triu(-3),
    "added": lambda q, k: filled(k > q),
    "upper, added": lambda q, k: torch.full((LENGTH, LENGTH), -inf).triu(1).to(torch.float32)[None, None],
    "hidden": lambda q, k: ~((k > q) | (k + 3 < q)),
    "packed": lambda q, k: k // 4 == q // 4,
    "unlike": lambda q, k: ~(k != q),
    "every second": lambda q, k: 2 * k >= 2 * q + 3,
    "chosen": lambda q, k: torch.where(k > q, k - q < 3, q - k < 2),
    "near": lambda q, k: (q - k).abs() <= 2,
    "nearer": lambda q, k: torch.full((), 3) > (k - q - 1).abs(),
    "not far": lambda q, k: ~((q - k).abs() > torch.full((), 4)),
    "never": lambda q, k: (k > q) & (k < q),
    "by two parts": lambda q, k: ((k == q) | (k == q - 5)).view(1, 1, LENGTH, LENGTH).expand(1, 2, -1, -1),
    "cut": lambda q, k: (torch.arange(LENGTH + 2) <= torch.arange(LENGTH + 2)[:, None])[2:, :LENGTH],
    "turned": lambda q, k: (k >= q - 1).mT,
}


@each("name", EXACT)
def test_positions_that_are_compared_give_the_band(name: str) -> None:
    mask, ends = EXACT[name], Band(1 - LENGTH, LENGTH - 1)
    found = derived(mask) & ends
    assert (found.is_empty and hull(mask).is_empty) or found == hull(mask)


UNKNOWN: dict[str, Mask] = {
    "a large number is no -inf": lambda q, k: filled(k > q, -1e30),
    "keys alone": lambda q, k: (k < 5)[None],
    "wrapping": lambda q, k: (q.to(torch.uint8) - k.to(torch.uint8)) < 4,
    "in numbers": lambda q, k: q.float() - k.float() >= 0,
    "far": lambda q, k: (q - k).abs() > 2,
    "a product": lambda q, k: q * k < 9,
    "mixed up": lambda q, k: (k <= q).flatten().view(LENGTH // 2, 2, LENGTH).transpose(0, 1).reshape(LENGTH, LENGTH),
    "spread": lambda q, k: (torch.arange(2 * LENGTH) <= torch.arange(2 * LENGTH)[:, None])[::2, ::2],
}


@each("name", UNKNOWN)
def test_what_is_not_known_is_not_bounded(name: str) -> None:
    assert derived(UNKNOWN[name]) == ALL


class Holding(nn.Module):
    """Attention of fewer tokens than a mask has that is held in a buffer."""

    def __init__(self, mask: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        mask = self.read(self.get_buffer("mask"))
        return F.scaled_dot_product_attention(x, x, x, mask).sum()


def held(mask: Tensor, read: Callable[[Tensor], Tensor] = lambda mask: mask[..., :LENGTH, :LENGTH]) -> Graph:
    return capture(Holding(mask, read), {"x": torch.randn(1, 2, LENGTH, 4)}).graph


def band(graph: Graph) -> Band:
    return next(graph.band(node) for node in graph.leaves("sdpa"))


NEAR = torch.ones(16, 16).tril(1).triu(-3).bool()
FILLED = torch.zeros(16, 16).masked_fill(~NEAR, -inf)
IN_BUFFERS: dict[str, tuple[Tensor, Callable[[Tensor], Tensor], Band]] = {
    "truth values": (NEAR, lambda m: m[:LENGTH, :LENGTH], Band(-3, 1)),
    "in every head": (NEAR.expand(1, 2, 16, 16).clone(), lambda m: m[:, :, :LENGTH, :LENGTH], Band(-3, 1)),
    "later keys": (NEAR, lambda m: m[:LENGTH, 2 : LENGTH + 2], Band(-5, -1)),
    "hidden": (~NEAR, lambda m: ~m[:LENGTH, :LENGTH], Band(-3, 1)),
    "filled": (~NEAR, lambda m: torch.zeros(16, 16).masked_fill(m, -inf)[:LENGTH, :LENGTH], Band(-3, 1)),
    "and causal": (
        NEAR,
        lambda m: m[:LENGTH, :LENGTH] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
        Band(-3, 0),
    ),
    "added": (FILLED, lambda m: m[:LENGTH, :LENGTH], Band(-3, 1)),
    "a large number": (FILLED.clamp(min=-1e30), lambda m: m[None, None, :LENGTH, :LENGTH], Band(-3, 1)),
    "the least number": (FILLED.nan_to_num(), lambda m: m[:LENGTH, :LENGTH], Band(-3, 1)),
    "of bfloat16": (FILLED.bfloat16().nan_to_num(), lambda m: m[:LENGTH, :LENGTH].float(), Band(-3, 1)),
    "no key": (torch.zeros(16, 16).bool(), lambda m: m[:LENGTH, :LENGTH], Band(inf, -inf)),
    # what follows is not known
    "of float16": (FILLED.half().nan_to_num(), lambda m: m[:LENGTH, :LENGTH].float(), ALL),
    "no large number": (FILLED.clamp(min=-1e9), lambda m: m[:LENGTH, :LENGTH], ALL),
    "a large number, moved": (FILLED.clamp(min=-1e30), lambda m: m[1 : LENGTH + 1, :LENGTH], ALL),
    "a large number, hidden again": (
        FILLED.clamp(min=-1e30),
        lambda m: m[:LENGTH, :LENGTH].masked_fill(torch.eye(LENGTH).bool(), -inf),
        ALL,
    ),
    "a large number for a whole query": (
        FILLED.clamp(min=-1e30).index_fill(0, torch.tensor([5]), -1e30),
        lambda m: m[:LENGTH, :LENGTH],
        ALL,
    ),
    "turned": (NEAR, lambda m: m[:LENGTH, :LENGTH].mT, ALL),
    "multiplied": (FILLED.exp(), lambda m: (m[:LENGTH, :LENGTH] * 2).log(), ALL),
}


@each("name", IN_BUFFERS)
def test_values_of_buffers_give_the_band(name: str) -> None:
    mask, read, expected = IN_BUFFERS[name]
    assert band(held(mask, read)) == expected


def test_what_values_show_is_no_part_of_what_a_graph_computes() -> None:
    """Nor is it known of a buffer that forward writes to, or of one without values."""
    near, all_of_it = held(NEAR), held(torch.ones_like(NEAR))
    assert (fingerprint(near), band(near), band(all_of_it)) == (fingerprint(all_of_it), Band(-3, 1), Band(-15, 15))
    assert difference(near, all_of_it) is None
    assert parse_graph(print_graph(near)) == near

    class Writing(Holding):
        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("mask").logical_not_()
            return super().forward(x)

    assert band(capture(Writing(NEAR, lambda m: m[:LENGTH, :LENGTH]), {"x": torch.randn(1, 2, LENGTH, 4)}).graph) == ALL
    empty = Holding(NEAR, lambda m: m[:LENGTH, :LENGTH]).to("meta")
    assert band(capture(empty, {"x": torch.randn(1, 2, LENGTH, 4, device="meta")}).graph) == ALL


def drawn(rng: random.Random, depth: int) -> Mask:
    """A mask of comparisons."""
    if depth:
        x, y = drawn(rng, depth - 1), drawn(rng, rng.randint(0, depth - 1))
        return rng.choice(
            [lambda q, k: x(q, k) & y(q, k), lambda q, k: x(q, k) | y(q, k), lambda q, k: ~x(q, k)]
        )  # fmt: skip
    a, b, c, d = rng.choice([-2, -1, 1, 1, 2]), rng.choice([-2, -1, 1, 1, 2]), rng.randint(-5, 5), rng.choice([1, 1, 3])
    compare = rng.choice([torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne])
    if rng.random() < 0.3:
        return lambda q, k: compare((a * q + b * k + c).abs(), torch.full((), abs(c)))
    return lambda q, k: compare(a * q // d + c, (b * k - c) // d)


def test_no_pair_that_a_mask_shows_is_outside_its_band() -> None:
    rng, bounded = random.Random(2), 0
    for _ in range(RANDOM_CASES or 16):
        mask = drawn(rng, rng.randint(0, 3))
        found, shown = derived(mask), hull(mask)
        assert shown.is_empty or (found | shown) == found
        bounded += found != ALL
    assert bounded >= 3
