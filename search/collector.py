"""Python's cyclic garbage collector is paused while plans are searched and checked."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """A search makes millions of objects that stay and hardly a cycle; to look for those took a quarter of its time.

    Frozen and thawed, they count as old: else all of them would be looked at once when the collector goes on.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # what the caller froze stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
