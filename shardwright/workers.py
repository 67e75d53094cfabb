"""Worker processes for long lists of tasks: a dead worker loses only its task, and Ctrl-C leaves no process behind.

Workers are fresh interpreters that import the modules that a task names, so nothing depends on how the caller was
started (a script without a main guard, a notebook). They talk over a socket pair, stay out of the terminal's process
group, and end when their parent does. A worker that has grown too large is replaced between two tasks.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from shardwright.pcg.errors import ShardwrightError

TELL_EVERY_S = 2.0
MAX_BYTES = 1_200 << 20
"""The peak memory of a worker above which it is replaced after its task."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `module:function` in a worker, as `function(*arguments, report=…)`; `label` is the caller's own."""

    function: str
    arguments: tuple[Any, ...]
    label: Any = None


@dataclass(frozen=True, slots=True)
class CallEvent:
    """A worker's message about its task: a report on the way, its result, or the way it died."""

    kind: Literal["report", "done", "died"]
    task: Call
    value: Any


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    task: Call | None = None


@dataclass
class Workers:
    """A queue of tasks and the processes that work on it. More may be submitted while events are read."""

    num_jobs: int
    max_bytes: int = MAX_BYTES
    _queue: deque[Call] = field(default_factory=deque)
    _workers: list[_Worker] = field(default_factory=list)

    def submit(self, tasks: Iterable[Call], *, first: bool = False) -> None:
        """Queue tasks, in order; `first` puts them before all others."""
        if first:
            self._queue.extendleft(reversed(list(tasks)))
        else:
            self._queue.extend(tasks)

    def events(self, tell: Callable[[], None] = lambda: None) -> Generator[CallEvent]:
        """Yield events until no task is left; `tell` is called now and then. A task that raises ends everything."""
        reported_at = time.perf_counter()
        while True:
            if time.perf_counter() - reported_at > TELL_EVERY_S:
                reported_at = time.perf_counter()
                tell()
            self._assign()
            busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
            if not busy:
                return
            for connection in wait(list(busy)):
                yield self._heard(busy[connection])  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        """Kill all workers at once."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.connection.close()
        self._workers.clear()

    def _assign(self) -> None:
        idle = [worker for worker in self._workers if worker.task is None]
        while self._queue and (idle or len(self._workers) < self.num_jobs):
            worker = idle.pop() if idle else self._start()
            worker.task = self._queue.popleft()
            try:
                worker.connection.send((worker.task.function, worker.task.arguments))
            except OSError:  # it died between two tasks: `wait` will report it
                continue

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        code = f"from shardwright.workers import serve; serve({theirs.fileno()}, {self.max_bytes})"
        paths = [path or str(Path.cwd()) for path in sys.path]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, process_group=0,
        )  # fmt: skip
        theirs.close()
        worker = _Worker(process, Connection(ours.detach()))
        self._workers.append(worker)
        return worker

    def _heard(self, worker: _Worker) -> CallEvent:
        task = worker.task
        assert task is not None
        try:
            kind, value, stays = worker.connection.recv()
        except (EOFError, OSError):
            return CallEvent("died", task, self._buried(worker))
        if kind == "failed":
            raise ShardwrightError(f"a worker failed in {task.function}:\n{value}")
        if kind == "done":
            worker.task = None
            if not stays:
                self._buried(worker)
        return CallEvent(kind, task, value)

    def _buried(self, worker: _Worker) -> str:
        """Forget a worker that has ended; return its signal or exit status in words."""
        worker.connection.close()
        status = worker.process.wait()
        self._workers.remove(worker)
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


@contextmanager
def workers(num_jobs: int, max_bytes: int = MAX_BYTES) -> Generator[Workers]:
    """Yield workers that are ended when the block is left, however it is left."""
    pool = Workers(num_jobs, max_bytes)
    try:
        yield pool
    finally:
        pool.close()


def num_cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def serve(file: int, max_bytes: int) -> None:
    """Serve as a worker: run the calls that arrive until the parent is gone."""
    connection = Connection(file)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        module, _, name = function.partition(":")
        try:
            value = getattr(import_module(module), name)(
                *arguments, report=lambda value: connection.send(("report", value, True))
            )
        except Exception:  # noqa: BLE001 - the parent raises it
            connection.send(("failed", traceback.format_exc(), True))
            continue
        stays = _peak_bytes() < max_bytes
        connection.send(("done", value, stays))
        if not stays:
            return


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
