"""torchrun, with four differences.

* It has no traceback of its own: the last words are those of the rank that failed. Before a restart, they are told.
* SIGTERM and SIGUSR1, by which clusters ask for machines, go to the ranks, which save and end with status `AGAIN`.
* This status is no failure that a restart here would mend: it becomes that of this process, who started it starts it
  again. Where a run may have fewer machines, those that were not asked to make room go on without the others.
* A machine that joins a run later is taken in. In torch 2.14.1 it waits for an address that the first machine, which
  shares its store with its ranks, writes only once (`findings/late-machines-wait-for-an-address.sh`).
"""

# torch's decorator hides the types of what an agent overrides, and its module of launchers names no agent as its own
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false, reportCallIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from argparse import Namespace
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from torch.distributed import DistError, run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from shardwright.cli.status import ENVIRONMENT, FINDING, INTERRUPTED
from shardwright.stopping import AGAIN, SIGNALS

GRACE_S = 600.0
"""The time that ranks have to save, after which they are ended."""


class MadeRoom(SignalException):
    """The ranks of this machine have ended because a signal asked for it; `status` is theirs."""

    def __init__(self, number: signal.Signals, status: int) -> None:
        super().__init__(f"the ranks have ended after {number.name}", number)
        self.status = status


class Agent(LocalElasticAgent):
    """torch's agent: it starts the ranks of this machine, watches them, and starts them anew with those of others.

    `is_elastic`: the run may have fewer machines.
    """

    def __init__(self, *args: Any, is_elastic: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_elastic = is_elastic
        self._asked: signal.Signals | None = None
        self._until = math.inf
        for number in SIGNALS:
            signal.signal(number, self._make_room)

    def _make_room(self, number: int, _: object) -> None:
        self._asked, self._until = signal.Signals(number), time.monotonic() + GRACE_S
        if self._pcontext is None:
            self._leave(INTERRUPTED)
        for pid in self._pcontext.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._asked is not None:
            self._leave(AGAIN)
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY and time.monotonic() > self._until:
            self._leave(INTERRUPTED)
        if not result.is_failed():
            return result
        asks_again = any(failure.exitcode == AGAIN for failure in result.failures.values())
        if self._asked is not None:
            self._leave(AGAIN if asks_again else INTERRUPTED)
        if asks_again:
            self._remaining_restarts = self._remaining_restarts + 1 if self._is_elastic else 0
        if self._remaining_restarts:
            rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
            left = self._remaining_restarts - 1
            tell(f"{failure_text(rank, failure)}; all ranks start again, at most {left} time{'s' * (left != 1)} more")
        return result

    def _leave(self, status: int) -> NoReturn:
        """End this machine's part of the run; a run that may have fewer machines goes on without it."""
        assert self._asked is not None
        raise MadeRoom(self._asked, status)


def failure_text(rank: int, failure: ProcessFailure) -> str:
    """Return how a rank ended, in words."""
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}"
    message = failure.message if failure.error_file_data.get("message") == failure.message else ""
    return f"rank {rank} ended with status {failure.exitcode}" if not message else f"rank {rank}: {message}"


def tell(text: str) -> None:
    """Write a line to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def where_they_meet(arguments: Namespace) -> str:
    """Return the address at which machines meet, by torchrun's arguments."""
    return arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port}"


def main() -> None:
    """Run torchrun with this process's arguments; a failed rank gives a status, and what ends others a line too."""
    logging.disable(logging.ERROR)
    arguments = run.parse_args(sys.argv[1:])
    fewest, most = run.parse_min_max_nnodes(arguments.nnodes)
    if fewest < most:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    api.LocalElasticAgent = partial(Agent, is_elastic=fewest < most)  # the launcher takes no other agent
    try:
        run.run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            tell(failure_text(rank, failure))
            sys.exit(ENVIRONMENT)
        sys.exit(AGAIN if failure.exitcode == AGAIN else FINDING)
    except MadeRoom as left:
        sys.exit(left.status)
    except (RendezvousError, DistError) as error:
        reason = str(error.__cause__ or error).splitlines()[0].rstrip(".")
        tell(
            f"the machines of this run do not meet at {where_they_meet(arguments)}: {reason}; start each of them with "
            "the same --rdzv-endpoint (or --master-addr and --master-port), --rdzv-id and --nnodes, while the machine "
            "of that address runs and can be reached"
        )
        sys.exit(ENVIRONMENT)
    except (KeyboardInterrupt, SignalException):
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
