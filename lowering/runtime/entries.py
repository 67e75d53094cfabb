"""The choice of a module's entry for a batch, by mode and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.lowering import private
from shardwright.lowering.runtime.entry import Entry
from shardwright.lowering.runtime.spec import Key
from shardwright.pcg.capture.importing import flat_batch
from shardwright.pcg.errors import BatchError

Shapes = Mapping[str, tuple[int, ...]]


class Entries:
    """The entries of a module, in the order in which they were added.

    A rank may pass a global batch or its own shard, and a shard of one entry may have the global shapes of another.
    Such a batch is taken for the kind that was passed last. Once ranks have passed shards, a batch of unknown shapes is
    taken for shards, in both modes.
    """

    def __init__(self) -> None:
        self._by_key = dict[tuple[Key, str], Entry]()
        self._seen = set[bool]()  # whether shards were passed (True), and global batches (False)
        self._in_shards: bool | None = None  # what was passed last
        self._whole = set[frozenset[tuple[str, tuple[int, ...]]]]()  # shapes of those that are always global batches

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_key.values())

    def add(self, entry: Entry) -> None:
        """Add an entry; it replaces an entry for the same mode, shapes and options."""
        self._by_key[entry.key, repr(sorted(entry.batch.options.items()))] = entry

    def take_whole(self, batch: Mapping[str, Any]) -> None:
        """Take batches of the shapes of this one for global batches from now on, whatever was passed before."""
        self._whole.add(_key(_shapes(_parted(batch)[0])))

    def find(self, batch: Mapping[str, Any]) -> Entry | None:
        """Return the entry for a batch of global tensors with these options, or None."""
        tensors, options = _parted(batch)
        shapes = _shapes(tensors)
        return next((e for e in self if shapes == e.batch.shapes and options == e.batch.options), None)

    def lacks(self, batch: Mapping[str, Any], *, training: bool) -> bool:
        """Return whether no program takes a batch in this mode, and some takes it but for its sizes or the mode.

        So another program can be made for it. A shard of a known batch is such a batch too if all batches so far were
        global. A batch with other names, types, options or numbers of dimensions is not.
        """
        tensors, options = _parted(batch)
        passed, of_mode = _shapes(tensors), self._of_mode(training)
        if any(passed == entry.batch.shapes for entry in of_mode):
            return False
        if _key(passed) not in self._whole and self._seen != {False} and any(_has_shards(passed, e) for e in of_mode):
            return False
        return any(_is_like(tensors, options, entry) for entry in self)

    def with_options(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch with the options of the first program that it leaves out."""
        flat, options = flat_batch(batch), next((entry.batch.options for entry in self), {})
        return {**{k: v for k, v in options.items() if k not in flat and "." not in k}, **batch}

    def globally(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return an example of a batch in the global shapes, with all options.

        Where ranks pass their shards, it has copies of this rank's shard in place of the others.
        """
        batch = self.with_options(batch)
        passed = _shapes(_parted(batch)[0])
        known = _key(passed) in self._whole or any(passed == entry.batch.shapes for entry in self)
        if known or True not in self._seen:
            return batch
        (first, *_), names = self, iter(flat_batch(batch))

        def whole(value: object) -> object:
            key = next(names)
            for layout, size in zip(first.batch.layouts.get(key, ()), first.ranks.mesh.sizes, strict=False):
                if layout.is_shard:
                    assert isinstance(value, Tensor)
                    value = torch.cat([value] * size, layout.dim)
            return value

        return private.tree_map(whole, batch)

    def _of_mode(self, training: bool) -> list[Entry]:
        return [entry for (key, _), entry in self._by_key.items() if key.training == training]

    def has_mode(self, *, training: bool) -> bool:
        return bool(self._of_mode(training))

    def of(self, batch: Mapping[str, Any], *, training: bool) -> Entry:
        """Return the entry for a batch in a mode. Raises `BatchError` if none fits, or if the choice is ambiguous.

        A mode's only entry is returned unchecked; its own check of the batch says what does not fit.
        """
        of_mode = self._of_mode(training)
        passed = _shapes(_parted(batch)[0])
        whole = [entry for entry in of_mode if passed == entry.batch.shapes]
        if whole and _key(passed) in self._whole:
            return whole[0]
        shards = [entry for entry in of_mode if entry not in whole and _in_parts(passed, entry)]
        if len(whole) + len(shards) == 1:
            self._in_shards = bool(shards)
            self._seen.add(self._in_shards)
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


def _is_like(tensors: Mapping[str, Tensor], options: Mapping[str, Any], entry: Entry) -> bool:
    """Return whether tensors have the names, dtypes and numbers of dimensions of an entry's, with no other options."""
    known = {name: (entry.batch.dtypes[name], len(shape)) for name, shape in entry.batch.shapes.items()}
    baked = entry.batch.options
    same = all(name in baked and baked[name] == value for name, value in options.items())
    return same and {name: (x.dtype, x.dim()) for name, x in tensors.items()} == known


def _parted(batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a batch by key, and its other values."""
    flat = flat_batch(batch)
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in flat.items() if name not in tensors}


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(x.shape) for name, x in tensors.items()}


def _key(shapes: Shapes) -> frozenset[tuple[str, tuple[int, ...]]]:
    return frozenset(shapes.items())


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
