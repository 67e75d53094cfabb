"""What the graph builder decides: the dtypes of scalars, what is no operation, what is computed once, and names."""

from __future__ import annotations

import pytest

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import OPAQUE, Source
from tests.each import each


def leaf(
    b: GraphBuilder, dtype: str = "float32", shape: tuple[int, ...] = (4,), name: str = "x", *, grad: bool = True
) -> str:
    return b.leaf(name, "parameter", shape, dtype, name, grad)


def ops(b: GraphBuilder) -> list[str]:
    return [node.op for node in b.nodes.values() if not node.is_leaf]


# ---- scalars ----


@each(
    ("beside", "value", "dtype"),
    [
        ("float32", 2, "float32"),
        ("float64", 0.5, "float64"),
        ("bfloat16", True, "bfloat16"),
        ("int64", 2, "int64"),
        ("int32", True, "int32"),
        ("int32", 0.5, "float32"),
        ("bool", 2, "int64"),
        ("bool", True, "bool"),
        ("bool", 0.5, "float32"),
    ],
)
def test_a_scalar_takes_the_dtype_that_torch_gives_it(beside: str, value: float, dtype: str) -> None:
    b = GraphBuilder()
    name = b.operands(leaf(b, beside), value)[1]
    assert (b.types[name].dtype, b.nodes[name].op, b.nodes[name].attr("value")) == (dtype, "full", value)
    assert type(b.nodes[name].attr("value")).__name__ in dtype  # True where programs read it as a number, not 1


def test_reals_decide_before_integers() -> None:
    b = GraphBuilder()
    names = b.operands(leaf(b, "bool"), leaf(b, "int64", name="y"), leaf(b, "float16", name="z"), 2)
    assert b.types[names[-1]].dtype == "float16"


def test_reals_among_integers_take_the_default_dtype() -> None:
    b = GraphBuilder("float64")
    assert b.types[b.operands(leaf(b, "int64"), 0.5)[1]].dtype == "float64"
    assert b.types[b.operands(0.5, 1)[0]].dtype == "float64"


# ---- what is not computed ----


@each(
    ("op", "attrs"),
    [
        ("reshape", {"shape": (2, 6)}),
        ("expand", {"shape": (2, 6)}),
        ("permute", {"dims": (0, 1)}),
        ("cast", {"dtype": "float32"}),
        ("slice", {"dim": 1, "start": 0, "stop": 6, "step": 1}),
        ("contiguous", {}),
        ("dropout", {"p": 0}),
    ],
)
def test_what_changes_nothing_is_the_operand(op: str, attrs: dict[str, object]) -> None:
    b = GraphBuilder()
    x = leaf(b, shape=(2, 6))
    assert b.op(op, x, **attrs) == x  # type: ignore[arg-type]


def test_what_has_no_gradient_is_not_detached() -> None:
    b = GraphBuilder()
    x, y = leaf(b), leaf(b, name="y", grad=False)
    b.op("detach", y)
    b.op("detach", b.op("detach", x))
    assert ops(b) == ["detach"]


def test_a_part_of_a_dimension_is_a_slice() -> None:
    b = GraphBuilder()
    x = leaf(b, shape=(2, 6))
    for start, stop, step in ((0, 5, 1), (1, 6, 1), (0, 6, 2)):
        b.op("slice", x, dim=1, start=start, stop=stop, step=step)
    assert ops(b) == ["slice"] * 3


def test_a_reshape_of_a_reshape_is_one() -> None:
    b = GraphBuilder()
    x = leaf(b, shape=(2, 6))
    flat = b.op("reshape", x, shape=(12,))
    assert b.nodes[b.op("reshape", flat, shape=(3, 4))].inputs == (x,)
    assert b.op("reshape", flat, shape=(2, 6)) == x


@each("view, attrs", [
    ("permute", {"dims": (1, 0)}),
    ("reshape", {"shape": (12,)}),
    ("expand", {"shape": (3, 2, 6)}),
])  # fmt: skip
def test_a_parameter_is_cast_before_it_is_seen_in_another_way(view: str, attrs: dict[str, object]) -> None:
    """So its slices are cast where they are stored. A part of it is cast by itself, and so is what is no parameter."""
    b = GraphBuilder()
    w, x = leaf(b, shape=(2, 6)), b.leaf("input", "input", (2, 6), "float32", "input")
    of_weight, of_input = (b.op(view, name, **attrs) for name in (w, x))  # type: ignore[arg-type]
    twice = b.op("expand", of_weight, shape=(2, *b.shape(of_weight)))
    part = b.op("slice", w, dim=1, start=0, stop=3, step=1)
    casts = [b.op("cast", name, dtype="bfloat16") for name in (of_weight, twice, of_input, part)]
    assert [b.nodes[name].op for name in casts] == [view, "expand", "cast", "cast"]
    assert {b.types[name].dtype for name in casts} == {"bfloat16"}
    (cast,) = b.nodes[casts[0]].inputs
    assert (b.nodes[cast].op, b.nodes[cast].inputs) == ("cast", (w,))


def test_equal_nodes_are_made_once() -> None:
    b = GraphBuilder()
    x = leaf(b)
    assert b.op("exp", x) == b.op("exp", x)
    assert b.op("mul", x, 2) == b.op("mul", x, 2.0)
    assert b.op("add", x, x) != b.op("sub", x, x)


def test_values_that_python_takes_for_equal_are_not() -> None:
    b = GraphBuilder()
    whole, flag = b.scalar(1, "int64"), b.scalar(True, "bool")
    assert whole != flag
    assert b.scalar(0.0, "float32") != b.scalar(-0.0, "float32")


def test_draws_are_numbered_and_never_shared() -> None:
    b = GraphBuilder()
    x = leaf(b)
    draws = [b.op("dropout", x, p=0.5) for _ in range(2)]
    assert [b.nodes[name].attr("seed") for name in draws] == [0, 1]


def test_opaque_operators_may_be_random_and_are_never_shared() -> None:
    b = GraphBuilder()
    x = leaf(b)
    attrs = {"target": "aten.rand_like.default", "args": (("$", 0),), "kwargs": (), "result": 0, "shape": (4,)}
    assert b.op(OPAQUE, x, **attrs, dtype="float32") != b.op(OPAQUE, x, **attrs, dtype="float32")


# ---- nodes and graphs ----


def test_names_are_wishes() -> None:
    b = GraphBuilder()
    x = leaf(b, name="h")
    b.at("h", Source("block.0", "model.py:7"))
    y = b.op("exp", x)
    z = b.op("exp", y)
    assert (x, y, z) == ("h", "h_1x", "h_2x")
    assert str(b.nodes[z].source) == "block.0 (model.py:7)"


def test_what_no_output_needs_is_dropped() -> None:
    b = GraphBuilder()
    x = leaf(b)
    b.op("sin", x)
    graph = b.graph([("loss", b.op("cos", x))])
    assert [node.op for node in graph.nodes] == ["parameter", "cos"]


def test_operands_that_do_not_fit_are_refused_at_once() -> None:
    b = GraphBuilder()
    with pytest.raises(GraphError, match=r"%t = add\(x, y\)"):
        b.op("add", leaf(b), leaf(b, shape=(3,), name="y"))
