"""The sweep: every model of the zoo in at least 30 ways on 2, 4 and 8 gloo ranks, against the single process.

A cell is a model in one way (`bench/ways.py`) on so many ranks. It takes ten steps of AdamW with dropout on, which are
compared with those of one process, and then some more, in which the peak of its memory is measured, to be compared with
the predicted one. What a model refuses is planned no further; of other ways so many are taken that enough have run.

Every cell's outcome is appended to a file, a line of JSON each, as soon as it is there. Cells that are in the file are
not run again, so a sweep that was ended goes on, and one of changed code begins with another file. The ranks of a model
are forked once for all its cells. A cell that fails or hangs takes them with it: it is noted, and the others go on.

    make sweep                                           all, and writes docs/sweep.md
    python -m bench.sweep --models gpt t5 --ranks 2 4    these
    python -m bench.sweep --page                         writes the page from what is in the file
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.accuracy import Errors, Kind, Prepared, adamw, errors_of, lowered, prepare
from bench.allocations import live_storages, peak_bytes
from bench.plans import Case
from bench.random_plans import TooLongError, within
from bench.sweep_page import NUM_RANKS, page
from bench.ways import ways
from bench.zoo_times import Stepper
from examples.zoo import ZOO
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.text import print_graph
from shardwright.search.plan import Plan

ROOT = Path(__file__).parents[1]
FILE, PAGE = ROOT / ".sweep.jsonl", ROOT / "docs" / "sweep.md"
NUM_PLANS = 30
NUM_NARROW = 3
"""Of these in fp32, and as many in bf16; in fp64 a wrong program can be told from rounding."""
NUM_STEPS = 10
TIMES = 4
"""The batch is that of four of the zoo's: enough for eight ranks and four microbatches."""
STEPS_FOR_MEMORY = 2
PLAN_S, CELL_S = 60, 180
CUT = "the batch cannot be cut into"
CONVOLUTION, GROUPED = "conv2d", {"grouped_mm", "experts"}
"""Of doubles, torch unfolds the input of the first on a CPU, which takes memory of its own, and it lacks the others."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell.

    Attributes:
        verdict: "equal", "differs", "failed", "refused", "slow" where no plan was found in time, "same" where it is
            that of another way.
        digest: of the plan.
        errors: `Errors`, as a dictionary.
        rounding: under bf16, the errors of `torch.autocast` on one process.
        predicted_bytes, measured_bytes: the peak of memory.
        note: what was said where nothing was run.
        facts: what else is known of the plan.
    """

    model: str
    num_ranks: int
    way: str
    kind: str
    verdict: str
    mesh: str = ""
    errors: dict[str, Any] | None = None
    rounding: dict[str, Any] | None = None
    predicted_bytes: int = 0
    measured_bytes: int = 0
    seconds: float = 0.0
    note: str = ""
    digest: str = ""
    facts: dict[str, Any] | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.model, self.num_ranks, self.way

    @property
    def has_run(self) -> bool:
        return self.verdict in ("equal", "differs", "failed")

    @property
    def memory_error(self) -> float:
        """Return the error of the predicted memory, relative to the measured one."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class Cell:
    """A way with its plan. `is_measured`: whether its memory is; `facts`: what else is known of it."""

    case: Case
    plan: Plan
    prepared: Prepared
    is_measured: bool
    facts: dict[str, Any] | None = None

    def outcome(self, verdict: str, **found: Any) -> Outcome:
        """Return the cell's outcome with this verdict."""
        case, plan, rounding = self.case, self.plan, self.prepared.rounding
        own = self.prepared.name, case.num_ranks, case.name, case.kind, verdict, str(plan.mesh)
        predicted = plan.prediction.memory.total_bytes
        known = {"rounding": rounding and asdict(rounding), "predicted_bytes": predicted, "digest": self.digest}
        known["facts"] = self.facts
        return Outcome(*own, **known, **found)

    @property
    def digest(self) -> str:
        """Return a digest of the kind of numbers, the graph and the execution."""
        text = f"{self.case.kind}\n{print_graph(self.plan.graph)}\n{self.plan.execution}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def kinds(model: str) -> Sequence[Kind]:
    """Return the kinds of numbers for a model: where fp64 does not show its memory, every second time fp32."""
    ops = {node.op for node in prepare(model).captured.graph.nodes}
    return ("fp32",) if GROUPED & ops else ("fp64", "fp32") if CONVOLUTION in ops else ("fp64",)


