"""Moves in pieces on the timeline: what is hidden, what is made again, and how many pieces a search takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict, predicted
from shardwright.cost.timeline.clock import Sharing
from shardwright.cost.timeline.pieces import Piece, Pieces, record
from shardwright.cost.timeline.program import Programs, program
from shardwright.cost.timeline.streams import run
from shardwright.cost.timeline.tasks import COMPUTE, Recorder
from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.precisions import Precision
from shardwright.search.tree.planner import Planner
from tests.lowering.parallelize import follow, parallelize
from tests.lowering.test_pieces import TP, graph_of
from tests.search.graphs import cluster, every_choice, mlp

SLOW = cluster(2, link_bytes_per_s=2e8)
GPUS = replace(SLOW, device=replace(SLOW.device, kind="cuda"))
"""A product of `wide` takes about as long as what it reads takes to travel."""
ALONE = Sharing(1.0, 1.0)
"""Nothing slows what runs beside it."""


def seconds(travels_s: float, product_s: float, count: int, *, move_first: bool, joined_s: float = 0.0) -> float:
    """Of one pair, alone."""
    travels, computed = Piece("tp", travels_s), Piece(COMPUTE, product_s, (), 1.0 if joined_s else 0.0, joined_s)
    members = [("move", Pieces(0, 2, count, True, travels, travels))]
    members.insert(1 if move_first else 0, ("product", Pieces(1, 2, count, False, computed, computed)))
    recorder = Recorder(overlap=True)
    recorder.compute("before", 0.0)
    record(recorder, members)
    recorder.compute("after", 0.0)
    return run(recorder.segment(), ALONE).seconds


@pytest.mark.parametrize("move_first", [True, False])
def test_all_pieces_but_one_are_hidden(move_first: bool) -> None:
    """The shorter of the two adds one piece to all pieces of the longer one."""
    for travels_s, product_s in ((1.0, 3.0), (3.0, 1.0), (2.0, 2.0)):
        for count in (2, 5):
            expected = count * max(travels_s, product_s) + min(travels_s, product_s)
            assert seconds(travels_s, product_s, count, move_first=move_first) == pytest.approx(expected)
    assert seconds(1.0, 3.0, 2, move_first=move_first, joined_s=0.5) == pytest.approx(7.5)


def wide(layers: int) -> Graph:
    return mlp(batch=1024, width=256, hidden=1024, layers=layers)


def test_a_step_in_pieces_waits_less() -> None:
    serial, mesh = wide(4), Mesh.of(tp=2)
    leaves = [str(leaf.attr("target")) for leaf in serial.leaves("parameter")]
    storage = {name: (S(0) if name.endswith("up") else S(1),) for name in leaves}
    graph = parallelize(serial, mesh, follow(serial, mesh), storage)
    found = [simulate(program(graph, GPUS, Execution(pieces=count))) for count in (1, 2, 8)]
    assert all(after.step_s < before.step_s for before, after in pairwise(found))
    assert all(after.stages[0].exposed_s < before.stages[0].exposed_s for before, after in pairwise(found))


def test_what_is_made_again_is_made_again_in_pieces() -> None:
    """And what its results are put together from; what reads these comes after."""
    graph, again = graph_of("sequence between", TP), ["norm", "gate", "up", ":silu", ":mul"]
    (stage,) = program(graph, GPUS, Execution(pieces=4, recompute={"": again})).stages
    names = [task.name for piece in stage.pieces for task in piece.backward.tasks if task.verb == "again"]
    assert Counter(names) == {
        "layer_norm again": 1, "layer_norm.combine_tp.replicate_tp again": 4, "linear again": 4, "linear_1x again": 5,
        "linear_1 again": 5, "silu again": 1, "mul again": 1,
    }  # fmt: skip
    assert (names[0], names[-2:]) == ("layer_norm again", ["silu again", "mul again"])


@pytest.mark.parametrize(("asked", "where", "expected"), [
    (None, GPUS, {2, 4, 8}), (1, GPUS, {1}), (3, GPUS, {3}), (None, SLOW, {1}),
])  # fmt: skip
def test_the_search_takes_as_many_pieces_as_are_fastest(asked: int | None, where: Cluster, expected: set[int]) -> None:
    """None on CPUs, where what runs beside compute takes its cores."""
    planner = Planner(where, every_choice)
    found = planner.plan(wide(2), mesh={"tp": 2}, roles="tensor", pieces=asked, compared=False)
    assert found.execution.pieces in expected
    assert found.report.bound_s <= found.prediction.step_s
    if asked is None and where is GPUS:
        whole = planner.plan(wide(2), mesh={"tp": 2}, roles="tensor", pieces=1, compared=False)
        assert found.prediction.step_s < whole.prediction.step_s
        assert found.report.bound_s < whole.report.bound_s


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_programs_share_what_does_not_depend_on_pieces(precision: Precision) -> None:
    """Whatever was run before: more pieces, fewer, the same ones again, or other recomputation."""
    graph = graph_of("sequence between", TP, torch.float32)
    device = replace(GPUS.device, flops_per_s={**GPUS.device.flops_per_s, "fp8": 1e12})
    gpus = replace(GPUS, device=device)
    shared, again = Programs(graph, gpus), {"": ["norm", "gate", "up", ":silu", ":mul"]}
    for count, made_again in product((2, 1, 2, 4), (again, "none")):
        run_as = replace(Execution.of(precision), pieces=count, recompute=made_again)
        assert predicted(shared, run_as) == predict(graph, gpus, run_as), (count, made_again)
