"""What is padded, how far padding goes, and how it may be stored."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.graph import Graph, infer
from shardwright.pcg.layout import Layouts, R, S, in_chunks
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.node import PADDED_FROM, leaf
from shardwright.pcg.padding.longer import padded
from shardwright.pcg.padding.origins import paddings
from shardwright.pcg.padding.stretches import Padding, Stretch
from tests.each import each

HEADS, HEAD = 9, 2
WIDTH = HEADS * HEAD


class Net:
    """A graph under construction: 4 rows of 6 tokens."""

    def __init__(self) -> None:
        self.b = GraphBuilder("float64")
        self.ids = self.b.leaf("ids", "input", (4, 6), "int64", "ids")

    def weight(self, name: str, *shape: int) -> str:
        return self.b.leaf(name, "parameter", shape, "float64", name, True)

    def embedded(self, vocab: int) -> str:
        return self.b.op("embedding", self.weight("tok", vocab, WIDTH), self.ids, padding_idx=None)

    def loss(self, x: str, vocab: int, width: int = WIDTH, smoothing: float = 0.0) -> Graph:
        logits = self.b.op("reshape", self.b.op("linear", x, self.weight("head", vocab, width)), shape=(24, vocab))
        ids = self.b.op("reshape", self.ids, shape=(24,))
        loss = self.b.op("cross_entropy_sum", logits, ids, ignore_index=-100, label_smoothing=smoothing)
        return self.b.graph([("loss", loss)])

    def attention(self, x: str, fused: bool) -> str:
        if fused:
            three = self.b.op("linear", x, self.weight("qkv", 3 * WIDTH, WIDTH))
            parts = [self.b.op("slice", three, dim=2, start=i * WIDTH, stop=(i + 1) * WIDTH, step=1) for i in range(3)]
        else:
            parts = [self.b.op("linear", x, self.weight(name, WIDTH, WIDTH)) for name in "qkv"]
        heads = [self.b.op("permute", self.b.op("reshape", y, shape=(4, 6, HEADS, HEAD)), dims=(0, 2, 1, 3))
                 for y in parts]  # fmt: skip
        y = self.b.op("permute", self.b.op("sdpa", *heads, causal=True, scale=None), dims=(0, 2, 1, 3))
        return self.b.op("linear", self.b.op("reshape", y, shape=(4, 6, WIDTH)), self.weight("o", WIDTH, WIDTH))


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def test_a_vocabulary_is_padded_where_tokens_are_looked_up_and_where_they_are_predicted() -> None:
    net = Net()
    graph = net.loss(net.embedded(51), 51)
    found = paddings(graph, 2)
    assert set(found) == {Padding(name, 0, Stretch(1, 51, 52, 1)) for name in ("tok", "head")}
    longer = padded(graph, found)
    assert longer.types["head"].shape == (52, WIDTH)
    assert longer.by_name["head"].unpadded == (51, WIDTH)
    assert set(ops(longer)) - set(ops(graph)) == {"arange", "lt", "where", "full"}
    assert padded(graph, [Padding.from_json(asdict(own)) for own in found]) == longer


@pytest.mark.parametrize("fused", [False, True])
def test_heads_are_padded_in_units(fused: bool) -> None:
    net = Net()
    graph = net.loss(net.attention(net.embedded(48), fused), 48)
    found = {(own.target, own.dim): own.stretch for own in paddings(graph, 2)}
    unit = Stretch(1, HEADS, HEADS + 1, HEAD)
    if fused:  # zeros among its rows cannot be at the end of memory
        assert found == {("qkv", 0): unit._replace(outer=3), ("o", 1): unit}
    else:
        assert found == {("q", 0): unit, ("k", 0): unit, ("v", 0): unit, ("o", 1): unit}
    longer = padded(graph, paddings(graph, 2))
    assert next(longer.types[n.name].shape for n in longer.nodes if n.op == "sdpa") == (4, HEADS + 1, 6, HEAD)
    assert [longer.types[n.name].shape for n in longer.nodes if n.op == "pad"] == [(3, 20, WIDTH)] * fused
    assert "slice" not in set(ops(longer)) - set(ops(graph))


@each(
    "vocab, parts, size", [(51, 2, 52), (51, 8, 56), (51, 32, 64 - 8), (48, 2, 48), (3, 2, 3), (7, 2, 8), (51, 51, 51)]
)
def test_a_size_grows_by_a_quarter_at_most(vocab: int, parts: int, size: int) -> None:
    net = Net()
    graph = padded(own := net.loss(net.embedded(vocab), vocab), paddings(own, parts))
    assert graph.types["head"].shape[0] == size


def test_what_no_law_allows_is_trimmed_before() -> None:
    net = Net()
    graph = net.loss(net.embedded(51), 51, smoothing=0.1)
    longer = padded(graph, paddings(graph, 2))
    loss = next(node for node in longer.nodes if node.op == "cross_entropy_sum")
    assert longer.types[loss.inputs[0]].shape == (24, 51)
    assert "where" not in ops(longer)


def test_padding_begins_at_parameters_only() -> None:
    net = Net()
    x = net.b.leaf("x", "input", (4, 6, WIDTH), "float64", "x")
    graph = net.loss(net.b.op("linear", net.b.op("sin", x), net.weight("w", 20, WIDTH)), 50, 20)
    assert paddings(graph, 5) == ()  # 4 rows, 6 tokens and 18 columns


def test_padding_of_another_model_is_refused() -> None:
    net = Net()
    graph = net.loss(net.embedded(51), 51)
    with pytest.raises(GraphError, match=r"shape \[51, 18\] cannot be padded as .*; make the plan again"):
        padded(graph, [Padding("tok", 0, Stretch(1, 50, 52, 1))])
    with pytest.raises(GraphError, match="padding of tok: 52 entries cannot become 51"):
        Padding.from_json({"target": "tok", "dim": 0, "stretch": [1, 52, 51, 1]})


MESH = Mesh.of(x=2, y=2)


@each(
    "shape, unpadded, layouts, good",
    [
        ((52, 8), (51, 8), (S(0), R), True),
        ((52, 8), (51, 8), (R, S(1)), True),
        ((52, 8), (51, 8), (S(0), S(1)), True),
        ((52, 8), (51, 8), (S(0), S(0)), False),
        ((52, 8), (51, 8), (S(0, 2), R), False),
        ((52, 8), (49, 8), (S(0), R), False),
        ((20, 8), (18, 8), (R, S(0)), False),  # 9 heads of 2: 10 rows and 8, where torch has 9 and 9
    ],
)
def test_padding_lies_where_torch_has_none(
    shape: tuple[int, int], unpadded: tuple[int, int], layouts: Layouts, good: bool
) -> None:
    assert in_chunks(shape, unpadded, layouts, MESH.sizes) == good
    own = leaf("w", "parameter", shape, "float32", "w", layouts=layouts)
    node = type(own)(own.name, own.op, (), (*own.attrs, (PADDED_FROM, unpadded)))
    if good:
        assert infer(node, [], MESH).shape == shape
    else:
        with pytest.raises(
            LayoutError, match=r"has padding .* in which parts are not those of torch.chunk; store it along"
        ):
            infer(node, [], MESH)
