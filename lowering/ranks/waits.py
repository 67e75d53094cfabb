"""Waits for other ranks: each ends after the module's timeout, with an error that names the ranks that are missing.

The groups of a mesh's axes have this timeout anyway (`launch.connect`). The group of all ranks may be the user's, whose
own timeout is restored afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist

from shardwright.lowering import private
from shardwright.lowering.ranks.rollcall import Answers, Phase, culprits, has_ended, phase_of_run, standstill
from shardwright.pcg.errors import DistributedError

TIMEOUT_S = 600.0
"""The longest wait for another rank, where nobody says otherwise."""
CALLS_S = 5.0
"""The time between two roll calls of a rank that waits for others in no collective."""
_SIGNS = (
    "Connection closed", "Connection reset", "Timed out", "timed out", "Wait timeout", "pair closure", "gloo", "NCCL",
    "Broken pipe", "Socket",
)  # fmt: skip


@contextmanager
def waiting(phase: Phase, timeout_s: float | None = None) -> Generator[None]:
    """Turn errors of process groups in a phase of a run into a `DistributedError` that names ranks.

    `phase`: in words, or what returns them once there is an error. `timeout_s`: the limit of collectives of the group
    of all ranks; None: as it is. The groups of meshes have theirs.
    """
    with phase_of_run(phase):
        try:
            with nullcontext() if timeout_s is None else private.world_timeout(timeout_s):
                yield
        except RuntimeError as error:
            if (blame := _blame(error, phase if isinstance(phase, str) else phase())) is error:
                raise
            raise blame from error


def start_up(timeout_s: float) -> AbstractContextManager[None]:
    """Limit the waits of ranks before the first step: a wait that takes longer raises a `DistributedError`."""
    return waiting(f"start-up (timeout_s={timeout_s:g})", timeout_s)


_met = 0


def meet(what: str, timeout_s: float) -> None:
    """Wait until every rank is here, to make `what`. Raises `DistributedError` that names the ranks that do not come.

    It waits no longer once another rank has ended, or three roll calls find nobody who computes and could come still.
    No collective waits: ranks that are in one meanwhile, in a step, end it with an error of its own.
    """
    global _met
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == private.FAKE:
        return
    store, _met = private.world_store(), _met + 1
    key = f"shardwright/meet/{_met}"
    with waiting(f"the meeting to make {what}"):  # where there is no store any more
        store.set(f"{key}/{dist.get_rank()}", "here")
        if store.add(key, 1) == dist.get_world_size():
            store.set(f"{key}/all", "here")
        waited_s = _wait_for(store, f"{key}/all", timeout_s)
        if not store.check([f"{key}/all"]):
            who = culprits()
            missing = [rank for rank in range(dist.get_world_size()) if not store.check([f"{key}/{rank}"])]
            raise DistributedError(
                f"rank {dist.get_rank()} waited {waited_s:.3g} s for ranks {missing} to make {what}; "
                f"{who or 'these are elsewhere'}; all ranks need batches of one shape, in one mode"
            )


def _wait_for(store: private.Store, key: str, timeout_s: float) -> float:
    """Wait until the store has a key, or nobody can come who would set it; return for how long, in seconds.

    It looks again and again, as torch logs waits of a store that end without a result.
    """
    begin, last = time.monotonic(), list[Answers | None]()
    while not store.check([key]):
        waited_s = time.monotonic() - begin
        if waited_s >= timeout_s:
            return timeout_s
        if waited_s > (len(last) + 1) * CALLS_S:
            last.append(answers := standstill())
            if answers is not None and (has_ended(answers) or last[-3:] == 3 * [answers]):
                return waited_s
        time.sleep(min(0.05, waited_s / 10 + 1e-4))
    return time.monotonic() - begin


def _blame(error: RuntimeError, phase: str) -> RuntimeError | DistributedError:
    """Return an error of the process group as a `DistributedError` that names ranks, and any other error unchanged."""
    text = str(error)
    if not isinstance(error, dist.DistError) and not any(sign in text for sign in _SIGNS):
        return error
    rank = f"rank {dist.get_rank()} of {dist.get_world_size()}: " if dist.is_initialized() else ""
    who = culprits() or "another rank has probably failed or is stuck, see its output"
    return DistributedError(f"{rank}a collective failed in {phase}: {text.strip()}; {who}; start all ranks anew")
