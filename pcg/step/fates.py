"""The fates of a value that forward makes, until backward."""

from __future__ import annotations

from enum import StrEnum


class Fate(StrEnum):
    """The place where backward finds a value.

    NOT_NEEDED   nowhere: it is let go of after its last reader in forward
    KEPT         on the device, from forward on
    AGAIN        made again there, right before backward needs it
    HOST         in the host's memory, from where it is fetched

    `is_stored`: whether the value that forward made is there for backward.
    """

    is_stored: bool

    NOT_NEEDED = "not needed"
    KEPT = "kept"
    AGAIN = "again"
    HOST = "host"

    def __init__(self, value: str) -> None:
        self.is_stored = value in ("kept", "host")
