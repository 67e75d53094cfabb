"""Encodings: what a move may send in place of its values, fewer bits that come near them.

A move of a parameter carries an encoding or none: the gather of a weight, or the sum of its gradient. Values are cut in
blocks of `BLOCK`. Each block is divided by its largest magnitude, and each quotient becomes a code of a few bits; the
codes and the magnitudes are sent. `ENCODINGS` has a row for each encoding; `lowering.ranks.encodings` encodes and
decodes by these rows. No block has values of two tensors, so errors are relative to each tensor's own values.

A sum is never made of codes, and codes are never made of codes on the way: each rank encodes its summands once and
sends every other rank its part (all-to-all); that rank decodes them and adds them up. Where all ranks need the sum, it
is encoded once more and gathered. So an error is that of one rounding, or of two, whatever the number of ranks.
Source: Wang et al., "ZeRO++: Extremely efficient collective communication for giant model training" (2023), sections
3.1 and 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, cast, get_args

from shardwright.pcg import checks
from shardwright.pcg.types import ITEM_BYTES

Carried = Literal["weights", "gradients"]
CARRIED: tuple[Carried, ...] = get_args(Carried)
"""What a move of parameters carries: weights that are gathered, and gradients that are summed over devices."""
EncodingName = Literal["int8", "fp8", "int4"]
BLOCK = 256
"""The number of values with one magnitude."""
ENCODED_TOGETHER = 1 << 22
"""The most values that are encoded at a time; so many quotients exist beside them."""
_NARROW = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of rounding to a dtype of 16 bits."""
_ARITHMETIC = 2.0**-21
"""More than the rounding of the quotient, of the magnitude's part for each code, and of their product in float32."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding of floats in blocks.

    Attributes:
        name: the one that plans and users say.
        bits: of a code.
        largest: the code of a block's largest magnitude.
        rounding: the largest error of a code, as a share of `largest`.
        carries: what may be sent in it.
        words: a description for people.
    """

    name: EncodingName
    bits: int
    largest: int
    rounding: float
    carries: tuple[Carried, ...]
    words: str

    @property
    def bound(self) -> float:
        """The largest error of a decoded value, as a share of the largest magnitude in its block.

        It holds for what is decoded in float32 or float64; a dtype of 16 bits adds its own rounding. A magnitude below
        2 · `largest` / m, where m is the largest finite number of the dtype that is computed in, counts as that one.
        """
        return self.rounding + _ARITHMETIC

    def bound_of(self, num_roundings: int, dtype: str) -> float:
        """Return the largest error of a value that is encoded so often, and decoded in a dtype each time.

        As a share of the largest magnitude in its block. Between two times, values may be added up over ranks: then it
        is a share of the summands' largest magnitudes, added up.
        """
        return (1 + self.bound + _NARROW.get(dtype, 0.0)) ** num_roundings - 1

    def num_bytes(self, num_elements: int, dtype: str) -> int:
        """Return the bytes of so many values of a dtype: whole blocks of codes, and their magnitudes."""
        return -(-num_elements // BLOCK) * (BLOCK * self.bits // 8 + magnitude_bytes(dtype))

    def item_bytes(self, dtype: str) -> float:
        """Return the bytes of one of many values."""
        return self.num_bytes(BLOCK, dtype) / BLOCK


def room(num_elements: int, size: int = 1) -> int:
    """Return the elements that a tensor takes in `size` equal pieces of whole blocks.

    In a message with others it takes whole blocks as well, so that it shares none.
    """
    return -(-num_elements // (size * BLOCK)) * size * BLOCK


def magnitude_bytes(dtype: str) -> int:
    """Return the bytes of a block's magnitude: float32, or float64 where the values are that."""
    return max(4, ITEM_BYTES[dtype])


ENCODINGS: Mapping[str, Encoding] = {
    one.name: one
    for one in (
        Encoding("int8", 8, 127, 1 / 254, ("weights", "gradients"), "whole numbers of 8 bits"),
        Encoding("fp8", 8, 448, 1 / 28, ("weights",), "float8_e4m3fn"),
        Encoding("int4", 4, 7, 1 / 14, ("gradients",), "whole numbers of 4 bits"),
    )
}
"""The rows by name. `fp8` rounds by 16 of 448 at most, half of what lies between its largest numbers."""

Encodings = tuple[tuple[Carried, EncodingName], ...]
"""What a plan sends encoded, in the order of `CARRIED`; the rest is exact."""


def canonical(given: Mapping[Any, Any] | Iterable[tuple[Any, Any]], owner: str) -> Encodings:
    """Return encodings from a mapping, or from pairs. Raises `FieldError` for what carries none, or not this one."""
    pairs = given.items() if isinstance(given, Mapping) else given
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise checks.FieldError(owner, "encodings", f"expected encodings by what is sent, got {given!r}")
    named: dict[Carried, EncodingName] = {carried(what, owner): row_of(what, name, owner).name for what, name in pairs}
    return tuple((what, name) for what in CARRIED if (name := named.get(what)) is not None)


def in_words(encodings: Encodings) -> str:
    """Return what a plan sends encoded, as the end of a list of facts; "" for nothing."""
    return "".join(f", {what} sent as {name}" for what, name in encodings)


def carried(what: object, owner: str) -> Carried:
    """Return one of `CARRIED`. Raises `FieldError` for anything else."""
    return cast("Carried", checks.choice(what, owner, "encodings", CARRIED))


def row_of(what: object, name: object, owner: str) -> Encoding:
    """Return the row of an encoding by its name. Raises `FieldError` if it does not carry what is sent."""
    able = {row.name: row for row in ENCODINGS.values() if what in row.carries}
    return able[cast("EncodingName", checks.choice(name, owner, f"encodings[{what!r}]", able))]


def padded(num_bytes: float, size: int, encoding: Encoding | None, dtype: str) -> float:
    """Return the bytes of an encoded tensor that is cut in `size` equal pieces of whole blocks."""
    if encoding is None:
        return num_bytes
    each = size * encoding.num_bytes(1, dtype)
    return ceil(num_bytes / each) * each


LEGS: Mapping[str, tuple[str, ...]] = {
    "all_gather": ("all_gather",),
    "reduce_scatter": ("all_to_all",),
    "all_reduce": ("all_to_all", "all_gather"),
}
"""The collectives that carry out a collective whose values are encoded; none adds anything up."""


def legs(collective: str, num_bytes: float, size: int, encoding: Encoding | None) -> list[tuple[str, float]]:
    """Return the collectives of a move along an axis of `size`, with the bytes of each.

    `num_bytes`: what is sent, encoded if it is, of a group's whole tensor, or of one rank's summand. In an all-to-all
    every rank has a whole one.
    """
    if encoding is None or collective not in LEGS:
        return [(collective, num_bytes)]
    return [(leg, num_bytes * (size if leg == "all_to_all" else 1)) for leg in LEGS[collective]]
