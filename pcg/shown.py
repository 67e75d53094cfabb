"""The band that the values of a mask show: differences of its last two indices, queries and keys.

A buffer or a constant may be a mask, or what a mask is made of. Capture reads its values and writes on the leaf what
they show (`SHOWS`). A graph has no values, so a program compares them with its leaf before every step.

    shows    where a value is true, or more than the least numbers
    hides    where a truth value is false
    finite   True: a hidden number may be large and negative in place of -inf

A large negative number hides a key from a query that sees another one: its weight is 0 to the last bit, as
exp(-1e29) is. A query that sees no other key weighs all hidden keys. So every query i must see key i.
"""

from __future__ import annotations

import numpy as np

from shardwright.pcg.attrs import Attrs, integers
from shardwright.pcg.bounds import ALL, NONE, Band, Bound, Truth

SHOWS, HIDES, FINITE = "shows", "hides", "finite"
READ = (SHOWS, HIDES, FINITE)
"""The attributes of a leaf that say what its values show; they are no part of what the graph computes."""
LEAST = -1e29
"""Numbers up to this one hide keys: no score is of their size. The least number of float16 is none of them."""


def band_of(visible: np.ndarray, start: int = 0) -> Band:
    """Return the differences k - q + `start` of all q, k at which some of [..., q, k] is true."""
    pairs = np.asarray(visible.reshape(-1, *visible.shape[-2:]).any(0))
    rows = np.flatnonzero(pairs.any(-1))
    if not len(rows):
        return NONE
    first, last = pairs[rows].argmax(-1), pairs.shape[-1] - 1 - pairs[rows, ::-1].argmax(-1)
    return Band(int((first - rows).min()) + start, int((last - rows).max()) + start)


def read_from(visible: np.ndarray, *, finite: bool | None) -> dict[str, tuple[int, ...] | bool]:
    """Return the attributes that say what a mask [..., q, k] shows; none, if it hides nothing outside of a band.

    Args:
        visible: truth values, or where numbers are more than `LEAST`.
        finite: some number that is not visible is no -inf; None: the mask has truth values.
    """
    rows, columns = visible.shape[-2:]
    everywhere, shows = Band(1 - rows, columns - 1), band_of(visible)
    if finite is None:
        hides = band_of(~visible)
        return {} if shows == everywhere == hides else {SHOWS: _ends(shows), HIDES: _ends(hides)}
    if shows == everywhere or (finite and not _sees_itself(visible)):
        return {}
    return {SHOWS: _ends(shows), **({FINITE: True} if finite else {})}


def _ends(band: Band) -> tuple[int, int]:
    return (1, 0) if band.is_empty else (int(band.first), int(band.last))


def _sees_itself(values: np.ndarray) -> bool:
    rows, columns = values.shape[-2:]
    return rows <= columns and bool(np.diagonal(values, axis1=-2, axis2=-1).all())


def bound_of(attrs: Attrs, queries: int, keys: int, *, unchanged: bool) -> Bound | None:
    """Return the bound of a leaf, of which a mask's query 0 and key 0 have these indices; None: nothing is known.

    `unchanged`: each query of the mask sees all that the leaf shows it, and its key of the same number.
    """
    if SHOWS not in attrs or (attrs.get(FINITE) and not (unchanged and queries == keys)):
        return None
    shown, hidden = (_moved(attrs, name, queries - keys) for name in (SHOWS, HIDES))
    return Truth(shown, hidden) if HIDES in attrs else shown


def _moved(attrs: Attrs, name: str, by: int) -> Band:
    if name not in attrs:
        return ALL
    first, last = integers(attrs, name)
    return NONE if first > last else Band(first + by, last + by)
