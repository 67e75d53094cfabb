"""The choice of a module's entry for a batch, by mode and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

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

    def takes(self, batch: Mapping[str, Any]) -> bool:
        """Return whether a program takes a batch of global tensors."""
        passed = {name: tuple(x.shape) for name, x in flat_batch(batch).items() if isinstance(x, Tensor)}
        return any(passed == entry.batch.shapes for entry in self)

    def lacks(self, batch: Mapping[str, Any], *, training: bool) -> bool:
        """Return whether no program takes a batch in this mode, and some takes it but for its sizes or the mode.

        So another program can be made for it. A shard of a known batch is such a batch too where global batches were
        passed before. A batch with other names, types or numbers of dimensions is not.
        """
        given = {name: x for name, x in flat_batch(batch).items() if isinstance(x, Tensor)}
        passed = {name: tuple(x.shape) for name, x in given.items()}
        of_mode = self._of_mode(training)
        if any(passed == entry.batch.shapes for entry in of_mode):
            return False
        if self._in_shards is not False and any(_has_shards(passed, entry) for entry in of_mode):
            return False
        return any(_is_like(given, entry) for entry in self._by_key.values())

    def globally(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return an example of a batch in the global shapes, with all options.

        Where ranks pass their shards, it has copies of this rank's shard in place of the others.
        """
        if not self._by_key:
            return dict(batch)
        (first, *_), flat = self._by_key.values(), flat_batch(batch)
        options = {k: v for k, v in first.batch.options.items() if k not in flat and "." not in k}
        if not self._in_shards:
            return {**options, **batch}
        keys, sizes = iter(flat), first.ranks.mesh.sizes

        def whole(value: object) -> object:
            key = next(keys)
            for layout, size in zip(first.batch.layouts.get(key, ()), sizes, strict=False):
                if layout.is_shard:
                    assert isinstance(value, Tensor)
                    value = torch.cat([value] * size, layout.dim)
            return value

        return {**options, **tree_map(whole, dict(batch))}

    def _of_mode(self, training: bool) -> list[Entry]:
        return [entry for key, entry in self._by_key.items() if key.training == training]

    def has_mode(self, *, training: bool) -> bool:
        return any(key.training == training for key in self._by_key)

    def of(self, batch: Mapping[str, Any], *, training: bool) -> Entry:
        """Return the entry for a batch in a mode. Raises `BatchError` if none fits, or if the choice is ambiguous.

        A mode's only entry is returned unchecked; its own check of the batch says what does not fit.
        """
        of_mode = self._of_mode(training)
        passed = {name: tuple(x.shape) for name, x in flat_batch(batch).items() if isinstance(x, Tensor)}
        whole = [entry for entry in of_mode if passed == entry.batch.shapes]
        shards = [entry for entry in of_mode if entry not in whole and _in_parts(passed, entry)]
        if len(whole) + len(shards) == 1:
            self._in_shards = bool(shards)
            return (whole or shards)[0]
        if whole and len(shards) == 1 and self._in_shards is not None:
            return shards[0] if self._in_shards else whole[0]
        if len(of_mode) == 1:
            return of_mode[0]
        raise BatchError(_refusal(passed, of_mode, both=bool(whole or shards)))


def _in_parts(passed: Shapes, entry: Entry) -> bool:
    """Return whether each tensor is an entry's global tensor or this rank's shard of it."""
    whole, own = entry.batch.shapes, entry.batch.own_shapes
    return passed.keys() == whole.keys() and all(passed[name] in (whole[name], own[name]) for name in passed)


def _has_shards(passed: Shapes, entry: Entry) -> bool:
    """Return whether some tensor can only be this rank's shard of an entry's, if it is for the entry."""
    whole, own = entry.batch.shapes, entry.batch.own_shapes
    return any(passed.get(name) == own[name] != whole[name] for name in whole)


def _is_like(given: Mapping[str, Tensor], entry: Entry) -> bool:
    """Return whether tensors have the names, dtypes and numbers of dimensions of an entry's."""
    known = {name: (entry.batch.dtypes[name], len(shape)) for name, shape in entry.batch.shapes.items()}
    return {name: (x.dtype, x.dim()) for name, x in given.items()} == known


def _refusal(passed: Shapes, entries: Sequence[Entry], *, both: bool) -> str:
    taken = "; ".join(_named(entry.batch.shapes) for entry in entries)
    if both:
        return (
            f"batch: {_named(passed)} is a global batch of one program and a shard of another ({taken}); pass the "
            "global batch of the larger one first, and global batches from then on"
        )
    return (
        f"batch: {_named(passed)} fits no program; there are some for {taken}; pad the batch, or drop it; where ranks "
        "pass shards, pass the global batch"
    )


def _named(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))
