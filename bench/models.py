"""Models of other people's packages, each under plans, against the single process.

A row of `bench/model_table.py` is a model with its batch. It takes two steps of AdamW with dropout on, in fp64 (in fp32
where the model itself cannot), in one process, and then in each of `WAYS` on gloo ranks: loss, gradients, buffers,
weights and the state of the generator have to be the same. Cells are those of `bench.sweep`. What became of a model is
appended to `bench/data/models.jsonl` as soon as it is there; what is in that file is not run again, unless asked.

Each model has a process of its own with a limit of time, so one that crashes or hangs is noted and the others go on.
With each plan goes the share of the predicted compute that is split, and why the rest is not, as the plan reports it.

    make models                                      what never ran, and writes docs/models.md
    python -m bench.models --matching 'timm|Llama'   of these models
    python -m bench.models --ways stages --again refused differs
                                                     in this way, those too that were refused or differed
    python -m bench.models --page                    writes the page from what is in the file
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils._pytree import tree_map

from bench import sweep
from bench.accuracy import Prepared, exactly, prepared
from bench.model_rows import Row, trained
from bench.model_store import STORE, Judged, judged, load, tidy
from bench.model_store import append as keep
from bench.model_table import ROWS
from bench.models_page import page
from bench.plans import Case
from bench.random_plans import TooLongError, within
from bench.sweep import Cell, Outcome, append, run_cells
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.reports.facts import PlanFacts
from shardwright.reports.foreign import foreign_parts
from shardwright.search.plan import Plan
from shardwright.search.request.restrict import DATA, FREE, TENSOR, ZERO

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TWO: dict[str, int] = {"x": 2}
WAYS = (
    Case("data", 2, Mesh.of(**TWO), (DATA,)),
    Case("tensor", 2, Mesh.of(**TWO), (TENSOR,)),
    Case("fast links", 2, Mesh.of(**TWO), (FREE,), fast_links=True),
    Case("zero", 2, Mesh.of(**TWO), (ZERO,)),
    Case("microbatches", 2, Mesh.of(**{TIME: 2}, **TWO), (DATA,)),
    Case("stages", 2, Mesh.of(**{TIME: 2}, x=1), (DATA,), num_stages=2),
)
FOUR = Case("data × tensor", 4, Mesh.of(x=2, y=2), (DATA, TENSOR))
UNCUT = {
    "microbatches": replace(WAYS[4], name="microbatches, own statistics", per_microbatch=("*",)),
    "stages": Case("stages, one batch", 2, Mesh.of(x=1), (DATA,), num_stages=2),
}
"""What runs in place of a way for which the batch cannot be cut into microbatches."""
EVERY = 5
"""Of the models, each so manieth runs on four ranks too."""
NUM_STEPS, SEED = 2, 7
MODEL_S, PLAN_S, CELL_S = 1800, 60, 600
NUM_REASONS = 6
"""So many of the reasons why operators are not split are kept of each plan, the most expensive."""


def reference(row: Row) -> Prepared:
    """A row's model with its steps in one process: in fp64, or in fp32 where it cannot be trained in that."""
    try:
        model, batch = trained(row, SEED)
        batch = tree_map(lambda x: x.double() if x.is_floating_point() else x, batch)
        return prepared(row.name, model.double(), batch, "fp64", NUM_STEPS, find=True)
    except (ShardwrightError, RuntimeError):
        return prepared(row.name, *trained(row, SEED), "fp32", NUM_STEPS, find=True)


# ---- its cells ----


def ways(row: Row) -> list[Case]:
    """Return the cases of a model: on two ranks and, for one model of every `EVERY`, on four."""
    return [*WAYS, *([FOUR] if ROWS.index(row) % EVERY == 0 else [])] if row in ROWS else [*WAYS]


def judge(row: Row, path: Path, cases: Sequence[Case]) -> None:
    """Run these cells of a model in this process; the file has their outcomes."""
    try:
        found = reference(row)
    except Exception as error:  # noqa: BLE001  # whatever a package raises
        said = str(error) if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {error}"
        for case in cases:
            append(path, _refused(row, case, said))
        return
    todo = list[Cell]()
    for planned in (planned for case in cases for planned in _planned(row, found, case)):
        if isinstance(planned, Cell):
            todo.append(planned)
        else:
            append(path, planned)
    for num_ranks in sorted({cell.case.num_ranks for cell in todo}):
        own = [cell for cell in todo if cell.case.num_ranks == num_ranks]
        while own:
            own = own[len(run_cells(own, path, CELL_S)) :]


def _refused(row: Row, case: Case, note: str, verdict: str = "refused") -> Outcome:
    return Outcome(row.name, case.num_ranks, case.name, case.kind, verdict, note=note)


def _planned(row: Row, found: Prepared, case: Case) -> Iterator[Cell | Outcome]:
    """A cell that can run; of another why not, and what runs in its place."""
    own = replace(case, kind=found.kind)
    try:
        with within(PLAN_S):
            plan = own.plan(found.captured.graph, row.name)
        found = exactly(found, SEED) if case.num_stages > 1 else found
        yield Cell(own, plan, found, is_measured=False, facts=facts_of(plan))
    except TooLongError as error:
        yield _refused(row, own, str(error), "slow")
    except ShardwrightError as error:
        yield _refused(row, own, str(error))
        if sweep.CUT in str(error) and case.name in UNCUT:
            yield from _planned_instead(row, found, UNCUT[case.name], str(error))


