"""Tensors in files: what they are, and parts of them, read without the rest.

    safetensors   a file, or a folder of files with an index
    torch.save    a file (or several with an index, as `pytorch_model.bin.index.json`), mapped into memory
    DCP           a folder of torch.distributed.checkpoint (`shards`)

Pages of a mapped file that were read count as memory of the process. So it is closed before they are more than the
largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwright.lowering.store.spans import Box, boxes, spans
from shardwright.lowering.store.storage import Slices
from shardwright.pcg.errors import MachineError, PlanError

MAPPED_BYTES = 1 << 20
"""The bytes that may be read from a mapped file in any case before it is closed and opened again."""


class Kind(NamedTuple):
    """A stored tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    @classmethod
    def of(cls, value: Tensor) -> Kind:
        return cls(tuple(value.shape), value.dtype)


class TensorFiles(Protocol):
    """Stored tensors by name.

    `others`: the names of values that are no tensors; None where files are of a model alone, and have none.
    """

    @property
    def kinds(self) -> Mapping[str, Kind]: ...

    @property
    def others(self) -> Collection[str] | None: ...

    def fill(self, part: Tensor, name: str, at: Iterator[tuple[Box, Box]]) -> None:
        """Copy boxes of a stored tensor into a part of it: the place of each in the whole, and in the part."""
        ...


def read_part(files: TensorFiles, name: str, slices: Slices) -> Tensor:
    """Return a rank's part of a stored tensor."""
    kind = files.kinds[name]
    along = spans(kind.shape, slices)
    part = torch.empty([sum(stop - start for start, stop in own) for own in along], dtype=kind.dtype)
    if part.numel():
        with told(f"{name} cannot be read"):
            files.fill(part, name, boxes(along))
    return part


@contextmanager
def told(what: str) -> Generator[None]:
    """Raise what libraries say of files as a `PlanError`."""
    try:
        yield
    except (PlanError, MachineError):
        raise
    except Exception as error:
        raise PlanError(f"{what}: {type(error).__name__}: {error}") from error


# ---- mapped files ----

Get = Callable[[str, Box], Tensor]
"""A function that returns a box of a stored tensor, perhaps in mapped memory."""


class Mapped:
    """Files of safetensors or of `torch.save` that are mapped into memory.

    `files`: by the names of their tensors, or one for all, under "".
    """

    others = None

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.kinds, self._file_of = dict[str, Kind](), dict[str, Path]()
        for file in dict.fromkeys(files.values()):
            with told(f"{file} cannot be read"):
                own = _opened(file)[0]
            for name, kind in own.items():
                if files.get(name, file) == file:
                    self.kinds[name], self._file_of[name] = kind, file
        if lacking := [f"{name} in {files[name].name}" for name in files if name and name not in self.kinds]:
            raise PlanError(f"the index names tensors that are not there: {', '.join(lacking[:10])}")
        largest = max((prod(kind.shape) * kind.dtype.itemsize for kind in self.kinds.values()), default=0)
        self._most_bytes, self._num_bytes = max(MAPPED_BYTES, largest), 0
        self._open: tuple[Path, Get] | None = None

    def fill(self, part: Tensor, name: str, at: Iterator[tuple[Box, Box]]) -> None:
        """Copy boxes out of the mapped file."""
        kind, file = self.kinds[name], self._file_of[name]
        row_bytes = prod(kind.shape[1:]) * kind.dtype.itemsize
        for there, here in at:
            num_bytes = row_bytes * (there[0].stop - there[0].start if there else 1)
            if self._open is None or self._open[0] != file or self._num_bytes + num_bytes > self._most_bytes:
                self._open = None  # before another is opened
                self._open, self._num_bytes = (file, _opened(file)[1]), 0
            part[here].copy_(self._open[1](name, there))
            self._num_bytes += num_bytes


def _opened(file: Path) -> tuple[dict[str, Kind], Get]:
    """Return the tensors of a file, and what reads them."""
    return _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)


def _safetensors(file: Path) -> tuple[dict[str, Kind], Get]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MachineError(f"{file}: to read it, pip install safetensors") from error
    handle: Any = safe_open(file, framework="pt", device="cpu")

    def kind(name: str) -> Kind:
        own = handle.get_slice(name)
        return Kind(tuple(own.get_shape()), _SAFETENSORS[own.get_dtype()])

    def get(name: str, box: Box) -> Tensor:
        return handle.get_slice(name)[box] if box else handle.get_tensor(name)

    return {name: kind(name) for name in handle.keys()}, get  # noqa: SIM118 - no dictionary


_SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip


def _pickled(file: Path) -> tuple[dict[str, Kind], Get]:
    loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    tensors = dict(_flat(loaded))
    if not tensors:
        raise PlanError(f"{file} holds a {type(loaded).__name__} without tensors; save a state_dict() into it")
    return {n: Kind.of(t) for n, t in tensors.items()}, lambda name, box: tensors[name][box]


def _flat(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries, by the keys on the way to them, joined by dots."""
    if isinstance(value, Tensor):
        yield path, value.detach()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
