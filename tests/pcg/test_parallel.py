"""The four parallel operators: steps, adjoints, and where they apply."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pcg.errors import LayoutError
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.interpret import denote, run_devices, run_serial
from shardwright.pcg.layout import C, Layout, P, R, S
from shardwright.pcg.parallel import (
    ADJOINT,
    COMBINE,
    PARALLEL_OPS,
    PARTITION,
    REDUCE,
    REPLICATE,
    Step,
    applicable,
    step,
)
from tests.each import each
from tests.pcg.strategies import examples, layouts_for, meshes, shapes
from tests.pcg.typed import operand_in

STEPS = [
    (step(PARTITION, 0, R, 1), R, S(1)),
    (step(PARTITION, 0, R, 1, 4), R, S(1, 4)),
    (step(COMBINE, 0, S(1, 4)), S(1, 4), R),
    (step(REPLICATE, 0, R), R, C),
    (step(REDUCE, 0, P), P, R),
]


@each(("move", "before", "after"), STEPS)
def test_steps(move: Step, before: Layout, after: Layout) -> None:
    assert (move.before, move.after) == (before, after)


@each("move", [move for move, *_ in STEPS])
def test_the_adjoint_leads_back_in_dual_layouts(move: Step) -> None:
    back = move.adjoint
    assert back.op == ADJOINT[move.op]
    assert (back.before, back.after) == (move.after.dual, move.before.dual)
    blocks, dim = max(back.after.blocks, 1), back.after.dim
    assert step(back.op, 0, back.before, dim, blocks) == back
    assert back.adjoint == move


@each(
    ("op", "before", "expected"),
    [
        *((PARTITION, before, "R") for before in (C, P, S(0))),
        *((COMBINE, before, r"S\(d\)") for before in (R, C, P)),
        *((REPLICATE, before, "R") for before in (C, P, S(0))),
        *((REDUCE, before, "P") for before in (R, C, S(0))),
    ],
)
def test_steps_that_do_not_exist(op: str, before: Layout, expected: str) -> None:
    got = str(before).replace("(", r"\(").replace(")", r"\)")
    message = rf"{op} steps from {expected} along its axis, got {got}; insert the step that leads there"
    with pytest.raises(LayoutError, match=message):
        step(op, 0, before, 0)


@each(
    ("layouts", "move", "answer"),
    [
        ((R, R), step(PARTITION, 0, R, 0), True),
        ((R, R), step(PARTITION, 0, R, 2), False),
        ((R, R), step(PARTITION, 1, R, 1), False),
        ((S(0), R), step(PARTITION, 1, R, 0), True),
        ((R, S(0)), step(PARTITION, 0, R, 0), False),
        ((R, S(0)), step(PARTITION, 0, R, 0, 2), True),
        ((S(0), S(0)), step(COMBINE, 0, S(0)), False),
        ((S(0), S(0)), step(COMBINE, 1, S(0)), True),
        ((S(0), P), step(REDUCE, 1, P), True),
        ((S(0), R), step(REPLICATE, 1, R), True),
    ],
)
def test_applicable(layouts: tuple[Layout, ...], move: Step, answer: bool) -> None:
    assert applicable((24, 3), layouts, (2, 2), move) is answer


def possible_steps(value_shape: tuple[int, ...], layouts: tuple[Layout, ...], sizes: tuple[int, ...]) -> list[Step]:
    steps: list[Step] = []
    for axis, layout in enumerate(layouts):
        places = [(dim, blocks) for dim in range(len(value_shape)) for blocks in (1, 2, 3, 4)]
        for op in PARALLEL_OPS:
            for dim, blocks in places if op == PARTITION else [(-1, 1)]:
                try:
                    steps.append(step(op, axis, layout, dim, blocks))
                except LayoutError:
                    continue
    return [move for move in steps if applicable(value_shape, layouts, sizes, move)]


@given(st.data())
@examples(100)
def test_every_walk_of_steps_denotes_the_identity(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes(2)), data.draw(shapes(2))
    layouts = data.draw(layouts_for(shape, mesh))
    array = np.random.default_rng(1).integers(-99, 99, shape).astype("float64")
    nodes, leaf_value = operand_in("x", array, layouts, mesh)
    for count in range(data.draw(st.integers(0, 5))):
        moves = possible_steps(shape, layouts, mesh.sizes)
        if not moves:
            break
        move = data.draw(st.sampled_from(moves))
        attrs = make_attrs(axis=mesh.names[move.axis])
        if move.op == PARTITION:
            attrs = make_attrs(axis=mesh.names[move.axis], dim=move.after.dim, blocks=move.after.blocks)
        nodes.append(Node(f"step{count}", move.op, (nodes[-1].name,), attrs))
        layouts = (*layouts[: move.axis], move.after, *layouts[move.axis + 1 :])
    graph = Graph(tuple(nodes), (), mesh)
    leaves = {"x_leaf": leaf_value}
    held, whole = run_devices(graph, leaves), run_serial(graph, leaves)
    assert graph.types[nodes[-1].name].layouts == layouts
    for name, value in graph.types.items():
        np.testing.assert_array_equal(denote(held[name], value, mesh), whole[name])
