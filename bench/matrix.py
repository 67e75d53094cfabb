"""The matrix: every model of the zoo under every layout on real gloo ranks, against the single process.

Writes the table to docs/matrix.md and exits with 1 where anything is out of tolerance. Run it with `make matrix`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from bench.accuracy import (
    BUFFER_TOLERANCE,
    DOUBLE_TOLERANCE,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    SMALL,
    Errors,
    Prepared,
    measure,
    prepare,
)
from bench.plans import CASES, TRAINING, Case
from bench.replicated import describe
from examples.zoo import ZOO
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import format_layouts

NUM_STEPS = 3
"""Of AdamW, in fp64."""
CUT = "the batch cannot be cut into"
PAGE = Path(__file__).parents[1] / "docs" / "matrix.md"


@dataclass(frozen=True)
class Cell:
    """One model under one case. `failure` is set where there is no result to compare.

    `refused`: it names the operator that keeps this model from being cut into microbatches.
    """

    model: str
    case: Case
    errors: Errors | None = None
    plan_s: float = 0.0
    mesh: str = ""
    layouts: str = ""
    replicated: str = ""
    failure: str = ""
    refused: bool = False

    @property
    def good(self) -> bool:
        if self.errors is None:
            return self.refused
        return self.errors.within_double if self.case.kind == "fp64" else self.errors.within_tolerance


def run_cell(prepared: Prepared, case: Case) -> Cell:
    """Plan, lower, run and compare; a failure becomes part of the cell."""
    serial = prepared.captured.graph
    start = time.perf_counter()
    try:
        plan = case.plan(serial, prepared.name)
        plan_s = time.perf_counter() - start
        replicated = describe(serial, plan.graph, case.roles)
        errors = measure(prepared, plan.graph, execution=plan.execution)
    except PlanError as error:
        refused = case.mesh is not None and case.mesh.num_microbatches > 1 and CUT in str(error)
        return Cell(prepared.name, case, failure=_first_failure(error), refused=refused)
    except ShardwrightError as error:
        return Cell(prepared.name, case, failure=_first_failure(error))
    return Cell(prepared.name, case, errors, plan_s, str(plan.mesh), _layouts(plan.graph), replicated)


def _first_failure(error: ShardwrightError) -> str:
    """The message, with the traceback of the first rank that failed only."""
    return f"{type(error).__name__}: " + re.split(r"\n+rank \d+ of", str(error))[0].strip()


def _layouts(graph: Graph) -> str:
    """Say how many parameters are stored in which layout."""
    counts: dict[str, int] = {}
    for node in graph.leaves("parameter"):
        text = format_layouts(graph.types[node.name].layouts, graph.mesh)
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} × ({text})" for text, count in sorted(counts.items(), key=lambda c: -c[1]))


def run(models: Sequence[str], cases: Sequence[Case]) -> Iterator[Cell]:
    """Every cell, one after the other: the ranks of one cell keep the machine busy."""
    for name in models:
        for case in cases:
            prepared = prepare(name, kind=case.kind, num_steps=NUM_STEPS if case.kind == "fp64" else 0)
            if case.suits(prepared.captured.graph):
                yield run_cell(prepared, case)


# ---- the page ----

INTRODUCTION = """\
# Every model under every layout

A plan has to compute what one process computes. This page holds training steps of small models, under many layouts on
real processes, beside the same step in one process; it is for those who want to know how equal *equal* is. The one
thing to take away: {claim}.

*Layout*, *mesh*, *rank* and other words are explained in [words](concepts.md). Why equality is also proven, before
anything runs, is told in [proofs](proofs.md).

## How it was measured

Written by `make matrix` on {date} with torch {torch}. Each cell is one training step of a model of `examples/zoo.py`
on gloo processes, against the same step in a single process: fp32, the same weights, batch and seed, train mode with
dropout on. Every plan was proven to denote the captured graph before it ran.

