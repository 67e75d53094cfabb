"""The speed benchmark at a toy size: contenders agree, ratios and the page come out. Times are not judged here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.gpt import Size, build
from bench.rounds import STEP, quartiles, ratio, slowest_rank
from bench.search import Task, measure, section
from bench.speed import PAIRS, SINGLE, chart, check_agreement, num_parameters, one_rank, page, two_ranks
from bench.trainers import Trainer
from shardwright.cost.clusters.local import default_cluster
from shardwright.lowering.ranks.launch import run_ranks
from tests.bench.toys import toy_example
from tests.each import in_whole_grids

TINY = Size(batch=4, seq=8, vocab=32, hidden=16, heads=2, layers=1)


@in_whole_grids
def test_every_contender_trains_the_same_model() -> None:
    """`two_ranks` and `one_rank` compare each contender's loss and gradients with the single process's first."""
    both, alone = two_ranks(TINY, 2), one_rank(TINY, 2)
    assert {name for pair in PAIRS for name in (pair.ours, pair.theirs)} == both.keys()
    assert {SINGLE.ours, SINGLE.theirs} == alone.keys()
    for samples in (*both.values(), *alone.values()):
        assert samples.shape == (2, 3)
        assert (samples[:, 1] >= samples[:, 0]).all()
    text = page(TINY, 2, both, alone)
    drawn = chart(text)
    for pair in (*PAIRS, SINGLE):
        assert f"| {pair.ours} | {pair.theirs} |" in text
        assert f">{pair.ours} / {pair.theirs}<" in drawn


def trainer(loss: float, gradient: float) -> Trainer:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    return Trainer("ours", lambda: torch.tensor(loss), optimizer, lambda: {"w": torch.tensor([gradient])})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (trainer(2.0, 1.0), "ours: loss 2.000000, expected 1.000000"),
        (trainer(1.0, 1.001), "ours: the gradient of w is off by 1.0e-03"),
        (trainer(1.0, float("nan")), "ours: the gradient of w is off by nan"),
    ],
)
def test_contenders_that_disagree_are_not_timed(found: Trainer, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_agreement(found, torch.tensor(1.0), {"w": torch.tensor([1.0])})


def test_ratios_are_taken_within_a_round_of_the_slowest_ranks() -> None:
    ranks = [{"a": np.array([[1.0, 2.0], [3.0, 4.0]])}, {"a": np.array([[2.0, 1.0], [1.0, 8.0]])}]
    times = slowest_rank(ranks)["a"]
    assert times.tolist() == [[2.0, 2.0], [3.0, 8.0]]
    theirs = np.array([[1.0, 1.0], [3.0, 2.0]])
    assert ratio(times, theirs).median == pytest.approx(1.5)
    assert ratio(times, theirs, STEP).median == pytest.approx(3.0)
    assert str(quartiles([1.0, 2.0, 3.0])) == "2.00 (1.50–2.50)"


def test_the_number_of_parameters_on_the_page_is_right() -> None:
    assert num_parameters(TINY) == sum(p.numel() for p in build(TINY).parameters())


def test_planning_is_timed_by_stage() -> None:
    task = Task("toy", toy_example, lambda: default_cluster(2), 5.0)
    (timing,) = run_ranks(measure, 1, args=(task,))
    assert timing.num_nodes > 0
    assert 0 < timing.plan_s <= timing.after_capture_s
    assert timing.gap >= 0
    assert "| toy | " in section([(task, timing)])
