"""Numbers as people read them: three digits and a unit. Bytes are decimal, as on datasheets."""

from __future__ import annotations

_LEAST_S = 5e-9  # less is the rounding of sums of times


def seconds(value: float) -> str:
    """`4.60 s`, `95.3 ms`, `12.0 µs`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= 0.9995 * scale:
            return f"{_digits(value / scale)} {unit}"
    return "0" if value < _LEAST_S else f"{_digits(value / 1e-6)} µs"


def size(num_bytes: float) -> str:
    """`65.7 GB`, `512 B`."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * scale:
            return f"{_digits(num_bytes / scale)} {unit}"
    return "0" if num_bytes <= 0 else f"{num_bytes:.0f} B"


def count(value: int) -> str:
    """`10.8 M` for parameters and the like."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:
            return f"{_digits(value / scale)} {unit}"
    return str(value)


def percent(share: float) -> str:
    """`98 %`, `0.3 %`; a small share is never shown as none, nor a large one as all."""
    value = 100 * share
    if value <= 0:
        return "0 %"
    if value < 0.1:
        return "under 0.1 %"
    if 99.9 < value < 100:
        return "over 99.9 %"
    return f"{value:.1f} %" if value < 9.95 or 99 < value < 100 else f"{value:.0f} %"


def bar(share: float) -> str:
    """Thirty blocks for all of it."""
    return "█" * round(30 * share)


def plural(number: int, singular: str, plural_form: str = "") -> str:
    """`1 mesh`, `6 meshes`."""
    return f"{number} {singular if number == 1 else plural_form or singular + 's'}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
