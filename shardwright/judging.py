"""Judging rules on all cores, for `shardwright rules verify`, the end of `rules generate` and new rule files.

The verdicts are kept on this machine (`verifier.store`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.reports.report import Paragraph, Report
from shardwright.substitutions.rules.rules import Rule, kind_of
from shardwright.verifier.catalogue import SHIPPED
from shardwright.verifier.certificates import PROOFS, RuleVerdict
from shardwright.verifier.judge import LIMIT_S, Jury, judge, one_by_one
from shardwright.verifier.rulefile import Entry, RuleFile, read_rules
from shardwright.verifier.store import Verdicts
from shardwright.workers import TELL_EVERY_S, Call, CallEvent, Workers, num_cpus, workers

if TYPE_CHECKING:
    from shardwright.search.tree.planner import Progress

OUTCOMES = ("certified", "refuted", "unknown", "malformed")
_CHUNK = 16
_FEW = 64
"""The number of rules below which judging them takes less time than starting workers."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A rule of a file with its verdict; a malformed rule has none."""

    entry: Entry
    verdict: RuleVerdict | None = None

    @property
    def outcome(self) -> str:
        return self.verdict.outcome if self.verdict else "malformed"

    def lines(self) -> list[str]:
        """Return the rule's position and its outcome in words."""
        if self.verdict is None:
            return [f"rules[{self.entry.position}]: {self.entry.problem}"]
        equation = self.entry.rule.equation if self.entry.rule else ""
        lines = [f"rules[{self.entry.position}]: {equation}", *self.verdict.reason.splitlines()]
        return [*lines, f"it is true where {self.verdict.hint}"] if self.verdict.hint else lines

    def data(self) -> dict[str, Any]:
        """Return the data for programs."""
        data: dict[str, Any] = {"position": self.entry.position, "name": self.entry.name, "outcome": self.outcome}
        if self.verdict is None:
            return {**data, "reason": self.entry.problem}
        fields = {"equation": self.entry.rule.equation if self.entry.rule else "", "reason": self.verdict.reason,
                 "true_under": self.verdict.hint}  # fmt: skip
        certificate = self.verdict.certificate
        proofs, axioms = (certificate.proofs, certificate.axioms) if certificate else ((), ())
        return {
            **data,
            **{k: v for k, v in fields.items() if v},
            "proofs": list(proofs),
            "axioms": list(axioms),
            "time_s": round(self.verdict.time_s, 4),
        }


@dataclass(frozen=True)
class Judgement(Report):
    """The judgement of a file, of the shipped rules that its proofs rest on, and of the lemmas under both."""

    path: Path
    rules: tuple[Judged, ...]
    base: tuple[Judged, ...] = ()
    lemmas: Mapping[str, str] = field(default_factory=dict)
    time_s: float = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """The number of the file's rules by outcome."""
        return count(self.rules)

    @property
    def passed(self) -> bool:
        """True if nothing is refuted or malformed, and all lemmas are proven."""
        bad = {"refuted", "malformed"} & {judged.outcome for judged in (*self.rules, *self.base)}
        return not bad and not any(self.lemmas.values())

    def proofs(self) -> list[str]:
        """Return the number of certified rules of each kind, with the kinds of proofs, in words."""
        certified = [j for j in self.rules if j.verdict is not None and j.verdict.certificate is not None]
        counts = Counter(kind_of(judged.entry.rule) for judged in certified if judged.entry.rule is not None)
        return [
            f"{kind} rules certified: {counts[kind]:,}, by {' and by '.join(proofs)}"
            for kind, proofs in PROOFS.items()
            if counts[kind]
        ]

    def paragraphs(self) -> list[Paragraph]:
        worst = [
            Paragraph(f"{outcome.upper()}: {judged.entry.name}", judged.lines())
            for outcome in ("unknown", "malformed", "refuted")
            for judged in (*self.rules, *self.base)
            if judged.outcome == outcome
        ]
        broken = [f"lemma {name}: {problem}" for name, problem in self.lemmas.items() if problem]
        lines = [outcomes(self.counts), *self.proofs()]
        if self.base:
            lines.append(f"shipped rules that proofs rest on: {outcomes(count(self.base))}")
        if self.lemmas:
            lines.append(f"lemmas: {len(self.lemmas) - len(broken)} of {len(self.lemmas)} proven")
        if self.counts["unknown"]:
            lines.append(f"{self.counts['unknown']} UNKNOWN: neither proven nor refuted, and never used; reasons above")
        title = f"{'PASSED' if self.passed else 'FAILED'}: {self.path}, {len(self.rules)} rules in {self.time_s:.1f} s"
        return [*worst, Paragraph(title, [*lines, *broken])]

    def data(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "passed": self.passed,
            "counts": self.counts,
            "base_counts": count(self.base),
            "lemmas": {name: problem or "certified" for name, problem in self.lemmas.items()},
            "time_s": round(self.time_s, 3),
            "rules": [judged.data() for judged in self.rules],
            "base": [judged.data() for judged in self.base if judged.outcome != "certified"],
        }


