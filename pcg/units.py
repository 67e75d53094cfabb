"""Seconds and bytes as people read them: three digits and a unit, or hours and minutes.

Bytes are decimal, as on datasheets.
"""

from __future__ import annotations

from collections.abc import Sequence

_HOUR_S = 3599.5
_LEAST_S = 5e-9  # less is the rounding of sums of times


def seconds(value: float) -> str:
    """Return a time as text: `30 h 43 min`, `4.60 s`, `95.3 ms`, `12.0 µs`."""
    if value >= _HOUR_S:
        hours, minutes = divmod(round(value / 60), 60)
        return f"{hours} h {minutes} min"
    return "0" if value < _LEAST_S else _scaled(value, ((1.0, "s"), (1e-3, "ms"))) or f"{_digits(value / 1e-6)} µs"


def size(num_bytes: float) -> str:
    """Return a size as text: `65.7 GB`, `512 B`."""
    large = _scaled(num_bytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))
    return large or ("0" if num_bytes <= 0 else f"{num_bytes:.0f} B")


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return the value in the largest unit that it reaches, to three digits; "" if it reaches none."""
    return next((f"{_digits(value / scale)} {unit}" for scale, unit in units if value >= 0.9995 * scale), "")


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
