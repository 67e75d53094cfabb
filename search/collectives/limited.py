"""A search with a time limit that holds, whatever the search is doing: it runs in a process of its own.

A question to Z3, a linear program or one attempt for a large network has no moments at which it looks at the clock.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, TypeVar

from shardwright.pcg.errors import MachineError, ShardwrightError

_Found = TypeVar("_Found")


def within(limit_s: float, search: Callable[[], Iterable[_Found]]) -> Iterator[_Found]:
    """Yield what a search yields in `limit_s` seconds; then it is ended.

    Raises:
        ShardwrightError: what the search raises; a `MachineError` where its process dies.
    """
    end = monotonic() + limit_s
    receive, send = Pipe(duplex=False)
    if not (process := os.fork()):
        _run(search, send)
    send.close()
    try:
        while receive.poll(max(0.0, end - monotonic())):
            kind, value = _received(receive)
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        receive.close()


def _run(search: Callable[[], Iterable[object]], send: Connection) -> None:
    """Send what a search finds, and end this process."""
    try:
        for one in search():
            send.send(("found", one))
        send.send(("end", None))
    except ShardwrightError as error:
        send.send(("error", error))
    finally:
        os._exit(0)


def _received(receive: Connection) -> tuple[str, Any]:
    try:
        return receive.recv()
    except EOFError:
        raise MachineError("the search's process died, as where memory is short; take a smaller network") from None
