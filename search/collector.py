"""Python's cyclic garbage collector is paused while modules are loaded, models captured, plans searched and checked."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause the cyclic garbage collector: a search makes millions of objects that stay, and hardly a cycle.

    Looking for cycles took a quarter of a search's time, and a fifth of a capture's. At the end, the objects are frozen
    and thawed, so that they count as old; else the collector would look at all of them at once when it goes on.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # what the caller froze stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
