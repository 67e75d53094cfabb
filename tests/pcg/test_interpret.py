"""The interpreter: whole parallel programs, what is exchanged, randomness and offsets, and every error."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from shardwright.pcg.choice import WHOLE
from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.interpret import Array, denote, run_devices, run_serial, scatter, shard_indices
from shardwright.pcg.layout import C, P, R, S
from shardwright.pcg.optable import ROWS, OpTable, Row
from shardwright.pcg.rows.neural import dropout_mask
from shardwright.pcg.text import parse_graph
from shardwright.pcg.types import TensorType
from tests.each import each
from tests.pcg.typed import leaf_node, make_mesh

MEGATRON = """\
mesh [dp=2, tp=2]
%ids = input() {dtype='int64', grad=False, layouts=('S(0)', 'R'), shape=(4, 6), target='ids'}
%table = parameter() {dtype='float64', grad=True, layouts=('R', 'S(0)'), shape=(10, 8), target='table'}
%up = parameter() {dtype='float64', grad=True, layouts=('S(1)', 'S(0)'), shape=(12, 8), target='up'}
%down = parameter() {dtype='float64', grad=True, layouts=('R', 'S(1)'), shape=(8, 12), target='down'}
%table_c = replicate(%table) {axis='dp'}
%up_whole = combine(%up) {axis='dp'}
%up_c = replicate(%up_whole) {axis='dp'}
%down_c = replicate(%down) {axis='dp'}
%rows = embedding(%table_c, %ids) split(dp=_0, tp=v) {padding_idx=None}
%x = reduce(%rows) {axis='tp'}
%x_c = replicate(%x) {axis='tp'}
%h = linear(%x_c, %up_c) split(dp=_0, tp=o)
%a = relu(%h) split(dp=_0, tp=_2)
%d = dropout(%a) split(dp=_0, tp=_2) {p=0.5, seed=3}
%y = linear(%d, %down_c) split(dp=_0, tp=i)
%y_r = reduce(%y) {axis='tp'}
%loss_p = sum(%y_r) split(dp=d0, tp=R) {dims=(0, 1, 2), keepdim=False}
%loss = reduce(%loss_p) {axis='dp'}
outputs loss=%loss
"""


def megatron_leaves() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"table": (10, 8), "up": (12, 8), "down": (8, 12)}
    return {"ids": rng.integers(0, 10, (4, 6)), **{k: rng.standard_normal(s) for k, s in shapes.items()}}


def test_a_tensor_parallel_program() -> None:
    graph, leaves = parse_graph(MEGATRON).validate(), megatron_leaves()
    held, whole = run_devices(graph, leaves), run_serial(graph, leaves)
    for name, value in graph.types.items():
        np.testing.assert_allclose(denote(held[name], value, graph.mesh), whole[name], atol=1e-12)
    hidden = np.maximum(leaves["table"][leaves["ids"]] @ leaves["up"].T, 0)
    hidden = hidden * dropout_mask((4, 6, 12), 0.5, 3) / 0.5
    np.testing.assert_allclose(whole["loss"], (hidden @ leaves["down"].T).sum())
    assert held["h"][0].shape == (2, 6, 6)
    assert [float(x) for x in held["loss"]] == pytest.approx([float(whole["loss"])] * 4)


def test_erasure_computes_the_same() -> None:
    graph, leaves = parse_graph(MEGATRON), megatron_leaves()
    whole = run_serial(graph, leaves)
    for name, value in run_serial(graph.erased(), leaves).items():
        np.testing.assert_array_equal(value, whole[name])


def test_a_serial_graph_runs_on_one_device() -> None:
    graph, leaves = parse_graph(MEGATRON).erased(), megatron_leaves()
    (loss,) = run_devices(graph, leaves)["loss_p"]
    assert loss == run_serial(graph, leaves)["loss_p"]


def test_steps_move_what_they_should() -> None:
    lines = """\
        mesh [a=2, b=2]
        %x = input() {dtype='int64', grad=False, layouts=('S(0)', 'R'), shape=(8,), target='x'}
        %inner = partition(%x) {axis='b', dim=0}
        %back = combine(%inner) {axis='b'}
        %copies = replicate(%back) {axis='b'}
        %sum = sum(%copies) split(a=d0, b=C) {dims=(0,), keepdim=False}
        %all = reduce(%sum) {axis='a'}
        outputs
    """
    held = run_devices(parse_graph(lines), {"x": np.arange(8)})
    assert [part.tolist() for part in held["inner"]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [part.tolist() for part in held["copies"]] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert [int(part) for part in held["sum"]] == [6, 6, 22, 22]
    assert [int(part) for part in held["all"]] == [28] * 4


def test_blocks() -> None:
    """A fused weight of 3 blocks: every device holds its slice of each."""
    parts = scatter(np.arange(12), (S(0, 3),), make_mesh(2))
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    nested = scatter(np.arange(12), (S(0, 3), S(0)), make_mesh(2, 3))
    assert [part.tolist() for part in nested] == [[0, 1], [4, 5], [8, 9], [2, 3], [6, 7], [10, 11]]


def test_summands_are_random_and_add_up() -> None:
    array, mesh = np.ones((4, 4)), make_mesh(2, 3)
    parts = scatter(array, (P, P), mesh)
    assert len({part.tobytes() for part in parts}) == 6
    np.testing.assert_allclose(sum(parts), array)
    assert scatter(array, (P, P), mesh, seed=1)[0].tobytes() != parts[0].tobytes()
    along_r = scatter(array, (R, P), mesh)
    assert along_r[0].tobytes() == along_r[3].tobytes()


def test_shard_indices() -> None:
    whole, mesh = np.arange(96).reshape(8, 12), make_mesh(2, 2)
    for layouts in ((S(0), S(0)), (R, S(1, 6)), (S(1, 3), R), (S(1, 3), S(0)), (S(1), S(1, 6))):
        value = TensorType((8, 12), "int64", layouts)
        held = [whole[shard_indices(value, mesh, at)] for at in mesh.coordinates()]
        np.testing.assert_equal(held, scatter(whole, layouts, mesh))


# ---- errors ----

SERIAL = """\
mesh []
%x = input() {dtype='float32', grad=False, layouts=(), shape=(4,), target='x'}
%i = input() {dtype='int64', grad=False, layouts=(), shape=(4,), target='i'}
%f = input() {dtype='bool', grad=False, layouts=(), shape=(), target='f'}
outputs
"""


@each(
    ("wrong", "message"),
    [
        ({"x": None}, r"%x = input\(\): no array for this leaf; `leaves` has \['f', 'i'\]"),
        ({"x": np.zeros(3)}, r"%x = input\(\): expected an array of shape \[4\], got \[3\]"),
        ({"x": np.zeros(4, int)}, r"%x = input\(\): expected an array of float32 or its kind, got int64"),
        ({"i": np.zeros(4)}, r"%i = input\(\): expected an array of int64 or its kind, got float64"),
        ({"f": np.zeros((), int)}, r"%f = input\(\): expected an array of bool or its kind, got int64"),
    ],
)
def test_leaves(wrong: Mapping[str, Array | None], message: str) -> None:
    leaves: dict[str, Array | None] = {"x": np.zeros(4), "i": np.zeros(4, int), "f": np.zeros((), bool), **wrong}
    given = {name: array for name, array in leaves.items() if array is not None}
    for run in (run_serial, run_devices):
        with pytest.raises(GraphError, match=message):
            run(parse_graph(SERIAL), given)


def test_opaque_operators_cannot_be_interpreted() -> None:
    opaque = Node("y", "opaque", ("x",), make_attrs(target="aten.foo", dtype="float32", shape=(3,)))
    graph = Graph((leaf_node("x", (4,)), opaque), ())
    for run in (run_serial, run_devices):
        with pytest.raises(GraphError, match=r"%y = opaque\(x\): aten.foo has no row in the op table and cannot be"):
            run(graph, {"x": np.zeros(4)})


def broken(**changes: object) -> OpTable:
    rows = [Row("neg", "... -> ...", **{"numpy": np.negative, "torch": "", **changes})]  # type: ignore[arg-type]
    return OpTable([*rows, *(row for name, row in ROWS.items() if name != "neg")])


def test_a_row_that_computes_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph((leaf_node("x", (4,)), Node("y", "neg", ("x",), (), (WHOLE,))), (), make_mesh(2))
    assert graph.types
    monkeypatch.setattr("shardwright.pcg.interpret.ROWS", broken(numpy=lambda x: x[:3]))
    with pytest.raises(GraphError, match=r"%y = neg\(x\): computes shape \[3\] on rank 0, inference says \[4\]"):
        run_devices(graph, {"x": np.zeros(4)})


def test_a_row_whose_offset_is_no_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph((leaf_node("x", (4,)), Node("y", "neg", ("x",), (), (WHOLE,))), (), make_mesh(2))
    assert graph.types
    monkeypatch.setattr("shardwright.pcg.interpret.ROWS", broken(offset="v"))
    with pytest.raises(GraphError, match=r"%y = neg.*: no operand, nor the result, has factor 'v' as a dim"):
        run_devices(graph, {"x": np.zeros(4)})


def test_denote_checks_what_it_is_given() -> None:
    mesh, value = make_mesh(2), TensorType((4,), "float32", (S(0),))
    with pytest.raises(LayoutError, match=r"denote: 1 arrays for the 2 devices of \[dp=2\]"):
        denote([np.zeros(4)], value, mesh)
    with pytest.raises(LayoutError, match=r"denote: rank 1 holds \[4\], expected \[2\] of float32\[4\]{S\(0\)}"):
        denote([np.zeros(2), np.zeros(4)], value, mesh)


@pytest.mark.parametrize("layout", [R, C])
def test_copies_must_agree(layout: object) -> None:
    mesh = make_mesh(2, 2)
    value = TensorType((2,), "float32", (S(0), layout))  # type: ignore[arg-type]
    parts = [np.zeros(1), np.zeros(1), np.ones(1), np.full(1, 1.5)]
    with pytest.raises(LayoutError, match=rf"is {layout} on axis 'tp', but the copies at 0 and 1 differ"):
        denote(parts, value, mesh)
    np.testing.assert_array_equal(denote([*parts[:3], np.ones(1)], value, mesh), [0, 1])
    nans = [np.full(1, np.nan)] * 4
    np.testing.assert_array_equal(denote(nans, value, mesh), [np.nan, np.nan])


@pytest.mark.parametrize(
    ("array", "layouts", "message"),
    [
        (np.zeros(5), (S(0),), r"shape \[5\] cannot have layout \(dp: S\(0\)\): dimension 0 has size 5, not divisible"),
        (np.zeros(4), (R, R), r"2 layouts for the 1 axes of \[dp=2\]"),
        (np.zeros(4, bool), (P,), r"an array of bools cannot be a partial sum; cast it to a number first"),
    ],
)
def test_what_cannot_be_scattered(array: Array, layouts: tuple[object, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        scatter(array, layouts, make_mesh(2))  # type: ignore[arg-type]
