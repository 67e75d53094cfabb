"""The folder of a run's checkpoints: one folder for each saved step, which is whole or not there.

    step-00001000/            a folder of torch.distributed.checkpoint, and two files beside it
        checkpoint.json       step, number of ranks, sizes and checksums of all other files; written last
        ranks.pt              the states of generators, the learning rate's schedule, the place in the data
    step-00001500.partial/    a save that is under way, or was cut off
    .lock                     held while a run saves here

A save writes into a `.partial` folder, which gets its name when everything is on disk. So whatever ends a save leaves
the checkpoints before it as they are.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwright.pcg.errors import CheckpointError

PREFIX, PARTIAL, ABOUT, RANKS, METADATA = "step-", ".partial", "checkpoint.json", "ranks.pt", ".metadata"
FORMAT = 1
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Written(WriteResult):
    """A written item, with the size and checksum of its file."""

    file: tuple[str, int, int] = ("", 0, 0)


class Writer(FileSystemWriter):
    """It writes a rank's parts, and a list of all files with their sizes and checksums.

    `ranks`: what goes into `ranks.pt`, on the rank that writes it. `about`: what `checkpoint.json` says beside files.
    """

    def __init__(self, folder: Path, ranks: object, about: Mapping[str, Any]) -> None:
        super().__init__(folder, thread_count=1)
        self._folder, self._ranks, self._about = folder, ranks, dict(about)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, then read them again for their checksums."""
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        files = {name: summed(self._folder / name) for name in names}
        future: Future[list[WriteResult]] = Future()
        future.set_result([
            Written(r.index, r.size_in_bytes, r.storage_data, files[r.storage_data.relative_path])
            for r in results
        ])  # fmt: skip
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what describes all ranks' files. Rank 0 calls it once they are written."""
        super().finish(metadata, results)
        with (self._folder / RANKS).open("wb") as small:
            torch.save(self._ranks, small)
            small.flush()
            os.fsync(small.fileno())
        written = {result.file for of_rank in results for result in of_rank if isinstance(result, Written)}
        files = sorted(written | {summed(self._folder / name) for name in (RANKS, METADATA)})
        about = {"format": FORMAT, **self._about, "files": {name: rest for name, *rest in files}}
        with (self._folder / ABOUT).open("w", encoding="utf-8") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())


def summed(file: Path) -> tuple[str, int, int]:
    """Return a file's name, its size in bytes, and its CRC-32."""
    total = size = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            total, size = zlib.crc32(chunk, total), size + len(chunk)
    return file.name, size, total


@dataclass
class CheckpointFolder:
    """A run's folder. Only rank 0 changes it."""

    path: Path
    _lock: TextIOWrapper | None = field(default=None, repr=False)

    def begin(self, step: int) -> Path:
        """Return a new folder for the files of a step.

        Raises `CheckpointError` if it cannot be made, if another run saves here, or if the step is there already.
        """
        if step < 0:
            raise CheckpointError(f"{self.path}: step {step!r}: expected a whole number of at least 0")
        target, last = self.at(step), max(self.steps(), default=-1)
        if step <= last:
            raise CheckpointError(f"{self.at(last)}: step {last} has been saved; save later steps, or move it away")
        partial = target.with_name(target.name + PARTIAL)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold()
            for old in self.path.glob(f"{PREFIX}*{PARTIAL}"):  # what was cut off
                shutil.rmtree(old)
            partial.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot save here: {error.strerror or error}; check the path"
            ) from error
        return partial

    def end(self, partial: Path, keep: int | None) -> Path:
        """Give a written folder its name, and delete all but the last `keep` checkpoints."""
        target = partial.with_name(partial.name.removesuffix(PARTIAL))
        _to_disk(partial)
        partial.rename(target)
        _to_disk(self.path)
        own = [step for step in self.steps() if self.at(step).is_dir()]
        for step in own[: -keep if keep else 0]:
            shutil.rmtree(self.at(step))
        return target

    def at(self, step: int) -> Path:
        """Return the folder of a step that is saved here."""
        return self.path / f"{PREFIX}{step:08d}"

    def all(self) -> dict[int, Path]:
        """Return the folder of each step: of those saved here, and of whole ones by torchtitan (`step-10`)."""
        if not self.path.is_dir():
            return {}
        entries = {entry.name.removeprefix(PREFIX): entry for entry in sorted(self.path.glob(f"{PREFIX}*"))}
        steps = {int(name): entry for name, entry in entries.items() if name.isdecimal() and entry.is_dir()}
        return {step: entry for step, entry in steps.items() if entry == self.at(step) or (entry / METADATA).is_file()}

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, in order."""
        return sorted(self.all())

    def _hold(self) -> None:
        """Lock the folder as long as this process lives."""
        if self._lock is not None:
            return
        lock = (self.path / ".lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise CheckpointError(f"{self.path}: another run saves here; give each run a folder of its own") from None
        self._lock = lock


def _to_disk(folder: Path) -> None:
    """Write a folder's list of files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_about(folder: Path) -> dict[str, Any]:
    """Return what `checkpoint.json` says. Raises `CheckpointError` if it is missing, damaged or of a later format."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        version, files = about["format"], about["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder}: {ABOUT} is missing or damaged ({error}); load another step, or, if the folder was not saved by "
            "shardwright.save, its weights alone by compile(weights=...)"
        ) from None
    if version != FORMAT or not isinstance(files, dict) or any(Path(name).name != name for name in files):
        raise CheckpointError(
            f"{folder}: format {version!r}, expected {FORMAT}; load it with the version that saved it"
        )
    return about


def check_files(folder: Path, files: Mapping[str, Sequence[int]], share: Iterable[str]) -> None:
    """Raise `CheckpointError` if one of the files in `share` is not as it was saved."""
    for name in share:
        try:
            now = summed(folder / name)[1:]
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror or error}; load another step") from error
        if now != tuple(files[name]):
            size, total = files[name]
            what = f"{size} bytes, got {now[0]}" if now[0] != size else f"checksum {total:08x}, got {now[1]:08x}"
            raise CheckpointError(f"{folder / name}: damaged: expected {what}; load another step")
