"""Graphs: invariants, types and every error of inference, topological order, erasure. Text in, message out."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest

from shardwright.pcg.choice import WHOLE
from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.graph import Graph, Node, Source, fits, leaf, make_attrs, topological
from shardwright.pcg.layout import C, Layout, P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.text import parse_graph
from shardwright.pcg.types import TensorType
from tests.each import each
from tests.pcg.typed import leaf_node

X = "%x = input() {dtype='float32', grad=True, layouts=(), shape=(8, 12), target='x'}"
W = "%w = parameter() {dtype='float32', grad=True, layouts=(), shape=(16, 12), target='w'}"
I = "%i = input() {dtype='int64', grad=False, layouts=(), shape=(8, 12), target='i'}"  # noqa: E741


def graph_of(*lines: str, mesh: str = "dp=2, tp=2", outputs: str = "") -> Graph:
    return parse_graph("\n".join([f"mesh [{mesh}]", *lines, f"outputs {outputs}"]))


def type_of(*lines: str, mesh: str = "dp=2, tp=2") -> str:
    """The type of the last node."""
    graph = graph_of(*lines, mesh=mesh)
    return str(graph.types[graph.nodes[-1].name])


# ---- types ----


@each(
    ("lines", "expected"),
    [
        ([X], "float32[8, 12]{R,R}"),
        ([I], "int64[8, 12]{R,R}'"),
        (["%b = buffer() {dtype='bool', grad=False, layouts=('S(0)', 'R'), shape=(8,), target='b'}"],
         "bool[8]{S(0),R}'"),
        ([X, "%y = partition(%x) {axis='tp', dim=1, blocks=3}"], "float32[8, 12]{R,S(1,3)}"),
        ([X, "%y = partition(%x) {axis='tp', dim=1}", "%z = combine(%y) {axis='tp'}"], "float32[8, 12]{R,R}"),
        ([X, "%y = replicate(%x) {axis='dp'}"], "float32[8, 12]{C,R}"),
        ([X, "%y = sum(%x) split(dp=R, tp=R) {dims=(0,), keepdim=True}"], "float32[1, 12]{R,R}"),
        ([X, "%y = detach(%x) split(dp=R, tp=R)"], "float32[8, 12]{R,R}'"),
        ([X, "%y = floor(%x) split(dp=R, tp=R)"], "float32[8, 12]{R,R}'"),
        ([X, "%y = cast(%x) split(dp=R, tp=R) {dtype='int64'}"], "int64[8, 12]{R,R}'"),
        ([X, I, "%y = mul(%x, %i) split(dp=R, tp=R)"], "float32[8, 12]{R,R}"),
        ([I, "%y = sigmoid(%i) split(dp=C, tp=C)"], "float32[8, 12]{C,C}'"),
        (["%y = full() split(dp=d0, tp=R) {dtype='int64', shape=(4,), value=1}"], "int64[4]{S(0),R}'"),
        (
            [X, W, "%a = partition(%x) {axis='dp', dim=0}", "%b = replicate(%a) {axis='tp'}",
             "%c = replicate(%w) {axis='dp'}", "%d = partition(%c) {axis='tp', dim=0}",
             "%y = linear(%b, %d) split(dp=_0, tp=o)"],
            "float32[8, 16]{S(0),S(1)}",
        ),
        (
            [X, W, "%a = partition(%x) {axis='dp', dim=1}", "%b = partition(%w) {axis='dp', dim=1}",
             "%y = linear(%a, %b) split(dp=i, tp=R)", "%z = neg(%y) split(dp=P0, tp=R)"],
            "float32[8, 16]{P,R}",
        ),
        ([X, "%y = opaque(%x) {args=(), dtype='float32', kwargs=(), result=0, shape=(3,), target='aten.foo'}"],
         "float32[3]{R,R}"),
        ([I, "%y = opaque(%i) {args=(), dtype='float32', kwargs=(), result=0, shape=(3,), target='aten.foo'}"],
         "float32[3]{R,R}'"),
    ],
)  # fmt: skip
def test_types(lines: list[str], expected: str) -> None:
    assert type_of(*lines) == expected


def test_serial_types_have_no_layouts() -> None:
    assert type_of(X, W, "%y = linear(%x, %w)", mesh="") == "float32[8, 16]"


@each(
    ("have", "need", "grad", "answer"),
    [(R, R, True, True), (R, C, True, False), (R, C, False, True), (C, R, False, True), (P, C, False, False)],
)
def test_fits(have: Layout, need: Layout, grad: bool, answer: bool) -> None:
    assert fits(TensorType((8,), "float32", (have,), grad), 0, need) is answer


# ---- errors ----

LEAF = "{dtype='float32', grad=True, layouts=(), shape=(8, 12), target='w'}"


@each(
    ("lines", "message"),
    [
        # leaves
        (["%x = input() {dtype='float99', grad=False, layouts=(), shape=(8,), target='x'}"],
         r"%x = input\(\): dtype 'float99' is not one of \['bfloat16', 'bool', "),
        (["%x = input() {dtype='float32', grad=False, layouts=('Q', 'R'), shape=(8,), target='x'}"],
         r"%x = input\(\): layout 'Q' is not one of R, C, P, S\(dim\) or S\(dim,blocks\)"),
        (["%x = input() {dtype='float32', grad=False, layouts=('R',), shape=(8,), target='x'}"],
         r"%x = input\(\): 1 layouts for the 2 axes of \[dp=2, tp=2\]"),
        (["%x = input() {dtype='float32', grad=False, layouts=('P', 'R'), shape=(8,), target='x'}"],
         r"%x = input\(\): a leaf is stored R or S, got \(dp: P, tp: R\)"),
        (["%x = input() {dtype='float32', grad=False, layouts=('S(0)', 'R'), shape=(5,), target='x'}"],
         r"%x = input\(\): shape \[5\] cannot have layout \(dp: S\(0\), tp: R\): dimension 0 has size 5, not"),
        (["%x = input() {dtype='float32', grad=False, layouts=(), target='x'}"],
         r"%x = input\(\): attribute 'shape' is missing; there are \['dtype', 'grad', 'layouts', 'target'\]"),
        ([X, f"%y = parameter(%x) {LEAF}"], r"%y = parameter\(x\): a leaf has no operands, got \['x'\]"),
        ([f"%y = parameter() split(dp=R, tp=R) {LEAF}"],
         r"%y = parameter\(\): only operators with a row have a split, got \('R', 'R'\); leave it empty"),
        # parallel operators
        ([X, "%y = partition(%x) {axis='ep', dim=0}"], r"partition\(x\): axis 'ep' is not in the mesh \[dp=2, tp=2\]"),
        ([X, "%y = partition(%x) {dim=0}"], r"%y = partition\(x\): attribute 'axis' is missing; there are \['bl"),
        ([X, "%y = partition(%x) {axis='dp'}"], r"%y = partition\(x\): attribute 'dim' is missing"),
        ([X, "%y = partition(%x) {axis='dp', dim=2}"], r"tp: R\): S\(2\) names dimension 2 of a tensor of rank 2"),
        ([X, "%y = partition(%x) {axis='dp', dim=1, blocks=5}"], r"dimension 1 has size 12 in 5 blocks, not divi"),
        ([X, "%y = partition(%x) {axis='dp', dim=1, blocks=0}"], r"S\(1,0\) has 0 blocks"),
        ([X, "%y = combine(%x) {axis='dp'}"], r"%y = combine\(x\): combine steps from S\(d\) along its axis, got R; "),
        ([X, "%y = reduce() {axis='dp'}"], r"%y = reduce\(\): reduce takes one operand, got 0"),
        ([X, "%y = partition(%x) {axis='dp', dim=0}", "%z = partition(%y) {axis='tp', dim=0}",
          "%u = combine(%z) {axis='dp'}"],
         r"%u = combine\(z\): another axis shards dimension 0 inside this one \(dp: S\(0\), tp: S\(0\)\); move the"),
        ([X, "%y = partition(%x) {axis='tp', dim=0}", "%z = partition(%y) {axis='dp', dim=0}"],
         r"%z = partition\(y\): another axis shards dimension 0 inside this one \(dp: R, tp: S\(0\)\); move the"),
        # operators
        ([X, W, "%y = linear(%x, %w) split(dp=i, tp=R)"],
         r"%y = linear\(x, w\): split 'i' on axis 'dp' needs operand 0 as S\(1\), got R; insert the parallel"),
        ([X, "%y = neg(%x) split(dp=q, tp=R)"], r"neg cannot be split along 'q'; choose R, C or one of \['_0', '_1'\]"),
        ([X, "%y = softmax(%x) split(dp=d1, tp=R) {dim=1}"], r"softmax cannot be split along 'd1'; choose .* \['d0'\]"),
        ([X, "%y = exp(%x) split(dp=P0, tp=R)"], r"exp is not jointly linear in operands \(0,\); choose from \(\)"),
        ([X, "%y = add(%x, %x) split(dp=P0, tp=R)"], r"linear in operands \(0,\); choose from \(\(0, 1\),\)"),
        ([X, W, "%y = add(%x, %w) split(dp=R, tp=R)"], r"add\(x, w\): factor string .*: _0 should have size 8, got 16"),
        ([X, "%y = permute(%x) split(dp=R, tp=R) {dims=(0,)}"], r"attribute 'dims' is \(0,\), not a permutation of 2"),
        ([X, "%y = sum(%x) split(dp=R, tp=R) {dims=(2,), keepdim=True}"], r"'dims' is \(2,\), not different dim"),
        ([X, "%y = softmax(%x) split(dp=R, tp=R) {dim=-1}"], r"'dim' is -1, not a dimension of a tensor of rank 2"),
        ([X, "%y = softmax(%x) split(dp=R, tp=R)"], r"%y = softmax\(x\): attribute 'dim' is missing; there are \[\]"),
        ([X, "%y = reshape(%x) split(dp=R, tp=R) {shape=(5, 3)}"], r"reshape of \[8, 12\], 96 elements, to \[5, 3\]"),
        ([X, "%y = slice(%x) split(dp=R, tp=R) {dim=0, start=0, step=1, stop=9}"],
         r"slice from 0 to 9 of dimension 0 of \[8, 12\]; stay inside"),
        ([X, "%y = cast(%x) split(dp=R, tp=R)"], r"%y = cast\(x\): attribute 'dtype' is missing; there are \[\]"),
        ([X, "%y = cross_entropy_sum(%x) split(dp=R, tp=R)"],
         r"%y = cross_entropy_sum\(x\): operands of shapes \[\[8, 12\]\] and attributes {} do not fit: list index"),
        ([X, "%y = partition(%x) {axis='dp', dim=1}", "%z = reshape(%y) split(dp=a, tp=R) {shape=(8, 12)}"],
         r"split 'a' on axis 'dp' needs operand 0 as S\(0\), got S\(1\)"),
        ([X, "%y = partition(%x) {axis='dp', dim=1}", "%z = reshape(%y) split(dp=c, tp=R) {shape=(8, 3, 4)}"],
         r"split 'c' on axis 'dp' needs operand 0 as S\(1,3\), got S\(1\)"),
        # an opaque operator
        ([X, "%y = replicate(%x) {axis='dp'}", "%z = opaque(%y) {dtype='float32', shape=(3,), target='aten.foo'}"],
         r"%z = opaque\(y\): aten.foo has no row in the op table, so operand 0 must be R, got float32\[8, 12\]{C,R}"),
        ([X, "%z = opaque(%x) {dtype='float32', target='aten.foo'}"], r"opaque\(x\): attribute 'shape' is missing"),
    ],
)  # fmt: skip
def test_messages(lines: list[str], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        graph_of(*lines).validate()


def test_the_number_of_splits() -> None:
    node = Node("y", "neg", ("x",), (), (WHOLE,))
    with pytest.raises(
        LayoutError, match=r"%y = neg\(x\): 1 split choices for the 2 axes of \[dp=2, tp=2\]; give one per"
    ):
        _ = Graph((leaf_node("x", (8,)), node), (), Mesh.of(dp=2, tp=2)).types


def test_a_split_divides_its_factor() -> None:
    """3 groups of 4 channels: 12 channels could be cut in two, the groups cannot."""
    lines = [
        "%x = input() {dtype='float32', grad=False, layouts=('S(1)',), shape=(1, 12, 4, 4), target='x'}",
        "%w = input() {dtype='float32', grad=False, layouts=('S(0)',), shape=(12, 4, 1, 1), target='w'}",
        "%y = conv2d(%x, %w) split(dp=g) {dilation=(1, 1), groups=3, padding=(0, 0), stride=(1, 1)}",
    ]
    with pytest.raises(LayoutError, match=r"factor 'g' has size 3, not divisible by dp=2; split another"):
        type_of(*lines, mesh="dp=2")


def test_partial_sums_are_not_rounded() -> None:
    lines = [X, "%p = sum(%s) split(dp=d0, tp=R) {dims=(0,), keepdim=False}"]
    lines[1:1] = ["%s = partition(%x) {axis='dp', dim=0}"]
    cast = "%y = cast(%p) split(dp=P0, tp=R) {dtype='int64'}"
    with pytest.raises(
        LayoutError, match=r"cast from float32 to int64 is not linear, so split 'P0' on axis 'dp' is wrong"
    ):
        type_of(*lines, cast)
    assert type_of(*lines, cast.replace("int64", "bfloat16")) == "bfloat16[12]{P,R}"


def test_bools_are_no_partial_sums() -> None:
    flags = "%f = input() {dtype='bool', grad=False, layouts=('R', 'S(1)'), shape=(8, 12), target='f'}"
    weight = "%w = input() {dtype='bool', grad=False, layouts=('R', 'S(1)'), shape=(16, 12), target='w'}"
    with pytest.raises(LayoutError, match=r"split 'i' on axis 'tp' would give partial sums of bools; choose another"):
        type_of(flags, weight, "%y = linear(%f, %w) split(dp=R, tp=i)")


def test_errors_name_the_source() -> None:
    with pytest.raises(GraphError, match=r"%y = neg\(x\) at layers.0 \(model.py:12\): neg cannot be split along 'q'"):
        type_of(X, "%y = neg(%x) split(dp=q, tp=R) @layers.0 (model.py:12)")
    assert str(Source()) == "model"
    assert str(Source("", "a.py:1")) == "model (a.py:1)"


# ---- graphs ----


def test_names_are_unique() -> None:
    with pytest.raises(GraphError, match=r"%x = parameter\(\): a node of this name exists already; names are unique"):
        Graph((leaf_node("x", (8,)), leaf_node("x", (4,))), ()).validate()


def test_names_are_defined_before_use() -> None:
    nodes = (Node("y", "neg", ("x",)), leaf_node("x", (8,)))
    with pytest.raises(
        GraphError, match=r"%y = neg\(x\): operand %x is not defined before it; order nodes topologically"
    ):
        Graph(nodes, ()).validate()
    assert Graph(topological(nodes), ()).validate().nodes == nodes[::-1]


def test_operators_are_known() -> None:
    with pytest.raises(
        GraphError, match=r"%y = nag\(x\): operator 'nag' has no row in the op table; add one to pcg/rows"
    ):
        Graph((leaf_node("x", (8,)), Node("y", "nag", ("x",))), ()).validate()


def test_outputs_exist() -> None:
    with pytest.raises(GraphError, match=r"output 'loss' names %y, which no node defines"):
        Graph((leaf_node("x", (8,)),), (("loss", "y"),)).validate()


@pytest.mark.parametrize("step", ["partition(%x) {axis='tp', dim=0}", "replicate(%x) {axis='tp'}"])
def test_outputs_are_whole(step: str) -> None:
    with pytest.raises(LayoutError, match=r"output 'loss' \(%y\) is .*; results are R on every axis: .* on \['tp'\]"):
        graph_of(X, f"%y = {step}", outputs="loss=%y").validate()


def test_attributes_by_name() -> None:
    node = leaf("x", "input", (8,), "float32", "batch.x")
    assert node.attr("target") == "batch.x"
    with pytest.raises(GraphError, match=r"%x = input\(\): no attribute 'axis'; it has \['dtype', 'grad', 'layouts', "):
        node.attr("axis")
    assert make_attrs(b=1, a=2) == (("a", 2), ("b", 1))


def test_a_source_is_no_part_of_identity() -> None:
    here, there = (Graph((replace(leaf_node("x", (8,)), source=Source(m)),), ()) for m in "ab")
    assert here == there


def test_users_and_leaves() -> None:
    graph = graph_of(X, W, "%y = linear(%x, %w) split(dp=R, tp=R)", "%z = mul(%y, %y) split(dp=R, tp=R)")
    assert graph.users == {"x": ("y",), "w": ("y",), "y": ("z", "z"), "z": ()}
    assert [node.name for node in graph.leaves("parameter")] == ["w"]
    assert graph.signature(graph.by_name["y"]).result_shape == (8, 16)


def test_dead_nodes() -> None:
    graph = graph_of(X, I, W, "%y = neg(%x)", "%z = abs(%w)", mesh="", outputs="loss=%y")
    assert [node.name for node in graph.without_dead_nodes().nodes] == ["x", "i", "y"]


def test_erasure_drops_parallel_operators_and_layouts() -> None:
    parallel = graph_of(
        X.replace("layouts=()", "layouts=('S(0)', 'R')"),
        W,
        "%a = replicate(%x) {axis='tp'}",
        "%b = replicate(%w) {axis='dp'}",
        "%c = partition(%b) {axis='tp', dim=0}",
        "%y = linear(%a, %c) split(dp=_0, tp=o)",
        "%g = combine(%y) {axis='tp'}",
        "%h = combine(%g) {axis='dp'}",
        outputs="y=%h",
    ).validate()
    assert parallel.erased() == graph_of(X, W, "%y = linear(%x, %w)", mesh="", outputs="y=%y")


# ---- topological order ----


def test_the_given_order_is_kept_where_it_is_one() -> None:
    nodes = graph_of(X, W, "%y = neg(%w)", "%z = linear(%x, %y)", mesh="").nodes
    assert topological(nodes) == nodes


def test_operands_come_first() -> None:
    text = dedent("""\
        mesh []
        %a = full() {dtype='int64', shape=(), value=1}
        %b = neg(%a)
        %c = add(%a, %b)
        outputs
    """)
    nodes = parse_graph(text).nodes
    assert [node.name for node in topological(nodes[::-1])] == ["a", "b", "c"]


def test_cycles() -> None:
    nodes = [Node("a", "neg", ("c",)), Node("b", "neg", ("a",)), Node("c", "neg", ("b",))]
    with pytest.raises(GraphError, match=r"%b = neg\(a\): the graph has a cycle through %a"):
        topological(nodes)
    with pytest.raises(GraphError, match=r"the graph has a cycle through %a"):
        topological([Node("a", "neg", ("a",))])


def test_topological_order_needs_unique_names() -> None:
    with pytest.raises(GraphError, match=r"%a = neg\(c\): a node of this name exists already"):
        topological([Node("a", "neg", ("b",)), Node("a", "neg", ("c",))])


def test_long_chains_do_not_recurse() -> None:
    nodes = [Node(f"n{i}", "neg", (f"n{i - 1}",) if i else ()) for i in range(5000)]
    assert list(topological(nodes[::-1])) == nodes
    assert S(0) != R
