"""Time limits, since a proof or a refutation may take for ever.

Time is this process's work, not wall-clock time, so a proof is not given up earlier beside other processes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Late(Exception):  # noqa: N818 - a signal, caught where the limit is set
    """The signal that the time is up."""


@contextmanager
def limit(seconds: float) -> Generator[None]:
    """Raise `Late` after this many seconds of the process's work; only the main thread can be interrupted.

    The kernel looks at its timer a few hundred times a second. What was late between two looks is late at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Late

    before, end = signal.signal(signal.SIGPROF, stop), time.process_time() + seconds
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
        if time.process_time() > end:
            raise Late
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
