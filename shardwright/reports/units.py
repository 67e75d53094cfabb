"""Numbers as people read them; seconds and bytes have the same form as in the rest of the package."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.pcg.units import seconds, size

__all__ = ["bar", "percent", "plural", "ranges", "seconds", "shape", "size", "times"]


def percent(share: float) -> str:
    """Return a share in percent, `98 %`, `0.3 %`; a small share is never shown as none, nor a large one as all."""
    value = 100 * share
    if value <= 0:
        return "0 %"
    if value < 0.1:
        return "under 0.1 %"
    if 99.9 < value < 100:
        return "over 99.9 %"
    return f"{value:.1f} %" if value < 9.95 or 99 < value < 100 else f"{value:.0f} %"


def shape(sizes: Sequence[int]) -> str:
    """Return a shape, `64 × 4096`, or "a number" where there is no dimension."""
    return " × ".join(map(str, sizes)) or "a number"


def times(factor: float) -> str:
    """Return a factor: `2.1 ×`, `154 ×`."""
    return f"{factor:.1f} ×" if factor < 99.95 else f"{factor:.0f} ×"


def bar(share: float) -> str:
    """Return a bar of blocks, thirty for all."""
    return "█" * round(30 * share)


def plural(number: int, singular: str, plural_form: str = "") -> str:
    """Return a number with its noun: `1 mesh`, `6 meshes`."""
    return f"{number} {singular if number == 1 else plural_form or singular + 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers with ranges: `0–3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
