"""The page of local predictions."""

from __future__ import annotations

import pytest

from bench.zoo_page import Calibration, Row, page, section


def row(model: str, predicted_s: float, measured_s: float, plan: str = "searched", ranks: int = 1) -> Row:
    return Row(
        model=model,
        plan_name=plan,
        num_ranks=ranks,
        predicted_alone_s=predicted_s * 2,
        alone_s=measured_s * 1.6,
        predicted_s=predicted_s,
        predicted_noise=0.05,
        measured_s=measured_s,
        measured_noise=0.03,
        cpu_s=measured_s / 2,
        predicted_bytes=90,
        measured_bytes=100,
    )


def test_errors_are_of_what_was_predicted() -> None:
    one = row("mlp", 1.2e-3, 1e-3)
    assert one.time_error == pytest.approx(0.2)
    assert one.cpu_error == pytest.approx(1.4)
    assert one.memory_error == pytest.approx(-0.1)
    assert one.error_alone == pytest.approx(0.5)


def test_the_page_has_medians_and_the_worst_first() -> None:
    rows = [row("mlp", 1.1e-3, 1e-3), row("gpt", 0.4e-3, 1e-3, "data")]
    text = section(rows, Calibration(1, "measured then", -0.25))
    assert "Median error, searched plans: 37.5% of a step alone; 10.0% as calibrated between the steps (120.0%" in text
    assert "(120.0% of CPU time); 10.0% of memory." in text
    assert "Median error, all: 43.8% of a step alone; 35.0%" in text
    assert text.index("| gpt | data |") < text.index("| mlp | searched |")
    assert "| 1.60 ms | +38% | 1.10 ms | 5% | 1.00 ms | 3% | +10% | 0.50 ms | +120% |" in text
    assert "Drift: the loop took -25% while" in text
    calibrations = [Calibration(1, "measured", 0.0), Calibration(2, "measured too", 0.1)]
    facts = {"passes": 6, "visits": 5, "steps": 3, "rounds": 3, "alone": 30, "memory": 15}
    whole = page([*rows, row("mlp", 1.0, 1.0, ranks=2)], calibrations, 9.4, facts)
    assert "## 1 rank\n" in whole
    assert "## 2 ranks\n" in whole
    assert "within 44 % at the median, in single cases from -50 % to +38 %, and its memory within 10 %." in whole
    assert "9 processes" in whole.replace("\n", " ")
    assert "The calibrations before and after: measured too." in whole
