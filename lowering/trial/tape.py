"""A record of what a rank sends, and of every storage of its tensors, while it runs on fake tensors."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.lowering import private
from shardwright.pcg.step.verbs import VERBS, SentKind

ACTIVATIONS, TEMPORARY, GATHERED = "activations", "temporary", "gathered"
"""Categories of storages: made in forward and freed in backward; made and freed otherwise; never freed in the step."""
_SENT = {
    "allreduce_": ("all_reduce", 0, 1),
    "_allgather_base_": ("all_gather", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "alltoall_base_": ("all_to_all", 1, 2),
    "all_reduce": ("all_reduce", 0, 2),
    "send": ("send", 0, 1),
    "recv_": ("receive", 0, 1),
    "broadcast_": ("broadcast", 0, 1),
}
"""Operators that send: the collective, the position of the argument with its data, and of the group's argument."""
_WAITS = ("wait_tensor",)
_EXECUTORS: dict[str, SentKind] = {row.executor: row.sends for row in VERBS.values() if row.executor and row.sends}
"""The kind of data that each executor of a verb sends."""
_RUNTIME = "shardwright.lowering.runtime."


class Event(NamedTuple):
    """The making of a storage, or its freeing (`num_bytes` < 0): the operator that ran, and whether in a backward."""

    storage: int
    num_bytes: int
    during: str
    in_backward: bool


class Peak(NamedTuple):
    """The peak of memory: bytes by category, and the operator that runs then."""

    memory: Mapping[str, int]
    during: str


class Tape(private.TorchDispatchMode):
    """A mode that records the messages and storages of fake tensors. Storages are numbered in the order of making."""

    def __init__(self, mode: private.FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.sent = Counter[tuple[str, str, int, SentKind]]()  # as `Message`, but with the name of a group
        self._events: list[Event] = []
        self._before: dict[int, int] = {}
        self._alive: dict[int, tuple[int, int, object]] = {}  # storage -> number, bytes, weak reference with callback
        self._labels: dict[int, str] = {}
        self._num_made = 0
        self._during = ""

    def begin(self) -> None:
        """Forget messages and events, but keep the storages that are alive."""
        self.sent.clear()
        self._events.clear()
        self._before = {number: num_bytes for number, num_bytes, _ in self._alive.values()}

    def label(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Set the category of the tensors' storages, unless they have one."""
        for tensor in tensors:
            self._labels.setdefault(self._alive[private.storage_key(tensor)][0], category)

    def peak(self) -> Peak:
        """Return the moment since `begin` at which most bytes were alive."""
        now = most = sum(self._before.values())
        moment = 0
        for count, event in enumerate(self._events, 1):
            now += event.num_bytes
            if now > most:
                most, moment = now, count
        alive, by_category, categories = Counter(self._before), Counter[str](), self._categories()
        for event in self._events[:moment]:
            alive[event.storage] += event.num_bytes
        for number, num_bytes in alive.items():
            by_category[categories.get(number, GATHERED)] += num_bytes
        return Peak(dict(+by_category), self._events[moment - 1].during if moment else "")

    def _categories(self) -> dict[int, str]:
        """Return the categories of storages; a storage that stays and has no label is missing."""
        in_forward = {event.storage for event in self._events if event.num_bytes > 0 and not event.in_backward}
        freed = (event for event in self._events if event.num_bytes < 0)
        freed_categories = {
            e.storage: ACTIVATIONS if e.in_backward and e.storage in in_forward else TEMPORARY for e in freed
        }
        return freed_categories | self._labels

    def __torch_dispatch__(
        self,
        func: private.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if any(issubclass(kind, private.DTensor) for kind in types):
            return NotImplemented  # its local part is dispatched separately
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))  # a question about a tensor
        self._during = str(func)
        if "c10d" in func.namespace:
            self._send(func.overloadpacket.__name__, args)
        result = func(*args, **(kwargs or {}))
        for tensor in private.tree_iter(result):
            if isinstance(tensor, private.FakeTensor) and tensor.fake_mode is self.mode:
                self._note(tensor)
        return result

    def _send(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _WAITS:
            return
        if name not in _SENT:
            self.sent[name, "", _num_bytes(args), _kind()] += 1
            return
        collective, which, where = _SENT[name]
        group, num_bytes = private.group_of(args[where]), _num_bytes(args[which])
        num_bytes *= group.size() if collective == "all_to_all" else 1
        self.sent[collective, group.group_name, num_bytes, _kind()] += 1

    def _note(self, tensor: Tensor) -> None:
        """Record a new storage, and register the callback that records its freeing."""
        key = private.storage_key(tensor)
        if key in self._alive:
            return
        storage, number = tensor.untyped_storage(), self._num_made
        self._num_made += 1
        self._alive[key] = number, storage.nbytes(), weakref.ref(storage, lambda _: self._free(key))
        self._events.append(Event(number, storage.nbytes(), self._during, private.in_backward()))

    def _free(self, key: int) -> None:
        number, num_bytes, _ = self._alive.pop(key)
        self._events.append(Event(number, -num_bytes, self._during, private.in_backward()))


def _kind() -> SentKind:
    """Return the kind of data that is being sent: by the executor that runs, or else by the program or autograd."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in _EXECUTORS and frame.f_globals.get("__name__", "").startswith(_RUNTIME):
            return _EXECUTORS[frame.f_code.co_name]
        frame = frame.f_back
    return VERBS["run"].sends


def _num_bytes(value: object) -> int:
    return sum(t.nbytes for t in private.tree_iter(value) if isinstance(t, Tensor))
