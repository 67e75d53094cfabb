"""The text form: what is printed is parsed back, and what cannot be parsed is pointed at."""

from __future__ import annotations

import math
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pcg.choice import WHOLE
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import Graph, Node, Source
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.offers import parse_choices
from shardwright.pcg.optable import ROWS, Attr
from shardwright.pcg.text import parse_graph, print_graph
from tests.each import each
from tests.pcg.strategies import examples
from tests.pcg.typed import choices, leaf_node, make_mesh, possible, split_case
from tests.samples import SAMPLES

EXAMPLE = """\
mesh [dp=2, tp=2]
%x = input() {dtype='float32', grad=False, layouts=('S(0)', 'R'), shape=(8, 12), target='x'} @x
%w = parameter() {dtype='float32', grad=True, layouts=('R', 'S(0)'), shape=(16, 12), target='fc.weight'} @fc.weight
%w1 = replicate(%w) {axis='dp'}
%y = linear(%x, %w1) split(dp=_0, tp=o) @fc (model.py:12)
%s = sum(%y) split(dp=d0, tp=d1) {dims=(0, 1), keepdim=False} @ (model.py:13)
%r = reduce(%s) {axis='dp'}
%loss = reduce(%r) {axis='tp'}
outputs loss=%loss, fc.steps=%loss
"""


def test_the_form() -> None:
    graph = parse_graph(EXAMPLE).validate()
    assert print_graph(graph, types=False) == EXAMPLE
    lines = print_graph(graph).splitlines()
    assert lines[4] == "%y = linear(%x, %w1) split(dp=_0, tp=o) @fc (model.py:12)  # float32[8, 16]{S(0),S(1)}"
    assert lines[1].endswith("@x  # float32[8, 12]{S(0),R}'")
    assert [node.source for node in graph.nodes[3:5]] == [Source("fc", "model.py:12"), Source("", "model.py:13")]


def test_layout_of_the_text_is_free() -> None:
    loose = dedent("""\
        # a graph, by hand

        mesh[dp = 2,tp=2]   # two axes\r
          %x=input( ){ shape=(8,12,),dtype = "float32",layouts=(),grad=False,target='#(%' }
        \t%y = neg ( %x )split(dp=R , tp = R)@ fc(model.py:12)
        outputs   loss = %y,
        # nothing more
    """).replace("%y,", "%y")
    tight = "mesh [dp=2, tp=2]\n%x = input() {shape=(8, 12), dtype='float32', layouts=(), grad=False, target='#(%'}\n"
    graph = parse_graph(loose)
    assert print_graph(graph, types=False).startswith(tight)
    assert graph.nodes[1] == Node("y", "neg", ("x",), (), (WHOLE, WHOLE))
    assert graph.nodes[1].source == Source("fc", "model.py:12")
    assert graph.outputs == (("loss", "y"),)


def test_a_comment_is_no_part_of_the_graph() -> None:
    lies = print_graph(parse_graph(EXAMPLE)).replace("# float32", "# int64")
    assert parse_graph(lies) == parse_graph(EXAMPLE)


def test_an_ill_typed_graph_shows_its_error_in_place() -> None:
    graph = parse_graph(EXAMPLE.replace("split(dp=_0, tp=o)", "split(dp=i, tp=o)"))
    comments = [line.partition("  # ")[2] for line in print_graph(graph).splitlines()[1:-1]]
    assert comments[2] == "float32[16, 12]{C,S(0)}"
    assert comments[3].startswith(
        "error: %y = linear(x, w1) at fc (model.py:12): split 'i' on axis 'dp' needs operand 0"
    )
    assert comments[4:] == ["", "", ""]


def same(graph: Graph) -> None:
    """Printing and parsing give the graph back: nodes, splits, attributes, outputs, mesh and sources."""
    for types in (True, False):
        text = print_graph(graph, types)
        back = parse_graph(text)
        assert back == graph
        assert [node.source for node in back.nodes] == [node.source for node in graph.nodes]
        assert print_graph(back, types) == text
        assert text.count("\n") == len(graph.nodes) + 2


@each("op", ROWS)
def test_round_trip_of_every_row(op: str) -> None:
    mesh = make_mesh(2, 2)
    for one in SAMPLES[op]:
        for choice in choices(op, one):
            if possible(op, one, (choice, "R"), mesh):
                same(split_case(op, one, (choice, "R"), mesh).graph)


def test_round_trip_of_nothing() -> None:
    assert print_graph(Graph((), ())) == "mesh []\noutputs\n"
    same(Graph((), ()))