| what is compared | error, the largest of any rank | tolerance |
|---|---|---|
| loss | \\|l − l_ref\\| / \\|l_ref\\| | {loss:g} |
| gradient of each parameter | ‖g − g_ref‖₂ / max(‖g_ref‖₂, {small:g} · ‖G_ref‖₂) | {gradient:g} |
| buffers after the step (batch norm's statistics) | ‖b − b_ref‖₂ / max(‖b_ref‖₂, {small:g}) | {buffer:g} |
| state of the random generator after the step | equal, bit by bit | 0 |

G_ref is the gradient of all parameters together. So a gradient's error is relative to its own norm, unless that is
below {small:g} of the whole gradient's. The bias of attention's keys is such a case: its gradient is zero but for
rounding, because softmax does not see it.

The plans:

* *data* splits the batch. *zero* also stores parameters in slices (ZeRO-3). *tensor* splits along the weights.
* *searched* is the search's own plan for this machine's CPU ranks. For models as tiny as these it keeps everything
  whole wherever communication would cost more.
* *searched (fast links)* is its plan for slow devices on links that cost nothing, which splits nearly everything.
"""
TRAINED = """\

What people train with is here as well, in fp64, for which everything has to be within {double:g}, and the weights
after {steps} steps of AdamW too:

* *hybrid* is sharded over two ranks and replicated over two pairs of them.
* `zero-1` to `zero-3` and `kept` say how long gathered parameters stay.
* The last word is what backward makes again. *mixture*: the first of equal blocks wholly, of the others their
  attention.
* *refused*: the model cannot be cut into microbatches exactly, and is told the operator.
"""
NOT_TRAINED = """\

`make matrix` also runs what people train with, in fp64: microbatches, lifetimes of gathered parameters and what is
made again, on one axis and two, within {double:g}, with the weights after {steps} steps of AdamW. Of these cells only
those of gpt have been run so far: all 60, on 2026-11-23, and all were equal, the largest error of a gradient below
1e-14. They are not in the tables of this page. [The sweep](sweep.md) has more of them, on up to eight ranks.
"""
RANDOM = """\

`python -m bench.random_plans 10000 10320` runs 320 random pairs of model and plan, which no search would choose. On
2026-11-24, 318 were equal. The two others, of T5 on a busy machine, were not compiled by `torch.compile` within two
minutes.
"""
OVERVIEW = """\
## Largest gradient error

By model and plan, the largest of all parameters. 0e+00 is no difference at all.

"""
EACH = """\
## How to read the other tables

Each model has a table of its own:

* *parameters stored*: how many parameters lie how on each axis. `6 × (dp: R)` are six that are whole on every rank of
  the axis `dp`; `S(0)` is a slice of dimension 0, `S(0,3)` one of each of the three parts of dimension 0.
* *loss*, *worst gradient*, *buffers*: the errors, and which parameter has the largest. A model without buffers has no
  such figure.
* *planned in*: what planning took.
* the last column is empty where all is within tolerance.

Below it are the operators that stay whole on an axis, so that each rank of the axis does all of their work. In brackets
is why: to split them would cost more (*cheaper whole*), or cannot be done.
"""


def page(cells: Sequence[Cell]) -> str:
    """The whole page as Markdown."""
    is_trained = any(c.case.kind == "fp64" for c in cells)
    head = INTRODUCTION + (TRAINED if is_trained else NOT_TRAINED) + RANDOM
    text = head.format(
        claim=_claim(cells),
        date=date.today().isoformat(),
        torch=torch.__version__,
        loss=LOSS_TOLERANCE,
        gradient=GRADIENT_TOLERANCE,
        buffer=BUFFER_TOLERANCE,
        small=SMALL,
        double=DOUBLE_TOLERANCE,
        steps=NUM_STEPS,
    )
    models = list(dict.fromkeys(c.model for c in cells))
    parts = [text, OVERVIEW + _overview(cells), EACH]
    return "\n".join(parts + [_section(model, [c for c in cells if c.model == model]) for model in models])


def _claim(cells: Sequence[Cell]) -> str:
    """Say how many cells are good, and the largest error of a gradient in fp32."""
    text = f"{sum(c.good for c in cells)} of {len(cells)} cells are within tolerance"
    found = [(c.errors.gradient, c) for c in cells if c.errors is not None and c.case.kind == "fp32"]
    if not found:
        return text
    error, cell = max(found, key=lambda pair: pair[0])
    where = f"{cell.model}; {cell.case}"
    return (
        f"{text}, and the largest error of a gradient is {error:.1e} ({where}), where {GRADIENT_TOLERANCE:g} is allowed"
    )


def _overview(cells: Sequence[Cell]) -> str:
    models = list(dict.fromkeys(c.model for c in cells))
    found = {(c.model, c.case): c for c in cells}
    lines = [f"| plan | {' | '.join(models)} |", "|---|" + "--:|" * len(models)]
    for case in dict.fromkeys(c.case for c in cells):
        marks = ("" if (cell := found.get((model, case))) is None else _mark(cell) for model in models)
        lines.append(f"| {case} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def _mark(cell: Cell) -> str:
    if cell.errors is None:
        return "refused" if cell.refused else "**failed**"
    return f"{cell.errors.gradient:.0e}" if cell.good else f"**{cell.errors.gradient:.0e}**"


def _section(model: str, cells: Sequence[Cell]) -> str:
    lines = [
        f"## {model}\n",
        "| plan | mesh | parameters stored | loss | worst gradient | buffers | planned in | |",
        "|---|---|---|--:|---|--:|--:|---|",
    ]
    lines += [_row(cell) for cell in cells]
    lines.append("\nOperators that stay whole on an axis:\n")
    texts: dict[str, list[str]] = {}
    for cell in cells:
        if not cell.failure:
            texts.setdefault(cell.replicated, []).append(str(cell.case))
    lines += [f"* {'; '.join(names)}: {text}" for text, names in texts.items()]
    failures: dict[str, list[str]] = {}
    for cell in cells:
        if cell.failure:
            verdict = "refused" if cell.refused else "failed"
            failures.setdefault(f"{verdict}**: `{cell.failure.splitlines()[-1]}`", []).append(str(cell.case))
    lines += [f"* **{'; '.join(names)} {text}" for text, names in failures.items()]
    return "\n".join(lines) + "\n"


def _row(cell: Cell) -> str:
    errors = cell.errors
    if errors is None:
        return f"| {cell.case} | | | | | | | {'refused' if cell.refused else '**failed**'} |"
    verdict = "" if cell.good else "**out of tolerance**" if errors.same_random_state else "**other random state**"
    gradient = f"{errors.gradient:.1e} `{errors.gradient_name}`"
    buffers = f"{errors.buffer:.1e}" if errors.buffer_name else ""
    figures = [f"{errors.loss:.1e}", gradient, buffers, f"{cell.plan_s * 1e3:.0f} ms", verdict]
    return f"| {cell.case} | {cell.mesh} | {cell.layouts} | " + " | ".join(figures) + " |"


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix; 1 where anything failed or is out of tolerance."""
    options = _options(arguments)
    cells: list[Cell] = []
    for cell in run(
        options.models or list(ZOO),
        [c for c in (*CASES, *TRAINING) if c.num_ranks in options.ranks and options.only in str(c)],
    ):
        cells.append(cell)
        print(_progress(cell), file=sys.stderr, flush=True)
    if not options.models and not options.only:
        PAGE.write_text(page(cells))
        print(f"wrote {PAGE}")
    bad = [c for c in cells if not c.good]
    print(f"{len(cells) - len(bad)} of {len(cells)} within tolerance")
    for cell in bad:
        print(f"FAILED {cell.model}, {cell.case}: {cell.failure or cell.errors}")
    return 1 if bad else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*ZOO, []], help="run only these, and write no page")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="run only these numbers of ranks")
    parser.add_argument("--only", default="", help="run only cases with this in their names, and write no page")
    return parser.parse_args(arguments)


def _progress(cell: Cell) -> str:
    if cell.errors is None:
        verdict = "refused" if cell.refused else "FAILED"
        return f"{cell.model:10} {cell.case!s:32} {verdict}: {cell.failure}"
    return f"{cell.model:10} {cell.case!s:32} loss {cell.errors.loss:.1e}  gradient {cell.errors.gradient:.1e}"


if __name__ == "__main__":
    sys.exit(main())