class Sweep:
    """The cells of one model on so many ranks."""

    def __init__(
        self, model: str, num_ranks: int, path: Path, known: Sequence[Outcome] = (), num_plans: int = NUM_PLANS
    ) -> None:
        self.model, self.num_ranks, self.path, self.num_plans = model, num_ranks, path, num_plans
        self.known = {o.way: o for o in known if (o.model, o.num_ranks) == (model, num_ranks)}
        self.is_cut = not any(CUT in o.note for o in self.known.values())
        self.kinds = kinds(model)

    def _prepared(self, kind: Kind) -> Prepared:
        return prepare(self.model, kind=kind, num_steps=NUM_STEPS, times=TIMES)

    def run(self) -> Iterator[Outcome]:
        """Plan and run what is not known yet."""
        todo = list[Cell]()
        for found in self._planned():
            if isinstance(found, Outcome):
                append(self.path, found)
                yield found
            else:
                todo.append(found)
        while todo:
            done = run_cells(todo, self.path)
            yield from done
            todo = todo[len(done) :]

    def _planned(self) -> Iterator[Cell | Outcome]:
        """Yield enough cells to run, and the refused ones in between."""
        seen, counts = {o.digest for o in self.known.values()}, Counter[str]()
        for case in ways(self.model, self.num_ranks, self.kinds):
            if counts.total() >= self.num_plans:
                return
            if case.kind != "fp64" and counts[case.kind] >= NUM_NARROW and "fp32" not in self.kinds:
                continue
            if case.name in self.known:
                counts[case.kind] += self.known[case.name].has_run
                continue
            prepared = self._prepared(case.kind)
            cut = case.mesh is not None and case.mesh.num_microbatches > 1
            if not case.suits(prepared.captured.graph) or (cut and not self.is_cut):
                continue
            found = self._plan(prepared, case)
            if isinstance(found, Cell) and found.digest in seen:
                found = found.outcome("same")
            elif isinstance(found, Cell):
                seen.add(found.digest)
                counts[case.kind] += 1
            yield found

    def _plan(self, prepared: Prepared, case: Case) -> Cell | Outcome:
        try:
            with within(PLAN_S):
                plan = case.plan(prepared.captured.graph, self.model)
                return Cell(case, plan, prepared, is_measured=case.kind == self.kinds[-1] or case.kind != "fp64")
        except TooLongError as error:
            verdict, note = "slow", str(error)
        except PlanError as error:
            verdict, note = "refused", str(error)
            self.is_cut = self.is_cut and CUT not in note
        return Outcome(self.model, self.num_ranks, case.name, case.kind, verdict, note=note)


def run_cells(cells: Sequence[Cell], path: Path, cell_s: float = CELL_S) -> list[Outcome]:
    """The outcomes of the first cells, all on as many ranks, up to one that fails, which is the last."""
    keys = [cell.outcome("").key for cell in cells]
    try:
        run_ranks(_run_cells, cells[0].case.num_ranks, (len(cells) + 1) * cell_s, args=(cells, path, cell_s))
    except ShardwrightError as error:
        done = [o for o in load(path) if o.key in keys]
        note = re.split(r"\n+rank \d+ of", str(error))[0].strip()
        failed = cells[len(done)].outcome("failed", note=note)
        append(path, failed)
        return [*done, failed]
    return [o for o in load(path) if o.key in keys]


