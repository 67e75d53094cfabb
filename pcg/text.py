"""The text form of a graph: one line per node, printed and parsed without loss.

    mesh [dp=2, tp=2]
    %x = input() {dtype='float32', …} @x  # float32[8, 12]{R,R}
    %y = linear(%x, %w) split(dp=_0, tp=o) @layers.0 (model.py:12)  # float32[8, 32]{S(0),S(1)}
    outputs loss=%l

A line gives the node's name, operator, operands, split along each mesh axis, attributes and source. Text after `#`
is a comment: the inferred type, for people. Names that are more than letters, digits, `_` and `.` are quoted.
Values of attributes are Python's literals for int, float, bool, None, str and tuple, and inf and nan.

    graph  = "mesh" "[" (axis "=" size),* "]"  node*  "outputs" (key "=" "%" name),*
    node   = "%" name "=" op "(" ("%" name),* ")"
             [ "split" "(" (axis "=" choice),* ")" ]  [ "{" (key "=" value),* "}" ]  [ "@" [module] [ "(" line ")" ] ]
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain

from shardwright.pcg.choice import Choices
from shardwright.pcg.cursor import NAME, Cursor
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import LEAVES, OPAQUE, Graph, Node, Source, infer
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.offers import parse_choices
from shardwright.pcg.optable import ROWS, Attr
from shardwright.pcg.parallel import PARALLEL_OPS, SEND
from shardwright.pcg.rows.declared import DECLARED
from shardwright.pcg.types import TensorType

_OPERATORS = ROWS, DECLARED, LEAVES, PARALLEL_OPS, (SEND, OPAQUE)
_AXIS = re.compile(r"\w+")
_SIZE = re.compile(r"\d+")
_CHOICE = re.compile(r"P\d+(?:,\d+)*|\w+(?:/[1-9]\d*|>\w+)?")
_LINE = re.compile(r"[^()'\"#\s](?:[^()'\"#\x00-\x1f]*[^()'\"#\s])?")
_INTEGER = re.compile(r"-?\d+")
_NUMBER = re.compile(r"-?(?:inf|nan|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)")
_WORDS: Mapping[str, Attr] = {"True": True, "False": False, "None": None}


# ---- printing ----


def print_graph(graph: Graph, types: bool = True) -> str:
    """Return the graph as text. With `types`, comments give inferred types, and the first ill-typed node its error."""
    comments = list(_comments(graph)) if types else [""] * len(graph.nodes)
    lines = [f"mesh {graph.mesh}"]
    for node, comment in zip(graph.nodes, comments, strict=True):
        lines.append(print_node(node, graph.mesh) + (f"  # {comment}" if comment else ""))
    outputs = ", ".join(f"{_name(key)}=%{_name(name)}" for key, name in graph.outputs)
    return "\n".join([*lines, f"outputs {outputs}".rstrip()]) + "\n"


def print_node(node: Node, mesh: Mesh) -> str:
    """Return the line of a node, without its type."""
    text = f"%{_name(node.name)} = {_name(node.op)}({', '.join('%' + _name(i) for i in node.inputs)})"
    if node.split:
        if len(node.split) != len(mesh):
            raise GraphError(f"{node}: {len(node.split)} split choices for the {len(mesh)} axes of {mesh}")
        choices = (f"{axis}={_name(x, _CHOICE)}" for axis, x in zip(mesh.names, node.split, strict=True))
        text += f" split({', '.join(choices)})"
    if node.attrs:
        text += " {" + ", ".join(f"{_name(key)}={_print_value(value, node, key)}" for key, value in node.attrs) + "}"
    if node.source != Source():
        text += " @" + (_name(node.source.module) if node.source.module else "")
        text += f" ({_name(node.source.line, _LINE)})" if node.source.line else ""
    return text


def _comments(graph: Graph) -> Iterator[str]:
    types: dict[str, TensorType] = {}
    failed = False
    for node in graph.nodes:
        comment = ""
        if not failed:
            try:
                types[node.name] = infer(node, [types[name] for name in node.inputs], graph.mesh)
                comment = str(types[node.name])
            except (GraphError, KeyError) as error:
                comment, failed = "error: " + str(error).replace("\n", " "), True
        yield comment


def _name(text: str, bare: re.Pattern[str] = NAME) -> str:
    return text if bare.fullmatch(text) and text.isprintable() else repr(text)


def _print_value(value: Attr, node: Node, key: str) -> str:
    match value:
        case bool() | None:
            return str(value)
        case int():
            return int.__repr__(value)
        case float():
            return float.__repr__(value)
        case str():
            return str.__repr__(value)
        case tuple():
            items = [_print_value(item, node, key) for item in value]
            return "(" + ", ".join(items) + (",)" if len(items) == 1 else ")")
    raise GraphError(
        f"{node}: attribute {key!r} holds {value!r} of type {type(value).__name__}; "
        "attributes are int, float, bool, None, str and tuples of these"
    )


# ---- parsing ----


def parse_graph(text: str) -> Graph:
    """Return the graph that `print_graph` printed as `text`.

    Raises `GraphError` with the line, a caret and what was expected there. Types are not checked: call `validate`.
    """
    lines = [Cursor(line, number) for number, line in enumerate(text.split("\n"), 1)]
    cursors = [cursor for cursor in lines if not cursor.at_end()] or lines[:1]
    mesh = _mesh(cursors[0])
    nodes: dict[str, Node] = {}
    for position, cursor in enumerate(cursors[1:], 2):
        if cursor.take("outputs"):
            if position < len(cursors):
                raise cursors[position].expected("nothing after the line `outputs`")
            return Graph(tuple(nodes.values()), _outputs(cursor, nodes), mesh)
        node = _node(cursor, mesh, nodes)
        nodes[node.name] = node
    end = cursors[-1]
    raise end.expected("one more line: `outputs name=%node, …`; is the text truncated?", len(end.line))


def _mesh(cursor: Cursor) -> Mesh:
    cursor.expect("mesh", "the line `mesh [axis=size, …]`")
    at = cursor.at
    cursor.expect("[")
    axes = cursor.items("]", lambda: (_axis(cursor), int(cursor.pattern(_SIZE, "the size of a mesh axis"))), "dp=2,")
    cursor.expect_end("the end of the line")
    try:
        return Mesh(tuple(name for name, _ in axes), tuple(size for _, size in axes))
    except GraphError as error:
        raise cursor.problem(str(error), at) from None


def _axis(cursor: Cursor) -> str:
    name = cursor.pattern(_AXIS, "the name of a mesh axis")
    cursor.expect("=")
    return name


def _outputs(cursor: Cursor, nodes: Mapping[str, Node]) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    while not cursor.at_end():
        if pairs:
            cursor.expect(",", "',' or the end of the line")
        key = cursor.name("the name of an output")
        cursor.expect("=")
        pairs.append((key, _reference(cursor, nodes)))
    return tuple(pairs)


def _node(cursor: Cursor, mesh: Mesh, nodes: Mapping[str, Node]) -> Node:
    at = cursor.at
    cursor.expect("%", "a node, as in `%name = op(…)`, or the line `outputs name=%node, …`")
    name = cursor.name("the name of a node")
    if name in nodes:
        raise cursor.problem(f"%{name} is defined already; names are unique", at)
    cursor.expect("=")
    op = _operator(cursor)
    cursor.expect("(")
    inputs = cursor.items(")", lambda: _reference(cursor, nodes), "%name")
    split = _split(cursor, mesh) if cursor.take("split") else ()
    attrs = cursor.items("}", lambda: _attribute(cursor), "key=value") if cursor.take("{") else []
    source = _source(cursor) if cursor.take("@") else Source()
    cursor.expect_end("split(…), {…}, @source, # or the end of the line")
    return Node(name, op, tuple(inputs), tuple(attrs), split, source)


def _reference(cursor: Cursor, nodes: Mapping[str, Node]) -> str:
    at = cursor.at
    cursor.expect("%", "a node, as in %name")
    name = cursor.name("the name of a node")
    if name not in nodes:
        near = difflib.get_close_matches(name, nodes, 1)
        hint = f"did you mean %{near[0]}?" if near else "define it before it is used"
        raise cursor.problem(f"%{name} is not defined above; {hint}", at)
    return name


def _operator(cursor: Cursor) -> str:
    at = cursor.at
    op = cursor.name("an operator")
    if not any(op in names for names in _OPERATORS):
        near = difflib.get_close_matches(op, chain(*_OPERATORS), 1)
        hint = f"did you mean {near[0]!r}?" if near else "see pcg/rows for those there are"
        raise cursor.problem(f"no operator is called {op!r}; {hint}", at)
    return op


def _split(cursor: Cursor, mesh: Mesh) -> Choices:
    at = cursor.at
    cursor.expect("(")
    pairs = cursor.items(")", lambda: (_axis(cursor), cursor.name("a factor, R, C or P0", _CHOICE)), "dp=factor")
    if tuple(axis for axis, _ in pairs) != mesh.names:
        raise cursor.expected(f"one choice for each axis of {mesh}, in that order", at)
    return parse_choices(choice for _, choice in pairs)


def _attribute(cursor: Cursor) -> tuple[str, Attr]:
    key = cursor.name("the name of an attribute")
    cursor.expect("=")
    at = cursor.at
    try:
        return key, _value(cursor)
    except RecursionError:
        raise cursor.expected("a value that is not nested so deeply", at) from None


def _value(cursor: Cursor) -> Attr:
    at = cursor.at
    if cursor.take("("):
        return _tuple(cursor)
    if cursor.sees("'", '"'):
        return cursor.string("a value")
    for word, value in _WORDS.items():
        if cursor.take(word):
            return value
    text = cursor.pattern(_NUMBER, "a value: a number, True, False, None, a quoted string or a tuple")
    if not _INTEGER.fullmatch(text):
        return math.nan if text == "nan" else float(text)
    try:
        return int(text)
    except ValueError:
        raise cursor.expected("an integer of fewer digits", at) from None


def _tuple(cursor: Cursor) -> tuple[Attr, ...]:
    items: list[Attr] = []
    while not cursor.take(")"):
        items.append(_value(cursor))
        if not cursor.sees(")"):
            cursor.expect(",", "',' or ')'")
    return tuple(items)


def _source(cursor: Cursor) -> Source:
    module = "" if cursor.at_end() or cursor.sees("(") else cursor.name("a module path")
    line = ""
    if cursor.take("("):
        line = cursor.name("a source line, as in (model.py:12)", _LINE)
        cursor.expect(")")
    return Source(module, line)
