"""Statistics of predictions, on runs whose right answer is plain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.decoders import DECODERS
from bench.judging import Order, Predicted, by_group, constant_mfu, errors, misordered, order, said_to_fit
from bench.published import Run, fitted, llm_foundry

RUN = Run("t", "125m", "h100", 8, 512, 4, 2, "bf16", False, "FULL_SHARD", (1000.0,))


def rows(*pairs: tuple[float, float]) -> list[Predicted]:
    """Runs of these published throughputs per GPU, with these predicted ones."""
    runs = [replace(RUN, published=(published,)) for published, _ in pairs]
    return [Predicted(run, run.step_s * p / q) for run, (p, q) in zip(runs, pairs, strict=True)]


def test_errors_are_relative_to_what_was_published() -> None:
    found = errors([Predicted(RUN, RUN.step_s * x) for x in (0.9, 1.0, 1.05, 1.2, 1.3)])
    assert found.count == 5
    assert (found.median, found.bias, found.worst) == pytest.approx((0.1, 0.05, 0.3))
    assert found.ninetieth == pytest.approx(0.26)


def test_no_rows() -> None:
    with pytest.raises(ValueError, match="errors: the group has no rows; leave it out"):
        errors([])


def test_throughput_is_the_inverse_of_the_step() -> None:
    assert Predicted(RUN, RUN.step_s / 2).tokens_per_s_gpu == pytest.approx(2000)


def test_order_counts_pairs_that_differ_enough() -> None:
    assert order(rows((100, 50), (104, 40))) == Order(0, 0)  # 4 % apart
    assert order(rows((100, 50), (110, 60))) == Order(1, 1)
    assert order(rows((100, 60), (110, 50))) == Order(1, 0)
    assert order(rows((100, 50), (110, 50))).right == 0  # a tie is not an order
    assert order(rows((100, 1), (200, 2), (300, 1.5))) == Order(3, 2)
    assert Order(0, 0).share == 1.0


def test_pairs_in_the_wrong_order_are_those_that_order_does_not_count() -> None:
    slow, middle, fast = rows((100, 1), (200, 2), (300, 1.5))
    assert misordered([slow, middle, fast]) == [(fast, middle)]
    assert misordered(rows((100, 50), (110, 50))) != []
    assert misordered(rows((100, 50), (104, 40), (120, 60))) == []


def test_what_uses_the_last_tenth_of_the_memory_is_not_said_to_fit() -> None:
    full = [replace(row, memory=share) for row, share in zip(rows((1, 1), (2, 2)), (0.9, 0.91), strict=True)]
    assert said_to_fit(full) == full[:1]


def test_order_keeps_to_one_model_gpu_and_sequence() -> None:
    a, b = rows((100, 50), (200, 10))
    for other in ({"model": "1b"}, {"gpu": "a100-40"}, {"seq": 1024}):
        assert order([a, replace(b, run=replace(b.run, **other))]).pairs == 0


def test_groups_keep_every_row() -> None:
    groups = by_group(rows((1, 1), (2, 2), (1, 3)), lambda run: run.published)
    assert [len(g) for g in groups.values()] == [2, 1]


def test_constant_mfu_is_right_where_rates_are_equal() -> None:
    """The median rate of the fitted rows, so a table of one rate is predicted exactly."""
    decoder = DECODERS["125m"]
    runs = [replace(RUN, num_gpus=n, microbatch=m) for n, m in ((8, 4), (16, 4), (8, 8))]
    rate = 1e14
    times = [decoder.model_flops(r.seq, r.tokens_per_step) / r.num_gpus / rate for r in runs]
    runs = [replace(r, published=(r.tokens_per_step / t / r.num_gpus,)) for r, t in zip(runs, times, strict=True)]
    found = constant_mfu(runs, frozenset({runs[0].name}), lambda run: decoder)
    assert [row.error for row in found] == pytest.approx([0, 0, 0])
    assert [row.fitted for row in found] == [True, False, False]


def test_constant_mfu_reproduces_the_tables_own_mfu() -> None:
    """MFU as llm-foundry counts it: 41.25 % of 989 TFLOP/s for the first row."""
    (run,) = (r for r in llm_foundry() if r.model == "70b" and r.num_gpus == 512)
    flops = DECODERS["70b"].model_flops(run.seq, run.tokens_per_step)
    assert flops / run.num_gpus / run.step_s / 989e12 == pytest.approx(0.4125, abs=5e-4)


def test_constant_mfu_needs_a_fitted_row_of_each_gpu() -> None:
    runs = llm_foundry()
    names = frozenset(n for n in fitted(runs, 0) if not n.startswith("h100"))
    with pytest.raises(ValueError, match="constant_mfu: no row of h100 is fitted; choose another offset"):
        constant_mfu(runs, names, lambda run: DECODERS[run.model])