FLOATS = st.floats(allow_nan=False) | st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 1e-05, 1e22, 0.1 + 0.2])
SCALARS = st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda values: st.lists(values, max_size=3).map(tuple), max_leaves=6)
NAMES = st.text("ab_.%'\"\\ \n\r\t\u2028#(é1", min_size=1, max_size=6)
SOURCES = st.builds(Source, st.text(max_size=6), st.text("ab.:1 ()#'\"\\\n\x85", max_size=6))


@given(
    names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    attrs=st.lists(st.tuples(NAMES, VALUES), max_size=4),
    split=st.lists(st.sampled_from(["R", "_0", "P0", "P0,1", "d3"]) | NAMES, min_size=2, max_size=2),
    source=SOURCES,
    outputs=st.lists(NAMES, max_size=3),
)
@examples(300)
def test_round_trip_of_anything(
    names: list[str], attrs: list[tuple[str, Attr]], split: list[str], source: Source, outputs: list[str]
) -> None:
    nodes = [Node(names[0], "full", (), tuple(attrs), (), source)]
    nodes += [Node(name, "neg", (names[0],), (), parse_choices(split), source) for name in names[1:]]
    same(Graph(tuple(nodes), tuple((key, names[-1]) for key in outputs), Mesh.of(dp=2, _e=3)))


@each("value", [[1], {"a": 1}, 1j, (1, [2]), b"x"])
def test_what_is_no_attribute(value: object) -> None:
    graph = Graph((Node("x", "full", (), (("value", value),)),), ())  # type: ignore[arg-type]
    with pytest.raises(
        GraphError, match=r"%x = full\(\): attribute 'value' holds .* of type (list|dict|complex|bytes); "
    ):
        print_graph(graph)


def test_splits_that_do_not_fit_the_mesh_cannot_be_printed() -> None:
    graph = Graph((leaf_node("x", (8,)), Node("y", "neg", ("x",), (), (WHOLE,))), (), make_mesh(2, 2))
    with pytest.raises(GraphError, match=r"%y = neg\(x\): 1 split choices for the 2 axes of \[dp=2, tp=2\]"):
        print_graph(graph)


# ---- errors ----

FULL = "%a = full() {dtype='int64', shape=(), value=1}"


