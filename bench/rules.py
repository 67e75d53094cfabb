"""Rules, generated and proven: how many, how fast, how much memory; the prover's mutation test; what the search uses.

Writes docs/generated-rules.md (generated-rules-N.md for --max-ops N other than 3) and exits with 1 where a target is
missed or a false mutant is certified. Run it with `make bench-rules`.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

from bench import mutations
from bench.plans import fast_links
from bench.search import llama_8b
from examples.zoo import ZOO
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.local import default_cluster
from shardwright.generation import Generated, Settings, generate
from shardwright.judging import Judgement, verify
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.reports.coverage import Coverage
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.rules import KINDS
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.verifier.choices import Certified
from shardwright.verifier.rulefile import read_rules
from shardwright.verifier.solver import version
from shardwright.workers import num_cpus
from tests.verifier.mutations.mutation import OUTCOMES, Sweep
from tests.verifier.placement.derivation import AXIOMS

DOCS = Path(__file__).parents[1] / "docs"
DEFAULT_OPS = 3
TARGET_S = {3: 120.0, 4: 1200.0}
TARGET_RULES, TARGET_MUTANTS, TARGET_PROOF_S, TARGET_BYTES = 3000, 2000, 60.0, 4e9


@dataclass
class Figures:
    """Everything the page shows."""

    max_ops: int
    num_jobs: int
    generated: Generated
    rules: Sequence[Equation]
    peak_bytes: int
    report: Judgement
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    sweep_s: float = 0.0
    lemmas: Counter[str] = field(default_factory=Counter)
    adjoints: Counter[str] = field(default_factory=Counter)
    coverage: Coverage | None = None
    generated_coverage: Coverage | None = None

    @property
    def num_mutants(self) -> int:
        """Mutants beyond those of row rules."""
        return sum(sweep.num_mutants for name, sweep in self.sweeps.items() if name != "rows")

    def missed(self) -> list[str]:
        """The targets that were not reached."""
        counts, wrong = self.generated.counts, sum(sweep.total("wrong") for sweep in self.sweeps.values())
        found = {
            f"{counts['certified']} certified rules, at least {TARGET_RULES}": counts["certified"] < TARGET_RULES,
            f"generated in {self.generated.time_s:.0f} s": self.generated.time_s > TARGET_S.get(self.max_ops, 1e9),
            f"{self.peak_bytes / 1e9:.1f} GB": self.peak_bytes > TARGET_BYTES,
            f"proven anew in {self.report.time_s:.0f} s": self.max_ops < 4 and self.report.time_s > TARGET_PROOF_S,
            f"{wrong} false mutants certified": wrong + self.lemmas["wrong"] + self.adjoints["wrong"] > 0,
            f"{self.num_mutants} mutants": bool(self.sweeps) and self.num_mutants < TARGET_MUTANTS,
            "not all rules are certified again": not self.report.passed or self.report.counts["unknown"] > 0,
        }
        return [what for what, bad in found.items() if bad]


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def measure(max_ops: int, num_jobs: int, output: Path) -> Figures:
    """Generate, and prove everything anew."""
    generated = generate(output, Settings(max_ops, whole=True), num_jobs, progress)
    own, child = (resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    file = read_rules(output)
    rules = [rule for _, rule in file.good if isinstance(rule, Equation)]
    report = verify(file, num_jobs, progress)
    return Figures(max_ops, num_jobs, generated, rules, own + num_jobs * child, report)


def mutate(figures: Figures, num_generated: int) -> None:
    """The mutation test: all mutants of the hand-named rules, steps and rows, and of a sample of generated rules."""
    start = time.perf_counter()
    step = max(1, len(figures.rules) // max(num_generated, 1))
    parts = {
        "axioms": [CATALOGUE[name] for name in AXIOMS],
        "equations": [rule for name, rule in CATALOGUE.items() if name not in AXIOMS],
        "steps": list(STEP_RULES.values()),
        "generated serial": [rule for rule in figures.rules if not rule.axes][::step],
        "generated placement": [rule for rule in figures.rules if rule.axes][::step],
        "rows": mutations.row_rules(),
    }
    for name, rules in parts.items():
        progress(f"mutants of {name}: {len(rules)} rules")
        figures.sweeps[name] = mutations.sweep(rules, figures.num_jobs, progress)
    figures.lemmas, figures.adjoints = mutations.lemmas(), mutations.adjoints()
    figures.sweep_s = time.perf_counter() - start


def survey(models: Sequence[str]) -> Coverage:
    """Return the shipped rules that the search used, on the zoo and on a large model on fake tensors."""
    certified = Certified()
    rules = {rule.name: rule for rule in certified.equations()}
    found = _on_the_zoo(models, certified, [make(ranks) for make in (default_cluster, fast_links) for ranks in (2, 4)])
    progress("coverage: Llama-8B, 4 layers, on dgx-h100")
    graph = _captured(*llama_8b(num_layers=4))
    found.plan("llama_8b, 4 layers", graph, Cluster.preset("dgx-h100", nodes=8), certified, rules)
    return found


def survey_generated(models: Sequence[str], file: Path) -> Coverage:
    """Return the rules of a generated file that the search used on the zoo."""
    return _on_the_zoo(models, Certified.of_file(file, progress), [default_cluster(2), fast_links(4)])


def _on_the_zoo(models: Sequence[str], certified: Certified, clusters: Sequence[Cluster]) -> Coverage:
    rules = {rule.name: rule for rule in certified.equations()}
    found = Coverage.of(certified)
    for name in models:
        torch.manual_seed(0)
        graph = _captured(*ZOO[name]())
        for cluster in clusters:
            progress(f"coverage: {name} on {cluster.name}")
            found.plan(name, graph, cluster, certified, rules)
    return found


def _captured(model: torch.nn.Module, batch: Mapping[str, object]) -> Graph:
    return capture(model, batch).graph


# ---- the page ----

INTRODUCTION = """\
# Rules, generated and proven

