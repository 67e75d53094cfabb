"""What a graph says about how it is written in code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwright.pcg.analysis import computed_once, copies_data, cut_with, kept_constants, read_again, saved_by, written
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.choice import Split
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from tests.each import each


@each(
    ("before", "after", "copies"),
    [
        ((4, 6), (4, 2, 3), False),
        ((4, 6), (24,), True),
        ((4, 6), (2, 2, 6), False),
        ((4, 6), (8, 3), True),
        ((4, 1, 6), (4, 1, 2, 3), False),
        ((2, 3), (2, 3), False),
    ],
)
def test_a_reshape_of_a_slice_copies_where_torch_does(
    before: tuple[int, ...], after: tuple[int, ...], copies: bool
) -> None:
    """Cutting dimensions up never copies; joining them does where there are gaps between rows."""
    b = GraphBuilder()
    wide = (*before[:-1], 2 * before[-1])
    x = b.leaf("x", "input", wide, "float32", "x")
    part = b.op("slice", x, dim=len(before) - 1, start=0, stop=before[-1], step=1)
    view = b.op("reshape", part, shape=after)
    graph = b.graph([("y", view)])
    assert copies_data(graph, graph.by_name[view]) == copies
    sliced = torch.zeros(wide)[..., : before[-1]]
    assert (sliced.reshape(after).data_ptr() != sliced.data_ptr()) == copies


@each(
    ("moves", "copies"),
    [
        ([(0, 2, 1, 3)], [True]),  # heads before positions: a batch and its heads are not neighbours
        ([(0, 1, 3, 2)], [False]),
        ([(0, 2, 1, 3), (0, 1, 3, 2)], [False, True]),  # copied where it is read, once
        ([(0, 2, 1, 3), (0, 2, 1, 3)], [False, False]),
        ([(2, 3, 0, 1)], [False]),
        ([(1, 0, 2, 3)], [True]),
    ],
)
def test_a_product_of_batches_copies_what_is_not_one_batch_in_memory(
    moves: list[tuple[int, ...]], copies: list[bool]
) -> None:
    b = GraphBuilder()
    tensor, names = torch.rand(2, 3, 4, 5), list[str]()
    x = b.leaf("x", "input", tuple(tensor.shape), "float32", "x")
    for dims in moves:
        names.append(x := b.op("permute", x, dims=dims))
        tensor = tensor.permute(dims)
    other = b.leaf("y", "input", (*tensor.shape[:2], tensor.shape[3], 6), "float32", "y")
    graph = b.graph([("z", b.op("matmul", x, other))])
    assert [copies_data(graph, graph.by_name[name]) for name in names] == copies
    one_batch = tensor.reshape(-1, *tensor.shape[2:])  # as torch.matmul does
    assert (one_batch.data_ptr() != tensor.data_ptr()) == copies[-1]


@pytest.mark.parametrize("shape", [(1, 3, 4, 5), (2, 3, 1, 5), (2, 1, 4, 5)])
def test_dimensions_of_one_element_are_joined_with_any(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", shape, "float32", "x")
    moved = b.op("permute", x, dims=(0, 2, 1, 3))
    graph = b.graph([("z", b.op("matmul", moved, b.leaf("y", "input", (shape[0], shape[2], 5, 6), "float32", "y")))])
    tensor = torch.zeros(shape).permute(0, 2, 1, 3)
    copies = tensor.reshape(-1, *tensor.shape[2:]).data_ptr() != tensor.data_ptr()
    assert copies_data(graph, graph.by_name[moved]) == copies
    b = GraphBuilder()
    x = b.leaf("x", "input", (2 * shape[0], *shape[1:]), "float32", "x")
    moved = b.op("permute", x, dims=(0, 2, 1, 3))
    y = b.leaf("y", "input", (2 * shape[0], shape[2], 5, 6), "float32", "y")
    serial = b.graph([("z", b.op("matmul", moved, y))])
    splits = {"permute": (Split("d0"),), "matmul": (Split("_0"),)}
    nodes = (
        replace(n, split=splits.get(n.op, ()), attrs=tuple((k, ("S(0)",) if k == "layouts" else v) for k, v in n.attrs))
        for n in serial.nodes
    )
    graph = Graph(tuple(nodes), serial.outputs, Mesh.of(x=2))
    assert copies_data(graph, graph.by_name[moved]) == copies, "as one device has it"


def test_a_scale_in_between_saves_no_copy() -> None:
    b = GraphBuilder()
    x, c = b.leaf("x", "input", (2, 3, 4, 5), "float32", "x"), b.leaf("c", "input", (), "float32", "c")
    moved = b.op("permute", x, dims=(0, 2, 1, 3))
    scaled = b.op("mul", moved, c)
    graph = b.graph([("z", b.op("matmul", scaled, b.leaf("y", "input", (2, 4, 5, 6), "float32", "y")))])
    assert copies_data(graph, graph.by_name[moved])
    tensor = torch.zeros(2, 3, 4, 5).permute(0, 2, 1, 3) * torch.tensor(0.5)
    assert tensor.reshape(-1, 3, 5).data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("reader", ["matmul of three dimensions", "add"])
def test_what_else_reads_moved_dimensions_does_not_copy(reader: str) -> None:
    b = GraphBuilder()
    shape = (2, 3, 4) if reader != "add" else (2, 3, 4, 5)
    x = b.leaf("x", "input", shape, "float32", "x")
    moved = b.op("permute", x, dims=(1, 0, 2) if reader != "add" else (0, 2, 1, 3))
    z = (
        b.op("add", moved, moved)
        if reader == "add"
        else b.op("matmul", moved, b.leaf("y", "input", (3, 4, 6), "float32", "y"))
    )
    graph = b.graph([("z", z)])
    assert not copies_data(graph, graph.by_name[moved])


def test_a_bias_is_fused_into_the_product_that_nothing_else_reads() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (4, 8), "float32", "x")
    bias = b.leaf("b", "parameter", (6,), "float32", "b", grad=True)
    row = b.leaf("r", "parameter", (4, 6), "float32", "r", grad=True)

    def product(number: int) -> str:
        return b.op("linear", x, b.leaf(f"w{number}", "parameter", (6, 8), "float32", f"w{number}", grad=True))

    fused, swapped = b.op("add", product(0), bias), b.op("add", bias, product(1))
    residual, twice = b.op("add", product(2), row), product(3)
    kept = b.op("add", twice, bias)
    graph = b.graph([("y", b.op("add", b.op("add", fused, swapped), b.op("add", residual, b.op("mul", kept, twice))))])
    assert [written(graph, graph.by_name[n]) for n in (fused, swapped, residual, kept)] == ["fused", "fused", "", ""]


def test_slices_that_cut_a_dimension_up_are_parts() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (4, 9), "float32", "x")
    parts = [b.op("slice", x, dim=1, start=i, stop=i + 3, step=1) for i in (0, 3, 6)]
    y = b.leaf("y", "input", (4, 9), "float32", "y")
    gap = [b.op("slice", y, dim=1, start=i, stop=i + 3, step=1) for i in (0, 6)]
    total = parts[0]
    for other in (*parts[1:], *gap):
        total = b.op("add", total, other)
    graph = b.graph([("z", total)])
    assert [n.name for n in cut_with(graph, graph.by_name[parts[1]])] == parts
    assert [written(graph, graph.by_name[n]) for n in (*parts, *gap)] == ["part"] * 3 + [""] * 2
    assert cut_with(graph, graph.by_name[total]) == ()


BILINEAR = [
    ("mul", torch.mul, (4, 6), (4, 6), {}),
    ("div", torch.div, (4, 6), (4, 6), {}),
    ("linear", torch.nn.functional.linear, (4, 6), (5, 6), {}),
    ("matmul", torch.matmul, (2, 4, 6), (2, 6, 5), {}),
    ("conv2d", torch.nn.functional.conv2d, (1, 4, 5, 5), (2, 4, 3, 3),
     {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}),
]  # fmt: skip


@each("grads", [(True, True), (True, False), (False, True)], ids=str)
@each(("op", "function", "first", "second", "attrs"), BILINEAR, ids=[b[0] for b in BILINEAR])
def test_of_a_product_torch_keeps_what_the_other_operand_needs(
    op: str, function: Any, first: tuple[int, ...], second: tuple[int, ...], attrs: dict[str, Any],
    grads: tuple[bool, bool],
) -> None:  # fmt: skip
    b = GraphBuilder()
    leaves = [
        b.leaf(n, "parameter", s, "float32", n, grad=g) for n, s, g in zip("xy", (first, second), grads, strict=True)
    ]
    node = b.op(op, *leaves, **attrs)
    found = saved_by(b.graph([("z", node)]).by_name[node], grads)
    operands = [torch.rand(s).add_(1).requires_grad_(g) for s, g in zip((first, second), grads, strict=True)]
    kept: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.untyped_storage().data_ptr()), lambda t: t):
        function(*operands)
    assert set(found) == {i for i, t in enumerate(operands) if t.untyped_storage().data_ptr() in kept}


def test_backward_reads_the_weights_of_products_of_activations_again() -> None:
    """Through a view too; not an embedding's table, nor the weight of what gets no gradient."""
    b = GraphBuilder()
    ids, x = b.leaf("ids", "input", (4,), "int64", "ids"), b.leaf("x", "input", (4, 8), "float32", "x")
    table, first, second, third, bias = (
        b.leaf(name, "parameter", shape, "float32", name, grad=name != "third")
        for name, shape in (("table", (9, 8)), ("first", (8, 8)), ("second", (8, 8)), ("third", (8, 8)), ("bias", (8,)))
    )
    h = b.op("add", b.op("embedding", table, ids, padding_idx=None, offset=None), b.op("linear", x, first))
    h = b.op("add", b.op("matmul", h, b.op("permute", second, dims=(1, 0))), bias)
    graph = b.graph([("z", b.op("linear", h, third))])
    assert read_again(graph) == {"second", "third"}


