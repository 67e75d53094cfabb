"""Batches of a data set, of which each rank reads its own rows."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.runtime.ahead import ahead, link_to
from shardwright.pcg.arguments import FLAG, NUMBER, Argument, checked
from shardwright.pcg.errors import BatchError
from shardwright.planned import require_plan

_TAKEN = "batch_size", "sampler", "batch_sampler"
_OPTIONS = [
    parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in inspect.signature(DataLoader).parameters.items()
    if name not in ("dataset", "shuffle", "drop_last")
]
_DATASET = Argument((Sized, IterableDataset), "a data set with __len__ and __getitem__, or an IterableDataset", (str,))
"""The options of torch's loader that ours takes too; `_TAKEN` are the plan's."""


class Loader:
    """The batches of a data set for a compiled model, epoch after epoch. A rank reads its own rows of each.

    Iterating gives what is left of an epoch: a rank's shards of global batches, as `forward_backward` takes them. All
    ranks agree on the order without sending anything. `save` and `load` take it as their `sampler`: after `load` it
    goes on behind the last batch that was taken, whatever was read ahead, on any number of ranks.

    On GPUs, where workers read (`num_workers`), the next batch is copied to the device from pinned memory beside the
    step; batches are then tensors of the device. On CPUs nothing is copied.

    Attributes:
        epoch: the number of epochs that are over.
        batch: the number of batches of this epoch that were taken.
    """

    @checked(BatchError, _OPTIONS, dataset=_DATASET, shuffle=FLAG, seed=NUMBER, drop_last=FLAG)
    def __init__(
        self,
        parallel: ParallelModule,
        dataset: Dataset[Any],
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        **options: Any,
    ) -> None:
        """Make batches as large as the one that the model was compiled with.

        Args:
            parallel: the compiled model, with a plan.
            dataset: with `__len__` and `__getitem__`, or an `IterableDataset`, which gives the same examples in the
                same order on every rank; of these each rank keeps its own.
            shuffle: whether to draw an order for each epoch from `seed`; not of an `IterableDataset`.
            seed: the same on every rank. Numbers that workers draw begin anew when a run goes on.
            drop_last: whether a rest that fills no batch is left out. Otherwise it is the last batch of an epoch, which
                every rank reads whole; the compiled model makes a program for it.
            options: of `torch.utils.data.DataLoader`: `num_workers`, `collate_fn`, `pin_memory`, … What an example and
                `collate_fn` give is a dictionary, by the model's argument names.

        Raises:
            BatchError: the model has no plan yet, the data set has no batch, or options do not fit. A rest
                that is to be the last batch has as many rows as a rank's part of a batch, for which it would be taken.
        """
        require_plan(parallel, "Loader", BatchError)
        self._entries, self._check = parallel.entries, (check := next(iter(parallel.entries)).batch)
        sizes = {shape[0] for shape in check.shapes.values() if shape}
        if len(sizes) != 1:
            raise BatchError(f"Loader: the tensors of a batch have {sorted(sizes)} rows; expected one number of rows")
        if taken := options.keys() & {*_TAKEN}:
            raise BatchError(f"Loader: {sorted(taken)[0]}= is the plan's; leave it out")
        (self._size,), self._dataset, self._options = sizes, dataset, options
        rows = check.own_rows()
        self._rows, self._is_cut = torch.arange(self._size) if rows is None else rows, rows is not None
        self._is_stream = isinstance(dataset, IterableDataset)
        if self._is_stream and options.get("num_workers", 0) > 1:
            raise BatchError("Loader: several workers would each read the whole IterableDataset; use num_workers=1")
        self._shuffle, self._seed, self._drop_last = shuffle and not self._is_stream, seed, drop_last
        self.epoch = self.batch = 0
        if not self._is_stream:
            if not len(self):
                raise BatchError(
                    f"Loader: the data set has {self._num_examples} examples, less than a batch of {self._size}"
                )
            self._check_rest(self._num_examples % self._size)

    def _check_rest(self, rows: int) -> None:
        """Refuse a last batch that the compiled model would take for a rank's part of a batch."""
        if not self._drop_last and self._is_cut and rows == len(self._rows) < self._size:
            raise BatchError(
                f"Loader: {rows} examples are left for the last batch, as many as a rank's part of a batch of "
                f"{self._size}; leave them out with drop_last=True, or take another number of examples"
            )

    @property
    def _num_examples(self) -> int:
        return len(cast("Sequence[Any]", self._dataset))

    def __len__(self) -> int:
        """Return the number of batches in an epoch. An `IterableDataset` may not say it."""
        whole, rest = divmod(self._num_examples, self._size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield what is left of this epoch."""
        batches, device = self._parts(), self._check.ranks.device
        if self._options.get("num_workers") and (link := link_to(device)) is not None:
            batches = ahead(batches, link, device)  # read by workers, so what this process draws stays in order
        for size, batch in batches:
            self.batch += 1
            if size < self._size:
                self._check_rest(size)
                self._entries.take_whole(batch)
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def _parts(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the size of each batch that is left, and this rank's part of it: all of a last one."""
        for size, batch in self._loader():
            yield size, self._check.of_rows(batch) if self._is_cut and size == self._size else batch

    def _loader(self) -> Iterable[tuple[int, dict[str, Any]]]:
        """Return the size of each batch that is left, and the rows of it that this rank reads."""
        order = torch.arange(0 if self._is_stream else self._num_examples)
        if self._shuffle:
            order = torch.randperm(self._num_examples, generator=_generator(self._seed, self.epoch))
        generator = _generator(self._seed, self.epoch, self.batch, int(self._rows[0]))  # of workers: by rank
        options: dict[str, Any] = {
            "generator": generator,
            **self._options,
        }  # else every start would draw from torch's own generator
        if self._is_stream:
            examples = cast("Iterable[Any]", self._dataset)
            rows = _Rows(examples, self._size, self._rows.tolist(), self.batch, drop_last=self._drop_last)
            options["collate_fn"] = partial(_collated, options.get("collate_fn") or default_collate)
            return DataLoader(rows, batch_size=None, **options)
        starts = range(self.batch * self._size, len(self) * self._size, self._size)
        batches = (order[start : start + self._size] for start in starts)
        rows = (batch[self._rows] if len(batch) == self._size else batch for batch in batches)
        sizes = (min(self._size, len(order) - start) for start in starts)
        loader = DataLoader(self._dataset, batch_sampler=map(Tensor.tolist, rows), **options)
        return zip(sizes, loader, strict=True)

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data, which is the same on all ranks."""
        return {"epoch": self.epoch, "batch": self.batch, **self._order}

    @property
    def _order(self) -> dict[str, int]:
        """Return the settings that decide which examples a place means."""
        many = -1 if self._is_stream else self._num_examples
        return {"size": self._size, "seed": self._seed, "shuffle": int(self._shuffle), "examples": many}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from a place. Raises `BatchError` if it was counted in batches of another size, or another order."""
        for name, here in self._order.items():
            if state_dict[name] != here:
                raise BatchError(
                    f"Loader: the place in the data was saved with {name} {state_dict[name]}, and here it is {here}; "
                    "use the same, or begin an epoch anew without the sampler"
                )
        self.epoch, self.batch = state_dict["epoch"], state_dict["batch"]


def _generator(*numbers: int) -> torch.Generator:
    """Return a generator that is seeded by some numbers together."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _collated(collate: Callable[[list[Any]], Any], given: tuple[int, list[Any]]) -> tuple[int, Any]:
    return given[0], collate(given[1])


class _Rows(IterableDataset[Any]):
    """Some rows of each batch of a stream, from the batch of a number on, all of a smaller last one; and its size."""

    def __init__(self, examples: Iterable[Any], size: int, rows: Sequence[int], first: int, *, drop_last: bool) -> None:
        self.examples, self.size, self.rows, self.first, self.drop_last = examples, size, rows, first, drop_last

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        assert (worker := get_worker_info()) is None or worker.num_workers == 1
        stream = islice(iter(self.examples), self.first * self.size, None)
        while len(batch := list(islice(stream, self.size))) == self.size:
            yield self.size, [batch[row] for row in self.rows]
        if batch and not self.drop_last:
            yield len(batch), batch
