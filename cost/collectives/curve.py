"""Time over size as a chain of straight pieces: one piece per algorithm, protocol or measured range."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class CostLine(NamedTuple):
    """latency_s + s_per_byte · bytes."""

    latency_s: float
    s_per_byte: float

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * num_bytes


class CurvePiece(NamedTuple):
    """From `start_bytes` on, `line` counts; `name` says which choice it is."""

    start_bytes: float
    line: CostLine
    name: str = ""


@dataclass(frozen=True)
class Curve:
    """Pieces in the order of their starts, the first at 0 bytes."""

    pieces: tuple[CurvePiece, ...]

    def time_s(self, num_bytes: float) -> float:
        """Seconds for `num_bytes`."""
        return self.at(num_bytes).line.time_s(num_bytes)

    def at(self, num_bytes: float) -> CurvePiece:
        """The piece that holds at `num_bytes`."""
        return self.pieces[bisect_right(self._starts, num_bytes) - 1]

    def least_s_per_byte(self, least: float, most: float) -> float:
        """No message of that many bytes takes less for each of them: on a piece, the least is at one of its ends."""
        found = list[float]()
        for start, end in intervals(self._starts):
            line, first, last = self.at(start).line, max(start, least), min(end, most)
            found += [line.time_s(x) / x for x in (first, last) if first <= last and x > 0]
        return min(found, default=0.0)

    @cached_property
    def _starts(self) -> list[float]:
        return [piece.start_bytes for piece in self.pieces]


def straight(line: CostLine, name: str = "") -> Curve:
    """A curve of one piece."""
    return Curve((CurvePiece(0.0, line, name),))


def lowest(named: Sequence[tuple[str, CostLine]]) -> Curve:
    """The least of several lines at every size."""
    return _envelope(named, least_of)


def highest(named: Sequence[tuple[str, CostLine]]) -> Curve:
    """The greatest of several lines at every size."""
    return _envelope(named, lambda lines, start, end: least_of([CostLine(-a, -b) for a, b in lines], start, end))


def _envelope(
    named: Sequence[tuple[str, CostLine]], chosen: Callable[[Sequence[CostLine], float, float], int]
) -> Curve:
    lines = [line for _, line in named]
    pieces: list[CurvePiece] = []
    for start, end in intervals([0.0, *sorted(set(crossings(lines)))]):
        name, line = named[chosen(lines, start, end)]
        pieces.append(CurvePiece(start, line, name))
    return rising(pieces)


def intervals(starts: Sequence[float], end: float = float("inf")) -> list[tuple[float, float]]:
    """(start, end) of each of the neighbouring intervals that begin at `starts`."""
    return list(zip(starts, [*starts[1:], end], strict=True))


def least_of(lines: Sequence[CostLine], start: float, end: float) -> int:
    """Which line is the least from `start` to `end`, between which none of them cross.

    Far out, rounding hides what parallel lines differ by: their latencies say it.
    """
    inside = (start + end) / 2 if end < float("inf") else 2 * start + 1
    return min(range(len(lines)), key=lambda i: (lines[i].time_s(inside), lines[i].latency_s))


def crossings(lines: Sequence[CostLine]) -> list[float]:
    """The sizes above zero at which two of the lines meet."""
    return [
        (b.latency_s - a.latency_s) / (a.s_per_byte - b.s_per_byte)
        for i, a in enumerate(lines)
        for b in lines[:i]
        if (a.s_per_byte - b.s_per_byte) * (b.latency_s - a.latency_s) > 0
    ]


def rising(pieces: Sequence[CurvePiece]) -> Curve:
    """The curve through `pieces` made to never fall: where a choice starts below the last one's end, it waits.

    Equal neighbours become one piece.
    """
    kept: list[CurvePiece] = []
    for index, piece in enumerate(pieces):
        start, line, name = piece
        if kept:
            reached = kept[-1].line.time_s(start)
            if line.time_s(start) < reached * (1 - 1e-12):
                end = pieces[index + 1].start_bytes if index + 1 < len(pieces) else float("inf")
                _append(kept, CurvePiece(start, CostLine(reached, 0.0), name))
                start = (reached - line.latency_s) / line.s_per_byte if line.s_per_byte > 0 else end
                if start >= end:
                    continue
        _append(kept, CurvePiece(start, line, name))
    return Curve(tuple(kept))


def _append(kept: list[CurvePiece], piece: CurvePiece) -> None:
    if not kept or kept[-1][1:] != piece[1:]:
        kept.append(piece)
