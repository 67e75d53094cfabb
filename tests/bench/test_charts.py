"""Charts: well-formed SVG, every point drawn, and in the right place."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from bench.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, curves, ranges, scatter, strips

SVG = "{http://www.w3.org/2000/svg}"


def dots(text: str, series: int) -> list[tuple[float, float]]:
    """The centres of the points of a series; the groups of the legend come after those of the data."""
    groups = ET.fromstring(text).findall(f"{SVG}g")
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in groups[series].findall(f"{SVG}circle")]


def test_scatter_draws_every_point_where_it_belongs() -> None:
    text = scatter(
        "a < b & c", "x", "y", [Series("one", [(1, 1), (100, 100), (10, 100)]), Series("two", [(5, 2)])], 0.1
    )
    (ax, ay), (bx, by), (cx, cy) = dots(text, 0)
    assert LEFT < ax < cx < bx < WIDTH - RIGHT
    assert TOP < by == cy < ay < HEIGHT - BOTTOM
    assert cx == pytest.approx((ax + bx) / 2, abs=0.1)  # logarithmic
    assert len(dots(text, 1)) == 1
    assert "a &lt; b &amp; c" in text
    labels = {t.text for t in ET.fromstring(text).findall(f"{SVG}text")}
    assert {"x", "y", "one", "two", "1", "100"} <= labels


def test_curves_join_their_points_on_axes_of_their_own() -> None:
    text = curves("t", "layers", "seconds", [Series("one", [(8, 1), (16, 2), (32, 4)]), Series("two", [(8, 400)])])
    (ax, ay), (bx, by), (cx, cy) = dots(text, 0)
    assert bx == pytest.approx((ax + cx) / 2, abs=0.1)
    assert by == pytest.approx((ay + cy) / 2, abs=0.1)
    assert dots(text, 1)[0][1] < cy < ay
    lines = [line for line in ET.fromstring(text).findall(f"{SVG}line") if line.attrib["stroke-width"] == "1.5"]
    assert len(lines) == 2  # a single point has none
    labels = {t.text for t in ET.fromstring(text).findall(f"{SVG}text")}
    assert {"8", "16", "32", "1", "200", "layers", "seconds"} <= labels


def test_strips_bound_errors_and_mark_medians() -> None:
    text = strips("t", "error", ["small", "large"], [Series("h100", [(0, -5), (0, 10), (1, 400)])], limit=30)
    (a, b, c) = dots(text, 0)
    assert a[0] == b[0] < c[0]
    assert b[1] < a[1]
    assert c[1] == pytest.approx(TOP)
    zero = TOP + (HEIGHT - TOP - BOTTOM) / 2
    bars = [e for e in ET.fromstring(text).findall(f"{SVG}line") if e.attrib["stroke-width"] == "2.5"]
    assert len(bars) == 2  # one per group that has points
    assert float(bars[0].attrib["y1"]) == pytest.approx(zero - 2.5 / 60 * (HEIGHT - TOP - BOTTOM), abs=0.1)


def test_ranges_lie_beside_one() -> None:
    text = ranges("t", "ratio", [("fast", 0.7, 0.8, 0.9), ("slow", 1.1, 1.2, 1.3)])
    lines = ET.fromstring(text).findall(f"{SVG}line")
    (one,) = [line for line in lines if line.attrib["stroke"] == "#888"]
    spans = [line for line in lines if line.attrib["stroke-width"] == "2.5"]
    ((fast, _),), ((slow, _),) = dots(text, 0), dots(text, 1)
    middle = float(one.attrib["x1"])
    assert LEFT < float(spans[0].attrib["x1"]) < fast < float(spans[0].attrib["x2"]) < middle
    assert middle < float(spans[1].attrib["x1"]) < slow < float(spans[1].attrib["x2"]) < WIDTH - RIGHT


def test_charts_are_the_same_every_time() -> None:
    series = [Series("s", [(3, 4), (30, 50)])]
    assert scatter("t", "x", "y", series, 0.1) == scatter("t", "x", "y", series, 0.1)