Written by `make bench-rules` on {date}: {cores}-core CPU, {jobs} workers, Python {python}, torch {torch}, {z3}.

`shardwright rules generate --max-ops {max_ops}` enumerates, context by context
([what that leaves out](rules.md#what-the-generator-enumerates)), graphs of up to {max_ops} operators on each side,
keeps the pairs whose fingerprints agree, checks them again on other data, and proves what is left: for all sizes and
all degrees, forward and backward. Only what is proven is written. [rules.md](rules.md) says what a rule is,
[proofs.md](proofs.md) what a proof is.
"""
_MEANING = {
    "type": "refuted: ill-typed, or not defined where the rule is",
    "z3": "refuted by numbers for which a claim breaks",
    "counterexample": "refuted by the falsifier, on concrete tensors",
    "true": "true variants: certified, and the falsifier cannot refute them",
    "not run": "certified, but the falsifier has no operands for them",
    "unknown": "neither proven nor refuted; such a rule is never used",
    "wrong": "certified though false",
}


def page(figures: Figures) -> str:
    """The page as Markdown."""
    head = INTRODUCTION.format(
        date=date.today().isoformat(), cores=os.cpu_count(), jobs=figures.num_jobs, python=platform.python_version(),
        torch=torch.__version__, z3=version(), max_ops=figures.max_ops,
    )  # fmt: skip
    parts = [head, *_generation(figures), *_proof(figures)]
    if figures.sweeps:
        parts += _mutation(figures)
    if figures.coverage is not None:
        parts += _coverage("What the search used", _SHIPPED, figures.coverage)
    if figures.generated_coverage is not None:
        parts += _coverage("What the search used of the generated rules", _GENERATED, figures.generated_coverage)
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "--:|" * (len(columns) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def _generation(figures: Figures) -> list[str]:
    counts = figures.generated.counts
    rows = [(key, f"{counts[key]:,}") for key in counts]
    rows += [("seconds", f"{figures.generated.time_s:.0f}"),
             ("memory at the peak, at most", f"{figures.peak_bytes / 1e9:.1f} GB")]  # fmt: skip
    forms = Counter("placement" if rule.axes else "serial" for rule in figures.rules)
    axes = sum(len(rule.axes) > 1 for rule in figures.rules)
    text = (
        f"{forms['serial'] - counts.get('named', 0):,} of the certified rules are serial, "
        f"{forms['placement']:,} placement rules, "
        f"{axes:,} of these on two axes. *minimal* counts those that no smaller ones imply. Memory is that of the "
        "parent and of the largest worker, once for every worker.\n"
    )
    return ["## Generated\n", _table(("", "number"), rows), text, *_rejected(figures.generated)]


def _rejected(generated: Generated) -> list[str]:
    reasons = Counter[str]()
    for (outcome, why), number in generated.reasons().items():
        reasons[f"{outcome}: {why[:160]}".replace("|", "\\|")] += number
    if not reasons:
        return ["Every candidate was certified.\n"]
    rows = reasons.most_common(15)
    return ["Candidates that were not certified, by reason (none of them is used):\n", _table(("why", "number"), rows)]


def _proof(figures: Figures) -> list[str]:
    report = figures.report
    proven = sum(not problem for problem in report.lemmas.values())
    text = (
        f"`shardwright rules verify` proves the {len(report.rules):,} rules of the file, the {len(report.base):,} "
        f"shipped rules that they rest on (rows and axioms included) and {proven} of {len(report.lemmas)} lemmas anew "
        f"in {report.time_s:.0f} s: {report.counts['certified']:,} certified, {report.counts['refuted']} refuted, "
        f"{report.counts['unknown']} unknown.\n"
    )
    seconds = "".join(f"* {what}\n" for what in report.proofs())
    return ["## Proven anew\n", text, seconds]


def _mutation(figures: Figures) -> list[str]:
    def line(name: str, counts: Mapping[str, int]) -> tuple[object, ...]:
        return (name, sum(counts.values()), *(counts.get(outcome, 0) for outcome in OUTCOMES))

    totals = {name: sum(sweep.counts.values(), Counter[str]()) for name, sweep in figures.sweeps.items()}
    rows = [line(name, counts) for name, counts in totals.items()]
    rows += [line("lemmas", figures.lemmas), line("adjoints", figures.adjoints)]
    rows.append(line("all", sum(totals.values(), figures.lemmas + figures.adjoints)))
    meaning = "\n".join(f"* *{name}*: {_MEANING[name]}" for name in OUTCOMES)
    unknown = Counter(
        (m.form, m.reason.splitlines()[0].partition(": ")[2][:120]) for s in figures.sweeps.values() for m in s.unknown
    )
    told = [(f"{form}: {why.replace('|', chr(92) + '|')}", number) for (form, why), number in unknown.most_common(10)]
    text = (
        "Systematically wrong variants of certified rules: an operator, operand, attribute, axis, dimension, number of "
        "blocks or layout changed, a parallel operator dropped, moved or replaced, what a device is told or a guard "
        f"dropped, a guard said of other sizes. {figures.sweep_s:.0f} s.\n"
    )
    parts = [
        "## The mutation test of the prover\n",
        text,
        _table(("mutants of", "number", *OUTCOMES), rows),
        meaning + "\n",
    ]
    return parts + (["Unknown mutants, by reason:\n", _table(("why", "number"), told)] if told else [])


_SHIPPED = (
    "the models of `examples/zoo.py` for 2 and 4 local ranks and for links that cost nothing, where nearly everything "
    "is split, and four layers of Llama-8B (fake tensors) for 8 × 8 H100"
)
_GENERATED = (
    "`--rules` with the file of this page and nothing else: the models of "
    "`examples/zoo.py` for 2 local ranks, and for 4 on links that cost nothing. The search spans placement rules by "
    "row rules and steps: they are compared with what a plan does, not applied"
)


def _coverage(title: str, what: str, coverage: Coverage) -> list[str]:
    forms = coverage.by_form()
    keys = ("loaded", "matched", "fired", "on_demand")
    rows = [(form, *(f"{forms[form][key]:,}" for key in keys)) for form in KINDS if any(forms[form].values())]
    text = (
        f"{len(coverage.plans)} plans: {what}. "
        "*matched*: offered to an operator or found in a leaf; *fired*: in a plan; *on demand*: rules that the "
        "catalogue lacks and that were proven when they were asked for.\n"
    )
    parts = [f"## {title}\n", text, _table(("form", "loaded", "matched", "fired", "on demand"), rows)]
    for form in KINDS:
        fired = [t for t in coverage.ranked() if t.form == form and t.fired]
        if fired:
            table = _table(("rule", "matched", "fired"), [(f"`{t.name}`", t.matched, t.fired) for t in fired[:15]])
            parts += [f"### {form}: {len(fired)} fired{', the most frequent' if len(fired) > 15 else ''}\n", table]
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the page; 1 where a target is missed."""
    options = _options(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = options.output or Path(folder) / "rules.json"
        figures = measure(options.max_ops, options.jobs, file)
        if not options.no_coverage:
            figures.generated_coverage = survey_generated(list(ZOO), file)
    if not options.no_mutants:
        mutate(figures, options.mutate)
    if not options.no_coverage:
        figures.coverage = survey(list(ZOO))
    text = page(figures)
    print(text)
    if not options.dry:
        name = "generated-rules" + f"-{options.max_ops}" * (options.max_ops != DEFAULT_OPS)
        (DOCS / f"{name}.md").write_text(text)
    for what in figures.missed():
        print(f"MISSED: {what}", file=sys.stderr)
    return 1 if figures.missed() else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-rules", description=__doc__)
    parser.add_argument("--max-ops", type=int, default=DEFAULT_OPS, help="operators on each side of a rule")
    parser.add_argument("--jobs", type=int, default=num_cpus(), help="worker processes")
    parser.add_argument("--mutate", type=int, default=600, metavar="N", help="mutate about this many generated rules")
    parser.add_argument("--output", type=Path, help="keep the generated catalogue here")
    parser.add_argument("--no-mutants", action="store_true", help="leave out the mutation test")
    parser.add_argument("--no-coverage", action="store_true", help="leave out the plans for the zoo")
    parser.add_argument("--dry", action="store_true", help="print the page, do not write it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
