"""`shardwright rules`: generate, list, show and verify rules, and see which of them the search uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.cli import terminal
from shardwright.cli.coverage import coverage
from shardwright.cli.options import FILE_PATH, Number, examples, format_option, rules_argument, writable

if TYPE_CHECKING:
    from shardwright.verifier.rulefile import RuleFile


@click.group(
    epilog=examples(
        "rules generate --max-ops 3 -o rules.json",
        "rules verify rules.json",
        "rules list --form placement --operator linear",
        "rules show fuse_two_linears",
        "rules coverage --models examples/zoo.py --cluster local:4",
    )
)
def rules() -> None:
    """Generate, list, show and verify rules.

    A rule file is JSON, documented in docs/rules.md; without FILE the shipped catalogue is meant.
    """


def _jobs(context: click.Context, parameter: click.Parameter, value: int | None) -> int:
    from shardwright.workers import num_cpus

    return value or num_cpus()


jobs_option = click.option(
    "--jobs", type=click.IntRange(1), callback=_jobs, metavar="N", help="Worker processes; by default one per core."
)


@rules.command(
    epilog=examples(
        "rules generate --max-ops 3 -o rules.json",
        "rules generate --max-ops 2 --operators linear,add,relu -o small.json",
        "rules generate --max-ops 4 --jobs 8 -o large.json",
    )
)
@click.option("--max-ops", type=click.IntRange(1, 8), default=3, show_default=True, metavar="N",
              help="Operators on each side of a rule, at most.")  # fmt: skip
@click.option("--output", "-o", required=True, type=FILE_PATH, callback=writable,
              help="Write the certified rules here; unfinished work is kept in FILE.partial.")  # fmt: skip
@click.option("--operators", default="", metavar="OPS", help="Only these rows, such as linear,permute; by default all.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the data of fingerprints.")
@jobs_option
@format_option
def generate(max_ops: int, output: Path, operators: str, seed: int, jobs: int, form: str) -> None:
    """Generate rules: enumerate graphs, compare fingerprints, prove what agrees.

    Only certified rules are written, and their proofs kept on this machine; rules that smaller ones imply are marked.
    Without --operators, what the search needs besides is written along: hand-named equations, and the shipped rules
    that split operators and move tensors. After Ctrl-C the same command goes on where it stopped. The same arguments
    give the same file, whatever the number of jobs.
    """
    from shardwright.generation import Settings
    from shardwright.generation import generate as run

    with terminal.progress("generate") as progress:
        progress("loading the generator")
        chosen = tuple(sorted({op.strip() for op in operators.split(",") if op.strip()}))
        generated = run(output, Settings(max_ops, seed, chosen, whole=not chosen), jobs, progress)
    terminal.show(generated, form)


@rules.command(
    epilog=examples(
        "rules verify",
        "rules verify rules.json --format json > verdicts.json",
        "rules verify mine.json --no-base",
    )
)
@rules_argument
@click.option("--base/--no-base", default=True, show_default=True,
              help="Prove the shipped rules and the lemmas anew as well, on which proofs rest.")  # fmt: skip
@click.option("--limit", type=Number(0, min_open=True), default=20.0, show_default=True, metavar="SECONDS",
              help="Of work for one rule; what takes longer is unknown.")  # fmt: skip
@jobs_option
@format_option
def verify(file: Path | None, base: bool, limit: float, jobs: int, form: str) -> int:
    """Judge every rule of a file: certified, refuted with a counterexample, unknown, or malformed.

    Nothing that was proven before is believed: everything is proven anew, and kept for the search. Ends with status 1
    where a rule is refuted or malformed. Unknown alone is no failure, but the search does not use such a rule.
    """
    from shardwright.judging import verify as run

    with terminal.progress("verify") as progress:
        progress("reading the rules")
        judgement = run(_read(file), jobs, progress, base=base, limit_s=limit)
    terminal.show(judgement, form)
    return 0 if judgement.passed else 1


@rules.command(
    "list",
    epilog=examples(
        "rules list --form serial",
        "rules list rules.json --minimal --operator softmax",
        "rules list --search concat --format json",
    ),
)
@rules_argument
@click.option("--form", "kind", type=click.Choice(["row", "steps", "serial", "placement"]), help="Rules of this kind.")
@click.option("--operator", "wanted", multiple=True, metavar="OP", help="That speak about it. May be repeated.")
@click.option("--minimal", is_flag=True, help="Leave out rules that others imply.")
@click.option("--search", "text", default="", metavar="TEXT", help="That have this in their name or equation.")
@format_option
def list_rules(file: Path | None, kind: str | None, wanted: Sequence[str], minimal: bool, text: str, form: str) -> None:
    """List the rules of a file, one a line."""
    from shardwright.reports.rules import RuleListReport, operators
    from shardwright.substitutions.rules.rules import kind_of
    from shardwright.verifier.store import Verdicts

    rule_file = _read(file)
    _note_malformed(rule_file)
    chosen = [
        (entry, rule)
        for entry, rule in rule_file.good
        if (kind is None or kind_of(rule) == kind)
        and operators(rule).issuperset(wanted)
        and not (minimal and entry.note.implied_by)
        and text.lower() in f"{rule.name} {rule.equation}".lower()
    ]
    terminal.show(RuleListReport(rule_file, chosen, Verdicts.here()), form)


@rules.command(
    epilog=examples(
        "rules show fuse_two_linears",
        'rules show "linear [a b, c b -> a c] by b"',
        "rules show my_rule mine.json --format json",
    )
)
@click.argument("name")
@rules_argument
@format_option
def show(name: str, file: Path | None, form: str) -> None:
    """Show one rule: its equation, both graphs, its guard and its proof.

    NAME may be a part of the name that only one rule has.
    """
    from shardwright.pcg.errors import RuleError
    from shardwright.reports.rules import RuleReport
    from shardwright.verifier.store import Verdicts

    rule_file = _read(file)
    entry = rule_file.named(name)
    if entry.rule is None:
        raise RuleError(f"{rule_file.path}: {entry.where}: {entry.problem}")
    terminal.show(RuleReport(entry, entry.rule, Verdicts.here()), form)


def _read(file: Path | None) -> RuleFile:
    from shardwright.verifier.catalogue import SHIPPED
    from shardwright.verifier.rulefile import read_rules

    return read_rules(file or SHIPPED)


def _note_malformed(rule_file: RuleFile) -> None:
    for entry in rule_file.malformed:
        terminal.note(f"{rule_file.path}: {entry.where}: {entry.problem}")


rules.add_command(coverage)
