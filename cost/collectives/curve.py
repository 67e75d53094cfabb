"""Curves of time over size, as chains of straight pieces: one piece per algorithm, protocol or measured range."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class CostLine(NamedTuple):
    """The line latency_s + s_per_byte · bytes."""

    latency_s: float
    s_per_byte: float

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * num_bytes


class CurvePiece(NamedTuple):
    """A piece of a curve: `line` counts from `start_bytes` on; `name` says which algorithm or range it is."""

    start_bytes: float
    line: CostLine
    name: str = ""


@dataclass(frozen=True)
class Curve:
    """Pieces in the order of their starts, the first at 0 bytes."""

    pieces: tuple[CurvePiece, ...]

    def time_s(self, num_bytes: float) -> float:
        """Return the seconds for `num_bytes`."""
        return self.at(num_bytes).line.time_s(num_bytes)

    def at(self, num_bytes: float) -> CurvePiece:
        """Return the piece that holds at `num_bytes`."""
        return self.pieces[bisect_right(self._starts, num_bytes) - 1]

    def least_s_per_byte(self, least: float, most: float) -> float:
        """Return the least seconds per byte of messages of `least` to `most` bytes, at an end of some piece."""
        at_ends = list[float]()
        for start, end in intervals(self._starts):
            line, first, last = self.at(start).line, max(start, least), min(end, most)
            at_ends += [line.time_s(x) / x for x in (first, last) if first <= last and x > 0]
        return min(at_ends, default=0.0)

    @cached_property
    def _starts(self) -> list[float]:
        return [piece.start_bytes for piece in self.pieces]


def straight(line: CostLine, name: str = "") -> Curve:
    """Return a curve of one piece."""
    return Curve((CurvePiece(0.0, line, name),))


def lowest(named: Sequence[tuple[str, CostLine]]) -> Curve:
    """Return the least of several lines at every size."""
    return _envelope(named, least_of)


def highest(named: Sequence[tuple[str, CostLine]]) -> Curve:
    """Return the greatest of several lines at every size."""
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
    """Return (start, end) of each of the neighbouring intervals that begin at `starts`."""
    return list(zip(starts, [*starts[1:], end], strict=True))


def least_of(lines: Sequence[CostLine], start: float, end: float) -> int:
    """Return the index of the least line from `start` to `end`; no lines may cross between them.

    At large sizes, rounding hides the difference between parallel lines, so ties are decided by latency.
    """
    inside = (start + end) / 2 if end < float("inf") else 2 * start + 1
    return min(range(len(lines)), key=lambda i: (lines[i].time_s(inside), lines[i].latency_s))


def crossings(lines: Sequence[CostLine]) -> list[float]:
    """Return the sizes above zero at which two of the lines meet."""
    return [
        (b.latency_s - a.latency_s) / (a.s_per_byte - b.s_per_byte)
        for i, a in enumerate(lines)
        for b in lines[:i]
        if (a.s_per_byte - b.s_per_byte) * (b.latency_s - a.latency_s) > 0
    ]


def rising(pieces: Sequence[CurvePiece]) -> Curve:
    """Return the curve through `pieces` made to never fall: a piece that starts below the last one's end waits.

    Equal neighbours become one piece.
    """
    pieces_in_order: list[CurvePiece] = []
    for index, piece in enumerate(pieces):
        start, line, name = piece
        if pieces_in_order:
            reached = pieces_in_order[-1].line.time_s(start)
            if line.time_s(start) < reached * (1 - 1e-12):
                end = pieces[index + 1].start_bytes if index + 1 < len(pieces) else float("inf")
                _append(pieces_in_order, CurvePiece(start, CostLine(reached, 0.0), name))
                start = (reached - line.latency_s) / line.s_per_byte if line.s_per_byte > 0 else end
                if start >= end:
                    continue
        _append(pieces_in_order, CurvePiece(start, line, name))
    return Curve(tuple(pieces_in_order))


def _append(pieces: list[CurvePiece], piece: CurvePiece) -> None:
    if not pieces or pieces[-1][1:] != piece[1:]:
        pieces.append(piece)
