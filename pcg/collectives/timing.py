"""The time that a schedule took."""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """A collective of so many bytes in all that ranks have run: whether results are right, and seconds.

    `torch_s`: of torch's own collective, None where it has none of the kind.
    """

    num_bytes: int
    is_right: bool
    seconds: float
    torch_s: float | None
