"""Requests for recomputation and offload: kinds, patterns of blocks, and lists of places in them.

Both are fields of an execution that have the same form: a kind for the whole model, or a mapping by block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import translate
from functools import lru_cache
from typing import Literal, NamedTuple

from shardwright.pcg import checks

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
BlockRecompute = Recompute | tuple[str, ...]
"""The recomputation of a block: a kind, or the places (`pcg.step.places`) of operations, by name or pattern."""
RecomputeByBlock = tuple[tuple[str, BlockRecompute], ...]
GivenByBlock = Mapping[str, BlockRecompute | list[str]]
"""The recomputation by block, as people give it."""
Offload = Literal["none", "full"]
OFFLOADS: tuple[Offload, ...] = ("none", "full")
BlockOffload = Offload | tuple[str, ...]
OffloadByBlock = tuple[tuple[str, BlockOffload], ...]
OffloadGiven = Mapping[str, BlockOffload | list[str]]
"""The offload by block, as people give it."""
Kind = Recompute | Offload
BlockKind = Kind | tuple[str, ...]
KindByBlock = tuple[tuple[str, BlockKind], ...]


class Field(NamedTuple):
    """A field of an execution that says something of every block of the model, and the kinds that it takes."""

    name: Literal["recompute", "offload"]
    kinds: tuple[Kind, ...]


RECOMPUTE, OFFLOAD = Field("recompute", RECOMPUTES), Field("offload", OFFLOADS)
FIELDS = (RECOMPUTE, OFFLOAD)

_RANGE = r"(?<![^.])(\d{1,9})-(\d{1,9})(?![^.])"


def fits(name: str, pattern: str) -> bool:
    """Return whether a pattern of `fnmatch` fits a module's name. A part `0-7` of it fits any number from 0 to 7."""
    return _compiled(pattern).match(name) is not None


def exactly(name: str) -> str:
    """Return the pattern that fits this name alone: `*`, `?`, `[` and apparent ranges stand for themselves."""
    return re.sub(r"[*?[]|(?<=\d)-(?=\d)", r"[\g<0>]", name)


def is_exact(pattern: str) -> bool:
    """Return whether a pattern fits itself alone, because it has no wildcard and no range."""
    return re.search(r"[*?[]|\d-\d", pattern) is None


@lru_cache(maxsize=1 << 16)
def _compiled(pattern: str) -> re.Pattern[str]:
    ranges = (_between(int(low), int(high)) for low, high in re.findall(_RANGE, pattern))
    regex = translate(re.sub(_RANGE, "\0", pattern))
    return re.compile(re.sub("\0", lambda match: next(ranges, match[0]), regex))


def _between(low: int, high: int) -> str:
    """Return a regex of the numbers from low to high: one run for each prefix that is followed by any digits."""
    runs = list[str]()
    while low <= high:
        free = 0
        while low % 10 ** (free + 1) == 0 and low + 10 ** (free + 1) <= high + 1 and (low or not free):
            free += 1
        digits = str(low)
        runs.append(digits[: len(digits) - free] + "[0-9]" * free)
        low += 10**free
    return f"(?:{'|'.join(runs) or '(?!)'})"


def canonical(value: object, owner: str, field: Field) -> Kind | KindByBlock:
    """Return a mapping as hashable pairs. Raise a `FieldError` for `owner` if it is no kind and no such mapping."""
    if isinstance(value, str):
        return checks.choice(value, owner, field.name, field.kinds)  # type: ignore[return-value]
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        wanted = f"one of {', '.join(map(repr, field.kinds))}, or a mapping from blocks of the model to these"
        raise checks.FieldError(owner, field.name, f"expected {wanted}, got {value!r}")
    return tuple((_pattern(pattern, owner, field), _of_block(kind, owner, field, pattern)) for pattern, kind in pairs)


def _pattern(pattern: object, owner: str, field: Field) -> str:
    return "" if pattern == "" else checks.text(pattern, owner, field.name, "a block's name, or a pattern of them")


def _of_block(kind: object, owner: str, field: Field, pattern: object) -> BlockKind:
    where = f"{field.name}[{pattern!r}]"
    if not isinstance(kind, (list, tuple)):
        return checks.choice(kind, owner, where, field.kinds)  # type: ignore[return-value]
    if not kind:
        raise checks.FieldError(owner, where, "expected places in the block, got an empty list; 'none' says that")
    return tuple(checks.text(place, owner, where, "a place in the block, or a pattern of them") for place in kind)