def _planned_instead(row: Row, found: Prepared, case: Case, why: str) -> Iterator[Cell | Outcome]:
    """The cell that runs where a batch cannot be cut, for such a reason.

    One process that takes microbatches in turn draws other masks, so models that draw have no reference for that.
    """
    if not case.per_microbatch:
        yield from _planned(row, found, case)
    elif "per_microbatch=" in why and not any(node.is_random for node in found.captured.graph.nodes):
        assert case.mesh is not None
        try:
            apart = prepared(
                row.name, found.model, found.batch, found.kind, NUM_STEPS, find=True,
                in_turn=case.mesh.num_microbatches,
            )  # fmt: skip
        except ShardwrightError as error:
            note = f"one process cannot take its microbatches in turn: {error}"
            yield _refused(row, replace(case, kind=found.kind), note)
        else:
            yield from _planned(row, apart, case)


def facts_of(plan: Plan) -> dict[str, Any]:
    """The share of a plan's predicted compute that is split along all axes, why not more, and what is foreign."""
    facts = PlanFacts(plan)
    axes = [axis for axis in facts.axes if not axis.is_time and axis.size > 1]
    total_s = sum(facts.costs[node.name].compute_s for node in facts.operators) or 1.0
    return {
        "split": min((1 - axis.share_of_compute["whole"] for axis in axes), default=None),
        "operators": len(facts.operators),
        "unsplit": [
            [u.op, u.reason, u.count, round(u.compute_s / total_s, 4)]
            for u in [u for u in facts.unsplit if u.axis != TIME][:NUM_REASONS]
        ],
        "foreign": [[part.name, part.why, round(part.share, 4)] for part in foreign_parts(facts)],
    }


# ---- all of them ----


def coverage(
    rows: Sequence[Row], path: Path, until: Callable[[], bool], only: Sequence[str] = (), again: Sequence[str] = ()
) -> Iterator[Judged]:
    """Run what the file lacks, each model in a process of its own.

    Args:
        rows: the models.
        path: of the file.
        until: whether to begin no further model.
        only: the ways; all of them if there are none.
        again: verdicts that do not count as known.
    """
    for row in rows:
        if until():
            return
        known = {o.way for o in load(path).values() if o.model == row.name and o.verdict not in again}
        todo = [case for case in ways(row) if case.name not in known and (not only or case.name in only)]
        for found in _outcomes(row, todo) if todo else ():
            keep(path, judged(found))
            yield judged(found)


def _outcomes(row: Row, cases: Sequence[Case]) -> list[Outcome]:
    """One for each way at least, whatever the model's process does."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cells.jsonl"
        said = _apart(row, path, cases)
        done = sweep.load(path)
        missing = [case for case in cases if case.name not in {o.way for o in done}]
        return done + [_refused(row, case, said, "failed") for case in missing]


def _apart(row: Row, path: Path, cases: Sequence[Case]) -> str:
    """Judge a model in a process of its own, and return how that ended; its ranks end with it."""
    try:
        row.load()  # once for all models of it
    except Exception as error:  # noqa: BLE001  # whatever a package raises
        return f"the package cannot be loaded: {type(error).__name__}: {error}"
    process = get_context("fork").Process(target=_alone, args=(row, path, cases))
    process.start()
    process.join(MODEL_S)
    timed_out = process.is_alive()
    assert process.pid is not None
    if timed_out:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return f"not done in {MODEL_S} s" if timed_out else f"its process ended with status {process.exitcode}"


def _alone(row: Row, path: Path, cases: Sequence[Case]) -> None:
    os.setsid()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    judge(row, path, cases)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; 1 where any cell differs or failed."""
    options = _options(arguments)
    end = time.monotonic() + options.seconds
    rows = [row for row in ROWS if re.search(options.matching, f"{row.package} {row.name}")]
    if not options.page:
        for outcome in coverage(rows, options.file, lambda: time.monotonic() > end, options.ways, options.again):
            print(_progress(outcome), file=sys.stderr, flush=True)
    cases = [*WAYS, *UNCUT.values(), FOUR]
    tidy(options.file, [row.name for row in ROWS], [case.name for case in cases])
    found = list(load(options.file).values())
    PAGE.write_text(page(found, ROWS, cases), encoding="utf-8")
    num_bad = sum(o.is_bad for o in found)
    print(f"wrote {PAGE}: {sum(o.has_run for o in found)} plans have run, {num_bad} of them differ or failed")
    return 1 if num_bad else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--matching", default="", help="only models whose package and name match")
    parser.add_argument(
        "--ways", nargs="+", default=(), choices=[case.name for case in (*WAYS, FOUR)], help="only these"
    )
    verdicts = ("equal", "refused", "slow", "differs", "failed")
    parser.add_argument("--again", nargs="+", default=(), choices=verdicts, help="also what has such a verdict")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further model after so long")
    parser.add_argument("--file", type=Path, default=STORE, help="default: bench/data/models.jsonl")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    return parser.parse_args(arguments)


def _progress(o: Judged) -> str:
    share = "" if o.split is None else f"{o.split:.0%} split"
    error = "" if o.error is None else f"{o.error:.0e}"
    said = "".join(o.note.strip().splitlines()[:1])[:200]
    return f"{o.verdict:8} {o.model:32} {o.way:14} {o.kind} {error:6} {share:10} {said}"


if __name__ == "__main__":
    sys.exit(main())
