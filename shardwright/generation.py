"""The run of `shardwright rules generate`: the generator and the prover on all cores.

    contexts ──▶ candidates (substitutions/generator) ──▶ verdicts (verifier/judge) ──▶ implications ──▶ catalogue

Every context is a task, and so is every few candidates. A finished context is kept in a folder beside the file, and
found there again after Ctrl-C or a crash if the arguments and the code are the same. The result does not depend on the
number of workers or on the order in which they finish.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardwright
from shardwright.judging import OUTCOMES, judging_calls, verdicts_of
from shardwright.pcg.errors import RuleError
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.rules import operators
from shardwright.resuming import FinishedContext, Unfinished, unfinished
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.generator.reduction import implications
from shardwright.substitutions.generator.sources import ContextSource, sources
from shardwright.verifier.catalogue import Catalogue, Note
from shardwright.verifier.certificates import RuleVerdict
from shardwright.verifier.choices import Certified
from shardwright.verifier.judge import LIMIT_S
from shardwright.verifier.store import Verdicts
from shardwright.workers import TELL_EVERY_S, Call, CallEvent, Workers, workers

if TYPE_CHECKING:
    from shardwright.search.tree.planner import Progress

_TRIES = 2
COUNTS = ("graphs", "fingerprints", "candidates", *OUTCOMES[:3])
SHIPPED_COUNTS = ("named", "rows and steps")

_MEANING = {
    "graphs": "enumerated",
    "fingerprints": "different values among them",
    "candidates": "rules that pairs of one value make, without common parts, each once",
    "certified": "proven for all sizes and degrees, forward and backward; these are written",
    "refuted": "false, though the fingerprints agree",
    "unknown": "neither proven nor refuted, and left out",
    "minimal": "certified and not implied by smaller ones",
    "named": "hand-named rules that are not among these, with several roots or parameters mostly; written along",
    "rows and steps": "shipped rules that split operators and move tensors; written along",
}
_MOST_REASONS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a generated catalogue; with the code, they decide the result.

    With `whole`, the file alone is enough for a search: rules that the search needs and that are not generated are
    added. They are the hand-named equations that it tries (with several roots, as some fusions have, or with
    parameters), and the shipped rules that split operators and move tensors.
    """

    max_ops: int
    seed: int = 0
    operators: tuple[str, ...] = ()
    limit_s: float = LIMIT_S
    whole: bool = False


@dataclass(frozen=True)
class Generated(Report):
    """A generated catalogue, its counts, and the candidates that are not in it."""

    path: Path
    catalogue: Catalogue
    counts: Mapping[str, int]
    rejected: tuple[tuple[Equation, RuleVerdict], ...]
    time_s: float

    def paragraphs(self) -> list[Paragraph]:
        """Return the counts, and the reasons of candidates that were not certified, most frequent first."""
        rows = [(key, f"{number:,}", _MEANING[key]) for key, number in self.counts.items()]
        reasons = sorted(self.reasons().items(), key=lambda item: (item[0][0], -item[1]))  # refuted ones first
        lines = [f"{outcome} ({number}): {reason}" for (outcome, reason), number in reasons[:_MOST_REASONS]]
        if len(reasons) > len(lines):
            lines.append(f"… and {len(reasons) - len(lines)} more reasons; --format json lists all")
        title = f"{self.path}: {len(self.catalogue)} rules in {self.time_s:.1f} s"
        return [Paragraph(title, lines, ("", ">number", ""), rows)]

    def reasons(self) -> Counter[tuple[str, str]]:
        """Count outcomes with their reasons. Counterexamples all differ, so they are counted by operators."""

        def reason(rule: Equation, verdict: RuleVerdict) -> str:
            if verdict.outcome == "refuted":
                return f"a counterexample to a rule of {', '.join(sorted(operators(rule)))}"
            return verdict.reason.splitlines()[0]

        return Counter((verdict.outcome, reason(rule, verdict)) for rule, verdict in self.rejected)

    def data(self) -> dict[str, Any]:
        rejected = [{"equation": r.equation, "outcome": v.outcome, "reason": v.reason} for r, v in self.rejected]
        return {"counts": dict(self.counts), "time_s": round(self.time_s, 3), "rejected": rejected}