def test_what_nothing_reaches_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (4, 8), "float32", "x")
    w = b.leaf("w", "parameter", (8,), "float32", "w", grad=True)
    positions = b.op("arange", start=0, stop=8, step=1, dtype="int64")
    table = b.op("cast", positions, dtype="float32")
    row = b.op("expand", b.op("reshape", table, shape=(1, 8)), shape=(4, 8))
    of_batch, of_parameter = b.op("mul", x, row), b.op("mul", w, table)
    random = b.op("dropout", table, p=0.5, seed=0)
    total = b.op("add", b.op("add", of_batch, of_parameter), random)
    graph = b.graph([("y", total)])
    once = {n.name for n in graph.nodes if n.op in ("arange", "cast", "reshape", "expand")}
    assert computed_once(graph) == once
    assert kept_constants(graph, computed_once(graph)) == {table}  # what is read of it later are views
    monkeypatch.setattr("shardwright.pcg.analysis.CONSTANT_BYTES", 4 * 8 * 4 - 1)
    assert computed_once(graph) == once - {row}


def test_a_constant_that_is_copied_or_returned_stays() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (32,), "float32", "x")
    table = b.op("cast", b.op("arange", start=0, stop=32, step=1, dtype="int64"), dtype="float32")
    turned = b.op("permute", b.op("reshape", table, shape=(4, 8)), dims=(1, 0))
    flat = b.op("reshape", turned, shape=(32,))
    graph = b.graph([("y", b.op("add", x, flat)), ("turned", turned)])
    assert kept_constants(graph, computed_once(graph)) == {flat, table}
