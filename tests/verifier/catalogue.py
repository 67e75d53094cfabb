"""The row rules that tests run over: every rule of every sample of every row of the op table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.pcg.optable import ROWS
from shardwright.substitutions.rules.pattern import Pattern, pattern_of
from shardwright.substitutions.rules.rowrules import RowRule, choices, derive, sending_choices
from tests.samples import SAMPLES, Sample, flags, real, sample

DEGREES = (2, 4)

# sizes that tests/samples.py keeps at 1 or odd: attention heads per key head, pieces, spatial dimensions
_HEADS = (real(2, 16, 12, 6), real(2, 4, 20, 6), real(2, 4, 20, 10))
MORE: dict[str, list[Sample]] = {
    "sdpa": [
        sample(*_HEADS, causal=True, scale=None),
        sample(*_HEADS, flags(2, 1, 12, 20), causal=False, scale=None),
        sample(*_HEADS, real(16, 12, 20), causal=False, scale=0.5),
    ],
    "concat": [sample(real(4, 8, 12), real(4, 8, 12), dim=1)],
    "conv2d": [sample(real(4, 12, 8, 8), real(16, 12, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)],
}


@dataclass(frozen=True)
class Case:
    """A rule with the samples that have its pattern."""

    rule: RowRule
    pattern: Pattern
    samples: tuple[Sample, ...]


def pattern_for(row: str, given: Sample) -> Pattern:
    return pattern_of(ROWS[row].signature(given.shapes, dict(given.attrs)))[0]


def cases(row: str) -> Iterator[Case]:
    """Every rule of a row."""
    by_pattern: dict[Pattern, list[Sample]] = {}
    for given in (*SAMPLES[row], *MORE.get(row, ())):
        by_pattern.setdefault(pattern_for(row, given), []).append(given)
    for pattern, samples in by_pattern.items():
        for choice in (*choices(ROWS[row], pattern), *sending_choices(ROWS[row], pattern)):
            yield Case(derive(row, pattern, choice), pattern, tuple(samples))


def admits(rule: RowRule, given: Sample) -> bool:
    """Whether the dtypes of a sample satisfy the rule's guard."""
    row, attrs = ROWS[rule.row], dict(given.attrs)
    if "numeric" in rule.guard and row.result_dtype(given.dtypes, attrs) == "bool":
        return False
    return not rule.choice.partial or rule.choice.partial in row.partial_sets(given.dtypes, attrs)
