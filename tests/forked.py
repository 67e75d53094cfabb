"""Processes of Python as forks of this one, which have loaded everything already: that takes seconds of each."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from shardwright import workers


def run_as_main(command: Sequence[str]) -> None:
    """What `python FILE …` or `python -m MODULE …` runs, also where the module was loaded by a test."""
    is_module = command[0] == "-m"
    sys.argv = list(command[is_module:])
    sys.modules.pop(sys.argv[0], None)
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__")
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


class Forked:
    """`subprocess.Popen` of a Python command, in place of a new Python. A method may say otherwise what is `run`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[Any] | int | None,
        stderr: IO[Any] | int = 2,
        **_: object,
    ) -> None:
        assert command[0] == sys.executable, command
        reading, writing = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            out = 1 if stdout is None else writing if isinstance(stdout, int) else stdout.fileno()
            self._become(command[1:], env, out, stderr if isinstance(stderr, int) else stderr.fileno())
        os.close(writing)
        self.stdout = os.fdopen(reading)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process, also where a test fails."""
        if self.poll() is None:
            self.kill()
            self.wait()

    def run(self, command: Sequence[str]) -> None:
        run_as_main(command)

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._ended(0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self.stdout.close()
        return self.returncode

    def _become(self, command: Sequence[str], env: Mapping[str, str], out: int, err: int) -> None:
        status = 1
        try:
            gc.freeze()
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
            os.environ.clear()
            os.environ.update(env)
            self.run(command)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001  as Python itself does
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


class ForkedWorker(Forked):
    """A process of `shardwright.workers`, which runs `python -P -c CODE`."""

    def run(self, command: Sequence[str]) -> None:
        workers._peak_bytes = lambda: 0  # of which most is the memory of the tests
        exec(command[-1], {})
