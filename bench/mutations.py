"""The mutation test of the prover on all cores: mutants of rules, lemmas and adjoints, and what became of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from shardwright.substitutions.rules.rowrules import RowRule
from shardwright.substitutions.rules.rules import Rule
from shardwright.verifier.lemmas import LEMMAS
from shardwright.workers import Call, workers
from tests.samples import SAMPLES
from tests.verifier.catalogue import MORE, admits, cases, pattern_for
from tests.verifier.mutations.lemmatwins import judge_lemma, lemma_twins
from tests.verifier.mutations.mutation import Mutant, Sweep, adjoint_mutants, judged, mutants

CHUNK = 64


def row_rules() -> list[RowRule]:
    """Every rule of every sample of every row of the op table."""
    return [case.rule for row in SAMPLES for case in cases(row)]


def samples(rule: RowRule) -> Iterable[tuple[list[Any], dict[str, Any]]]:
    """The samples of a row that have the rule's pattern and dtypes."""
    for given in (*SAMPLES[rule.row], *MORE.get(rule.row, ())):
        if str(pattern_for(rule.row, given)) == rule.pattern and admits(rule, given):
            yield given.arrays(1), dict(given.attrs)


def judge(chunk: Sequence[Mutant], report: Callable[[object], None]) -> Sweep:
    """Judge some mutants, in a worker."""
    found = Sweep()
    for mutant in chunk:
        found.add(judged(mutant, samples))
    return found


def sweep(rules: Sequence[Rule], num_jobs: int, progress: Callable[[str], None], every: int = 1) -> Sweep:
    """Judge every `every`-th mutant of these rules."""
    total, found = 0, Sweep()
    chosen = islice(mutants(rules), 0, None, every)
    with workers(num_jobs) as pool:
        for chunk in _chunks(chosen):
            total += len(chunk)
            pool.submit([Call("bench.mutations:judge", (chunk,))])
        for event in pool.events():
            if event.kind == "died":
                raise RuntimeError(f"a worker died of a mutant: {event.value}")
            if event.kind == "done":
                found.merge(event.value)
                progress(f"{found.num_mutants} of {total} mutants, {found.total('wrong')} wrong")
    return found


def _chunks(items: Iterable[Mutant]) -> Iterator[list[Mutant]]:
    pending = iter(items)
    while chunk := list(islice(pending, CHUNK)):
        yield chunk


def lemmas() -> Counter[str]:
    """Count the outcomes of mutated lemmas."""
    return Counter(judge_lemma(twin)[0] for lemma in LEMMAS.values() for twin in lemma_twins(lemma))


def adjoints() -> Counter[str]:
    """Count the outcomes of wrong adjoints."""
    return Counter(mutant.outcome for mutant in adjoint_mutants())
