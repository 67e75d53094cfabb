"""The text of lowered programs: what is fused, what is inlined, what is computed when, and that it reads well."""

from __future__ import annotations

import ast
import importlib.util
import re
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.zoo import GPT
from shardwright.lowering.text.emit import emit
from shardwright.lowering.text.outside import find_outside
from shardwright.lowering.text.program import Program, compile_source
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import Graph, Node, Source, topological
from shardwright.pcg.layout import S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.late import sink_reductions, summand_of_loss
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.text import parse_graph
from tests.each import each
from tests.lowering.parallelize import follow, parallelize
from tests.lowering.runs import Case
from tests.lowering.test_training import DATA, MEGATRON, TWO, ZERO3, Net


@pytest.fixture(scope="module")
def net() -> Case:
    torch.manual_seed(0)
    return Case(Net(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})


def text_of(graph: Graph) -> str:
    """The program's body without comments and without the lines that free locals."""
    body = emit(graph).split("\n\n\n", 1)[1]
    lines = [line.split("  # ")[0] for line in body.splitlines() if not line.lstrip().startswith("del ")]
    return "\n".join(lines)


def run(graph: Graph, leaves: dict[str, Any]) -> torch.Tensor:
    program = compile_source(emit(graph))
    device = torch.device("cpu")
    return program.forward(leaves, leaves, program.constants(device), [], None, device)["loss"]


def builder(**leaves: tuple[int, ...]) -> GraphBuilder:
    b = GraphBuilder()
    for name, shape in leaves.items():
        b.leaf(name, "parameter", shape, "float32", name, True)
    return b


# ---- fusions ----


def test_bias_joins_its_linear() -> None:
    b = builder(x=(4, 8, 12), w=(16, 12), bias=(16,))
    text = text_of(b.graph([("loss", b.op("add", b.op("linear", "x", "w"), "bias"))]))
    assert "= F.linear(x, w, bias)" in text
    assert " + " not in text


def test_bias_stays_apart_where_the_linear_has_other_readers() -> None:
    b = builder(x=(4, 12), w=(16, 12), bias=(16,))
    y = b.op("linear", "x", "w")
    text = text_of(b.graph([("loss", b.op("mul", b.op("add", y, "bias"), y))]))
    assert "= F.linear(x, w)\n" in text


def test_matmul_of_matrices_and_bias_is_addmm() -> None:
    b = builder(x=(4, 12), w=(12, 16), bias=(16,))
    text = text_of(b.graph([("loss", b.op("add", b.op("matmul", "x", "w"), "bias"))]))
    assert "= torch.addmm(bias, x, w)" in text


def test_convolution_takes_its_bias() -> None:
    b = builder(x=(4, 3, 9, 9), w=(8, 3, 3, 3), bias=(8,))
    y = b.op("conv2d", "x", "w", stride=(2, 1), padding=(1, 0), dilation=(1, 1), groups=1)
    text = text_of(b.graph([("loss", b.op("add", y, b.op("reshape", "bias", shape=(1, 8, 1, 1))))]))
    assert "= F.conv2d(x, w, bias, (2, 1), (1, 0), (1, 1), 1)" in text


def test_slices_that_cut_up_a_dimension_are_a_split() -> None:
    b = builder(x=(4, 24))
    a, c = (b.op("slice", "x", dim=1, start=i, stop=j, step=1) for i, j in ((0, 8), (8, 24)))
    graph = b.graph([("loss", b.op("concat", c, a, dim=1))])
    assert "x.split((8, 16), 1)" in text_of(graph)
    x = torch.randn(4, 24)
    assert torch.equal(run(graph, {"x": x}), torch.cat([x[:, 8:], x[:, :8]], 1))


def test_results_of_one_operator_share_one_call() -> None:
    b = builder(x=(4, 24))
    values, indices = (b.op(f"topk_{what}", "x", k=3, dim=1) for what in ("values", "indices"))
    text = text_of(b.graph([("loss", b.op("mul", values, b.op("cast", indices, dtype="float32")))]))
    assert text.count("topk(") == 1
    assert f"{values} = {values}_all[0]" in text
    assert f"{indices} = {values}_all[1]" in text


# ---- numbers ----


def test_scalars_are_written_as_numbers() -> None:
    b = builder(x=(4, 24))
    y = b.op("sub", -1.5, b.op("pow", b.op("div", "x", 3.0), 2.0))
    text = text_of(b.graph([("loss", b.op("maximum", b.op("minimum", y, 6.0), 0.0))]))
    assert "torch.full" not in text
    for piece in ("x / 3.0", "** 2.0", "-1.5) - ", ".clamp_max(6.0)", ".clamp_min(0.0)"):
        assert piece in text


