"""`make demo`: train a GPT-2 of 11 million parameters on two ranks of this machine, and show that nothing is lost.

1. measure this machine: matrix products, memory, collectives between ranks
2. capture the model, search the best plan, and explain it
3. train in a single process
4. train on the ranks under the plan, by torchrun
5. set the losses beside each other, and the predicted step time beside the measured one

Ends with status 1 where the losses differ by more than 1e-4. What it leaves in demo-output/ is listed at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import shardwright as sw
from shardwright.cli.run import environment
from shardwright.cli.terminal import progress, show
from shardwright.cli.torchrun import Start
from shardwright.cost.clusters.cluster import threads_per_rank
from shardwright.cost.clusters.cluster_json import load_cluster
from shardwright.reports.units import seconds

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-4
WARM_UP = 3
"""Steps that are not timed."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Step:
    """One step of a run."""

    loss: float
    step_s: float


def heading(number: int, text: str) -> None:
    console.print(f"\n[bold]{number}/5  {text}[/bold]")


# ---- the steps of the demo ----


def measure(num_ranks: int) -> sw.Cluster:
    """This machine, as it is now."""
    from shardwright.cost.calibration.calibrate import calibrate

    with progress("calibrate") as tell:
        cluster = calibrate(num_ranks, progress=tell)
    console.print(f"  {cluster.summary()}")
    return cluster


def make_plan(cluster: sw.Cluster, folder: Path) -> sw.Plan:
    """The best plan for the demo's model, explained and saved."""
    import torch
    from demo_model import batches, model

    from shardwright.reports.plan import PlanReport
    from shardwright.view.page import write_page

    torch.manual_seed(0)
    with progress("plan") as tell:
        plan = sw.plan(model(), cluster, kwargs=next(batches(1)), progress=tell)
    plan.save(folder / "plan.json")
    write_page(plan, folder / "plan.html")
    show(PlanReport(plan))
    return plan


def train(title: str, num_ranks: int, num_steps: int, arguments: Sequence[str] = ()) -> list[Step]:
    """Run demo_train.py in processes of their own, each with its share of the threads, and show how it goes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(torchrun if num_ranks > 1 else ()), str(HERE / "demo_train.py")]
    environ = {**environment(Start.local(num_ranks)), "OMP_NUM_THREADS": str(threads_per_rank(num_ranks))}
    steps: list[Step] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*command, "--steps", str(num_steps), *arguments], env=environ,
                                   stdout=subprocess.PIPE, stderr=errors, text=True)  # fmt: skip
        try:
            steps += told(process, title, num_steps)
        finally:
            process.terminate()
            status = process.wait()
        errors.seek(0)
        if len(steps) < num_steps:
            sys.exit(f"{errors.read()}\nerror: {title} ended after {len(steps)} of {num_steps} steps (status {status})")
    return steps


def told(process: subprocess.Popen[str], title: str, num_steps: int) -> Iterator[Step]:
    """The steps that a run tells of, shown as a bar on a terminal and as lines elsewhere."""
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"),
               TimeElapsedColumn())  # fmt: skip
    terminal = Console(stderr=True)
    assert process.stdout is not None
    with Progress(*columns, console=terminal, disable=not terminal.is_terminal) as shown:
        task = shown.add_task(title, total=num_steps, now="starting")
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            found = json.loads(line)
            now = f"loss {found['loss']:.4f}"
            shown.update(task, advance=1, now=now)
            if not terminal.is_terminal and found["step"] % 10 == 0:
                print(f"{title}: step {found['step']} of {num_steps}, {now}", file=sys.stderr)
            yield Step(found["loss"], found["step_s"])


# ---- what came out ----


def compare(alone: Sequence[Step], together: Sequence[Step]) -> float:
    """Show the losses beside each other; the largest relative difference."""
    differences = [abs(a.loss - b.loss) / abs(a.loss) for a, b in zip(alone, together, strict=True)]
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for title in ("step", "single process", "ranks", "relative difference"):
        table.add_column(title, justify="right")
    for i, (a, b, difference) in enumerate(zip(alone, together, differences, strict=True)):
        if i in (0, 1, 2, len(alone) - 1) or (i + 1) % 5 == 0:
            table.add_row(str(i + 1), f"{a.loss:.6f}", f"{b.loss:.6f}", f"{difference:.1e}")
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    return max(differences)


def times(plan: sw.Plan, alone: Sequence[Step], together: Sequence[Step]) -> None:
    """Show predicted against measured step time."""
    predicted = plan.prediction.step_s
    measured, single = (statistics.median(s.step_s for s in steps[WARM_UP:] or steps) for steps in (together, alone))
    num_ranks = plan.cluster.num_devices
    console.print(f"\n  step time on {num_ranks} ranks   measured {seconds(measured)}, predicted {seconds(predicted)} "
                  f"({predicted / measured - 1:+.0%})")  # fmt: skip
    console.print(f"  single process           measured {seconds(single)} with {threads_per_rank(1)} threads "
                  f"(the ranks have {threads_per_rank(num_ranks)} each)")  # fmt: skip
    console.print(f"  medians of the steps after the first {WARM_UP}")


def verdict(difference: float, num_steps: int, folder: Path, start: float) -> int:
    """Say whether it was the same training, and what is left to look at."""
    passed = difference < TOLERANCE
    word = "[bold green]PASSED[/bold green]" if passed else "[bold red]FAILED[/bold red]"
    console.print(f"\n  {word}: over {num_steps} steps the losses differ by at most {difference:.1e}, relative; "
                  f"the limit is {TOLERANCE:g}")  # fmt: skip
    shardwright = f"{sys.executable} -m shardwright"
    console.print("\n  To look at:")
    for name, what in (
        ("plan.html", "the plan as a page: open it in a browser"),
        ("plan.json", f"the plan: {shardwright} explain {folder / 'plan.json'}"),
        ("program.py", "what rank 0 ran, as readable Python"),
    ):
        console.print(f"    {folder / name}  {what}", soft_wrap=True)
    console.print(f"\n  done in {time.perf_counter() - start:.0f} s")
    return 0 if passed else 1


def main() -> int:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--cluster", type=Path, help="a saved cluster, in place of measuring this machine")
    options = parser.parse_args()
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)

    heading(1, f"Measuring {options.ranks} ranks of this machine" if options.cluster is None else "A saved cluster")
    cluster = measure(options.ranks) if options.cluster is None else load_cluster(options.cluster)
    heading(2, "Searching the best plan for GPT-2 (11 M parameters, real text: Python's own source)")
    plan = make_plan(cluster, folder)
    heading(3, f"Training {options.steps} steps in a single process")
    alone = train("single process", 1, options.steps)
    heading(4, f"Training {options.steps} steps on {options.ranks} ranks under the plan")
    plan_arguments = ("--plan", str(folder / "plan.json"), "--program", str(folder / "program.py"))
    together = train(f"{cluster.num_devices} ranks", cluster.num_devices, options.steps, plan_arguments)
    heading(5, "Is it the same training?")
    difference = compare(alone, together)
    times(plan, alone, together)
    return verdict(difference, options.steps, folder, start)


if __name__ == "__main__":
    sys.exit(main())
