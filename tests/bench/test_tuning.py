"""Factors from measured collectives."""

import numpy as np
import pytest

from bench.tuning import UNTUNED, Tuning, fit_tuning

MODEL = [("small", 10.0, 0.0), ("small", 10.0, 1.0), ("large", 20.0, 100.0), ("large", 20.0, 1000.0)]
"""Choice, latency, time of the bytes."""
NAMES = [name for name, *_ in MODEL]


def predict(tuning: Tuning) -> list[float]:
    return [a * tuning.factors(name)[0] + b * tuning.factors(name)[1] for name, a, b in MODEL]


def test_without_rows_nothing_changes() -> None:
    assert UNTUNED.factors("small") == (1.0, 1.0)
    assert fit_tuning([], [], lambda tuning: []) == UNTUNED
    for factor in np.array(fit_tuning(NAMES, predict(UNTUNED), predict).factors("small")):
        assert factor == pytest.approx(1.0)


def test_the_machines_factors_hold_for_choices_without_a_row() -> None:
    tuning = Tuning((("", 2.0), ("small", 4.0)), (("", 3.0), ("small", 5.0), ("small, first", 7.0)))
    assert tuning.factors("small") == (4.0, 5.0)
    assert tuning.factors("small, first") == (4.0, 7.0)
    assert tuning.factors("small, last") == (4.0, 3.0)
    assert tuning.factors("large") == (2.0, 3.0)


def test_a_machine_that_is_slower_in_all() -> None:
    tuning = fit_tuning(NAMES, [1.2 * t for t in predict(UNTUNED)], predict)
    assert predict(tuning) == pytest.approx([1.2 * t for t in predict(UNTUNED)], rel=0.03)
    assert 1.05 < tuning.factors("unmeasured")[0] < 1.2  # drawn to 1: few measurements, and some trust in the model


def test_one_choice_that_is_slower_moves_the_others_less() -> None:
    measured = predict(UNTUNED)
    measured[2] *= 1.3
    measured[3] *= 1.3
    tuning = fit_tuning(NAMES, measured, predict)
    assert tuning.factors("large")[1] > 1.2
    assert abs(tuning.factors("small")[0] - 1) < 0.1


def test_trust_follows_from_the_measurements() -> None:
    """Many rows that agree on a factor of 3 are believed; rows that scatter about the model leave it alone."""
    rng = np.random.default_rng(0)
    names, model = ["a"] * 12, np.logspace(0, 3, 12)

    def times(tuning: Tuning) -> list[float]:
        return list(model * tuning.factors("a")[1])

    assert fit_tuning(names, list(3 * model), times).factors("a")[1] == pytest.approx(3, rel=0.02)
    scattered = model * np.exp(rng.normal(0, 0.06, 12))
    assert fit_tuning(names, list(scattered), times).factors("a")[1] == pytest.approx(1, abs=0.04)


def test_one_row_that_is_off_is_noise_before_it_is_the_machine() -> None:
    """Two rows, of which one is 15 % off: it is met by less than a third, and what was not measured hardly moves."""
    tuning = fit_tuning(NAMES[1:3], [1.15 * predict(UNTUNED)[1], predict(UNTUNED)[2]], lambda t: predict(t)[1:3])
    assert tuning.factors("small")[0] < 1.05
    assert abs(tuning.factors("unmeasured")[0] - 1) < 0.02


def test_one_row_moves_the_model_towards_it() -> None:
    tuning = fit_tuning(NAMES[:1], [13.0], lambda t: predict(t)[:1])
    assert 10.0 < predict(tuning)[0] < 13.0


@pytest.mark.parametrize(("names", "seconds"), [(["a"], [0.0]), (["a"], [-1.0]), (["a", "b"], [1.0])])
def test_times_that_are_none(names: list[str], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"expected a positive time for each of \d phases, got"):
        fit_tuning(names, seconds, lambda tuning: seconds)