def count(rules: Iterable[Judged]) -> dict[str, int]:
    """Return the number of rules by outcome."""
    counts = Counter(judged.outcome for judged in rules)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def verify(
    file: RuleFile, num_jobs: int, progress: Progress, *, base: bool = True, limit_s: float = LIMIT_S
) -> Judgement:
    """Judge every rule of a file, and with `base` the shipped rules and lemmas that proofs rest on.

    Raises `RuleError` where the shipped rules cannot be read.
    """
    start = time.perf_counter()
    shipped = file if file.path == SHIPPED else read_rules(SHIPPED)
    hashes = {rule.hash for _, rule in file.good}
    foundations = [e for e, rule in shipped.good if rule.hash not in hashes] if base and shipped is not file else []
    entries = [entry for entry, _ in file.good]
    rules = [entry.rule for entry in (*entries, *foundations) if entry.rule is not None]
    with workers(num_jobs) as pool:
        if base:
            pool.submit([Call("shardwright.judging:prove_lemmas", (), "lemmas")])
        verdicts, lemmas = _judged(pool, rules, progress, limit_s)
    Verdicts.here().keep(zip(rules, verdicts, strict=True))
    by_place = dict(zip([e.position for e in entries], verdicts, strict=False))
    judged = tuple(Judged(entry, by_place.get(entry.position)) for entry in file.entries)
    rest = tuple(Judged(e, v) for e, v in zip(foundations, verdicts[len(entries) :], strict=True))
    return Judgement(file.path, judged, rest, lemmas, time.perf_counter() - start)


def _judged(
    pool: Workers, rules: Sequence[Rule], progress: Progress, limit_s: float
) -> tuple[list[RuleVerdict], Mapping[str, str]]:
    """Return the verdicts, in the order of the rules, and the problem of each lemma ("" if proven)."""
    verdicts: dict[int, RuleVerdict] = {}
    lemmas: Mapping[str, str] = {}

    def tell() -> None:
        counts = Counter(verdict.outcome for verdict in verdicts.values())
        progress(f"{len(verdicts)} of {len(rules)} rules: " + outcomes(counts))

    pool.submit(judging_calls(range(len(rules)), rules, limit_s, pool.num_jobs))
    for event in pool.events(tell):
        if event.task.label == "lemmas":
            lemmas = event.value if event.kind == "done" else {"all": f"the prover's process died ({event.value})"}
        else:
            verdicts.update(verdicts_of(event, pool))
    return [verdicts[number] for number in range(len(rules))], lemmas


def jury(progress: Progress) -> Jury:
    """Return a judge of rules that uses all cores; on each rank of a machine but the first, it uses one."""

    def judged(rules: Sequence[Rule]) -> Iterator[tuple[Rule, RuleVerdict]]:
        num_jobs, reported_at = num_cpus() if os.environ.get("LOCAL_RANK", "0") == "0" else 1, time.monotonic()
        few = num_jobs < 2 or len(rules) < _FEW
        for done, verdict in enumerate(one_by_one(rules) if few else _by_workers(rules, num_jobs), 1):
            if time.monotonic() - reported_at > TELL_EVERY_S:
                reported_at = time.monotonic()
                progress(f"{done} of {len(rules)} rules")
            yield verdict

    return judged


def _by_workers(rules: Sequence[Rule], num_jobs: int) -> Iterator[tuple[Rule, RuleVerdict]]:
    with workers(num_jobs) as pool:
        pool.submit(judging_calls(rules, rules, LIMIT_S, num_jobs, explain=False))
        for event in pool.events():
            yield from verdicts_of(event, pool)


def outcomes(counts: Mapping[str, int]) -> str:
    """Return the counts in a line: `12 certified, 1 refuted, 0 unknown`, and malformed rules if there are any."""
    names = [name for name in OUTCOMES if name != "malformed" or counts.get(name)]
    return ", ".join(f"{counts.get(name, 0)} {name}" for name in names)


def judging_calls(
    labels: Iterable[Any], rules: Sequence[Rule], limit_s: float, num_jobs: int, *, explain: bool = True
) -> Iterator[Call]:
    """Yield tasks that judge some rules each; neighbouring rules share the prover's cache."""
    keys = list(labels)
    size = max(1, min(_CHUNK, len(rules) // (8 * num_jobs)))
    for at in range(0, len(rules), size):
        yield _judge_call(keys[at : at + size], rules[at : at + size], limit_s, explain)


def _judge_call(labels: Sequence[Any], rules: Sequence[Rule], limit_s: float, explain: bool) -> Call:
    return Call("shardwright.judging:judge_rules", (list(rules), limit_s, explain), ("judge", tuple(labels)))


def verdicts_of(event: CallEvent, pool: Workers) -> Iterator[tuple[Any, RuleVerdict]]:
    """Yield the verdicts of an event of a judging task, by label. A rule that kills its worker is unknown."""
    _, labels = event.task.label
    rules, limit_s, explain = event.task.arguments
    if event.kind == "done":
        yield from zip(labels, event.value, strict=True)
    elif event.kind == "died" and len(labels) == 1:
        yield labels[0], RuleVerdict("unknown", None, f"the prover's process died ({event.value})", final=False)
    elif event.kind == "died":
        alone = [_judge_call([label], [rule], limit_s, explain) for label, rule in zip(labels, rules, strict=True)]
        pool.submit(alone, first=True)


def judge_rules(
    rules: Sequence[Rule], limit_s: float, explain: bool, report: Callable[[object], None]
) -> list[RuleVerdict]:
    """Judge some rules, in a worker."""
    return [judge(rule, limit_s, explain=explain) for rule in rules]


def prove_lemmas(report: Callable[[object], None]) -> dict[str, str]:
    """Prove the lemmas, in a worker; return the problem of each, or ""."""
    from shardwright.pcg.errors import RuleError
    from shardwright.verifier.lemmas import LEMMAS, require

    def problem(name: str) -> str:
        try:
            require(name)
        except RuleError as error:
            return str(error)
        return ""

    return {name: problem(name) for name in LEMMAS}