def test_a_negative_number_to_a_power_keeps_its_sign() -> None:
    b = builder(x=(4,))
    graph = b.graph([("loss", b.op("pow", -2.0, b.op("mul", "x", 2.0)))])
    assert torch.equal(run(graph, {"x": torch.ones(4)}), torch.full((4,), 4.0))


def test_a_number_that_would_change_the_dtype_stays_a_tensor() -> None:
    b = GraphBuilder()
    b.leaf("n", "buffer", (4,), "int64", "n")
    graph = b.graph([("loss", b.op("mul", "n", 0.5))])
    assert "torch.full((), 0.5" in text_of(graph)
    assert run(graph, {"n": torch.arange(4)}).dtype == torch.float32


def test_infinities_are_python() -> None:
    b = builder(x=(4,))
    graph = b.graph([("loss", b.op("maximum", "x", b.op("full", shape=(4,), value=float("-inf"), dtype="float32")))])
    assert torch.equal(run(graph, {"x": torch.ones(4)}), torch.ones(4))


# ---- names and comments ----


def test_names_that_python_or_the_program_use_are_changed() -> None:
    b = GraphBuilder()
    for name in ("lambda", "torch", "x.y", "0", "dp"):
        b.leaf(name, "parameter", (4,), "float32", name, True)
    total = "lambda"
    for name in ("torch", "x.y", "0"):
        total = b.op("add", total, name)
    graph = parallelize(b.graph([("loss", b.op("add", total, "dp"))]), Mesh.of(dp=1), lambda *_: "R")
    text = text_of(graph)
    for line in ("lambda_ = ", "torch_ = ", "x_y = ", "t_0 = ", "dp_ = "):
        assert f"    {line}leaf[" in text


HOSTILE = 'a"""\n    raise SystemExit  # \x1b[2J\u2028\u202e\\'


def test_no_text_of_a_graph_becomes_code() -> None:
    """Sources, names of nodes and outputs, and targets hold anything; what is run of the program stays the same."""
    b = GraphBuilder()
    x = b.leaf(f"x {HOSTILE}", "parameter", (4, 4), "float32", HOSTILE, True)
    for layer in range(4):
        w = b.leaf(f"w{layer}", "parameter", (4, 4), "float32", f"{HOSTILE}.{layer}.w", True)
        b.at(HOSTILE, Source(f"{HOSTILE}.{layer}", HOSTILE))
        for _ in range(4):
            x = b.op("tanh", b.op("linear", x, w))
    source = emit(b.graph([("loss", b.op("sum", x, dims=(0, 1), keepdim=False)), (HOSTILE, x)]))
    assert "def a________raise_SystemExit" in source
    assert all(c.isprintable() or c == "\n" for c in source)
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Raise, ast.Expr)) and not
                isinstance(getattr(node, "value", None), ast.Constant)]  # fmt: skip


@each(
    ("target", "more", "message"),
    [
        ("aten.triu.default", {"args": (("$", 1),)}, "an argument is operand 1 of 1"),
        ("aten.triu.default", {"args": 3}, "expected a tuple of arguments, got 3"),
        (
            "aten.triu.default",
            {"args": (("torch", "torch.load('x')"),)},
            "\"torch.load('x')\" is no name that torch has",
        ),
        ("aten.triu.default", {"kwargs": (("a=exit(),b", 1),)}, "'a=exit(),b' is no name that torch has"),
        ("aten.triu.default", {"result": 1}, "attribute 'result' is 1, and aten.triu.default gives 1 values"),
        ("aten.save.default", {}, "attribute 'result' is 0, and aten.save.default gives 0 values"),
        ("aten.triu", {}, "'aten.triu' is no name that torch has"),
        ("load_library", {}, "'load_library' is no name that torch has"),
        ("aten.no.such", {}, "torch has no operator 'aten.no.such' here; import what registers it"),
    ],
)
def test_calls_that_capture_would_not_write_are_refused(target: str, more: dict[str, Any], message: str) -> None:
    b = builder(x=(4, 4))
    attrs: dict[str, Any] = {"args": (("$", 0),), "kwargs": (), "result": 0, "shape": (4, 4), "dtype": "float32"} | more
    graph = b.graph([("loss", b.op("opaque", "x", target=target, **attrs))])
    with pytest.raises(GraphError) as error:
        emit(graph)
    assert message in str(error.value)


