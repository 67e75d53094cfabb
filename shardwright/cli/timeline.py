"""`shardwright timeline`: what runs when in a step of a plan. Needs neither torch nor the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.cli import terminal
from shardwright.cli.options import format_option
from shardwright.cost.timeline.execution import PRECISIONS, RECOMPUTES, Precision, Recompute

if TYPE_CHECKING:
    from shardwright.cost.timeline.timeline import Timeline


@click.command(epilog="\b\nExample:\n  shardwright timeline plan.json --trace trace.json\n")
@click.argument("plan_file", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.option("--trace", "trace_file", type=click.Path(path_type=Path),
              help="Write the tasks here, for ui.perfetto.dev or chrome://tracing.")  # fmt: skip
@click.option("--microbatches", type=click.IntRange(1), default=1, help="Batches whose gradients a step accumulates.")
@click.option("--precision", type=click.Choice(PRECISIONS),
              help="By default the model's own dtypes; fp32 is for models that are planned in it.")  # fmt: skip
@click.option("--recompute", type=click.Choice(RECOMPUTES), default="none", help="What backward computes again.")
@click.option("--overlap/--no-overlap", default=True, help="Whether collectives of parameters run beside compute.")
@format_option
def timeline(
    plan_file: Path,
    trace_file: Path | None,
    microbatches: int,
    precision: Precision | None,
    recompute: Recompute,
    overlap: bool,
    form: str,
) -> None:
    """Simulate a step of a plan.

    How busy compute and communication are, what communication is exposed, and when memory is at its peak. The options
    cost ways to run a plan that `run` does not offer yet.
    """
    from shardwright.cost.timeline.execution import Execution
    from shardwright.search.plan import Plan
    from shardwright.search.timeline import describe_timeline, explain_timeline, plan_timeline

    plan = Plan.load(plan_file)
    run = Execution(precision, num_microbatches=microbatches, recompute=recompute, overlap=overlap)
    found = plan_timeline(plan, run)
    if trace_file is not None:
        _write(trace_file, found)
    if form == "json":
        terminal.show_json(describe_timeline(found))
    else:
        terminal.show(explain_timeline(plan, found))


def _write(path: Path, found: Timeline) -> None:
    from shardwright.cost.timeline.trace import trace
    from shardwright.pcg.errors import PlanError

    try:
        path.write_text(json.dumps(trace(found)) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot write the trace: {error.strerror or error}; choose a writable path") from error
