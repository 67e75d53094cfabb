"""Pipeline stages on real ranks: models of the zoo, against the single process.

A cell is a plan on the mesh of a stage, cuts of the model, a schedule and microbatches. Its ranks take three steps of
AdamW with dropout on (`seed_exactly`); loss, gradients, buffers and weights have to be those of one process, in fp64
within 1e-9, under bf16 autocast as far off as `torch.autocast` on one process. There are two kinds:

* the grid: every model, six blocks deep, on 2, 4 and 8 ranks under every schedule with 1, 2, 4 and 8 microbatches;
  what is inside a stage, the lifetimes of parameters, what is made again and the precision go round;
* at random: as `bench.random_plans` draws layouts, lifetimes and what is made again, and cuts as they come.

    python -m bench.stage_matrix                     the grid
    python -m bench.stage_matrix --models gpt t5 --ranks 2 4 --every 5
    python -m bench.stage_matrix --random 0 200      the cases of these numbers
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby, islice, product

import torch

from bench.accuracy import Errors, Kind, Prepared, adamw, errors_of, lowered, prepare
from bench.plans import CERTIFIED
from bench.random_plans import Pair, TooLongError, within
from examples import zoo
from shardwright.cost.clusters.local import default_cluster
from shardwright.lowering.random.exact import seed_exactly
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.checks import FieldError
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.stages import cut
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.pipelining import SCHEDULES, ScheduleName
from shardwright.pcg.step.recompute import Recompute
from shardwright.pcg.step.sections import sections, units
from shardwright.pcg.step.time import as_run
from shardwright.search.request.restrict import DATA, EXPERT, TENSOR, ZERO
from shardwright.search.tree.planner import Planner

MODELS = ("gpt", "gpt2", "llama", "bert", "vit", "t5", "mixtral", "qwen3_moe")
EXPERTS = ("mixtral", "qwen3_moe")
"""In fp32, as torch multiplies no groups of doubles."""
LAYERS, NUM_STEPS, SEED = 6, 3, 11
FEW_LAYERS = 4
"""In random cases, of whose blocks no two are alike."""
SECTIONS = FEW_LAYERS + 2
"""With what comes before the blocks, and after them."""
MICROBATCHES = (1, 2, 4, 8)
CELL_S, RANDOM_S, AT_ONCE = 90, 8, 6
Inside = tuple[str, ...]
"""The roles of the axes of a stage, two ranks along each."""
INSIDES: dict[int, Sequence[Inside]] = {
    1: [()], 2: [(DATA,), (TENSOR,), (ZERO,)], 4: [(DATA, TENSOR), (ZERO, TENSOR), (DATA, ZERO)],
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A cell that is run, and the words for it."""

    model: str
    kind: Kind
    text: str
    prepared: Prepared
    graph: Graph
    execution: Execution

    @property
    def num_ranks(self) -> int:
        return self.graph.mesh.num_devices * self.execution.schedule.num_stages

    def __str__(self) -> str:
        return f"{self.model:9} {self.kind:8} {self.num_ranks} ranks  {self.text}"


@dataclass(frozen=True)
class Refused:
    """A cell that cannot be planned, and the reason."""

    text: str
    why: str

    def __str__(self) -> str:
        return self.text


def prepared_of(model: str, kind: Kind, trained: float = 1.0) -> Prepared:
    """Prepare a model under `seed_exactly`, from its first mask."""
    with seed_exactly(SEED) as masks:
        found = prepare(model, kind=kind, trained=trained, num_steps=NUM_STEPS)
        assert masks.counter == 0
    return found


def number_of_sections(graph: Graph, execution: Execution) -> int:
    """Return the number of sections that a split may spread."""
    return len(units(sections(Operations(as_run(graph, execution), execution), {}, by_block=True)))


# ---- the grid ----


def grid(models: Sequence[str], ranks: Sequence[int], every: int = 1) -> Iterator[Cell | Refused]:
    """Yield every `every`-th cell of the whole grid."""
    for model in models:
        for number, found in enumerate(_of_model(model, ranks)):
            if number % every == 0:
                yield found()


