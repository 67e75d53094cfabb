"""The store of proofs: the shipped rules' proofs are in the package, those of other files on this machine.

A file of rules only proposes rules and never claims proofs. `proofs.jsonl` lies beside `rules.json`, and proofs made
here are kept in the cache folder (`$XDG_CACHE_HOME/shardwright`), in a file for each prover. A line is the verdict on
the rule with one hash, and ends with a check of itself:

    {"rule": "9f2c…", "axioms": ["digits", …], "guard": ["k | a"], "solver": "z3 5.4.0", "check": "1b0e…"}
    {"rule": "41aa…", "failure": "swapped is false for …", "check": "77d1…"}

Runs append whole blocks of lines, one after the other. A line that is cut off or damaged is ignored, and its rule is
judged again. Only verdicts of a prover in this process may be kept (`Verdicts.keep`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.pcg.files import cache_folder
from shardwright.substitutions.rules.rules import Rule
from shardwright.verifier.certificates import Certificate, RuleVerdict, prover_digest

SHIPPED_PROOFS = Path(__file__).with_name("proofs.jsonl")
_CHECK = ', "check": "'


@dataclass
class Verdicts:
    """This prover's verdicts by rule hash: the axioms of a proof, or the reason why there is none.

    path    the file that keeps new verdicts, or None
    """

    path: Path | None = None
    _records: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def shipped(cls) -> Verdicts:
        """Return the proofs of the package; none if they are another prover's."""
        head, *lines = _lines(SHIPPED_PROOFS) or [""]
        records = _records(lines) if head == json.dumps({"prover": prover_digest()}) else []
        return cls(None, {str(record["rule"]): record for record in records})

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Verdicts:
        """Return the verdicts of the package and of this machine."""
        path = cache_folder(environ) / f"proofs-{prover_digest()}.jsonl"
        stored = {str(record["rule"]): record for record in _records(_lines(path))}
        return cls(path, {**stored, **cls.shipped()._records})

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def certificate(self, key: str, data: Mapping[str, Any]) -> Certificate | None:
        """Return the certificate of the rule with this hash and JSON form, or None if it is not proven."""
        record = self._records.get(key)
        if record is None or "failure" in record:
            return None
        return Certificate.of_json(key, data, tuple(record["axioms"]), tuple(record["guard"]), record["solver"])

    def failure(self, key: str) -> str:
        """Return the known reason why a rule is not proven; "" if it is proven or was not judged."""
        return str(self._records.get(key, {}).get("failure", ""))

    def keep(self, judged: Iterable[tuple[Rule, RuleVerdict]]) -> None:
        """Keep the verdicts on rules just judged; final ones also beyond this process.

        A folder that cannot be written is not an error: the next process judges again.
        """
        new: list[Mapping[str, Any]] = []
        try:
            for rule, verdict in judged:
                record = _record(rule.hash, verdict.certificate or verdict.reason)
                if self._records.get(rule.hash) != record:
                    self._records[rule.hash] = record
                    new += [record] * verdict.final
        finally:
            if self.path is not None and new:
                with suppress(OSError):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    _append(self.path, "".join(map(_line, new)))


def _record(key: str, outcome: Certificate | str) -> dict[str, Any]:
    if isinstance(outcome, str):
        return {"rule": key, "failure": outcome}
    return {"rule": key, "axioms": list(outcome.axioms), "guard": list(outcome.guard), "solver": outcome.solver}


def _line(record: Mapping[str, Any]) -> str:
    body = json.dumps(record)[:-1]
    return f'{body}{_CHECK}{_check(body)}"}}\n'


def _check(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _records(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the records of undamaged lines."""
    for line in lines:
        body, _, tail = line.rpartition(_CHECK)
        if tail == f'{_check(body)}"}}':
            yield json.loads(body + "}")


def _append(path: Path, text: str) -> None:
    """Append a block of lines, after an end of line in case a run was killed in the middle of a line."""
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        block = f"\n{text}".encode("ascii")
        while block:
            block = block[file.write(block) :]
