"""Inference beside the table of `test_graph.py`: what is asked of operands, and rare attributes and types."""

from __future__ import annotations

import pytest

from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.graph import Node, infer
from shardwright.pcg.layout import C, Layouts, P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.node import OPAQUE
from shardwright.pcg.offers import offered, parse_choice, parse_choices
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import TensorType

MESH = Mesh.of(dp=2)


def tensor(shape: tuple[int, ...], *layouts: object, dtype: str = "float32", grad: bool = True) -> TensorType:
    return TensorType(shape, dtype, layouts or (R,), grad)  # type: ignore[arg-type]  # layouts


def test_what_a_partial_sum_asks_of_the_operands_beside_it() -> None:
    """The others are copies: each device adds up its own gradient of them."""
    row = ROWS["linear"]
    signature = row.signature([(4, 6), (8, 6)], {})
    asked: tuple[Layouts, object] = parse_choice("P0").layouts(signature, row)
    assert asked == ((P, C), P)
    assert parse_choice("P1").layouts(signature, row) == ((C, P), P)
    assert parse_choice("C").layouts(signature, row) == ((C, C), C)
    assert parse_choice("R").layouts(signature, row) == ((R, R), R)


def test_a_name_that_begins_with_p_is_a_factor() -> None:
    row = ROWS["linear"]
    signature = row.signature([(4, 6), (8, 6)], {})
    with pytest.raises(LayoutError, match=r"linear cannot be split along 'Pq'; choose R, C or one of"):
        parse_choice("Pq").layouts(signature, row)


def test_what_needs_consecutive_parts_is_not_split_in_blocks() -> None:
    """A lookup's table, whose rows are told apart by where they begin; of draws a device takes any part."""
    lookup, draw = ROWS["embedding"], next(row for row in ROWS.values() if row.random)
    table = lookup.signature([(8, 6), (4,)], {"padding_idx": None})
    assert lookup.offset is not None
    with pytest.raises(LayoutError, match=r"embedding needs consecutive parts along '.'; split it without blocks"):
        parse_choice(f"{lookup.offset}/2").layouts(table, lookup)
    other = next(f.name for f in table.factors if f.name != lookup.offset and f.size % 2 == 0 and f.role != "fixed")
    assert parse_choice(f"{other}/2").layouts(table, lookup)[1].blocks == 2
    drawn = draw.signature([(8, 6)], {"p": 0.5})
    name = next(f.name for f in drawn.factors if f.role != "fixed")
    assert draw.offset is None
    assert parse_choice(f"{name}/2").layouts(drawn, draw)[1].blocks == 2


def test_every_way_to_run_an_operator() -> None:
    """What is whole, partial, split by factors that have more than one part, then split in blocks of several parts."""
    tried: list[int] = []

    def blocks(size: int) -> list[int]:
        tried.append(size)
        return [1, 2, 3, 4, size]

    linear = ROWS["linear"]
    assert list(offered(linear, linear.signature([(6, 8), (1, 8)], {}), blocks)) == [
        ("R", (R, R), R), ("C", (C, C), C), ("P0", (P, C), P), ("P1", (C, P), P), ("_0", (S(0), C), S(0)),
        ("i", (S(1), S(1)), P), ("_0/2", (S(0, 2), C), S(0, 2)), ("_0/3", (S(0, 3), C), S(0, 3)),
        ("i/2", (S(1, 2), S(1, 2)), P), ("i/4", (S(1, 4), S(1, 4)), P),
    ]  # fmt: skip
    assert tried == [6, 8]
    softmax, dropout, lookup = ROWS["softmax"], ROWS["dropout"], ROWS["embedding"]
    found = offered(softmax, softmax.signature([(6, 8)], {"dim": 1}), blocks)
    assert [choice for choice, *_ in found] == ["R", "C", "d0", "d0/2", "d0/3"]
    found = offered(dropout, dropout.signature([(4,)], {"p": 0.5}), blocks)
    assert [choice for choice, *_ in found] == ["R", "C", "_0", "_0/2"]
    found = offered(lookup, lookup.signature([(8, 6), (4,)], {"padding_idx": None}), lambda size: [2])
    assert [choice for choice, *_ in found] == ["R", "C", "P0", "v", "h", "_0", "h/2", "_0/2"]


def test_attributes_that_cannot_be_hashed_are_inferred_all_the_same() -> None:
    node = Node("y", "sum", ("x",), (("dims", [1]), ("keepdim", False)), parse_choices(["R"]))  # type: ignore[arg-type]  # a list
    plain = Node("y", "sum", ("x",), (("dims", (1,)), ("keepdim", False)), parse_choices(["R"]))
    try:
        found = infer(node, [tensor((4, 6))], MESH)
    except GraphError:
        found = None
    assert found in (None, infer(plain, [tensor((4, 6))], MESH))
    assert infer(plain, [tensor((4, 6))], MESH).shape == (4,)
    loose = Node("y", "neg", ("x",), (("note", ["a"]),), parse_choices(["R"]))  # type: ignore[arg-type]  # a list
    assert infer(loose, [tensor((4, 6))], MESH) == tensor((4, 6))


def test_an_indivisible_factor_names_the_axes_that_split_it() -> None:
    mesh = Mesh.of(dp=2, tp=4, ep=3)
    node = Node("y", "neg", ("x",), (), parse_choices(["_0", "R", "_0"]))
    with pytest.raises(LayoutError, match=r"factor '_0' has size 4, not divisible by dp=2, ep=3; split another"):
        infer(node, [tensor((4, 6), S(0), R, S(0))], mesh)


def test_a_result_in_layouts_that_no_tensor_has_is_refused() -> None:
    """Two axes split factors that merge into one dimension, the second of them inside of blocks that the first cuts."""
    mesh = Mesh.of(dp=2, tp=2)
    merged = Node("y", "reshape", ("x",), (("shape", (8,)),), parse_choices(["b", "a"]))
    found = infer(merged, [tensor((4, 2), S(1), S(0))], mesh)
    assert found.layouts == (S(0, 4), S(0))
    flat = Node("y", "concat", ("x", "x"), (("dim", 0),), parse_choices(["R", "R"]))
    assert infer(flat, [tensor((4, 2), R, R)] * 2, mesh).shape == (8, 2)


def test_a_leaf_may_name_one_layout() -> None:
    attrs = {"dtype": "float32", "grad": True, "layouts": "S(0)", "shape": (8,), "target": "x"}
    node = Node("x", "input", (), tuple(sorted(attrs.items())))
    assert infer(node, [], MESH) == tensor((8,), S(0))


def test_a_dtype_is_a_name() -> None:
    for dtype, shown in ((32, "32"), (["float32"], r"\['float32'\]")):
        attrs = {"dtype": dtype, "grad": True, "layouts": (), "shape": (8,), "target": "x"}
        node = Node("x", "input", (), tuple(sorted(attrs.items())))  # type: ignore[arg-type]  # a list
        with pytest.raises(GraphError, match=rf"dtype {shown} is not one of \['bfloat16', "):
            infer(node, [], MESH)


def test_what_an_unknown_operator_makes_has_a_gradient_if_it_is_of_floats_and_an_operand_has() -> None:
    for dtype, grads, expected in (
        ("float32", (True, False), True), ("float32", (False, False), False), ("int64", (True, True), False),
    ):  # fmt: skip
        node = Node("y", OPAQUE, ("a", "b"), (("dtype", dtype), ("shape", (3,)), ("target", "aten.foo")))
        operands = [tensor((4,), grad=grad) for grad in grads]
        assert infer(node, operands, MESH) == TensorType((3,), dtype, (R,), expected)