def _of_model(model: str, ranks: Sequence[int]) -> Iterator[_Asked]:
    insides = {inner: cycle([*i, (EXPERT,)] if model in EXPERTS and inner == 2 else i) for inner, i in INSIDES.items()}
    lifetimes, again = cycle(ZEROS), cycle(("none", "full", "selective", "none", "full"))
    kinds: Iterator[Kind] = cycle(("fp32",) if model in EXPERTS else ("fp64", "fp64", "fp64", "fp64", "amp_bf16"))
    for num_ranks in ranks:
        stages = cycle([s for s in (2, 4, 8) if s <= num_ranks and num_ranks // s in INSIDES])
        for many, schedule in product(MICROBATCHES, SCHEDULES):
            num_stages = min(next(stages), 4 if schedule == "interleaved" else 8)  # there are eight sections
            inside = next(insides[num_ranks // num_stages])
            yield _Asked(model, next(kinds), num_stages, inside, many, schedule, next(lifetimes), next(again))


@dataclass(frozen=True)
class _Asked:
    """A cell of the grid, to be planned."""

    model: str
    kind: Kind
    stages: int
    inside: Inside
    many: int
    schedule: ScheduleName
    zero: Zero
    recompute: Recompute

    def __call__(self) -> Cell | Refused:
        inside = "×".join(self.inside) or "one rank"
        text = f"{self.stages} stages of {inside}, {self.schedule}, {self.many} microbatches"
        text = f"{text}, {self.zero}, {self.recompute}"
        try:
            prepared = prepared_of(self.model, self.kind)
            graph, execution = self._planned(prepared)
        except (PlanError, FieldError) as error:
            return Refused(f"{self.model:9} {self.kind:8} {text}", str(error))
        return Cell(self.model, self.kind, text, prepared, graph, execution)

    def _planned(self, prepared: Prepared) -> tuple[Graph, Execution]:
        schedule, chunks = self.schedule, 2 if self.schedule == "interleaved" else 1
        execution = Execution.of(
            num_stages=self.stages, chunks_per_stage=chunks, schedule=schedule, recompute=self.recompute
        )
        sizes = dict.fromkeys("xyz"[: len(self.inside)], 2) or {"x": 1}
        mesh = Mesh.of(**({TIME: self.many} if self.many > 1 else {}), **sizes)
        planner = Planner(default_cluster(2 ** len(self.inside)), CERTIFIED, precision=prepared.precision)
        graph = planner.solve(prepared.captured.graph, mesh, self.inside or (DATA,), self.model).graph
        graph = with_lifetimes(graph, {leaf.name: self.zero for leaf in graph.leaves("parameter")})
        many, parts = number_of_sections(graph, execution), execution.schedule.num_virtual_stages
        split = tuple(many // parts + (part < many % parts) for part in range(parts))
        execution = execution.having(split=split)
        cut(as_run(graph, execution), execution)
        return graph, execution


# ---- at random ----

SHAPES: dict[int, Sequence[dict[str, int]]] = {
    2: ({"x": 1}, {"x": 2}, {"x": 2}, {"x": 2, "y": 2}), 3: ({"x": 1}, {"x": 2}), 4: ({"x": 1}, {"x": 2}),
}  # fmt: skip


def at_random(number: int) -> Cell | Refused:
    """The case of a number."""
    draw = random.Random(f"stages {number}")
    stages = draw.choice((2, 2, 2, 3, 4))
    schedule: ScheduleName = draw.choice(SCHEDULES)
    most = SECTIONS // stages
    if schedule == "interleaved" and most == 1:
        schedule = "1f1b"
    chunks = draw.randint(2, most) if schedule == "interleaved" else 1
    many = draw.choice([m for m in MICROBATCHES if chunks == 1 or m < stages or m % stages == 0])
    shape = draw.choice(SHAPES[stages])
    mesh = Mesh.of(**({TIME: many} if many > 1 else {}), **shape)
    pair = Pair.drawn(number, [m for m in MODELS if m not in EXPERTS])
    roles = (*pair.roles, *pair.roles)[: len(shape)]
    pair = replace(pair, mesh=mesh, roles=roles, backend="")
    text = f"{number}: {pair.model}, {stages} stages of {mesh} {'×'.join(roles)}, {schedule}, {chunks} chunks"
    try:
        prepared = prepared_of(pair.model, "fp64", pair.trained)
        with within(RANDOM_S), seed_exactly(SEED):
            graph, execution = pair.plan()
        many_sections, parts = number_of_sections(graph, execution), stages * chunks
        ends = sorted(draw.sample(range(1, many_sections), parts - 1))
        split = tuple(b - a for a, b in zip([0, *ends], [*ends, many_sections], strict=True))
        execution = execution.having(num_stages=stages, chunks_per_stage=chunks, schedule=schedule, split=split)
        cut(as_run(graph, execution), execution)
    except (PlanError, TooLongError, FieldError) as error:
        return Refused(text, str(error))
    return Cell(pair.model, "fp64", f"{text}, sections {split}", prepared, graph, execution)


# ---- on ranks ----


def run(found: Sequence[Cell]) -> Iterator[tuple[Cell, Errors | str]]:
    """Every cell with its errors, or what was said where it failed: the ranks of several are forked once."""
    try:
        by_rank = run_ranks(_run_cells, found[0].num_ranks, len(found) * CELL_S, args=(found,))
        yield from zip(found, by_rank[0], strict=True)
    except ShardwrightError as error:
        if len(found) == 1:
            yield found[0], re.split(r"\n+rank \d+ of", str(error))[0].strip()
            return
        for cell in found:
            yield from run([cell])


def _run_cells(cells: Sequence[Cell]) -> list[Errors]:
    """Run cells on one rank. A cell that hangs ends the rank, with its stack on stderr."""
    found = list[Errors]()
    for cell in cells:
        faulthandler.dump_traceback_later(CELL_S, exit=True)
        found.append(_errors(cell))
        faulthandler.cancel_dump_traceback_later()
    return found


def _errors(cell: Cell) -> Errors:
    """Return the errors of all stages together. Where several have a parameter, the worst copy counts."""
    prepared = cell.prepared
    parallel = lowered(prepared, cell.graph, cell.execution, CELL_S)
    with seed_exactly(SEED):
        return errors_of(prepared, parallel, adamw(parallel), is_staged=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 where any cell differs or failed."""
    options = _options(arguments)
    torch.set_num_threads(1)
    zoo.LAYERS = FEW_LAYERS if options.random else LAYERS
    cells = (
        map(at_random, range(*options.random)) if options.random else grid(options.models, options.ranks, options.every)
    )
    counts, start = Counter[str](), time.monotonic()
    while (batch := list(islice(cells, AT_ONCE))) and time.monotonic() - start < options.seconds:
        for cell in batch:
            if isinstance(cell, Refused):
                counts["refused"] += 1
                print(f"refused   {cell}: {cell.why}", flush=True)
        planned = sorted((cell for cell in batch if isinstance(cell, Cell)), key=lambda cell: cell.num_ranks)
        for _, own in groupby(planned, key=lambda cell: cell.num_ranks):
            for cell, errors in run(list(own)):
                verdict, text = _judged(cell, errors)
                counts[verdict] += 1
                print(f"{verdict:9} {cell}  {text}", flush=True)
    print(", ".join(f"{many} {verdict}" for verdict, many in counts.items()))
    return 1 if counts.keys() - {"equal", "refused"} else 0


def _judged(cell: Cell, errors: Errors | str) -> tuple[str, str]:
    if isinstance(errors, str):
        return "FAILED", errors
    if cell.prepared.accepts(errors):
        return "equal", f"{errors.gradient:.0e}"
    return "DIFFERS", str(errors)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.stage_matrix", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4, 8))
    parser.add_argument("--every", type=int, default=1, help="of the grid, only every so manieth cell")
    parser.add_argument("--random", nargs=2, type=int, metavar=("FIRST", "BEHIND"), help="random cases in place of it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
