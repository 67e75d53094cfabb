"""The collectives of an axis that run by schedules: which one for which size, and their order.

Schedules of one axis run one after the other, in the order in which they were started, on a process group of their own.
Under gloo a thread of the axis runs them, beside whatever this process does. Under NCCL they run where they are
started: messages are kernels, so the process goes on, but the device does not overlap them with its other work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.scheduled import ScheduledCollective
from shardwright.lowering.ranks.untraced import untraced
from shardwright.pcg.collectives.schedule import BySize
from shardwright.pcg.stages import GroupName

Picked = Mapping[str, BySize]
"""By collective, what is picked for an axis."""
ByGroup = Mapping[GroupName, Picked]
"""What is picked for each group of a stage's ranks."""


class Work(Protocol):
    """A collective that was started, torch's or ours."""

    def wait(self) -> Any: ...  # noqa: ANN401 - torch returns a flag


class _Started:
    """A collective that runs in a thread, or has run."""

    def __init__(self, future: Future[Tensor] | None) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait for the end. Raises `DistributedError` where a message did not go through."""
        if self._future is not None:
            self._future.result()


class AxisSchedules:
    """The schedules that ranks of a group run, in one order on all of them. `torch.compile` leaves them out."""

    def __init__(self, picked: Picked, group: dist.ProcessGroup, timeout_s: float) -> None:
        made = dict[int, ScheduledCollective]()
        for pieces in picked.values():
            for _, one in pieces:
                if one is not None and id(one) not in made:
                    made[id(one)] = ScheduledCollective(one, group, timeout_s=timeout_s)
        self._starts = {name: [start for start, _ in pieces] for name, pieces in picked.items()}
        self._runs = {name: [one and made[id(one)] for _, one in pieces] for name, pieces in picked.items()}
        self._in_thread = dist.get_backend(group) == "gloo"
        self._worker: ThreadPoolExecutor | None = None

    @untraced
    def has(self, collective: str, num_bytes: float) -> bool:
        """Return whether a schedule is picked for a collective of this size; else the library is to run it."""
        return self._run_of(collective, num_bytes) is not None

    @untraced
    def knows(self, collective: str) -> bool:
        """Return whether a schedule is picked for a collective of any size."""
        return any(runs is not None for runs in self._runs.get(collective, ()))

    def _run_of(self, collective: str, num_bytes: float) -> ScheduledCollective | None:
        starts = self._starts.get(collective)
        return None if starts is None else self._runs[collective][bisect_right(starts, num_bytes) - 1]

    @untraced
    def start(self, collective: str, given: Tensor, result: Tensor, num_elements: int) -> Work:
        """Start the schedule that is picked for a collective of `num_elements` of the whole.

        `given`, `result`: as `ScheduledCollective.run` takes them; both stay as they are until it has ended.
        """
        runs = self._run_of(collective, num_elements * given.element_size())
        assert runs is not None, "the library runs this size"
        return self._start(partial(runs.run, given, num_elements, result))

    @untraced
    def start_uneven(
        self, collective: str, given: Tensor, result: Tensor, units: Sequence[Sequence[int]], num_bytes: float
    ) -> Work:
        """Start the schedule that is picked for a collective of about so many bytes, with these elements for each rank.

        `given`, `result`, `units`: as `ScheduledCollective.run_uneven` takes them.
        """
        runs = self._run_of(collective, num_bytes)
        assert runs is not None, "the library runs this size"
        return self._start(partial(runs.run_uneven, given, units, result))

    def _start(self, run: Callable[[], Tensor]) -> Work:
        if not self._in_thread:
            run()
            return _Started(None)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="schedules")
        return _Started(self._worker.submit(run))
