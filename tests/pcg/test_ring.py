"""Rings: where operands travel, what is sent in which round, and that no axis shares the keys with another."""

from __future__ import annotations

import pickle
import random
from itertools import product
from math import inf
from unittest import mock

import numpy as np
import pytest

from shardwright.pcg import slices
from shardwright.pcg.bounds import ALL, Band
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.choice import Split, Transfers
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.interpret import denote, run_devices, run_serial
from shardwright.pcg.layout import S
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.offers import sending
from shardwright.pcg.optable import ROWS
from shardwright.pcg.ring import Ring, Rounds, slices_of
from shardwright.pcg.slices import Sees, Slices
from shardwright.pcg.text import parse_graph, print_graph
from tests.lowering.parallelize import parallelize

RING = "q@k"
SHAPES = {"q": (2, 4, 8, 6), "k": (2, 2, 8, 6), "v": (2, 2, 8, 10)}


def attention(
    causal: bool = True, dtype: str = "float32", trained: str = "qkv", mask: tuple[int, ...] | None = None
) -> Graph:
    b = GraphBuilder()
    shapes = SHAPES if mask is None else SHAPES | {"mask": mask}
    names = [b.leaf(n, "parameter", shape, dtype, n, grad=n in trained) for n, shape in shapes.items()]
    y = b.op("sdpa", *names, causal=causal, scale=None)
    return b.graph([("loss", b.op("sum", y, dims=(0, 1, 2, 3), keepdim=False))])


def ringed(graph: Graph, mesh: Mesh, *split: str) -> tuple[Graph, Node]:
    found = parallelize(graph, mesh, lambda node, axis, operands: split[axis] if node.op == "sdpa" else "R")
    return found, next(found.leaves("sdpa"))


def rounds(found: Graph, node: Node) -> tuple[Rounds, ...]:
    sent = found.exchanges(node)
    assert all(isinstance(one, Rounds) for one in sent)
    return sent  # type: ignore[return-value]


