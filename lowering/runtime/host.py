"""Values that wait for backward in the host's memory, as the list of actions says (`pcg.step.offload`).

A program gives each value that is to leave to `Trip.offload`. The value is copied beside compute to a buffer of the
host, and its memory here is released later. Autograd keeps handles of its memory, also through views. In backward,
hooks on the values that the list names launch the copies back and wait for them; a handle whose value has not arrived
waits for it. The value is gone with its last handle, and its buffer serves the next one.

On GPUs, copies run on a stream of their own, to and from pinned memory. On CPUs a thread makes them, in memory that is
the same; `ThreadLink.bytes_per_s` may hold it to the rate of a device's link.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import ClassVar, NamedTuple, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from shardwright.lowering import private
from shardwright.lowering.runtime.schedule import OffloadSchedule
from shardwright.lowering.runtime.views import View
from shardwright.pcg.errors import MachineError
from shardwright.pcg.step.verbs import VERBS, Action

Wait = Callable[[], None]
"""Waits for a copy; on a GPU, what the current stream runs from then on does."""


class Link(Protocol):
    """A maker of copies, which end in the order of their launches.

    `finish` keeps the process waiting until all of them have ended.
    """

    def copy(self, target: Tensor, source: Tensor) -> Wait: ...

    def finish(self) -> None: ...


class StreamLink:
    """Copies on a stream of their own, each after what the current stream has been given before."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> Wait:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            done = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(done)

    def finish(self) -> None:
        self.stream.synchronize()


class ThreadLink:
    """Copies in a thread, at most at `bytes_per_s` (None: as fast as they go)."""

    bytes_per_s: ClassVar[float | None] = None

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._thread: ThreadPoolExecutor | None = None  # a fork has no threads, so it starts with the first copy

    def copy(self, target: Tensor, source: Tensor) -> Wait:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "host copies")
        return partial(self._ended, self._thread.submit(self._copy, target, source))

    def finish(self) -> None:
        if self._thread is not None:
            self._ended(self._thread.submit(lambda: None))

    def _copy(self, target: Tensor, source: Tensor) -> None:
        end = time.perf_counter() + (source.nbytes / self.bytes_per_s if self.bytes_per_s else 0.0)
        target.copy_(source)
        time.sleep(max(0.0, end - time.perf_counter()))

    def _ended(self, copy: Future[None]) -> None:
        try:
            copy.result(self.timeout_s)
        except FutureTimeoutError:
            raise MachineError(
                f"offload: a copy to or from the host's memory takes longer than {self.timeout_s:g} s; "
                "offload less, or raise timeout_s"
            ) from None


class Host:
    """The host's memory: a link to it, and its buffers, which are used again."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.is_pinned = device.type == "cuda"
        self.link: Link = StreamLink(device) if self.is_pinned else ThreadLink(timeout_s)
        self.num_bytes = 0
        self._free = defaultdict[int, list[Tensor]](list)

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer of this size. Raise `MachineError` if the host has no memory for it."""
        if free := self._free[num_bytes]:
            return free.pop()
        try:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_pinned)
        except RuntimeError as error:
            pinned = "pinned " if self.is_pinned else ""
            raise MachineError(
                f"offload: the host has no {num_bytes} bytes of {pinned}memory beside the {self.num_bytes} that values "
                f"of this rank have; offload less ({error})"
            ) from error
        self.num_bytes += num_bytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. What the link copies next may overwrite it."""
        self._free[buffer.numel()].append(buffer)


class Away:
    """A value that waits on the host, with all memory that it shares.

    `here` is its memory on the device, before it is released and from its fetch on; `there` its buffer, until it has
    arrived. `key` reserves the key of the memory that it had in forward, so that no other value gets it meanwhile.
    """

    def __init__(self, host: Host, tensor: Tensor) -> None:
        self.host, self.key, self.device = host, private.weakly(tensor), tensor.device
        self.here: Tensor | None = torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage())
        self.there: Tensor | None = host.take(self.here.numel())
        self._wait: Wait | None = host.link.copy(self.there, self.here)

    def release(self) -> None:
        """Wait until the value is on the host, and give its memory here back."""
        self._end_copy()
        self.here = None

    def fetch(self) -> None:
        """Launch the copy back, unless the value is here or on its way."""
        if self.here is None:
            assert self.there is not None
            self.here = torch.empty(self.there.numel(), dtype=torch.uint8, device=self.device)
            self._wait = self.host.link.copy(self.here, self.there)

    def arrive(self) -> Tensor:
        """Wait until the value is here, and return its memory."""
        self.fetch()
        self._end_copy()
        assert self.here is not None
        return self.here

    def _end_copy(self) -> None:
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    def __del__(self) -> None:
        self._end_copy()
        if self.there is not None:
            self.host.give(self.there)


class Part(NamedTuple):
    """The handle of a tensor that lies in the memory of a value on the host."""

    away: Away
    view: View

    def tensor(self) -> Tensor:
        return self.view.on(self.away.arrive())


class Perhaps:
    """The handle of a tensor that may leave yet: an operator keeps its result before the program offloads it."""

    def __init__(self, tensor: Tensor) -> None:
        self.kept: Tensor | Part = tensor

    def tensor(self) -> Tensor:
        return self.kept if isinstance(self.kept, Tensor) else self.kept.tensor()


class Trip:
    """The values of one run of a program that wait on the host, from its forward to the end of its backward.

    Once forward has ended, only autograd's handles keep a value.
    """

    def __init__(self, schedule: OffloadSchedule, host: Host) -> None:
        self.host = host
        self._leaving, self._released = iter(schedule.leaving), iter(schedule.released)
        self._arriving = iter(schedule.arriving)
        self._in_forward: dict[int, Away] = {}  # by the key of their memory
        self._values = WeakValueDictionary[int, Away]()  # by the number of their allocation
        self._perhaps = defaultdict[int, WeakSet[Perhaps]](WeakSet)

    # ---- forward ----

    def offload(self, tensor: Tensor) -> None:
        """Launch the copy of the next value that leaves."""
        key = private.storage_key(tensor)
        away = self._in_forward.get(key)
        if away is None:
            away = self._in_forward[key] = Away(self.host, tensor)
        self._values[next(self._leaving)] = away
        for handle in self._perhaps.pop(key, ()):
            handle.kept = Part(away, View.of(handle.tensor()))

    def release(self) -> None:
        """Give back the memory of the values whose turn it is."""
        for number in next(self._released):
            self._values[number].release()

    def before(self, tensor: Tensor) -> None:
        """Let backward carry out the next actions of the list before it goes through this value."""
        actions = next(self._arriving)
        if tensor.requires_grad:
            tensor.register_hook(partial(self._run, actions))

    def end(self) -> None:
        """End forward."""
        self._in_forward.clear()
        self._perhaps.clear()

    def pack(self, tensor: Tensor) -> Tensor | Part:
        """Return the object that autograd keeps: a handle if the tensor's memory leaves, else the tensor."""
        found = self._in_forward.get(private.storage_key(tensor)) if self._in_forward else None
        return tensor if found is None else Part(found, View.of(tensor))

    def perhaps(self, tensor: Tensor) -> Perhaps:
        """Return a handle of a tensor whose memory has not left so far."""
        handle = Perhaps(tensor)
        self._perhaps[private.storage_key(tensor)].add(handle)
        return handle

    # ---- backward ----

    def _run(self, actions: Iterable[Action], gradient: Tensor) -> None:
        for verb, number, _ in actions:
            if (away := self._values.get(number)) is not None:
                getattr(away, str(VERBS[verb].executor))()
