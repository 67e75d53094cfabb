"""Several shapes behind one module, planned together, and the few lengths to which sequences are best padded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

import shardwright as sw
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import BatchError, PlanError
from tests.each import each
from tests.shardwright.test_programs import Call, batch_of, memory, model_of, trained

CALLS = [Call(8, 6), Call(8, 10), Call(8, 6)]
LENGTHS = [3, 3, 4, 7, 7, 7, 9, 15, 16, 16]


def least_padding(lengths: Sequence[int], most: int) -> int:
    """The fewest tokens of padding of all choices of bounds."""
    distinct = sorted(set(lengths))
    ways = combinations(distinct[:-1], most - 1)
    return min(sum(min(b for b in (*way, distinct[-1]) if b >= n) - n for n in lengths) for way in ways)


@each("lengths", [LENGTHS, [5], [8, 8, 8], list(range(1, 14)), [1, 1, 1, 1, 9, 10, 100]])
def test_buckets_have_the_least_padding(lengths: list[int]) -> None:
    best = sw.bucket(lengths, most=4)
    for buckets in (*best.fewer, best):
        padding = sum(bucket.num_padded for bucket in buckets)
        assert padding == least_padding(lengths, len(buckets)) == sum(map(buckets.bound_of, lengths)) - sum(lengths)
    assert [len(own) for own in (*best.fewer, best)] == list(range(1, min(4, len(set(lengths))) + 1))


def test_bounds_are_multiples_and_what_is_saved_is_said() -> None:
    best = sw.bucket(LENGTHS, most=2, multiple=8)
    assert best.bounds == (8, 16)
    assert best.padding == pytest.approx(1 - 87 / (6 * 8 + 4 * 16))
    assert str(best).splitlines()[:2] == [
        "1 bucket   padded to 16: 73 tokens of padding, 45.6% of all",
        "2 buckets  padded to 8, 16: 25 tokens of padding, 22.3% of all",
    ]


@each(
    "given",
    [{"lengths": []}, {"lengths": [0, 3]}, {"lengths": [3], "most": 0}, {"lengths": [3], "multiple": 0}],
)
def test_no_buckets(given: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match="expected lengths of 1 or more"):
        sw.bucket(**given)


def test_a_sequence_that_no_bucket_takes_is_refused() -> None:
    with pytest.raises(BatchError, match=r"17 tokens is longer than all buckets, \[16\]"):
        sw.bucket(LENGTHS, 1).bound_of(17)


def test_shapes_are_planned_together_and_buckets_have_their_times() -> None:
    def body() -> tuple[list[float], list[str], bool, str, list[float]]:
        told, model = list[str](), model_of(norm=False)
        shapes = [(batch_of(8, 6), 0.75), (batch_of(8, 10), 0.25)]
        parallel = sw.compile(
            model, sw.Cluster.local(2), shapes=shapes, mesh={"x": 2}, progress=told.append, timeout_s=60
        )
        told.clear()
        before = memory(parallel)
        losses = trained(parallel, CALLS).losses
        captured, same = [text for text in told if text.startswith("capturing")], memory(parallel) == before
        buckets = sw.bucket([3, 4, 6, 6, 9, 10], 2, parallel=parallel)
        return losses, captured, same, str(buckets), [bucket.step_s or 0.0 for bucket in buckets]

    expected = trained(model_of(norm=False), CALLS).losses
    for losses, captured, same, text, times in run_ranks(body, 2, 120):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert (captured, same) == ([], True)
        assert "an epoch takes" in text
        assert text.count("a step") == 2
        assert 0 < times[0] <= times[1]


@each(
    "shapes, words",
    [
        ([], "expected at least one batch"),
        ([(batch_of(8, 6), 0)], "positive weight, got dict and 0"),
        ([batch_of(8, 6)], "expected a batch by argument name and a positive weight"),
        ([(3, 1.0)], "got int and 1.0"),
    ],
)
def test_shapes_without_weights_are_refused(shapes: list[Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        sw.compile(model_of(), sw.Cluster.local(1), shapes=shapes)


def test_shapes_beside_a_batch_are_refused() -> None:
    batch = batch_of(8, 6)
    with pytest.raises(PlanError, match="leave out args, kwargs and plan"):
        sw.compile(model_of(), sw.Cluster.local(1), kwargs=batch, shapes=[(batch, 1.0)])
