"""Lifetimes of sharded parameters: every one from every other, as orders of operators that type and denote the same."""

from __future__ import annotations

import pytest

from shardwright.pcg.errors import GraphError, PlanError
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.parameters import Slices, find_parameters
from shardwright.pcg.text import parse_graph, print_graph

GRAPH = """
mesh [{time}x=2]
%x = input() {{dtype='float32', grad=False, layouts=({r}'R'), shape=(8, 4), target='x'}}
%w = parameter() {{dtype='float32', grad=True, layouts=({r}'S(0)'), shape=(4, 4), target='w'}}
%v = parameter() {{dtype='float32', grad=True, layouts=({r}'S(0)'), shape=(4, 4), target='v'}}
{ways}
%h = linear(%xs, %ww) split({s}x=_0)
%y = linear(%h, %vv) split({s}x=_0)
%l = sum(%y) split({t}x=d0) {{dims=(0, 1), keepdim=False}}
{sums}
outputs loss=%loss
"""
IN_MICROBATCHES = GRAPH.format(
    time="mb=4, ", r="'R', ", s="mb=_0, ", t="mb=d0, ",
    ways="%x1 = partition(%x) {axis='mb', blocks=1, dim=0}\n%xs = partition(%x1) {axis='x', blocks=1, dim=0}\n"
         "%w1 = combine(%w) {axis='x'}\n%w2 = replicate(%w1) {axis='x'}\n%ww = replicate(%w2) {axis='mb'}\n"
         "%v1 = replicate(%v) {axis='mb'}\n%v2 = combine(%v1) {axis='x'}\n%vv = replicate(%v2) {axis='x'}",
    sums="%l1 = reduce(%l) {axis='mb'}\n%loss = reduce(%l1) {axis='x'}",
)  # fmt: skip
AT_ONCE = GRAPH.format(
    time="", r="", s="", t="",
    ways="%xs = partition(%x) {axis='x', blocks=1, dim=0}\n%w1 = combine(%w) {axis='x'}\n"
         "%ww = replicate(%w1) {axis='x'}\n%v1 = combine(%v) {axis='x'}\n%vv = replicate(%v1) {axis='x'}",
    sums="%loss = reduce(%l) {axis='x'}",
).replace("layouts=('S(0)')", "layouts=('S(0)',)").replace("layouts=('R')", "layouts=('R',)")  # fmt: skip
SLICES: dict[Zero, Slices] = {
    "zero-1": Slices("x", 0, 1, True, "step", summed=True),
    "zero-2": Slices("x", 0, 1, True, "step"),
    "kept": Slices("x", 0, 1, True, "microbatch"),
    "zero-3": Slices("x", 0, 1, True, "pass"),
}


def test_the_order_says_how_often() -> None:
    found = find_parameters(parse_graph(IN_MICROBATCHES).validate()).by_leaf
    assert (found["w"].slices, found["v"].slices) == (SLICES["zero-1"], SLICES["zero-3"])


def test_every_lifetime_is_made_from_every_other() -> None:
    start = parse_graph(IN_MICROBATCHES)
    for before in ZEROS:
        graph = with_lifetimes(start, {"w": before})
        for after in ZEROS:
            made = with_lifetimes(graph, {"w": after, "v": after})
            found = find_parameters(made).by_leaf
            assert (found["w"].slices, found["v"].slices) == (SLICES[after],) * 2
            assert made.erased() == start.erased()
            assert parse_graph(print_graph(made)) == made
            assert with_lifetimes(made, {"w": before, "v": before}) == with_lifetimes(graph, {"v": before})


def test_with_one_microbatch_what_stays_for_a_step_stays_for_backward() -> None:
    start = parse_graph(AT_ONCE)
    lifetimes = {zero: with_lifetimes(start, {"w": zero}) for zero in ZEROS}
    found = {zero: find_parameters(graph).by_leaf["w"].slices for zero, graph in lifetimes.items()}
    assert found == {
        "zero-1": SLICES["kept"],
        "zero-2": SLICES["zero-2"],
        "kept": SLICES["kept"],
        "zero-3": SLICES["zero-3"],
    }
    assert all(graph.erased() == start.erased() for graph in lifetimes.values())


def test_a_lifetime_that_there_is_none_of() -> None:
    wrong = parse_graph(IN_MICROBATCHES.replace("combine(%w) {axis='x'}", "combine(%w) {axis='x', keep='forever'}"))
    with pytest.raises(GraphError, match="keep is 'forever'; expected one of"):
        find_parameters(wrong)


def test_what_is_not_gathered_or_no_lifetime() -> None:
    start = parse_graph(IN_MICROBATCHES)
    whole = parse_graph(IN_MICROBATCHES.replace("'S(0)'", "'R'").replace("%w2 = replicate(%w1)", "%w2 = replicate(%w)")
                        .replace("%w1 = combine(%w) {axis='x'}\n", "").replace("%v2 = combine(%v1) {axis='x'}\n", "")
                        .replace("%vv = replicate(%v2)", "%vv = replicate(%v1)")).validate()  # fmt: skip
    assert with_lifetimes(whole, {"w": "zero-3", "v": "zero-1"}) == whole
    with pytest.raises(PlanError, match="'u' is no parameter of the graph"):
        with_lifetimes(start, {"u": "zero-1"})
    with pytest.raises(PlanError, match="w: 'zero-4' is no lifetime of a parameter; choose one of"):
        with_lifetimes(start, {"w": "zero-4"})  # pyright: ignore[reportArgumentType]
