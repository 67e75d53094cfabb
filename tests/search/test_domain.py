"""What operators can choose: shared by all sizes that the same degrees divide."""

from __future__ import annotations

from itertools import product

from shardwright.pcg.builder import GraphBuilder
from shardwright.search import domain
from shardwright.search.domain import axis_options
from tests.search.graphs import every_choice


def test_what_divides_the_sizes_decides_what_can_be_combined() -> None:
    """As if every size were looked at by itself; blocks of a fused dimension, and of none, included."""
    domain._combined.cache_clear()
    for sizes, batch, heads, width in product(((2, 4), (4, 2), (3,)), (1, 8, 24), (3, 4, 12), (5, 12, 20)):
        b = GraphBuilder()
        x = b.leaf("x", "input", (batch, heads * width), "float32", "x")
        w = b.leaf("w", "parameter", (width, heads * width), "float32", "w", grad=True)
        b.op("linear", x, w)
        b.op("reshape", x, shape=(batch, heads, width))
        for node in b.nodes.values():
            if node.is_leaf:
                continue
            operands = [b.types[i] for i in node.inputs]
            signature = node.row.signature([t.shape for t in operands], dict(node.attrs)) if node.row else None
            assert signature is not None
            certified = every_choice(node, operands, ("i/3",) if node.op == "linear" else ())
            options = tuple(tuple(axis_options(node, signature, size, certified)) for size in sizes)
            shape = b.types[node.name].shape
            found = domain._combine(options, signature, operands, shape, sizes)
            assert found == domain._combined.__wrapped__(
                options, signature, (shape, *(t.shape for t in operands)), sizes
            )
    info = domain._combined.cache_info()
    assert info.hits > info.misses / 4
