"""The replay of a record: its steps run on real memory, and every tensor is handed over as soon as it is made.

    Record, wanted windows ──▶ steps, each draw in its turn ──▶ (name, tensor), of which nothing is kept

It holds what the steps of one tensor need, and what later steps read. Draws that nobody wants are made and dropped, as
they advance the generator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator as Iteration
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.pcg.capture.record import Real, Record, Step, Unknown, Version, Window, generator_of
from shardwright.pcg.errors import PlanError


def replay(record: Record, wanted: Mapping[str, Window]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with the values that one process would have, each once, in the order in which they are made.

    Whoever takes one lets go of it before the next. Raises `PlanError` where a step cannot be run again.
    """
    order = record.needed(window.version for window in wanted.values())
    names = dict[Version, list[str]]()
    for name, window in wanted.items():
        names.setdefault(window.version, []).append(name)
    memory = _Memory(record, order, names)
    with _default_generator_kept(), torch.no_grad():
        for i in order:
            memory.run(i)
            step = record.steps[i]
            for version in step.versions:
                for name in names.get(version, ()):
                    yield name, memory.take(wanted[name])


@contextmanager
def _default_generator_kept() -> Iteration[None]:
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iteration[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_kind(step: Step, result: Tensor, window: Window) -> None:
    """Raise `PlanError` where a step makes another tensor than it was noted to make."""
    made, noted = (result.dtype, tuple(result.shape)), (window.dtype, window.size)
    if made != noted:
        raise PlanError(
            f"{step.name} makes a tensor of {made[0]} {list(made[1])} now, and made one of {noted[0]} "
            f"{list(noted[1])} inside of `with shardwright.fake()`; build the model on real memory"
        )


class _Memory:
    """The versions of storages that are alive, and the generators that steps draw from."""

    def __init__(self, record: Record, order: list[int], names: Mapping[Version, list[str]]) -> None:
        self._record = record
        self._readers = Counter(version for i in order for version in record.steps[i].reads)
        self._readers.update({version: len(own) for version, own in names.items()})
        self._alive = dict[Version, UntypedStorage]()
        self._resumed = {step.state for step in record.steps if isinstance(step.state, int)}
        self._states = dict[int, Tensor]()  # of generators, after steps to which later ones return
        self._generators = {torch.default_generator: torch.default_generator}

    def take(self, window: Window) -> Tensor:
        """Return a tensor for one of its readers, and forget it after the last."""
        tensor = self._tensor(window, self._alive[window.version])
        self._let_go(window.version)
        return tensor

    def run(self, number: int) -> None:
        """Run a step on the versions that it reads, and keep what others read of the versions that it makes."""
        step = self._record.steps[number]
        written = {version: self._to_write(step, window) for window, version in step.writes}
        by_old = {window.version: written[version] for window, version in step.writes}
        generator = self._generator(step) if step.draws else None

        def real(value: object) -> object:
            match value:
                case Window():
                    old = value.version
                    return self._tensor(value, by_old[old] if old in by_old else self._alive[old])
                case Generator():
                    return generator
                case Unknown():
                    raise PlanError(
                        f"{step.name} made a part of the model from a tensor {list(value.size)} that was not made "
                        "inside of the same `with shardwright.fake()`; make both inside of one"
                    )
                case Real() if self._record.has_written(value.source):
                    raise PlanError(
                        f"{step.name} reads a real tensor {list(value.source.shape)} into which something was written "
                        "inside of `with shardwright.fake()`, which leaves it as it is; write into it outside"
                    )
                case Real():
                    return value.value
                case _:
                    return value

        args, kwargs = tree_map(real, (step.args, dict(step.kwargs)))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        with _default_dtype(step.dtype):
            results = tree_leaves(step.func(*args, **kwargs))
        if generator is not None and number in self._resumed:
            self._states[number] = generator.get_state()
        for place, window in step.made.items():
            _check_kind(step, results[place], window)
            self._keep(window.version, self._as_noted(results[place], window, given))
        for version, storage in written.items():
            self._keep(version, storage)
        for version in step.reads:
            self._let_go(version)

    def _to_write(self, step: Step, window: Window) -> UntypedStorage:
        """Return the memory that a step writes: that of the version before, or a copy if others read it yet."""
        if window.version not in step.reads:
            return UntypedStorage(self._record.num_bytes[window.version[0]])
        storage = self._alive[window.version]
        return storage if self._readers[window.version] == step.reads.count(window.version) else storage.clone()

    def _as_noted(self, result: Tensor, window: Window, given: set[int]) -> UntypedStorage:
        """Return the memory of a result, of its own and laid out as it was noted."""
        storage = result.untyped_storage()
        if storage._cdata in given:
            return storage.clone()
        if (tuple(result.stride()), result.storage_offset()) != (window.stride, window.offset):
            storage = UntypedStorage(self._record.num_bytes[window.version[0]])
            self._tensor(window, storage).copy_(result)
        return storage

    def _generator(self, step: Step) -> Generator:
        """Return the generator of a step, in the state in which the step began if that is not where it is."""
        own = generator_of(step)
        generator = self._generators.setdefault(own, own if own is torch.default_generator else Generator(own.device))
        if not step.is_inside:
            raise PlanError(
                f"{step.name} draws for the model after the `with shardwright.fake()` in which the model was built; "
                "fill its tensors inside of the block"
            )
        if step.state is not None:
            generator.set_state(self._states[step.state] if isinstance(step.state, int) else step.state)
        return generator

    def _keep(self, version: Version, storage: UntypedStorage) -> None:
        if self._readers[version]:
            self._alive[version] = storage

    def _let_go(self, version: Version) -> None:
        self._readers[version] -= 1
        if not self._readers[version]:
            del self._alive[version]

    @staticmethod
    def _tensor(window: Window, storage: UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=window.dtype)
        return empty.set_(storage, window.offset, window.size, window.stride)