@each(
    ("text", "at", "message"),
    [
        ("", "", "line 1: expected the line `mesh [axis=size, …]`"),
        ("mash [dp=2]\noutputs", "mash", "line 1: expected the line `mesh [axis=size, …]`"),
        ("mesh dp=2\noutputs", "dp", "line 1: expected '['"),
        ("mesh [dp]\noutputs", "]", "line 1: expected '='"),
        ("mesh [dp=]\noutputs", "]", "line 1: expected the size of a mesh axis"),
        ("mesh [dp=2", "", "line 1: expected ',' or ']'"),
        ("mesh [", "", "line 1: expected dp=2, or ']'"),
        ("mesh [dp=2 tp=2]\noutputs", "tp", "line 1: expected ',' or ']'"),
        (
            "mesh [dp=2, dp=2]\noutputs",
            "[dp",
            "line 1: mesh: axis names ['dp', 'dp'] repeat; give every axis its own name",
        ),
        ("mesh [dp=0]\noutputs", "[dp", "line 1: mesh: axis 'dp' has size 0; expected a positive integer"),
        ("mesh [2=2]\noutputs", "[2", "line 1: mesh: axis name '2' is not an identifier; use letters, digits and '_'"),
        ("mesh [] x\noutputs", "x", "line 1: expected the end of the line"),
        ("mesh []", "", "line 1: expected one more line: `outputs name=%node, …`; is the text truncated?"),
        (f"mesh []\n{FULL}", "", "line 2: expected one more line: `outputs name=%node, …`; is the text truncated?"),
        ("mesh []\noutputs loss", "", "line 2: expected '='"),
        ("mesh []\noutputs loss=l", "l", "line 2: expected a node, as in %name"),
        ("mesh []\noutputs loss=%l", "%l", "line 2: %l is not defined above; define it before it is used"),
        (f"mesh []\n{FULL}\noutputs l=%a m=%a", "m=", "line 3: expected ',' or the end of the line"),
        (f"mesh []\n{FULL}\noutputs l=%a,", "", "line 3: expected the name of an output"),
        (f"mesh []\n\n\n{FULL}\noutputs\n{FULL}", "%a", "line 6: expected nothing after the line `outputs`"),
        (
            "mesh []\nx = full()",
            "x",
            "line 2: expected a node, as in `%name = op(…)`, or the line `outputs name=%node, …`",
        ),
        ("mesh []\n% = full()", "=", "line 2: expected the name of a node"),
        ("mesh []\n%a full()", "full", "line 2: expected '='"),
        ("mesh []\n%a = ()", "(", "line 2: expected an operator"),
        ("mesh []\n%a = fill()", "fill", "line 2: no operator is called 'fill'; did you mean 'full'?"),
        ("mesh []\n%a = qqqq()", "qqqq", "line 2: no operator is called 'qqqq'; see pcg/rows for those there are"),
        ("mesh []\n%a = full", "", "line 2: expected '('"),
        ("mesh []\n%a = full(", "", "line 2: expected %name or ')'"),
        (f"mesh []\n{FULL}\n%b = neg(a)", "a)", "line 3: expected a node, as in %name"),
        (f"mesh []\n{FULL}\n%b = neg(%a %a)", "%a)", "line 3: expected ',' or ')'"),
        (f"mesh []\n{FULL}\n{FULL}", "%a", "line 3: %a is defined already; names are unique"),
        (
            "mesh []\n%layer = full()\n%b = neg(%lyer)",
            "%lyer",
            "line 3: %lyer is not defined above; did you mean %layer?",
        ),
        ("mesh []\n%a = full() spilt()", "spilt", "line 2: expected split(…), {…}, @source, # or the end of the line"),
        ("mesh []\n%a = full() {value}", "}", "line 2: expected '='"),
        (
            "mesh []\n%a = full() {value=}",
            "}",
            "line 2: expected a value: a number, True, False, None, a quoted string",
        ),
        ("mesh []\n%a = full() {value=1", "", "line 2: expected ',' or '}'"),
        ("mesh []\n%a = full() {value=1,", "", "line 2: expected key=value or '}'"),
        ("mesh []\n%a = full() {value=truth}", "truth", "line 2: expected a value: a number"),
        ("mesh []\n%a = full() {value='x}", "'x", "line 2: expected a value: a quoted string that ends on this line"),
        (
            "mesh []\n%a = full() {value='\\x'}",
            "'\\x",
            "line 2: expected a value: a quoted string with Python's escapes",
        ),
        ("mesh []\n%a = full() {shape=(1 2)}", "2)", "line 2: expected ',' or ')'"),
        ("mesh []\n%a = full() {shape=(1,", "", "line 2: expected a value"),
        (f"mesh []\n%a = full() {{value={'1' * 5000}}}", "111", "line 2: expected an integer of fewer digits"),
        ("mesh [dp=2]\n%a = full() split dp=R", "dp=R", "line 2: expected '('"),
        ("mesh [dp=2]\n%a = full() split(dp=)", ")", "line 2: expected a factor, R, C or P0"),
        ("mesh [dp=2]\n%a = full() split(tp=R)", "(tp", "line 2: expected one choice for each axis of [dp=2], in that"),
        (
            "mesh [dp=2, tp=2]\n%a = full() split(dp=R)",
            "(dp",
            "line 2: expected one choice for each axis of [dp=2, tp=2]",
        ),
        ("mesh []\n%a = full() @fc (model.py:12", "", "line 2: expected ')'"),
        ("mesh []\n%a = full() @fc ()", ")", "line 2: expected a source line, as in (model.py:12)"),
        ("mesh []\n%a = full() @(a) b", "b", "line 2: expected split(…), {…}, @source, # or the end of the line"),
        ("mesh []\n%a = full() @ +", "+", "line 2: expected a module path"),
    ],
)
def test_errors_point_at_what_is_wrong(text: str, at: str, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse_graph(text)
    first, line, caret = str(caught.value).split("\n")
    assert first.startswith(message)
    assert line.startswith("  ")
    pointed = line[len(caret) - 1 :]
    assert pointed.startswith(at) if at else not pointed


def complaint(text: str) -> str:
    """The error of parsing, or none, and then it can be printed and parsed again."""
    try:
        graph = parse_graph(text)
    except GraphError as error:
        return str(error)
    same(graph)
    return "none"


@given(st.integers(0, len(EXAMPLE) - 2))
@examples(200)
def test_a_truncated_text_is_an_error(length: int) -> None:
    """Unless what is missing is the rest of the outputs."""
    text = EXAMPLE[:length]
    assert complaint(text).startswith("line " if "outputs" not in text else ("line ", "none"))


@given(st.integers(0, len(EXAMPLE) - 1), st.sampled_from("%=(){}'\",\\ #@x0\n[]"))
@examples(300)
def test_a_damaged_text_is_a_graph_or_an_error(position: int, character: str) -> None:
    assert complaint(EXAMPLE[:position] + character + EXAMPLE[position + 1 :]).startswith(("line ", "none"))
