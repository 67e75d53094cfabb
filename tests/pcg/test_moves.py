"""Moves: the table against the parallel operators, and which pairs of operators of a graph are one move."""

from __future__ import annotations

from itertools import product

import pytest

from shardwright.pcg.errors import LayoutError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import C, Layout, P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import FUSED, MOVES, SLICE, Move, absorbed, fused_moves, move_between, steps_of
from shardwright.pcg.parallel import ADJOINT, step
from shardwright.pcg.text import parse_graph
from tests.each import each

KINDS: dict[str, Layout] = {"R": R, "C": C, "P": P, "S": S(0)}


def after(op: str, before: Layout, shard: Layout) -> Layout:
    return step(op, 0, before, shard.dim, shard.blocks).after


def test_the_table_has_every_change_of_one_operator_or_of_two() -> None:
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for kind, before in KINDS.items():
        for ops in [(op,) for op in ADJOINT] + list(product(ADJOINT, repeat=2)):
            layout = before
            try:
                for op in ops:
                    layout = after(op, layout, S(1))
            except LayoutError:
                continue
            if layout != before:
                found.setdefault((kind, layout.kind), ops)
    assert found == {pair: kind.operators for pair, kind in MOVES.items()}
    assert {kind.operators: kind.function for kind in MOVES.values() if len(kind.operators) == 2} == FUSED
    assert [kind.function for kind in MOVES.values() if len(kind.operators) == 1] == [
        kind.operators[0] for kind in MOVES.values() if len(kind.operators) == 1
    ]


def test_a_moves_backward_is_the_forward_of_the_move_back_in_dual_layouts() -> None:
    for (before, to), kind in MOVES.items():
        back = MOVES[KINDS[to].dual.kind, KINDS[before].dual.kind]
        assert (kind.forward, kind.backward) == (back.backward, back.forward)
        assert kind.operators == tuple(ADJOINT[op] for op in reversed(back.operators))


def test_the_collectives() -> None:
    """What a device has to get from the others, and what it has to add up."""
    for (before, to), kind in MOVES.items():
        gets, adds = before == "S" and to != "S", before == "P"
        expected = {(True, False): "all_gather", (False, True): "reduce_scatter" if to == "S" else "all_reduce"}
        alone = {("R", "S"): SLICE, ("R", "C"): "", ("S", "S"): "all_to_all"}
        assert kind.forward == (expected.get((gets, adds)) or alone[before, to])
        assert Move(0, KINDS[before], KINDS[to]).collectives() == (kind.forward, kind.backward)


def test_a_move_is_told_in_words_and_called_by_a_name() -> None:
    told = {"all_gather": "all-gathered", "reduce_scatter": "reduce-scattered", "all_reduce": "all-reduced",
            "all_to_all": "all-to-all", SLICE: "slice", "": ""}  # fmt: skip
    for kind in MOVES.values():
        assert told[kind.forward] in kind.words
        assert told[kind.backward] in kind.words
        assert kind.function.isidentifier()


@each(
    ("before", "after", "sizes", "answer"),
    [
        ((R, R), (S(0), R), (2, 2), True),
        ((R, R), (R, R), (2, 2), False),
        ((C, R), (R, R), (2, 2), False),
        ((C, R), (S(0), R), (2, 2), False),
        ((R, S(0)), (S(0), S(0)), (2, 2), False),  # the second axis shards inside the first
        ((R, S(0, 4)), (S(0), S(0, 4)), (2, 2), False),
        ((R, S(0)), (S(0, 4), S(0)), (2, 2), True),
        ((S(0), S(0)), (S(1), S(0)), (2, 2), False),
        ((S(0, 4), S(0)), (S(1), S(0)), (2, 2), True),
        ((S(0, 4), S(1)), (S(1, 2), S(1)), (2, 2), True),
        ((S(0), R), (S(0, 2), R), (2, 2), True),
        ((S(0, 2), R), (S(0), R), (2, 2), True),
        ((S(0), R), (S(0, 3), R), (2, 2), False),
        ((S(0), R), (S(0, 6), R), (2, 2), True),
        ((S(0), R), (S(0, 2), R), (4, 2), False),
        ((S(0, 2), S(0)), (S(0, 4), S(0)), (2, 2), True),
        ((S(0, 2), S(0)), (S(0, 8), S(0)), (4, 2), True),
        ((S(0, 2), S(0)), (S(0, 6), S(0)), (4, 2), False),
    ],
)
def test_what_is_one_move(
    before: tuple[Layout, Layout], after: tuple[Layout, Layout], sizes: tuple[int, int], answer: bool
) -> None:
    found = move_between(before, after, 0, sizes)
    assert found == (Move(0, before[0], after[0]) if answer else None)


