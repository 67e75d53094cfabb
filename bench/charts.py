"""Charts as SVG text, drawn without a plotting library so that they are small, and the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10
from statistics import median

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 140, 36, 52
COLOURS = ("#1f5fa8", "#c4501b", "#2b8a4b", "#7a4fa3", "#8a6d1d", "#555555")
_STYLE = "font-family='Helvetica,Arial,sans-serif' font-size='12' fill='#222'"


@dataclass(frozen=True)
class Series:
    """Points of one colour, with its name in the legend."""

    name: str
    points: Sequence[tuple[float, float]]


def scatter(title: str, x_label: str, y_label: str, series: Sequence[Series], band: float) -> str:
    """Points on two logarithmic axes of one range, with the diagonal and a band of ± `band` around it."""
    values = [v for s in series for point in s.points for v in point]
    low, high = 10 ** (log10(min(values)) - 0.05), 10 ** (log10(max(values)) + 0.05)

    def place(value: float, start: float, length: float) -> float:
        return start + length * (log10(value) - log10(low)) / (log10(high) - log10(low))

    def x(value: float) -> float:
        return place(value, LEFT, WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return place(value, HEIGHT - BOTTOM, -(HEIGHT - TOP - BOTTOM))

    ticks = [f * 10.0**e for e in range(floor(log10(low)), ceil(log10(high)) + 1) for f in (1, 3)]
    shown = [t for t in ticks if low <= t <= high]
    corners = ((low, low * (1 + band)), (high / (1 + band), high), (high, high * (1 - band)), (low / (1 - band), low))
    parts = [_polygon([(x(a), y(b)) for a, b in corners]), _line(x(low), y(low), x(high), y(high), "#888")]
    parts += [_tick_x(x(t), _number(t)) for t in shown] + [_tick_y(y(t), _number(t)) for t in shown]
    parts += [_dots([(x(a), y(b)) for a, b in s.points], colour) for s, colour in zip(series, COLOURS, strict=False)]
    return _svg(title, x_label, y_label, parts, [s.name for s in series])


def curves(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """Lines through points on two logarithmic axes, each with a range of its own."""
    ranges_of = [[point[axis] for s in series for point in s.points] for axis in (0, 1)]
    (left, right), (low, high) = ((log10(min(own)) - 0.05, log10(max(own)) + 0.05) for own in ranges_of)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log10(value) - left) / (right - left)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (log10(value) - low) / (high - low)

    along = sorted({value for s in series for value, _ in s.points})
    up = [f * 10.0**e for e in range(floor(low), ceil(high) + 1) for f in (1, 2, 5)]
    parts = [_tick_x(x(value), _number(value)) for value in along]
    parts += [_tick_y(y(t), _number(t)) for t in up if low <= log10(t) <= high]
    for s, colour in zip(series, COLOURS, strict=False):
        placed = [(x(a), y(b)) for a, b in s.points]
        parts += [_line(*one, *other, colour, 1.5) for one, other in pairwise(placed)] + [_dots(placed, colour)]
    return _svg(title, x_label, y_label, parts, [s.name for s in series])


def strips(title: str, y_label: str, groups: Sequence[str], series: Sequence[Series], limit: float) -> str:
    """Errors in percent by group: a point's first coordinate is the index of its group; a bar marks each median.

    Errors beyond `limit` are drawn at it.
    """
    step = (WIDTH - LEFT - RIGHT) / len(groups)

    def y(value: float) -> float:
        bounded = max(-limit, min(limit, value))
        return TOP + (HEIGHT - TOP - BOTTOM) * (limit - bounded) / (2 * limit)

    parts = [_line(LEFT, y(t), WIDTH - RIGHT, y(t), "#ddd") for t in range(-int(limit), int(limit) + 1, 10)]
    parts += [_tick_y(y(t), f"{t:+d} %" if t else "0") for t in range(-int(limit), int(limit) + 1, 10)]
    parts += [_tick_x(LEFT + step * (i + 0.5), name) for i, name in enumerate(groups)]
    for number, (s, colour) in enumerate(zip(series, COLOURS, strict=False)):
        offset = step * (number + 1) / (len(series) + 1)
        parts.append(_dots([(LEFT + step * group + offset, y(error)) for group, error in s.points], colour))
        for group in range(len(groups)):
            mine = [error for index, error in s.points if index == group]
            if mine:
                middle, at = LEFT + step * group + offset, y(median(mine))
                parts.append(_line(middle - 7, at, middle + 7, at, colour, 2.5))
    return _svg(title, "", y_label, parts, [s.name for s in series])


def ranges(title: str, x_label: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Ratios by name: the least, the middle and the most of each, beside 1."""
    low, high = min(1.0, *(row[1] for row in rows)) - 0.05, max(1.0, *(row[3] for row in rows)) + 0.05
    step = (HEIGHT - TOP - BOTTOM) / len(rows)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    parts = [_line(x(1), TOP, x(1), HEIGHT - BOTTOM, "#888")]
    parts += [_tick_x(x(t / 10), f"{t / 10:g}") for t in range(ceil(low * 10), floor(high * 10) + 1)]
    for number, (name, least, middle, most) in enumerate(rows):
        y = TOP + step * (number + 0.6)
        parts += [_text(LEFT + 6, y - 12, name, "start"), _line(x(least), y, x(most), y, COLOURS[0], 2.5)]
        parts.append(_dots([(x(middle), y)], COLOURS[1]))
    return _svg(title, x_label, "", parts, [])


# ---- pieces ----


def _svg(title: str, x_label: str, y_label: str, parts: Iterable[str], names: Sequence[str]) -> str:
    frame = (
        f"<rect x='{LEFT}' y='{TOP}' width='{WIDTH - LEFT - RIGHT}' height='{HEIGHT - TOP - BOTTOM}' "
        "fill='none' stroke='#222'/>"
    )
    middle = (HEIGHT - BOTTOM + TOP) / 2
    labels = [
        _text(LEFT, 22, title, "start", "font-weight='bold'"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label),
        _text(16, middle, y_label, "middle", f"transform='rotate(-90 16 {middle:.1f})'"),
    ]
    for i, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        at = TOP + 14 + 18 * i
        labels += [_dots([(WIDTH - RIGHT + 14, at - 4)], colour), _text(WIDTH - RIGHT + 24, at, name, "start")]
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' {_STYLE}>"
    background = f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>"
    return "\n".join([head, background, *parts, frame, *labels, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {more}>{escaped}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='{colour}' stroke-width='{width}'/>"


def _polygon(points: Iterable[tuple[float, float]]) -> str:
    return f"<polygon points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in points)}' fill='#eee'/>"


def _dots(points: Iterable[tuple[float, float]], colour: str) -> str:
    circles = "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3'/>" for x, y in points)
    return f"<g fill='{colour}' fill-opacity='0.65'>{circles}</g>"


def _tick_x(x: float, label: str) -> str:
    return _line(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 5, "#222") + _text(x, HEIGHT - BOTTOM + 19, label)


def _tick_y(y: float, label: str) -> str:
    return _line(LEFT - 5, y, LEFT, y, "#222") + _text(LEFT - 9, y + 4, label, "end")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
