"""Batches that are copied to the device beside the step before.

launch the copy of batch n + 1  ─  hand out batch n  ─  step n runs  ─  wait for the copy of n + 1  ─  …
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shardwright.lowering import private
from shardwright.lowering.runtime.host import Link, StreamLink, Wait

_Item = TypeVar("_Item")


def link_to(device: torch.device) -> Link | None:
    """Return what copies to a device, or None where it has the host's memory."""
    return StreamLink(device) if device.type == "cuda" else None


def ahead(items: Iterable[_Item], link: Link, device: torch.device) -> Generator[_Item]:
    """Yield items with their tensors on the device, each while the copy of the next one is under way.

    An error in reading an item is raised in its turn. An item that nobody takes any more is waited for: its memory may
    serve others only after its copy.
    """
    reading = iter(items)
    coming = _next(reading, link, device)
    try:
        while (now := coming) is not None:
            if isinstance(now, Exception):
                raise now
            coming = _next(reading, link, device)
            yield now.arrive()
    finally:
        if isinstance(coming, _Coming):
            coming.arrive()


class _Coming(Generic[_Item]):
    """An item whose tensors are on their way. From pinned memory, which torch keeps until they have arrived."""

    def __init__(self, item: _Item, link: Link, device: torch.device) -> None:
        self._link, self._device, self._waits = link, device, list[Wait]()
        self._item = private.tree_map(self._send, item)

    def _send(self, value: object) -> object:
        if not isinstance(value, Tensor) or not value.is_cpu or value.layout != torch.strided:
            return value
        target = torch.empty_like(value, device=self._device)
        self._waits.append(self._link.copy(target, value.pin_memory() if self._device.type == "cuda" else value))
        return target

    def arrive(self) -> _Item:
        """Wait for the copies, and return the item."""
        for wait in self._waits:
            wait()
        return self._item


def _next(reading: Iterator[_Item], link: Link, device: torch.device) -> _Coming[_Item] | Exception | None:
    """Read an item and launch its copy; return the error if it cannot be read, and None at the end."""
    try:
        return _Coming(next(reading), link, device)
    except StopIteration:
        return None
    except Exception as error:  # noqa: BLE001 - raised when it is the item's turn
        return error