def test_a_path_by_way_of_r_is_not_one_move() -> None:
    """Along one axis; a detour along another one, or to another layout than R, leaves two moves as they are."""
    mesh = Mesh.of(dp=2, tp=4)
    to_r, on, across = Move(0, S(0), R), Move(0, R, S(1, 3)), Move(1, R, C)
    gather, both = ("combine", {"axis": "dp"}), {"axis": "dp", "dim": 1, "blocks": 3}
    for path, expected in (
        ([to_r, on], [[gather], [("partition", both | {"alone": True})]]),
        ([to_r, across, on], [[gather], [("replicate", {"axis": "tp"})], [("partition", both)]]),
        ([Move(1, R, S(0))], [[("partition", {"axis": "tp", "dim": 0, "blocks": 1})]]),
        ([Move(0, P, S(0)), Move(0, S(0), C)],
         [[("reduce", {"axis": "dp"}), ("partition", {"axis": "dp", "dim": 0, "blocks": 1})],
          [gather, ("replicate", {"axis": "dp"})]]),
    ):  # fmt: skip
        found = [[(op, dict(attrs)) for op, attrs in steps] for steps in steps_of(path, mesh)]
        assert found == expected


# ---- in graphs ----

X = "%x = input() {dtype='float32', grad=True, layouts=('S(0)', 'R'), shape=(8, 16), target='x'}"
W = "%w = parameter() {dtype='float32', grad=True, layouts=('S(0)', 'R'), shape=(8, 16), target='w'}"
START = "%n = neg(%x) split(dp=_0, tp=R)"


def graph(*lines: str, outputs: str = "") -> Graph:
    return parse_graph("\n".join(["mesh [dp=2, tp=4]", X, W, START, *lines, f"outputs {outputs}"]))


def moves(*lines: str, outputs: str = "") -> list[str]:
    """The moves of a graph as `last node < tensor: before to after along axis`."""
    return [
        f"{node.name} < {start}: {move.before} to {move.after} along {move.axis}"
        for node, start, move in fused_moves(graph(*lines, outputs=outputs))
    ]


COMBINE, REPLICATE = "%a = combine(%n) {axis='dp'}", "%b = replicate(%a) {axis='dp'}"


def test_two_operators_on_one_axis_are_one_move() -> None:
    assert moves(COMBINE, REPLICATE) == ["b < n: S(0) to C along 0"]
    assert moves(COMBINE, "%b = partition(%a) {axis='dp', blocks=1, dim=1}") == ["b < n: S(0) to S(1) along 0"]
    three = ("%b = partition(%a) {axis='dp', blocks=1, dim=1}", "%c = combine(%b) {axis='dp'}")
    assert moves(COMBINE, *three) == ["c < b: S(1) to R along 0", "b < n: S(0) to S(1) along 0"]
    back = "%b = partition(%a) {axis='dp', blocks=1, dim=0}"
    assert moves(COMBINE, back) == ["b < a: R to S(0) along 0", "a < n: S(0) to R along 0"]


def test_operators_on_two_axes_are_two_moves() -> None:
    lines = (COMBINE, "%b = replicate(%a) {axis='tp'}")
    assert moves(*lines) == ["b < a: R to C along 1", "a < n: S(0) to R along 0"]


def test_a_value_that_others_read_is_made() -> None:
    apart = ["b < a: R to C along 0", "a < n: S(0) to R along 0"]
    assert moves(COMBINE, REPLICATE, "%c = neg(%a) split(dp=R, tp=R)") == apart
    assert moves(COMBINE, REPLICATE, outputs="y=%a") == apart
    read = moves(COMBINE, REPLICATE, "%c = replicate(%a) {axis='dp'}")
    assert read == ["c < a: R to C along 0", "b < a: R to C along 0", "a < n: S(0) to R along 0"]


def test_parameters_move_as_the_runtime_gathers_them() -> None:
    gathered = ("%a = combine(%w) {axis='dp'}", "%b = replicate(%a) {axis='dp'}")
    assert moves(*gathered) == ["b < w: S(0) to C along 0"]
    resharded = ("%a = combine(%w) {axis='dp'}", "%b = partition(%a) {axis='dp', blocks=1, dim=1}")
    assert moves(*resharded) == ["b < a: R to S(1) along 0", "a < w: S(0) to R along 0"]
    beyond = ("%t = partition(%w) {axis='tp', blocks=1, dim=1}", "%a = combine(%t) {axis='dp'}",
              "%b = partition(%a) {axis='dp', blocks=1, dim=0}", "%c = combine(%b) {axis='tp'}")  # fmt: skip
    assert moves(*beyond)[-1] == "t < w: R to S(1) along 1"


def test_what_is_marked_runs_alone() -> None:
    marked = "%b = partition(%a) {alone=True, axis='dp', blocks=1, dim=1}"
    assert moves(COMBINE, marked) == ["b < a: R to S(1) along 0", "a < n: S(0) to R along 0"]


def test_nothing_is_absorbed_by_what_follows_no_parallel_operator() -> None:
    made = graph(COMBINE)
    assert absorbed(made, made.by_name["a"]) is None
    with pytest.raises(KeyError):
        _ = Move(0, C, R).kind