def test_an_attribute_of_text_is_a_word() -> None:
    b = builder(x=(4, 4))
    graph = b.graph([("loss", b.op("gelu", "x", approximate="none', exit()"))])
    with pytest.raises(GraphError, match="is no name that torch has"):
        emit(graph)


def test_names_that_the_program_keeps_are_refused() -> None:
    b = builder(**{"block 0": (4,)})
    with pytest.raises(
        GraphError, match="no node has a name of two words that begins with block , leaf , mask , draw "
    ):
        emit(b.graph([("loss", b.op("exp", "block 0"))]))


def test_axes_may_be_called_as_what_the_program_uses_and_names_differ_as_python_sees_them() -> None:
    b = builder(**dict.fromkeys(("H", "ℌ"), (4,)))  # Python takes both for H
    parallel = parallelize(b.graph([("loss", b.op("sub", "H", "ℌ"))]), Mesh.of(batch=1, torch=1), lambda *_: "R")
    source = emit(parallel)
    assert "def forward(leaf, batch, constant, blocks, saved, device, batch_, torch_, draw=rt.Draw()):" in source
    program = compile_source(source)
    leaves = {"H": torch.ones(4), "ℌ": torch.zeros(4)}
    found = program.forward(leaves, leaves, {}, [], None, torch.device("cpu"), None, None)["loss"]
    assert torch.equal(found, torch.ones(4))


def test_comments_tell_source_layout_and_local_type(net: Case) -> None:
    source = emit(net.graph(TWO, MEGATRON))
    (line,) = [x for x in source.splitlines() if "up_weight, up_bias" in x]
    assert line.endswith("| dp: S(2) | float32[8, 12, 12]")
    assert "# up (test_training.py:" in line


def test_leaves_are_read_where_they_are_first_used(net: Case) -> None:
    lines = text_of(net.graph(TWO, MEGATRON)).splitlines()
    at = next(i for i, line in enumerate(lines) if "F.linear" in line and "up_weight" in line)
    assert [line.split(" = ")[0].strip() for line in lines[at - 2 : at]] == ["up_weight", "up_bias"]


def test_the_written_file_is_a_program(net: Case, tmp_path: Path) -> None:
    program = compile_source(emit(net.graph(Mesh.of(only=1), {})))
    path = tmp_path / "program.py"
    program.write(path)
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.forward)
    assert "Every rank runs the same text" in (module.__doc__ or "")


def test_tracebacks_show_the_programs_lines() -> None:
    b = builder(x=(4,), y=(4,))
    program = compile_source(emit(b.graph([("loss", b.op("mul", b.op("exp", "x"), "y"))])))
    with pytest.raises(RuntimeError) as caught:
        program.forward({"x": torch.ones(4), "y": torch.ones(3)}, {}, {}, [], None, torch.device("cpu"))
    assert "mul = exp * y" in "".join(traceback.format_exception(caught.value)) or "* y" in "".join(
        traceback.format_exception(caught.value)
    )


def test_an_operator_without_a_row_is_called_as_captured() -> None:
    b = builder(x=(4, 4))
    attrs: dict[str, Any] = {"kwargs": (), "dtype": "float32"}
    y = b.op("opaque", "x", target="aten.triu.default", args=(("$", 0), 1), result=0, shape=(4, 4), **attrs)
    z = b.op("opaque", y, target="aten.var_mean.dim", args=(("$", 0), (1,)), result=1, shape=(4,), **attrs)
    graph = b.graph([("loss", z)])
    x = torch.randn(4, 4)
    torch.testing.assert_close(run(graph, {"x": x}), x.triu(1).mean(1))
    assert "torch.ops.aten.triu.default(x, 1)" in text_of(graph)


# ---- when things happen ----


def test_what_depends_on_nothing_is_computed_once() -> None:
    b = builder(x=(4, 12))
    rows, columns = (
        b.op("arange", start=0, stop=4, step=1, dtype="int64"),
        b.op("arange", start=0, stop=12, step=1, dtype="int64"),
    )
    mask = b.op("le", b.op("reshape", columns, shape=(1, 12)), b.op("reshape", rows, shape=(4, 1)))
    graph = b.graph([("loss", b.op("where", mask, "x", 0.0))])
    forward, constants = emit(graph).split("def constants")
    assert "arange" not in forward
    assert constants.count("torch.arange") == 2
    assert f"{mask} = constant['{mask}']" in forward
    x = torch.randn(4, 12)
    assert torch.equal(run(graph, {"x": x}), torch.where(torch.ones(4, 12).tril().bool(), x, 0.0))


