"""Slices of the shards of torch.distributed.checkpoint, beside torch's own reader, which reads whole shards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardwright.lowering.store import slice_reader
from shardwright.lowering.store.shards import Checkpoint
from shardwright.lowering.store.slice_reader import SliceReader

torch.manual_seed(0)
TENSORS: dict[str, Tensor] = {
    "matrix": torch.randn(24, 10),
    "transposed": torch.randn(10, 24).t(),
    "permuted": torch.randn(4, 24, 10).permute(1, 0, 2),
    "half": torch.randn(24, 10).bfloat16(),
    "eighth": torch.randn(24, 10).to(torch.float8_e4m3fn),
    "flags": torch.rand(24, 10) > 0.5,
    "complex": torch.randn(24, 10, dtype=torch.complex64),
    "conjugate": torch.randn(24, 10, dtype=torch.complex64).conj(),
    "negative": torch.randn(24, 10, dtype=torch.complex64).conj().imag,
    "number": torch.tensor(7),
    "one": torch.tensor([3.5]),
    "nothing": torch.zeros(0, 10),
    "part": torch.arange(480).view(2, 24, 10)[1],
    "expanded": torch.randn(24, 1).expand(24, 10),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("dcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # there is no process group
        save({**TENSORS, "words": "kept"}, storage_writer=FileSystemWriter(where))
    return where


def loaded(folder: Path, reader: type[FileSystemReader]) -> dict[str, Any]:
    state: dict[str, Any] = {name: torch.zeros_like(value) for name, value in TENSORS.items()}
    state["expanded"] = torch.zeros(24, 10)
    state["words"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load(state, storage_reader=reader(folder))
    return state


def test_whole_tensors_are_those_that_torch_reads(folder: Path) -> None:
    ours, theirs = loaded(folder, SliceReader), loaded(folder, FileSystemReader)
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            assert value.dtype == ours[name].dtype, name
            assert torch.equal(value.to(torch.complex128), ours[name].to(torch.complex128)), name
            assert torch.equal(value.to(torch.complex128), TENSORS[name].to(torch.complex128)), name
        else:
            assert ours[name] == value


@pytest.mark.parametrize("name", ["matrix", "transposed", "half", "eighth", "flags", "complex", "part", "expanded"])
def test_slices_are_read_without_the_rest(folder: Path, name: str) -> None:
    """Torch's reader is left with nothing to read."""
    files, part = Checkpoint(folder), torch.zeros(7, 5, dtype=TENSORS[name].dtype)
    boxes = [
        ((slice(2, 6), slice(3, 8)), (slice(0, 4), slice(0, 5))),
        ((slice(20, 23), slice(5, 10)), (slice(4, 7), slice(0, 5))),
    ]
    real = FileSystemReader.read_data
    with (
        mock.patch.object(torch, "frombuffer", wraps=torch.frombuffer) as mapped,
        mock.patch.object(FileSystemReader, "read_data", side_effect=real, autospec=True) as whole,
    ):
        files.fill(part, name, iter(boxes))
    assert mapped.call_count == 2
    assert [call.args[1].items for call in whole.call_args_list] == [[]]
    own = TENSORS[name].to(torch.complex128)
    assert torch.equal(part.to(torch.complex128), torch.cat([own[2:6, 3:8], own[20:23, 5:10]]))


def test_what_has_no_known_place_is_read_by_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a torch that does not tell it."""
    monkeypatch.setattr(slice_reader.private, "record_offset", lambda tensor: None)
    for name, value in loaded(folder, SliceReader).items():
        if isinstance(value, Tensor):
            assert torch.equal(value.to(torch.complex128), TENSORS[name].to(torch.complex128)), name


def test_a_file_that_was_cut_off_is_no_zeros(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".distcp" else content)
    part, at = torch.zeros(24, 10), (slice(0, 24), slice(0, 10))
    failed = 0
    for name in ("matrix", "expanded"):
        try:
            Checkpoint(tmp_path).fill(part, name, iter([(at, at)]))
        except (RuntimeError, ValueError, OSError):
            failed += 1
        else:
            assert torch.equal(part, TENSORS[name])
    assert failed
