"""The rules benchmark on one context: the page comes out, missed targets are named. Figures are not judged here."""

from __future__ import annotations

import pytest

from bench import mutations
from bench.rules import Figures, page
from shardwright.generation import Settings, generate
from shardwright.judging import verify
from shardwright.reports.coverage import Coverage
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.generator.sources import sources
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.verifier.rulefile import read_rules
from tests.verifier.mutations.mutation import Mutant


def quiet(message: str) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    path = tmp_path_factory.mktemp("rules") / "rules.json"
    source = next(source for source in sources() if source.name == "serial-quotients")
    generated = generate(path, Settings(2), 1, quiet, [source])
    file = read_rules(path)
    rules = [rule for _, rule in file.good if isinstance(rule, Equation)]
    found = Figures(2, 1, generated, rules, 10**9, verify(file, 1, quiet, base=False))
    found.sweeps["steps"] = mutations.sweep([STEP_RULES["all_reduce"], CATALOGUE["add_commutes"]], 1, quiet)
    found.lemmas.update(z3=3, true=1)
    found.adjoints = mutations.adjoints()
    found.coverage = Coverage.of_rules([CATALOGUE["add_commutes"], STEP_RULES["reduce_scatter"]])
    return found


def test_the_page_shows_every_figure(figures: Figures) -> None:
    text = page(figures)
    num = figures.sweeps["steps"].num_mutants
    assert f"| certified | {len(figures.rules)} |" in text
    assert f"{len(figures.rules)} of the certified rules are serial, 0 placement rules" in text
    assert "| mutants of | number | type | z3 | counterexample | true | not run | unknown | wrong |" in text
    assert f"| steps | {num} |" in text
    assert "| lemmas | 4 | 0 | 3 | 0 | 1 | 0 | 0 |" in text
    assert "| adjoints | 12 | 12 | 0 | 0 | 0 | 0 | 0 |" in text
    assert f"| all | {num + 16} |" in text
    assert "| steps | 1 | 0 | 0 | 0 |" in text


def test_missed_targets_are_named(figures: Figures) -> None:
    missed = figures.missed()
    assert f"{len(figures.rules)} certified rules, at least 3000" in missed
    assert f"{figures.num_mutants} mutants" in missed
    assert not any("false mutants" in what or "GB" in what for what in missed)
    rule = CATALOGUE["add_commutes"]
    figures.sweeps["steps"].add(Mutant("serial", "x", "y", rule, "wrong"))
    assert "1 false mutants certified" in figures.missed()


def test_all_samples_of_a_rule_have_its_pattern() -> None:
    rule = next(rule for rule in mutations.row_rules() if rule.name == "linear [a b, c b -> a c] by b")
    assert [[array.shape for array in arrays] for arrays, _ in mutations.samples(rule)] == [[(8, 12), (16, 12)]]
