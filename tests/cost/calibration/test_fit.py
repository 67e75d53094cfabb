"""Fitting lines to measurements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from shardwright.cost.calibration.fit import fit_line

SIZES = [2.0**12, 2.0**16, 2.0**20, 2.0**24]


def test_an_exact_line_is_found() -> None:
    fit = fit_line(SIZES, [3e-4 + 1e-9 * size for size in SIZES])
    assert (fit.latency_s, fit.s_per_byte) == (pytest.approx(3e-4), pytest.approx(1e-9))
    assert fit.worst_error < 1e-9


@given(st.lists(st.floats(1e-6, 1), min_size=4, max_size=4))
def test_no_coefficient_is_negative_and_none_fits_better(times: list[float]) -> None:
    fit = fit_line(SIZES, times)
    columns = np.stack([1 / np.array(times), np.array(SIZES) / np.array(times)], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    _, best = nnls(columns / scale, np.ones(4))
    error = np.linalg.norm(columns @ [fit.latency_s, fit.s_per_byte] - 1)
    assert fit.latency_s >= 0
    assert fit.s_per_byte >= 0
    assert error == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert fit.median_error <= fit.worst_error


@pytest.mark.parametrize(("sizes", "times"), [([1.0], [1.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0, 0.0])])
def test_too_little_to_fit(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ValueError, match="expected positive times at two or more sizes"):
        fit_line(sizes, times)
