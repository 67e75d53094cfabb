"""The values of a model that has none yet: it was built inside `shardwright.fake()`, or they are in files.

    files ──read in parts──▶ this rank's parts ◀──replay, one tensor at a time── record of a constructor

A rank holds its parts, and one whole tensor while it makes that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwright.lowering import private
from shardwright.lowering.ranks.agreement import share_values
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.store.sources import own_part
from shardwright.lowering.store.storage import Slices
from shardwright.lowering.store.weights import SHOWN, Stored, WeightFiles
from shardwright.pcg.capture.fake import record_of
from shardwright.pcg.capture.importing import names_by_first
from shardwright.pcg.capture.record import Record
from shardwright.pcg.capture.replay import replay
from shardwright.pcg.errors import PlanError

TRIMMED_BYTES = 1 << 20
"""The bytes of a tensor from which on its memory is returned to the system as soon as it is free."""


class DeferredValues:
    """A source: values from files, else as the model has them, else as its constructor makes them.

    A rank makes or reads one tensor at a time, and keeps its part.
    """

    def __init__(self, model: nn.Module, files: WeightFiles | None = None) -> None:
        """Raise `PlanError` where files are not of the model, or nothing gives a value to some of its tensors."""
        self.parameters: Mapping[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.buffers: Mapping[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
        self._stored = Stored(files, model) if files is not None else None
        names = self._stored.names if self._stored is not None else {}
        values = {**self.parameters, **self.buffers}
        others = {name: values[name] for name in names_by_first(values) if name not in names}
        self._real = {name: value for name, value in others.items() if not is_unreal(value)}
        self._made = _Recipes({name: value for name, value in others.items() if is_unreal(value)}, type(model).__name__)
        records = {id(record): record for value in values.values() if (record := record_of(value)) is not None}
        written = [n for n, value in self._real.items() if any(r.has_written(value) for r in records.values())]
        if written:
            raise PlanError(
                f"{type(model).__name__}: {_listed(written)} real values, into which something was written inside of "
                "`with shardwright.fake()`, which leaves them as they are; write into them outside, or make them inside"
            )

    @property
    def facts(self) -> dict[str, str]:
        """Facts that must be the same on all ranks, in words, by their subject."""
        kinds = {} if self._stored is None else self._stored.files.kinds
        stored = {f"{name} in the files": str(kind) for name, kind in kinds.items()}
        return stored | {"what the constructor does": self._made.digest}

    def agree(self, ranks: Ranks, others: Mapping[str, Tensor]) -> None:
        """Copy rank 0's real values, those that its constructor read, and the random states that it began with."""
        share_values({**others, **self._real, **self._made.given}, ranks)

    def parts(self, wanted: Mapping[str, Slices], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield parts of each kind in turn; those that the constructor makes, in its order."""
        for name, slices in wanted.items():
            if self._stored is not None and name in self._stored.names:
                yield name, self._stored.part(name, slices).to(device)
            elif name in self._real:
                yield name, own_part(self._real[name], slices, device)
        for name, value in self._made.values(name for name in wanted if name in self._made.windows):
            yield name, own_part(value, wanted[name], device)
            num_bytes = value.nbytes
            del value
            if num_bytes >= TRIMMED_BYTES:
                _trim()

    def real(self, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of tensors that are neither parameters nor buffers, and that the constructor has made."""
        unreal = {name: value for name, value in constants.items() if is_unreal(value)}
        made = {name: value.clone() for name, value in _Recipes(unreal, "the model").values(unreal)}
        return {name: made.get(name, value) for name, value in constants.items()}


def _trim() -> None:
    """Return free memory to the system. glibc keeps what lies between pieces that are alive, as parts do."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def is_unreal(value: Tensor) -> bool:
    """Return whether a tensor has no values: it is fake, or on device meta."""
    return isinstance(value, private.FakeTensor) or value.device.type == "meta"


class _Recipes:
    """The steps that make fake tensors. `windows`: those tensors in their record, by name."""

    def __init__(self, tensors: Mapping[str, Tensor], model: str) -> None:
        """Raise `PlanError` where a tensor has no record, or where nothing ever writes it."""
        records = {name: record_of(value) for name, value in tensors.items()}
        windows = {n: r.window(tensors[n]) if r is not None else None for n, r in records.items()}
        if lost := [name for name, window in windows.items() if window is None]:
            raise PlanError(
                f"{model}: {_listed(lost)} no values, and nothing says how they are made: build the whole model inside "
                "one `with shardwright.fake()`, whose tensors note that, on the CPU; or read them from files, "
                "compile(weights=...)"
            )
        self.windows = {name: window for name, window in windows.items() if window is not None}
        own = {id(record): record for record in records.values() if record is not None}
        if len(own) > 1:
            raise PlanError(f"{model} was built inside several `with shardwright.fake()`; build it inside of one")
        self._record = next(iter(own.values()), Record())
        makers = self._record.makers()
        if empty := [name for name, window in self.windows.items() if self._record.is_empty(window, makers)]:
            raise PlanError(
                f"{model}: {_listed(empty)} no values, as no initializer fills them (they are as torch.empty or device "
                "meta gives them): fill them in the constructor, or inside `with shardwright.fake()` after it; or read "
                "them from files, compile(weights=...)"
            )

    @property
    def given(self) -> dict[str, Tensor]:
        return self._record.given if self.windows else {}

    @property
    def digest(self) -> str:
        return self._record.digest if self.windows else ""

    def values(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, one at a time."""
        return replay(self._record, {name: self.windows[name] for name in names})


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more} {'has' if len(names) == 1 else 'have'}"