def test_the_count_is_summed_first_and_the_loss_last(net: Case) -> None:
    graph = sink_reductions(net.graph(TWO, DATA, data_axes=(0,))).validate()
    text = text_of(graph)
    assert text.index("start_sum(") < text.index("rt.embedding(")
    assert text.index("finish_sum(") > text.index("rt.cross_entropy_sum(")
    assert " reduce(" not in text
    name, sums = summand_of_loss(graph)
    assert [node.op for node in sums] == ["reduce"]
    assert str(graph.types[name].layouts[0]) == "P"


def test_sinking_reductions_keeps_what_the_graph_denotes(net: Case) -> None:
    graph = net.graph(Mesh.of(a=2, b=2), {"ids": (S(0), S(0)), "labels": (S(0), S(0))}, data_axes=(0, 1))
    sunk = sink_reductions(graph).validate()
    assert len(summand_of_loss(sunk)[1]) == 2
    plain, moved = graph.erased(), sunk.erased()
    assert [n.op for n in plain.nodes] == [n.op for n in moved.nodes]


def test_reductions_that_others_read_are_not_sunk() -> None:
    b = builder(x=(8, 12))
    total = b.op("sum", b.op("mul", "x", "x"), dims=(0, 1), keepdim=False)
    serial = b.graph([("loss", b.op("div", total, 3.0)), ("copy", total)])
    graph = parallelize(serial, TWO, follow(serial, TWO), {"x": (S(0),)})
    assert sink_reductions(graph) is graph
    assert summand_of_loss(graph) == (dict(graph.outputs)["loss"], [])


def test_blocks_are_gathered_before_their_first_use_and_freed_after_the_last(net: Case) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.sum()

    case = Case(Two(), {"x": torch.randn(8, 16)})
    storage = {name: (S(0),) for name, _ in case.model.named_parameters()} | {"x": (S(0),)}
    lines = text_of(case.graph(TWO, storage, data_axes=(0,))).splitlines()
    events = [line.strip().lstrip(") =") for line in lines if "blocks[" in line or "F.linear" in line]
    assert [e.split(" = ")[-1].split("(")[0] for e in events] == [
        "blocks[0].gather", "F.linear", "blocks[0].free",
        "blocks[1].gather", "F.linear", "blocks[1].free",
        "blocks[2].gather", "F.linear",
    ]  # fmt: skip
    assert "blocks[" not in text_of(net.graph(TWO, MEGATRON))
    assert "gather_copy" not in text_of(net.graph(TWO, DATA | ZERO3, data_axes=(0,)))


# ---- masks ----


def dropouts(order: tuple[int, ...]) -> Graph:
    """A sum of dropouts of one value, written in this order of their seeds."""
    nodes = [
        Node(
            "x",
            "parameter",
            (),
            tuple(sorted({"shape": (64,), "dtype": "float32", "target": "x", "grad": True, "layouts": ()}.items())),
        )
    ]
    nodes += [Node(f"d{i}", "dropout", ("x",), (("p", 0.5), ("seed", seed))) for i, seed in enumerate(order)]
    total = "x"
    for i in range(len(order)):
        nodes.append(Node(f"s{i}", "mul" if i else "add", (total, f"d{i}")))
        total = f"s{i}"
    return Graph(topological(nodes), (("loss", total),)).validate()


def masks(program: Program, graph: Graph) -> dict[str, torch.Tensor]:
    wide = replace(graph, outputs=tuple((n.name, n.name) for n in graph.nodes if n.op == "dropout"))
    program = compile_source(emit(wide))
    torch.manual_seed(3)
    found = program.forward({"x": torch.ones(64)}, {}, {}, [], None, torch.device("cpu"))
    return {str(wide.by_name[name].attr("seed")) + name: value for name, value in found.items()}


def test_masks_do_not_depend_on_the_order_of_the_lines() -> None:
    torch.manual_seed(3)
    expected = [torch.native_dropout(torch.ones(64), 0.5, True)[0] for _ in range(3)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1)):
        graph = dropouts(order)
        for key, value in masks(compile_source(emit(graph)), graph).items():
            assert torch.equal(value, expected[int(key[0])]), (order, key)


def test_a_mask_that_two_dropouts_share_is_drawn_once() -> None:
    torch.manual_seed(3)
    expected = [torch.native_dropout(torch.ones(64), 0.5, True)[0] for _ in range(2)]
    graph = dropouts((0, 0, 1))
    for key, value in masks(compile_source(emit(graph)), graph).items():
        assert torch.equal(value, expected[int(key[0])]), key


