"""Dispatch: what it means, what it sends, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.choice import indivisible, num_senders
from shardwright.pcg.dispatch import Dispatch, Sent, aligned, named_share
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.interpret import denote, run_devices, run_serial
from shardwright.pcg.layout import S
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.offers import parse_choice
from shardwright.pcg.optable import ROWS
from shardwright.pcg.text import parse_graph, print_graph
from tests.lowering.parallelize import parallelize

TOKENS, EXPERTS, USED, SIZE, HIDDEN, OUT = 16, 8, 2, 4, 6, 5
UP, DOWN = (EXPERTS, SIZE, HIDDEN), (EXPERTS, HIDDEN, OUT)
SHAPES = [(TOKENS, SIZE), (TOKENS, USED), (TOKENS, USED), UP, DOWN]
SENT = "e>_0"


def network(*, grad: bool = True) -> Graph:
    """A network of experts; `grad`: of what their tokens are, too."""
    b = GraphBuilder()
    x = b.leaf("x", "parameter" if grad else "input", (TOKENS, SIZE), "float32", "x", grad=grad)
    index = b.leaf("index", "input", (TOKENS, USED), "int64", "index")
    weights = b.leaf("w", "input", (TOKENS, USED), "float32", "w")
    up, down = (b.leaf(n, "parameter", s, "float32", n, grad=True) for n, s in (("up", UP), ("down", DOWN)))
    y = b.op("experts", x, index, weights, up, down, activation="gelu")
    return b.graph([("loss", b.op("sum", y, dims=(0, 1), keepdim=False))])


def split(graph: Graph, mesh: Mesh, *choices: str) -> tuple[Graph, Node]:
    found = parallelize(graph, mesh, lambda node, axis, _: choices[axis] if node.op == "experts" else "R", {})
    return found, next(found.leaves("experts"))


def dispatches(graph: Graph, node: Node, dtype_of: Callable[[str], str] = str) -> list[Dispatch]:
    found = graph.exchanges(node, dtype_of)
    sent = [exchange for exchange in found if isinstance(exchange, Dispatch)]
    assert len(sent) == len(found)
    return sent


def test_what_a_dispatch_is() -> None:
    """Seen from outside it splits rows; each device computes its part of what they name."""
    sent = parse_choice(SENT)
    assert isinstance(sent, Sent)
    assert (sent.named, sent.rows, sent.factors, sent.sends) == ("e", "_0", ("e", "_0"), True)
    assert (sent.outward, sent.inner, sent.renamed({"e": "d", "_0": "a"})) == ("_0", "e", "d>a")
    assert (sent.senders(4), parse_choice("e").senders(4), num_senders([sent, sent.inner], (4, 2))) == (4, 1, 4)


def test_every_device_has_what_one_device_computes_for_its_tokens() -> None:
    graph, rng = network(), np.random.default_rng(0)
    shapes = {"x": SHAPES[0], "w": SHAPES[1], "up": UP, "down": DOWN}
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    values |= {"index": rng.integers(0, EXPERTS, (TOKENS, USED))}
    leaves = {node.name: values[str(node.attr("target"))] for node in graph.nodes if node.is_leaf}
    (serial,) = graph.leaves("experts")
    expected = run_serial(graph, leaves)[serial.name]
    for choices in ((SENT, "_0"), ("_0", SENT), (SENT, SENT), ("e", SENT), (SENT, "e"), (SENT, "f")):
        found, node = split(graph, mesh := Mesh.of(a=2, b=2), *choices)
        assert parse_graph(print_graph(found)) == found
        held = run_devices(found, leaves)[node.name]
        assert np.allclose(denote(held, found.types[node.name], mesh), expected), choices


def test_the_share_of_rows_that_name_a_device_is_that_of_all_choices() -> None:
    for count, width, slots in ((8, 2, 2), (6, 3, 4), (4, 1, 1), (5, 5, 2), (6, 5, 3)):
        chosen = list(combinations(range(count), slots))
        named = sum(min(choice) < width for choice in chosen)
        assert named_share(width, count, slots) == pytest.approx(named / len(chosen))


def test_what_is_sent() -> None:
    """Rows of floats, of weights and of numbers there, each aligned; results back; gradients the same ways."""
    graph = network()
    found, node = split(graph, Mesh.of(a=4), SENT)
    (sent,) = dispatches(found, node)
    rows = round(TOKENS / 4 * (1 - 6 / 8 * 5 / 7) + 0.49)
    there = aligned(SIZE * 4) + aligned(USED * 4) + aligned(USED * 4)
    assert (sent.axis, sent.size, sent.width, sent.rows) == (0, 4, 2, rows)
    assert sent.sent() == ((4 * 4 * 8, 16 * rows * there), (), (16 * rows * aligned(OUT * 4),))
    assert sent.sent(backward=True) == ((16 * rows * aligned(OUT * 4),), (), (16 * rows * aligned(SIZE * 4),))
    (wide,) = dispatches(found, node, lambda dtype: "float64" if dtype == "float32" else dtype)
    assert (wide.there, wide.back) == (aligned(SIZE * 8) + aligned(USED * 8) + aligned(USED * 4), aligned(OUT * 8))
    found, node = split(network(grad=False), Mesh.of(a=4), SENT)
    assert dispatches(found, node)[0].sent(backward=True).after == ()
    assert found.local_shapes(node).senders == 4
    found, node = split(graph, Mesh.of(a=4), "e")
    assert (found.exchanges(node), found.local_shapes(node).senders) == ((), 1)


def test_from_axis_to_axis_and_among_a_part_of_the_experts() -> None:
    """Behind the first axis are half of the experts, behind the second a quarter: what arrives names its half."""
    found, node = split(network(), Mesh.of(a=2, b=2), SENT, SENT)
    first, second = dispatches(found, node)
    half, quarter = named_share(4, EXPERTS, USED), named_share(2, EXPERTS, USED)
    assert (first.width, first.rows) == (4, int(np.ceil(TOKENS / 4 * half)))
    assert (second.width, second.rows) == (2, int(np.ceil(2 * first.rows * quarter / half)))
    found, node = split(network(), Mesh.of(a=2, b=2), "e", SENT)
    (alone,) = dispatches(found, node)
    assert (alone.axis, alone.width, alone.rows) == (1, 2, int(np.ceil(TOKENS / 2 * quarter)))


def test_tokens_and_experts_are_slices() -> None:
    row = ROWS["experts"]
    signature = row.signature(
        [(TOKENS, SIZE), (TOKENS, USED), (TOKENS, USED), (EXPERTS, SIZE, HIDDEN), (EXPERTS, HIDDEN, OUT)],
        {"activation": "gelu"},
    )
    assert parse_choice(SENT).layouts(signature, row) == ((S(0),) * 5, S(0))


def test_errors() -> None:
    row = ROWS["experts"]
    signature = row.signature(
        [(TOKENS, SIZE), (TOKENS, USED), (TOKENS, USED), (EXPERTS, SIZE, HIDDEN), (EXPERTS, HIDDEN, OUT)],
        {"activation": "gelu"},
    )
    for choice in ("f>_0", "e>k", "e>o", "_0>e"):
        message = rf"experts cannot be split by '{choice}'; it can by \['e>_0'\]"
        with pytest.raises(LayoutError, match=message):
            parse_choice(choice).layouts(signature, row)
    linear = ROWS["linear"]
    with pytest.raises(LayoutError, match="linear cannot be split by 'o>_0'; it can by no dispatch"):
        parse_choice("o>_0").layouts(linear.signature([(4, 6), (8, 6)], {}), linear)
    with pytest.raises(LayoutError, match="split 'e>_0' on axis 'mb': microbatches send each other nothing"):
        split(network(), Mesh.of(**{TIME: 2}), SENT)
    for size, factor in ((3, "_0"), (16, "e")):
        found = indivisible(signature, [parse_choice(SENT)], [size])
        assert found is not None
        assert found.name == factor