def generate(
    path: Path, settings: Settings, num_jobs: int, progress: Progress, given: Sequence[ContextSource] | None = None
) -> Generated:
    """Generate, prove and reduce rules, and write them to `path`; `given` replaces the generator's own contexts.

    Raises `RuleError` where the file cannot be written, or another run is writing it.
    """
    start = time.perf_counter()
    todo = list(given) if given is not None else sources(settings.operators)
    with unfinished(path, _arguments(settings, todo), progress) as unfinished_run:
        with workers(num_jobs) as pool:
            finished = GenerationRun(pool, settings, unfinished_run, progress).all(todo)
        progress("finding out which rules imply which")
        catalogue, counts, rejected = _catalogue(finished, settings, todo)
        catalogue.save(path)
    return Generated(path, catalogue, counts, rejected, time.perf_counter() - start)


def _arguments(settings: Settings, todo: Sequence[ContextSource]) -> dict[str, Any]:
    """Return the arguments of a run as plain data."""
    contexts = hashlib.sha256(repr(todo).encode()).hexdigest()[:16]
    return {**asdict(settings), "operators": list(settings.operators), "contexts": contexts}


@dataclass
class GenerationRun:
    """A run over all contexts. Judging tasks go before generating tasks, so that contexts finish."""

    pool: Workers
    settings: Settings
    store: Unfinished
    progress: Progress
    proven: Verdicts = field(default_factory=Verdicts.here)
    finished: dict[str, FinishedContext] = field(default_factory=dict)
    _open: dict[str, list[Equation]] = field(default_factory=dict)
    _counts: dict[str, dict[str, int]] = field(default_factory=dict)
    _verdicts: dict[str, RuleVerdict] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _tries: Counter[str] = field(default_factory=Counter)

    def all(self, todo: Sequence[ContextSource]) -> dict[str, FinishedContext]:
        """Return the findings of every context, by name, in the order of the contexts."""
        for source in todo:
            if (rules_of_source := self.store.load(source.name)) is not None:
                self._finish(source.name, rules_of_source)
        left = [source for source in todo if source.name not in self.finished]
        if len(left) < len(todo):
            self.progress(f"{len(todo) - len(left)} of {len(todo)} contexts are kept from the last run")
        self.pool.submit(self._generating(source) for source in left)
        for event in self.pool.events(
            lambda: self.progress(f"{len(self.finished)} of {len(todo)} contexts; {self._line()}")
        ):
            if event.task.label[0] == "generate":
                self._generated(event)
            else:
                self._judged(event)
        return {source.name: self.finished[source.name] for source in todo}

    def _generating(self, source: ContextSource) -> Call:
        arguments = (source.context, self.settings.max_ops, self.settings.seed)
        return Call("shardwright.generation:generate_one", (source.function, *arguments), ("generate", source))

    def _generated(self, event: CallEvent) -> None:
        source: ContextSource = event.task.label[1]
        if event.kind == "report":
            self._counts[source.name] = dict(event.value)
        elif event.kind == "died":
            self._again(source, str(event.value))
        else:
            rules = list({rule.hash: rule for rule in event.value}.values())
            new = [rule for rule in rules if rule.hash not in self._asked]
            self._asked.update(rule.hash for rule in new)
            self._open[source.name] = rules
            self.pool.submit(
                judging_calls(new, new, self.settings.limit_s, self.pool.num_jobs, explain=False), first=True
            )
            self._close()

    def _again(self, source: ContextSource, how: str) -> None:
        self._tries[source.name] += 1
        if self._tries[source.name] >= _TRIES:
            raise RuleError(
                f"generating {source.name} with {self.settings.max_ops} operators ended its process {_TRIES} times "
                f"({how}); is there enough memory? Finished contexts are kept in {self.store.folder}"
            )
        self.pool.submit([self._generating(source)])

    def _judged(self, event: CallEvent) -> None:
        judged = list(verdicts_of(event, self.pool))
        self.proven.keep(judged)
        self._verdicts.update({rule.hash: verdict for rule, verdict in judged})
        self._close()

    def _close(self) -> None:
        """Save the contexts whose candidates have all been judged."""
        for name, rules in list(self._open.items()):
            if all(rule.hash in self._verdicts for rule in rules):
                finished = FinishedContext(
                    [(rule, self._verdicts[rule.hash]) for rule in rules], self._counts.get(name, {})
                )
                self.store.save(name, finished)
                del self._open[name]
                self._finish(name, finished)

    def _finish(self, name: str, finished: FinishedContext) -> None:
        self.finished[name] = finished
        self._counts[name] = finished.counts
        for rule, verdict in finished.rules:
            self._asked.add(rule.hash)
            self._verdicts[rule.hash] = verdict

    def _line(self) -> str:
        totals = Counter[str]()
        for counts in self._counts.values():
            totals.update({key: counts.get(key, 0) for key in COUNTS[:2]})
        totals["candidates"] = len(self._asked)
        totals.update(verdict.outcome for verdict in self._verdicts.values())
        return line(totals)


