"""The benchmark of ZeRO-1 by hand at a toy size: contenders agree, and the table comes out. Times are not judged."""

from __future__ import annotations

import numpy as np
import pytest

from bench import sliced
from bench.accumulation import OURS
from bench.gpt import Size
from bench.sliced import CONTENDERS, DDP_NAME, OUR_NAME, race, table
from bench.trainers import serial_graph
from shardwright.lowering.ranks.launch import run_ranks
from tests.each import in_whole_grids

TINY = Size(batch=8, seq=8, vocab=48, hidden=16, heads=2, layers=2)


@in_whole_grids
def test_every_contender_trains_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`race` compares each contender's loss and gradients with the single process's first. Some slices are packed."""
    monkeypatch.setattr(sliced, "PLACED_BYTES", 1 << 10)
    times = run_ranks(race, 2, 120.0, args=(OURS[OUR_NAME].plan(serial_graph(TINY)), TINY, 2))
    assert [[*own] for own in times] == [[*CONTENDERS, OUR_NAME]] * 2
    assert all((seconds > 0).all() for own in times for seconds in own.values())


def test_the_table_is_of_means_over_ranks() -> None:
    ranks = [{DDP_NAME: np.full(3, theirs), OUR_NAME: np.full(3, ours)} for theirs, ours in ((0.1, 0.1), (0.3, 0.5))]
    assert table(ranks).splitlines()[2:] == [
        f"| {DDP_NAME} | 200 ms | 1.00 (1.00–1.00) |", f"| {OUR_NAME} | 300 ms | 1.50 (1.50–1.50) |"
    ]  # fmt: skip