def _run_cells(cells: Sequence[Cell], path: Path, cell_s: float) -> None:
    """Run cells on one rank. A cell that hangs ends all ranks, with its stack on stderr.

    What was forked is taken from the collector's hands, which would look through all of it in every cell.
    """
    forked = live_storages()
    gc.freeze()
    for cell in cells:
        start = time.perf_counter()
        faulthandler.dump_traceback_later(cell_s, exit=True)
        mine, measured = _measured(cell, forked, cell_s)
        ranks = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        faulthandler.cancel_dump_traceback_later()
        if dist.get_rank() == 0:
            errors, seconds = Errors.worst(ranks), round(time.perf_counter() - start, 2)
            verdict = "equal" if cell.prepared.accepts(errors) else "differs"
            append(path, cell.outcome(verdict, errors=asdict(errors), measured_bytes=measured, seconds=seconds))


def _measured(cell: Cell, forked: dict[int, int], cell_s: float) -> tuple[Errors, int]:
    """Return this rank's errors against one process and, on rank 0, its peak memory: all ranks hold as much.

    Args:
        cell: what runs.
        forked: the storages that this process began with.
        cell_s: how long a wait for another rank may take.
    """
    before = forked | live_storages()
    parallel = lowered(cell.prepared, cell.plan.graph, cell.plan.execution, cell_s)
    optimizer = adamw(parallel)
    errors = errors_of(cell.prepared, parallel, optimizer, is_staged=cell.case.num_stages > 1)
    if not cell.is_measured:
        return errors, 0
    stepper = Stepper(parallel, cell.prepared.batch, before, optimizer)
    if dist.get_rank() == 0:
        return errors, peak_bytes(stepper, STEPS_FOR_MEMORY)
    for _ in range(STEPS_FOR_MEMORY):
        stepper.step()
    return errors, 0


def append(path: Path, outcome: Outcome) -> None:
    """A line of the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def load(path: Path) -> list[Outcome]:
    """Return the last outcome of each cell in the file, if there is one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return list({outcome.key: outcome for outcome in found}.values())


def sweep(
    models: Sequence[str], ranks: Sequence[int], path: Path, until: Callable[[], bool], num_plans: int = NUM_PLANS
) -> Iterator[Outcome]:
    """All cells that are not in the file, model by model, until it is time to end."""
    for num_ranks in ranks:
        for model in models:
            if until():
                return
            yield from Sweep(model, num_ranks, path, load(path), num_plans).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; 1 where any cell differs or failed."""
    options = _options(arguments)
    end = time.monotonic() + options.seconds
    torch.set_num_threads(1)
    if not options.page:
        asked = options.models, options.ranks, options.file
        for outcome in sweep(*asked, lambda: time.monotonic() > end, options.plans):
            print(_progress(outcome), file=sys.stderr, flush=True)
    found = load(options.file)
    PAGE.write_text(page(found, NUM_PLANS, NUM_STEPS, TIMES), encoding="utf-8")
    bad = [o for o in found if o.verdict in ("differs", "failed")]
    print(f"wrote {PAGE}: {sum(o.has_run for o in found)} plans have run, {len(bad)} of them differ or failed")
    return 1 if bad else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.sweep", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO), help="default: all")
    parser.add_argument("--ranks", nargs="+", type=int, default=NUM_RANKS, help="default: 2 4 8")
    parser.add_argument("--plans", type=int, default=NUM_PLANS, help="of each model on so many ranks; default: 30")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further model after so long")
    parser.add_argument("--file", type=Path, default=FILE, help="default: .sweep.jsonl")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    return parser.parse_args(arguments)


def _progress(o: Outcome) -> str:
    head = f"{o.verdict:8} {o.seconds:5.1f} s  {o.model:10} {o.num_ranks} ranks  {o.way:48}"
    if not (e := o.errors):
        return f"{head} {o.note}"
    return (
        f"{head} loss {e['loss']:.0e} gradient {e['gradient']:.0e} weight {e['weight']:.0e} drift {e['drift']:.0e} "
        f"{f'memory {o.measured_bytes / 1e6:.2f} MB, {o.memory_error:+.1%}' if o.measured_bytes else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