def test_operands_travel_where_neither_queries_nor_the_result_have_their_dimension() -> None:
    row = ROWS["sdpa"]

    def offered(*shapes: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(map(str, sending(row, row.signature(shapes, {}))))

    q, k, v = SHAPES.values()
    assert offered(q, k, v) == offered(q[1:], k[1:], v[1:]) == (RING,)
    for mask in ((8, 8), (2, 1, 8, 8), (1, 1, 1, 8), (8, 1)):
        assert offered(q, k, v, mask) == (RING,)
    linear = ROWS["linear"]
    assert tuple(sending(linear, linear.signature([(4, 6), (8, 6)], {}))) == ()


def test_its_layouts_and_how_it_is_seen() -> None:
    ring, row = Ring("q", "k"), ROWS["sdpa"]
    signature = row.signature(list(SHAPES.values()), {})
    assert ring.layouts(signature, row) == ((S(2), S(2), S(2)), S(2))
    assert (ring.inner, ring.outward, ring.unblocked, ring.senders(3)) == ("q", "q", ring, 3)
    assert ring.renamed({"q": "d", "k": "f"}) == Ring("d", "f") == "d@f"
    blocked = ring.in_blocks(2).in_blocks(2)
    assert blocked.layouts(signature, row) == ((S(2, 4), S(2, 4), S(2, 4)), S(2, 4))
    assert (blocked, blocked.inner, blocked.outward, blocked.unblocked) == ("q@k/4", "q/4", "q/4", ring)
    assert blocked.renamed({"q": "d"}) == Ring("d", "k", 4) == pickle.loads(pickle.dumps(Ring("d", "k", 4)))
    with pytest.raises(LayoutError, match=r"sdpa cannot be split by 'k@q'; it can by \['q@k'\]"):
        Ring("k", "q").layouts(signature, row)
    with pytest.raises(LayoutError, match="linear cannot be split by 'q@k'; it can by no ring"):
        ring.layouts(ROWS["linear"].signature([(4, 6), (8, 6)], {}), ROWS["linear"])


@pytest.mark.parametrize("mask", [None, (8, 8), (2, 4, 8, 8), (2, 1, 1, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_devices_compute_what_one_computes(causal: bool, mask: tuple[int, ...] | None) -> None:
    """Along one axis, beside axes that split examples, heads or queries; a device has the mask of its queries."""
    graph, rng = attention(causal, mask=mask), np.random.default_rng(0)
    leaves = {node.name: rng.standard_normal(graph.types[node.name].shape) for node in graph.leaves("parameter")}
    (attended,) = graph.leaves("sdpa")
    expected = run_serial(graph, leaves)[attended.name]
    striped = ((f"{RING}/4", "R"), *product((f"{RING}/4",), ("b0", "h")), ("q", f"{RING}/4"), ("q/4", "R"))
    for first, second in (*striped, (RING, "R"), *product((RING,), ("b0", "h", "r", "q")), ("q", RING), ("h", RING)):
        found, node = ringed(graph, mesh := Mesh.of(x=2, y=2), first, second)
        assert parse_graph(print_graph(found)) == found
        held = run_devices(found, leaves)[node.name]
        assert np.allclose(denote(held, found.types[node.name], mesh), expected), (first, second)


def test_keys_travel_along_one_axis() -> None:
    with pytest.raises(LayoutError, match="factor 'k' can be divided along one axis only, got x=2, y=2; split another"):
        ringed(attention(), Mesh.of(x=2, y=2), RING, RING)
    with pytest.raises(LayoutError, match="microbatches send each other nothing"):
        ringed(attention(), Mesh.of(**{TIME: 2}), RING)


def test_what_is_sent_beside_which_round() -> None:
    """Forward, keys and values in all rounds but the last; backward, their gradients two rounds later."""
    for size in (1, 2, 4):
        found, node = ringed(attention(), Mesh.of(x=size), RING)
        (sent,) = rounds(found, node)
        block = 2 * 2 * (8 // size) * (6 + 10) * 4
        assert (sent.axis, sent.size, sent.block, sent.gradient) == (0, size, block, block)
        assert (sent.result, sent.wide) == (2 * 4 * (8 // size) * 10 * 4, 1)
        keys, both = (size * block,), (size * block,) * 2
        forward = {1: ((),), 2: (keys, ()), 4: (keys, keys, keys, ())}
        backward = {1: ((),), 2: (keys, (), keys), 4: (keys, keys, both, keys, keys)}
        assert sent.sent() == Transfers((), forward[size])
        assert sent.sent(backward=True) == Transfers((), backward[size])
        assert found.local_shapes(node).senders == size


def test_gradients_travel_where_keys_or_values_have_some() -> None:
    for trained, has in (("q", False), ("k", True), ("v", True), ("qkv", True)):
        (sent,) = rounds(*ringed(attention(trained=trained), Mesh.of(x=2), RING))
        assert (sent.gradient == sent.block) == has
        assert sent.sent(backward=True).during[2] == ((2 * sent.block,) if has else ())


def test_memory_is_that_of_a_few_blocks_and_of_sums_in_fp32() -> None:
    (narrow,) = rounds(*ringed(attention(False, dtype="bfloat16"), Mesh.of(x=4), RING))
    (wide,) = rounds(*ringed(attention(False, dtype="float64"), Mesh.of(x=4), RING))
    assert (narrow.wide, wide.wide, narrow.block * 4) == (2, 1, wide.block)
    assert narrow.held_bytes() == 2 * narrow.block + 3 * narrow.result
    assert wide.held_bytes() == 2 * wide.block + wide.result
    assert wide.held_bytes(backward=True) == 3 * wide.block + 3 * wide.gradient + wide.result
    (pair,) = rounds(*ringed(attention(False, dtype="float64"), Mesh.of(x=2), RING))
    assert pair.held_bytes(backward=True) == 3 * pair.block + 2 * pair.gradient + pair.result
    assert narrow.held_bytes(backward=True) == 3 * narrow.block + 4 * narrow.gradient + 3 * narrow.result


def test_the_call_names_the_axis() -> None:
    for causal, call in ((False, "ring=x"), (True, "ring=x, sees=(-16, 0, 4)")):
        (sent,) = rounds(*ringed(attention(causal), Mesh.of(x=2), RING))
        assert sent.call("x", "") == call


def drawn(rng: random.Random) -> tuple[int, int, int, int, bool, Band]:
    """Devices of a ring, and of another axis that splits queries; queries, keys, whether striped, and a band."""
    size, others, keys = rng.choice([2, 3, 4]), rng.choice([1, 2]), rng.randint(1, 9)
    first, last = rng.choice([-inf, rng.randint(-12, 8)]), rng.choice([inf, 0, rng.randint(-8, 12)])
    striped = others == 1 and rng.random() < 0.4
    queries = size * (keys if striped else others * rng.randint(1, 5))
    return size, others, queries, size * keys, striped, Band(first, last)


def test_slices_are_the_keys_between_the_first_and_the_last_in_the_band() -> None:
    """Counted key by key, for each place along another axis that splits queries. The band may be empty."""
    rng, num_cut = random.Random(3), 0
    for number in range(400):
        size, others, queries, keys, striped, band = drawn(rng)
        signature = ROWS["sdpa"].signature([(1, 1, queries, 4), (1, 1, keys, 4), (1, 1, keys, 4)], {})
        inside, part, blocks = number % 2 == 0, queries // (size * others), keys // size if striped else 1
        ring = Ring("q", "k", blocks)
        split = (ring, Split("q")) if inside else (Split("q"), ring)
        sizes = (size, others) if inside else (others, size)
        found = slices_of(band, signature, split, sizes, split.index(ring))
        assert len(found) in (0, others)
        blocks_of = [range(keys)[i::size] if blocks > 1 else range(keys)[i * keys // size :][: keys // size]
                     for i in range(size)]  # fmt: skip
        sent = 0
        for place in range(others):
            starts = [(i * others + place if inside else place * size + i) * part for i in range(size)]
            read = [range(queries)[i::size] if blocks > 1 else range(start, start + part)
                    for i, start in enumerate(starts)]  # fmt: skip
            parts = list[int]()
            for reader, mine in enumerate(read):
                shown = [[not band.is_empty and mine[0] + band.first <= k <= mine[-1] + band.last for k in own]
                         for own in blocks_of]  # fmt: skip
                sent += sum(sum(own) for owner, own in enumerate(shown) if owner != reader)
                parts.append(sum(map(any, shown)))
                for owner, own in enumerate(blocks_of if found else ()):
                    seen = found[place].of(owner, reader)
                    assert [seen.start <= i < seen.stop for i in range(len(own))] == shown[owner], (number, owner)
                    assert all(
                        shown[owner][i] for i, k in enumerate(own) for q in mine if band.first <= k - q <= band.last
                    )
            assert not found or found[place].num_parts() == max(parts)
        num_cut += bool(found)
        assert bool(found) == (4 * sent <= 3 * others * (size - 1) * keys and band != ALL), (number, band)
    assert 100 < num_cut < 350


def test_pairs_are_those_of_tiles_of_a_few_queries() -> None:
    """Each query is computed with all keys that any query of its tile can see."""
    rng = random.Random(4)
    with mock.patch.object(slices, "TILE_ROWS", 3):
        for _ in range(100):
            size, step = rng.choice([(2, 1), (3, 1), (3, 3)])
            first, length = rng.randint(-9, 3), rng.randint(3, 9)
            own = Slices(
                size, Sees(first, first + rng.randint(0, 4), 1 if step > 1 else length), 0, step, length, length
            )
            pairs = list[int]()
            for reader in range(size):
                mine = [reader * own.sees.apart + step * i for i in range(length)]
                tiles = [mine[at : at + own.tile_rows] for at in range(0, length, own.tile_rows)]
                pairs.append(sum(len(tile) for tile in tiles for k in range(size * length)
                                 if tile[0] + own.sees.first <= k <= tile[-1] + own.sees.last))  # fmt: skip
            assert own.num_pairs() == max(pairs), own