def test_masks_in_order_need_no_lines_of_their_own() -> None:
    assert "rt.ahead" not in emit(dropouts((0, 1, 2)))


def test_sources_without_a_module_say_model() -> None:
    assert str(Source("", "a.py:3")) in emit(Graph(
        (*builder(x=(4,)).nodes.values(), Node("y", "exp", ("x",), (), (), Source("", "a.py:3"))), (("loss", "y"),)
    ).validate())  # fmt: skip


PARTIAL = """\
mesh [tp=2]
%x = input() {dtype='float32', grad=False, layouts=('S(1)',), shape=(4, 8), target='x'}
%w = parameter() {dtype='float32', grad=True, layouts=('S(1)',), shape=(6, 8), target='w'}
%y = linear(%x, %w) split(tp=i)
%t = permute(%y) split(tp=P0) {dims=(1, 0)}
"""
TO_R, VIEW_TO_R = "%r = reduce(%y) {axis='tp'}", "%r = reduce(%t) {axis='tp'}"
TO_C = "%c = replicate(%r) {axis='tp'}"


@pytest.mark.parametrize(
    ("lines", "result", "inplace"),
    [
        ([TO_R], "r", True),
        ([VIEW_TO_R], "r", False),
        ([TO_R, VIEW_TO_R.replace("%r", "%s"), "%u = permute(%s) split(tp=R) {dims=(1, 0)}"], "r", False),
        ([TO_R, TO_C, "%n = neg(%c) split(tp=C)"], "c", True),
        ([VIEW_TO_R, TO_C, "%n = neg(%c) split(tp=C)"], "c", False),
    ],
    ids=["alone", "of a view", "read twice", "and copied", "of a view and copied"],
)
def test_what_is_priced_as_summed_in_place_is(lines: list[str], result: str, *, inplace: bool) -> None:
    text = PARTIAL if any("%t" in line for line in lines) else PARTIAL[: PARTIAL.index("%t")]
    graph = parse_graph("\n".join([*text.splitlines(), *lines, "outputs "]))
    sums = re.findall(rf" {result} = reduce(?:_copy)?\(\w+, tp(, inplace=True)?\)", text_of(graph))
    assert list(map(bool, sums)) == [inplace]
    (operation,) = (o for o in Operations(graph).listed if o.name == result)
    assert bool(operation.alias) == inplace


# ---- functions ----


@cache
def gpt(num_layers: int) -> Graph:
    torch.manual_seed(0)
    ids = torch.randint(64, (2, 8, 16))
    found = Case(GPT(64, 64, 64, 4, num_layers), {"ids": ids[0], "targets": ids[1]})
    storage = {name: (S(0),) for name, _ in found.model.named_parameters()} | {"ids": (S(0),), "targets": (S(0),)}
    return sink_reductions(found.graph(TWO, storage, data_axes=(0,))).validate()


def functions_of(source: str) -> list[str]:
    return re.findall(r"^def (\w+)", source, re.MULTILINE)


@each("recompute", ["none", "selective", "full"])
def test_equal_blocks_are_one_function(recompute: Any) -> None:
    """A deeper model has a call, and what frees its parameters, more for each layer."""
    few, many = (emit(g, find_outside(g, Execution(recompute=recompute))) for g in (gpt(2), gpt(8)))
    own = ["attention", "blocks_0"] if recompute == "selective" else ["blocks_0"]
    assert functions_of(few) == functions_of(many) == [*own, "forward", "constants"]
    assert '"""blocks.0 … blocks.7, 8 equal blocks"""' in many
    assert 6 * 2 <= len(many.splitlines()) - len(few.splitlines()) <= 6 * 3
    assert ("saved.checkpoint(blocks_0, " in many, "saved.remade(attention, " in many) == (
        recompute == "full",
        recompute == "selective",
    )


HEADS = """
mesh [tp=2]
%w = parameter() {dtype='float32', grad=True, layouts=('R',), shape=(8, 8), target='w'} @w
%x = input() {dtype='float32', grad=False, layouts=(), shape=(2, 6, 8), target='x'} @x
%y = linear(%x, %w) split(tp=R) @layers.0.a
%z = reshape(%y) split(tp=R) {shape=(2, 6, 4, 2)} @layers.0.a
%q = permute(%z) split(tp=R) {dims=(0, 2, 1, 3)} @layers.0.a
%k = permute(%q) split(tp=R) {dims=(0, 1, 3, 2)} @layers.0.a
%scores = matmul(%q, %k) split(tp=R) @layers.0.a
%sum = sum(%scores) split(tp=R) {dims=(0, 1, 2, 3), keepdim=False} @layers.0.a
outputs loss=%sum
"""


