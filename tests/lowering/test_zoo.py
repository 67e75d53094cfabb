"""Every model of the zoo, in fp32 on two ranks, under data parallelism, ZeRO-3 storage and split weights."""

from __future__ import annotations

import pytest

from bench.accuracy import prepare
from examples.zoo import ZOO
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts, S
from tests.each import some
from tests.lowering.runs import Case, Step, assert_same_step, parallel_step, serial_step
from tests.lowering.test_training import TWO
from tests.models import zoo

pytestmark = pytest.mark.slow


def stored(case: Case, kinds: tuple[str, ...], min_rank: int = 1) -> dict[str, Layouts]:
    """The leaves of these kinds sliced along their first dimension, where that is even."""
    return {
        str(n.attr("target")): (S(0),)
        for n in case.captured.graph.nodes
        if n.op in kinds and len(s := case.captured.graph.types[n.name].shape) >= min_rank and s[0] % 2 == 0
    }


def graphs(case: Case) -> list[Graph]:
    return [
        case.graph(TWO, stored(case, ("input",)), data_axes=(0,)),
        case.graph(TWO, stored(case, ("input", "parameter")), data_axes=(0,)),
        case.graph(TWO, stored(case, ("parameter",), 2)),
    ]


@pytest.mark.parametrize("name", zoo(*some(ZOO, 3)))
def test_zoo(name: str) -> None:
    prepared = prepare(name)
    case = Case(prepared.model, prepared.batch, prepared.captured)
    layouts = graphs(case)

    def rank() -> list[Step]:
        return [parallel_step(case.lower(graph), case.batch) for graph in layouts]

    (expected,) = run_ranks(lambda: serial_step(case), 1, 60)
    for steps in run_ranks(rank, 2, 120):
        for step in steps:
            assert_same_step(step, expected, 1e-5)
