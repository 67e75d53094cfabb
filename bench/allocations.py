"""Measure what a step allocates on the CPU: storages that are alive, and the most that is handed out at once.

The profiler records every allocation and release of torch's CPU allocator. The record lacks what gloo's threads
release: a collective's tensor, where such a thread lets go of it last, seems to stay. So a step waits, after every
collective, until these threads have let go of it (`settled`). That an address is handed out again shows that it was
free; and what is still missing can only make a step's peak too large, so that the least of several steps counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives
from torch.profiler import ProfilerActivity, profile

SETTLE_S = 0.002
"""More than a thread of gloo needs to let go of the tensors of a collective that is done."""


class Stepping(Protocol):
    """A subject of memory measurements."""

    def step(self) -> None: ...

    def resident_bytes(self) -> int: ...


def peak_bytes(stepper: Stepping, num_steps: int) -> int:
    """The most that is allocated at once during a step, by the record of the step that shows the least."""
    return stepper.resident_bytes() + min(_most_allocated(stepper) for _ in range(num_steps))


def _most_allocated(stepper: Stepping) -> int:
    """Return the most bytes that a step allocates, on top of those before it."""
    with settled(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stepper.step()
    events, pending = [], list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag.name == "Allocation":
            details: Any = event.extra_fields
            events.append((event.start_time_ns, details.ptr, details.alloc_size))
    events.sort(key=lambda e: e[0])
    return most_allocated([(address, num_bytes) for _, address, num_bytes in events])


@contextmanager
def settled() -> Generator[None]:
    """Let a wait for a collective end only when the threads of gloo hold none of its tensors."""

    def later(function: Callable[..., object]) -> Callable[..., object]:
        def waited(*args: object, **kwargs: object) -> object:
            result = function(*args, **kwargs)
            time.sleep(SETTLE_S)
            return result

        return waited

    functional = mock.patch.object(_functional_collectives, "wait_tensor", later(_functional_collectives.wait_tensor))
    with functional, mock.patch.object(dist.Work, "wait", later(dist.Work.wait)):
        yield


def most_allocated(events: Sequence[tuple[int, int]]) -> int:
    """The most that is there at once, by addresses and bytes (negative: given back) in the order of time.

    What is given back without having been taken was there before; what is handed out twice was free in between.
    """
    taken: dict[int, int] = {}
    now = most = 0
    for address, num_bytes in events:
        now += num_bytes
        if num_bytes > 0:
            now -= taken.get(address, 0)
            taken[address] = num_bytes
        else:
            taken.pop(address, None)
        most = max(most, now)
    return most


def live_storages() -> dict[int, int]:
    """Bytes of every storage on the CPU whose tensor an object in Python holds, by address.

    What no object holds is not counted, such as a local variable's tensor, or one that torch has lost: where Python and
    a thread of gloo let go of a collective's tensor in the same moment, each takes the other for its owner, and it
    stays for ever.
    """
    gc.collect()
    kinds, objects = (Tensor, nn.Parameter), gc.get_objects()
    tensors = [o for o in objects if type(o) in kinds and o.device.type == "cpu"]
    held = {id(t) for o in objects if o is not tensors for t in gc.get_referents(o) if type(t) in kinds}
    storages = [t.untyped_storage() for t in tensors if id(t) in held]
    return {s.data_ptr(): s.nbytes() for s in storages}
