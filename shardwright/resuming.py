"""The saved state of an unfinished run of the generator, from which the same command goes on.

The state is a folder `FILE.partial` beside the file that is being written. `run.json` has the run's arguments and a
digest of the code, `lock` is locked while a run writes there, and every finished context is a file of candidates and
verdicts. These decide which rules the file proposes; a search believes only the proofs of this machine
(`verifier.store`). A folder of other arguments or code is emptied.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import shardwright
from shardwright.pcg.errors import RuleError
from shardwright.pcg.files import write_whole
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.wellformed import equation_from_json
from shardwright.verifier.certificates import RuleVerdict


@dataclass
class FinishedContext:
    """The findings in one context: candidates with their verdicts, and the generator's counts."""

    rules: list[tuple[Equation, RuleVerdict]]
    counts: dict[str, int]


@dataclass(frozen=True)
class Unfinished:
    """The folder of a run, locked while we write in it."""

    folder: Path

    def load(self, name: str) -> FinishedContext | None:
        """Return a finished context; None where there is none, or the file was damaged."""
        data = _read(self._file(name))
        try:
            return FinishedContext(
                [(equation_from_json(e["rule"]), _verdict(e)) for e in data["rules"]], dict(data["counts"])
            )
        except (TypeError, KeyError, RuleError):
            return None

    def save(self, name: str, finished: FinishedContext) -> None:
        """Save a finished context."""
        rules = [{**asdict(replace(v, certificate=None)), "rule": rule.to_json()} for rule, v in finished.rules]
        _write(self._file(name), {"counts": finished.counts, "rules": rules})

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


@contextmanager
def unfinished(path: Path, arguments: Mapping[str, Any], progress: Callable[[str], None]) -> Generator[Unfinished]:
    """Yield the saved state of a run that writes `path`; delete it when the block ends without an error.

    `arguments` are plain data: with the code, they decide whether the saved state is used. Raises `RuleError` where the
    folder cannot be written, is not ours, or is being used by another run.
    """
    folder = path.with_name(path.name + ".partial")
    key, mark, lock = {**arguments, "code": code_digest()}, folder / "run.json", folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and set(folder.iterdir()) - {lock}:
            raise RuleError(f"{folder}: this folder is not ours, and unfinished work is kept there; move it away")
        held = lock.open("a")
    except OSError as error:
        raise RuleError(f"{folder}: cannot keep unfinished work there ({error.strerror}); check the path") from error
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuleError(f"{path}: another run is generating this file; wait for it or use another name") from None
        if mark.exists() and _read(mark) != key:
            progress("the unfinished run was of other arguments or another version: starting anew")
            for file in set(folder.iterdir()) - {lock, mark}:
                file.unlink()
        _write(mark, key)
        yield Unfinished(folder)
        shutil.rmtree(folder)


def code_digest() -> str:
    """Return a digest of the code that decides what is generated: operators, rules and prover."""
    root, digest = Path(shardwright.__file__).parent, hashlib.sha256()
    for folder in ("pcg", "substitutions", "verifier"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(path: Path, data: object) -> None:
    write_whole(path, json.dumps(data), "unfinished work", RuleError)


def _verdict(data: Mapping[str, Any]) -> RuleVerdict:
    return RuleVerdict(data["outcome"], None, data["reason"], data["hint"], data["time_s"], data["final"])
