"""The encodings that a request allows: the words for them, and the ways that the words leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from shardwright.pcg import checks
from shardwright.pcg.encodings import CARRIED, ENCODINGS, Encodings, canonical, carried, row_of

EXACT, AUTO = "exact", "auto"
"""The words for values as they are, and for all encodings."""
Allowed = tuple[tuple[str, tuple[str, ...]], ...]
"""For each of `CARRIED`, what may be chosen: encodings by name, or `EXACT`."""
EncodingsLike = str | list[str] | tuple[str, ...] | Mapping[str, str | list[str] | tuple[str, ...] | None]
"""What a request says. "auto" allows all encodings; a name, or several, allow these, for all that they carry. A mapping
says it for weights and for gradients: what is sent in any case, or what may be chosen; the rest is exact."""


def allowed(given: object) -> Allowed:
    """Return what an `EncodingsLike` allows. Raises `FieldError` for what is none, or names what it cannot."""
    if isinstance(given, tuple) and given and isinstance(given[0], tuple):  # what this returned
        given = dict(given)
    if isinstance(given, Mapping):
        chosen = {carried(what, ""): _choices(str(what), names) for what, names in given.items()}
        return tuple((what, chosen.get(what, (EXACT,))) for what in CARRIED)
    names = tuple(ENCODINGS) if given == AUTO else (given,) if isinstance(given, str) else given
    if not isinstance(names, (tuple, list)) or not names:
        problem = f"expected '{AUTO}', names, or encodings of weights and of gradients, got {given!r}"
        raise checks.FieldError("", "encodings", problem)
    for name in names:
        checks.choice(name, "", "encodings", ENCODINGS)
    rows = [row for row in ENCODINGS.values() if row.name in names]
    return tuple((what, (EXACT, *(row.name for row in rows if what in row.carries))) for what in CARRIED)


def _choices(what: str, names: object) -> tuple[str, ...]:
    several = (names,) if isinstance(names, str) or names is None else names
    if not isinstance(several, (tuple, list)) or not several:
        raise checks.FieldError("", "encodings", f"expected an encoding of {what}, or several, got {names!r}")
    return tuple(EXACT if name in (None, EXACT) else row_of(what, name, "").name for name in several)


def combinations(of: Allowed) -> Iterator[Encodings]:
    """Yield every way to send what a request allows."""
    for names in product(*(names_of_choice for _, names_of_choice in of)):
        pairs = zip((what for what, _ in of), names, strict=True)
        yield canonical([(what, name) for what, name in pairs if name != EXACT], "")


def parse(text: str) -> EncodingsLike:
    """Return what `auto`, `int8,int4` or `weights=int8,gradients=int4` says; of one kind, several joined by `|`."""
    parts = text.split(",")
    if not any("=" in part for part in parts):
        return text if text == AUTO else parts
    pairs = [part.partition("=") for part in parts]
    return {what: names.split("|") for what, _, names in pairs}


def shown(of: Allowed) -> str:
    """Return the text that `parse` reads."""
    return ",".join(f"{what}={'|'.join(names)}" for what, names in of)
