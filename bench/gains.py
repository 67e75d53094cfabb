"""Measure the gain of each rule: plans with the rules and without, of the zoo and of large models on fake tensors.

Writes a section of docs/rules.md. Run it with `make bench-gains`; it takes some minutes.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

import torch

from bench.entangled import Example
from bench.grid_cases import bert_large, gpt2_xl, resnext_101, t5_11b
from bench.search import llama_8b
from examples.zoo import ZOO
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.local import default_cluster
from shardwright.pcg.capture.capture import capture
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified

PAGE, HEADING = Path(__file__).parents[1] / "docs" / "rules.md", "## What rules gain"
LARGE: dict[str, Callable[[], Example]] = {
    "Llama-8B": llama_8b, "T5-11B": t5_11b, "BERT-large": bert_large, "GPT-2 XL": gpt2_xl, "ResNeXt-101": resnext_101,
}  # fmt: skip
_SMALL = ("one CPU rank", lambda: default_cluster(1)), ("2 CPU ranks", lambda: default_cluster(2))
_H100 = ("8 H100", lambda: Cluster.preset("dgx-h100"))
_MORE = ("64 H100", lambda: Cluster.preset("dgx-h100", nodes=8)), ("4 A10", lambda: Cluster.preset("a10-box"))


@dataclass(frozen=True)
class Gain:
    """Plans of a model with rules and without, the CPU time of both searches, and the places that a search found."""

    model: str
    cluster: str
    plain: Plan
    plan: Plan
    seconds: tuple[float, float]
    places: Counter[str]

    @property
    def share(self) -> float:
        """Return the gain as a share of the step without rules."""
        return 1 - self.plan.prediction.step_s / self.plain.prediction.step_s

    @property
    def fired(self) -> Counter[str]:
        return Counter(rule for rewrite in self.plan.report.rewrites for rule, _ in rewrite.steps)


def measure(names: Sequence[str]) -> list[Gain]:
    """Every model on every cluster that it is meant for."""
    certified, found = Certified(), list[Gain]()
    rules = certified.by_name()
    for name in names:
        torch.manual_seed(0)
        graph = capture(*(ZOO[name]() if name in ZOO else LARGE[name]())).graph
        for where, cluster in (*_SMALL, _H100) if name in ZOO else (_H100, *_MORE):
            plans, seconds, found_places = list[Plan](), list[float](), Counter[str]()
            for own in ({}, rules):
                planner, start = Planner(cluster(), certified, rules=own), time.process_time()
                plans.append(planner.plan(graph, name))
                seconds.append(time.process_time() - start)
                found_places = planner.places
            check_plan(plans[1], graph, certified, rules)
            found.append(Gain(name, where, plans[0], plans[1], (seconds[0], seconds[1]), found_places))
            print(_line(found[-1]), flush=True)
    return found


def _line(gain: Gain) -> str:
    rules = ", ".join(f"`{rule}` {number}" for rule, number in gain.fired.most_common())
    meshes = [str(plan.mesh) for plan in (gain.plain, gain.plan)]
    steps = " → ".join(f"{plan.prediction.step_s * 1e3:,.4g}" for plan in (gain.plain, gain.plan))
    mesh = " → ".join(dict.fromkeys(meshes))
    return f"| {gain.model} | {gain.cluster} | {rules} | {steps} | {gain.share:.2%} | {mesh} | {_times(gain)} |"


def _times(gain: Gain) -> str:
    return " → ".join(f"{s:.1f}" for s in gain.seconds)


INTRODUCTION = """\
{heading}

In {fired} of {count} plans rules are used. They make the predicted step {least:.2%} to {most:.2%} shorter, {median:.2%}
at the median. In the other {idle} no rule fires.

Written by `make bench-gains` on {date}, on a busy machine. Each plan is made without rules and with the shipped ones.
The number behind a rule says at how many places of the plan it is used; *search* is the CPU time of both searches.

| model | cluster | rules that fire | step, ms | gain | mesh | search, s |
|---|---|---|--:|--:|---|--:|
"""


def section(gains: Sequence[Gain]) -> str:
    """The tables as Markdown."""
    fired, places = Counter[str](), Counter[str]()
    for gain in gains:
        fired, places = fired + gain.fired, places + gain.places
    shares = [gain.share for gain in gains if gain.fired] or [0.0]
    idle = sum(not gain.fired for gain in gains)
    head = INTRODUCTION.format(
        heading=HEADING, date=date.today().isoformat(), fired=len(gains) - idle, count=len(gains), idle=idle,
        least=min(shares), most=max(shares), median=median(shares),
    )  # fmt: skip
    names = [rule for rule, _ in fired.most_common()] + sorted(places.keys() - fired.keys())
    rows = [f"| `{rule}` | {places[rule]:,} | {fired[rule]:,} | {_where(rule, gains)} |" for rule in names]
    by_rule = "\n\n| rule | places found | places in plans | models |\n|---|--:|--:|---|\n"
    return head + "\n".join(map(_line, gains)) + by_rule + "\n".join(rows) + "\n"


def _where(rule: str, gains: Sequence[Gain]) -> str:
    return ", ".join(dict.fromkeys(gain.model for gain in gains if rule in gain.fired)) or "none"


def replaced(page: str, text: str) -> str:
    """The page with this section in the place of the one with its heading, or at its end."""
    before, _, rest = page.partition(f"{HEADING}\n")
    after = rest.partition("\n## ")[2]
    return f"{before.rstrip()}\n\n{text}" + (f"\n## {after}" if after else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(prog="make bench-gains", description=__doc__)
    parser.add_argument("--models", default=",".join((*ZOO, *LARGE)), help="names, separated by commas")
    parser.add_argument("--dry", action="store_true", help="print the section, do not write it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = section(measure(options.models.split(",")))
    if not options.dry:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
