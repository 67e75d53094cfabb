"""The end of a run that is asked to make room: it saves, and asks to be started again."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.pcg.arguments import Argument, checked
from shardwright.pcg.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.lowering.module import ParallelModule

AGAIN = 75
"""The exit status that means "start me again" (EX_TEMPFAIL), to `shardwright run` and to the files of `launch`."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What clusters send before they take machines away: Kubernetes the first, Slurm what `--signal` says."""


class StopSignals:
    """Signals that ask a run to make room, as from a cluster that takes machines away.

    From now on they no longer end the process: a training loop asks after each step whether one came, and all ranks
    get the same answer after the same step. `AGAIN`, status 75, is how a loop that has saved then ends.
    """

    @checked(ShardwrightError, signals=Argument((Sequence,), "signals, as [signal.SIGTERM]", (str,)))
    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self._came = False
        for number in signals:
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self._came = True

    def asked(self, parallel: ParallelModule) -> bool:
        """Return whether a signal has come to any rank. Every rank calls it, after the same step."""
        import torch
        import torch.distributed as dist

        from shardwright.lowering.ranks.waits import waiting

        came = torch.tensor(float(self._came), device=parallel.ranks.device)
        with waiting("StopSignals.asked", parallel.ranks.timeout_s):
            dist.all_reduce(came)
        self._came = bool(came.item())
        return self._came