@each(
    ("again", "copied"),
    [
        ((), []),
        (("a:linear", "a:reshape", "a:permute", "a:permute#2"), ["q", "k"]),
        (("a:linear", "a:reshape", "a:permute", "a:permute#2", "a:matmul"), []),
    ],
)
def test_heads_are_made_again_as_a_product_reads_them(again: tuple[str, ...], copied: list[str]) -> None:
    """Otherwise it would keep copies of its own, of what is not kept."""
    graph = parse_graph(HEADS)
    source = emit(graph, find_outside(graph, Execution(recompute=(("layers.0", again),) if again else "none")))
    assert re.findall(r"(\w+) = .*permute\(.*\)\.contiguous\(\)", source) == copied


SUMMED = """
mesh [tp=2]
%w = parameter() {dtype='float32', grad=True, layouts=('S(1)',), shape=(8, 8), target='w'} @w
%v = parameter() {dtype='float32', grad=True, layouts=('S(0)',), shape=(8, 8), target='v'} @v
%x = input() {dtype='float32', grad=False, layouts=(), shape=(2, 8), target='x'} @x
%xs = partition(%x) {axis='tp', dim=1} @layers.0.a
%y = linear(%xs, %w) split(tp=i) @layers.0.a
%r = reduce(%y) {axis='tp'} @layers.0.a
%c = replicate(%r) {axis='tp'} @layers.0.a
%z = linear(%c, %v) split(tp=o) @layers.0.b
%g = combine(%z) {axis='tp'} @layers.0.b
%sum = sum(%g) split(tp=R) {dims=(0, 1), keepdim=False} @layers.0.b
outputs loss=%sum
"""


def test_a_sum_overwrites_nothing_that_is_made_again_without_it() -> None:
    """Who reads the sum would find the summands in its place, as these are what is made again at that address."""
    graph = parse_graph(SUMMED)
    for again, in_place in ((None, True), (("a:linear",), False)):
        execution = Execution(recompute=(("layers.0", again),) if again else "none")
        source = emit(graph, find_outside(graph, execution))
        assert re.findall(r"= reduce_copy\(\w+, tp(, inplace=True)?\)", source) == [", inplace=True" * in_place]


def test_functions_know_no_layer_by_name() -> None:
    source = emit(gpt(2))
    function = source.split("def blocks_0")[1].split("\ndef ")[0]
    assert "blocks." not in function.split('"""')[2]
    assert "# qkv (" in function


def test_blocks_that_differ_have_functions_of_their_own() -> None:
    class Odd(GPT):
        def __init__(self) -> None:
            super().__init__(64, 64, 64, 4, 4)
            self.blocks[2].ln_mlp.eps = 1e-3  # type: ignore[union-attr, assignment]

    found = Case(Odd(), {"ids": torch.randint(64, (8, 16)), "targets": torch.randint(64, (8, 16))})
    source = emit(found.graph(TWO, {"ids": (S(0),), "targets": (S(0),)}, data_axes=(0,)))
    assert functions_of(source)[:2] == ["blocks_0", "blocks_2"]
    assert '"""blocks.0, blocks.1, blocks.3"""' in source


# ---- marks ----


def test_marks_name_blocks_and_operators_and_change_nothing_else(net: Case) -> None:
    """Each operator is named after all that is written into its line; equal blocks still share a function."""
    ids, model = torch.randint(20, (2, 8)), GPT(vocab=20, max_seq=8, hidden=16, num_heads=2, num_layers=2)
    found = list[str]()
    for graph in (net.graph(TWO, MEGATRON), Case(model, {"ids": ids, "targets": ids}).captured.graph):
        plain, marked = emit(graph), emit(graph, marked=True)
        assert "rt.mark" not in plain
        assert re.sub(r"with rt\.mark\('[^']*'\): ", "", marked) == plain
        assert compile_source(marked).forward.__name__ == "forward"
        found += re.findall(r"rt\.mark\('shardwright ([^']*)'\)", marked)
    assert {"block blocks.0", "block blocks.1"} <= {*found}
    assert any(re.fullmatch(r"\S+:linear \S+:add", name) for name in found), found
    assert any(name.endswith("/reduce") for name in found)