def line(counts: Mapping[str, int]) -> str:
    """Return the counts in a line: `198108 graphs, 52542 fingerprints, …`."""
    return ", ".join(f"{counts[key]} {key}" for key in (*COUNTS, "minimal") if key in counts)


def generate_one(
    function: str, context: object, max_ops: int, seed: int, report: Callable[[Mapping[str, int]], None]
) -> list[Equation]:
    """Return the candidates of a context, in a worker. Counts are reported now and then, and at the end."""
    from importlib import import_module

    last: Mapping[str, int] = {}
    reported_at = time.perf_counter()

    def note(counts: Mapping[str, int]) -> None:
        nonlocal last, reported_at
        last = counts
        if time.perf_counter() - reported_at > TELL_EVERY_S:
            reported_at = time.perf_counter()
            report(dict(last))

    module, _, name = function.partition(":")
    equations: list[Equation] = getattr(import_module(module), name)(context, max_ops, seed, note)
    report(dict(last))
    return equations


# ---- the result ----


def _catalogue(
    finished: Mapping[str, FinishedContext], settings: Settings, todo: Sequence[ContextSource]
) -> tuple[Catalogue, Mapping[str, int], tuple[tuple[Equation, RuleVerdict], ...]]:
    judged: dict[str, tuple[Equation, RuleVerdict]] = {}
    counts = Counter[str]()
    for context in finished.values():
        counts.update({key: context.counts.get(key, 0) for key in COUNTS[:3]})
        for rule, verdict in context.rules:
            judged.setdefault(rule.hash, (rule, verdict))
    counts["candidates"] = len(judged)
    counts.update(dict.fromkeys(OUTCOMES[:3], 0))
    counts.update(verdict.outcome for _, verdict in judged.values())
    certified = _named([rule for rule, verdict in judged.values() if verdict.outcome == "certified"])
    implied = implications(list(certified.values()))
    catalogue = Catalogue()
    for key, rule in certified.items():
        catalogue.add(rule, judged[key][1].certificate, Note(implied_by=implied[rule.name]))
    counts["minimal"] = sum(not catalogue.note(key).implied_by for key in catalogue)
    if settings.whole:
        counts.update(_add_shipped(catalogue))
    shown_counts = {key: counts[key] for key in (*COUNTS, "minimal", *(SHIPPED_COUNTS if settings.whole else ()))}
    rejected = tuple((rule, verdict) for rule, verdict in judged.values() if verdict.outcome != "certified")
    unknown = [(rule, verdict) for rule, verdict in rejected if verdict.outcome == "unknown"]
    catalogue.generator = {
        **asdict(settings), "operators": list(settings.operators), "version": shardwright.__version__,
        "contexts": [source.name for source in todo], "counts": shown_counts,
        "unknown": [{"equation": rule.equation, "reason": verdict.reason} for rule, verdict in unknown],
    }  # fmt: skip
    return catalogue, shown_counts, rejected


def _add_shipped(catalogue: Catalogue) -> dict[str, int]:
    """Add the shipped rules that the search needs; return how many were missing, by kind."""
    known, shipped = {catalogue.rule(key).name for key in catalogue}, Certified()
    missing = [rule for rule in shipped.equations() if rule.name not in known]
    for rule in missing:
        catalogue.add(rule)
    num_equations = len(catalogue)
    catalogue.merge(shipped.store, {"row", "steps"})
    return dict(zip(SHIPPED_COUNTS, (len(missing), len(catalogue) - num_equations), strict=True))


def _named(rules: Sequence[Equation]) -> dict[str, Equation]:
    """Return the rules by hash, with distinct names."""
    taken = Counter(rule.name for rule in rules)
    return {
        rule.hash: rule if taken[rule.name] == 1 else replace(rule, name=f"{rule.name}_{rule.hash[:8]}")
        for rule in rules
    }
