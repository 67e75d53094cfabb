"""Curves of straight pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwright.cost.collectives.curve import CostLine, Curve, CurvePiece, highest, lowest, rising, straight

lines = st.lists(st.builds(CostLine, st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6)
sizes = st.floats(0, 1e4)


def named(found: list[CostLine]) -> list[tuple[str, CostLine]]:
    return [(str(i), line) for i, line in enumerate(found)]


@example(
    [CostLine(0.0, 1.0), CostLine(0.0, 1e-38), CostLine(1.0, 1.0), CostLine(0.5, 0.0)], 1.0
)  # two of them meet at 5e37
@given(lines, sizes)
def test_envelopes(found: list[CostLine], num_bytes: float) -> None:
    times = [line.time_s(num_bytes) for line in found]
    assert lowest(named(found)).time_s(num_bytes) == pytest.approx(min(times), abs=1e-9)
    assert highest(named(found)).time_s(num_bytes) == pytest.approx(max(times), abs=1e-9)


pieces = st.lists(st.tuples(st.floats(1, 1e4), st.builds(CostLine, st.floats(0, 1), st.floats(0, 1))), max_size=6)


@given(pieces, st.builds(CostLine, st.floats(0, 1), st.floats(0, 1)), sizes, sizes)
def test_curves_never_fall_and_lie_no_lower_than_their_pieces(
    found: list[tuple[float, CostLine]], first: CostLine, a: float, b: float
) -> None:
    chain = [CurvePiece(0.0, first), *(CurvePiece(start, line) for start, line in sorted(dict(found).items()))]
    curve = rising(chain)
    fewer, more = (curve.time_s(x) for x in sorted([a, b]))
    assert fewer <= more * (1 + 1e-9) + 1e-12
    assert curve.time_s(a) >= Curve(tuple(chain)).time_s(a) * (1 - 1e-9)


def test_a_piece_that_starts_too_low_waits() -> None:
    curve = rising([CurvePiece(0.0, CostLine(0.0, 1.0), "slow"), CurvePiece(10.0, CostLine(0.0, 0.5), "fast")])
    assert [curve.time_s(x) for x in (5.0, 10.0, 15.0, 20.0, 30.0)] == [5.0, 10.0, 10.0, 10.0, 15.0]
    assert [curve.at(x).name for x in (5.0, 10.0, 30.0)] == ["slow", "fast", "fast"]


def test_equal_neighbours_are_one_piece() -> None:
    assert len(rising([CurvePiece(0.0, CostLine(1.0, 1.0)), CurvePiece(5.0, CostLine(1.0, 1.0))]).pieces) == 1


def test_straight() -> None:
    assert straight(CostLine(1.0, 2.0), "one").pieces == (CurvePiece(0.0, CostLine(1.0, 2.0), "one"),)
