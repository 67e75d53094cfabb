"""The choice of a module's entry for a batch, by mode and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwright.lowering.runtime.entry import Entry
from shardwright.lowering.runtime.spec import Key
from shardwright.pcg.capture.importing import flat_batch
from shardwright.pcg.errors import BatchError

Shapes = Mapping[str, tuple[int, ...]]


class Entries:
    """The entries of a module, in the order in which they were added.

    A rank may pass a global batch or its own shard, and a shard of one entry may have the global shapes of another.
    Such a batch is taken for the kind that was passed before, a global batch or a shard.
    """

    def __init__(self) -> None:
        self._by_key = dict[Key, Entry]()
        self._in_shards: bool | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_key.values())

    def add(self, entry: Entry) -> None:
        """Add an entry; it replaces an entry with the same key."""
        self._by_key[entry.key] = entry

    def has_mode(self, *, training: bool) -> bool:
        return any(key.training == training for key in self._by_key)

    def of(self, batch: Mapping[str, Any], *, training: bool) -> Entry:
        """Return the entry for a batch in a mode. Raises `BatchError` if none fits, or if the choice is ambiguous.

        A mode's only entry is returned unchecked; its own check of the batch says what does not fit.
        """
        of_mode = [entry for key, entry in self._by_key.items() if key.training == training]
        if len(of_mode) == 1:
            return of_mode[0]
        passed = {name: tuple(x.shape) for name, x in flat_batch(batch).items() if isinstance(x, Tensor)}
        whole = [entry for entry in of_mode if passed == entry.batch.shapes]
        shards = [entry for entry in of_mode if entry not in whole and passed == entry.batch.own_shapes]
        if len(whole) + len(shards) == 1:
            self._in_shards = bool(shards)
            return (whole or shards)[0]
        if whole and len(shards) == 1 and self._in_shards is not None:
            return shards[0] if self._in_shards else whole[0]
        raise BatchError(_refusal(passed, of_mode, both=bool(whole or shards)))


def _refusal(passed: Shapes, entries: Sequence[Entry], *, both: bool) -> str:
    taken = "; ".join(_named(entry.batch.shapes) for entry in entries)
    if both:
        return (
            f"batch: {_named(passed)} is a global batch of one program and a shard of another ({taken}); pass the "
            "global batch of the larger one first, and global batches from then on"
        )
    return f"batch: {_named(passed)} fits no program; there are some for {taken}; pad the batch, or drop it"


def _named(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))
