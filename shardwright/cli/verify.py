"""`shardwright verify`: a comparison of the lowered program's results with the model's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli import terminal
from shardwright.cli.options import (
    PATH,
    Number,
    cluster_option,
    examples,
    format_option,
    model_options,
    search_options,
)
from shardwright.cli.planfiles import load_with_its_cluster, status_of
from shardwright.pcg.errors import PlanError

if TYPE_CHECKING:
    from shardwright.cost.clusters.cluster import Cluster
    from shardwright.search.plan import Plan


@click.command(
    epilog=examples(
        "verify examples/zoo.py:gpt2 --cluster local:2",
        "verify examples/zoo.py:llama --cluster local:4 --mesh dp=2,tp=2 --roles data,tensor",
        "verify train.py:make --plan plan.json",
        "verify plan.json --dry-run",
    )
)
@model_options
@cluster_option
@click.option("--plan", "plan_file", type=PATH, help="Check this plan, which has a cluster of its own.")
@search_options
@click.option("--loss-tolerance", type=float, show_default="1e-5, in 16 bits 1e-2", help="Relative error of the loss.")
@click.option(
    "--gradient-tolerance",
    type=float,
    show_default="1e-4, summed in 16 bits 1e-2, computed in them 1e-1",
    help="Relative error of a gradient.",
)
@click.option("--timeout", type=Number(0, min_open=True), default=300.0, show_default=True,
              help="Seconds until a rank counts as stuck.")  # fmt: skip
@click.option("--dry-run", is_flag=True,
              help="Check a plan file alone, on tensors without data: no model, no devices, any size.")  # fmt: skip
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Whose program, with --dry-run.")
@format_option
def verify(
    model: Mapping[str, Any],
    cluster: Cluster,
    plan_file: Path | None,
    search: Mapping[str, Any],
    loss_tolerance: float | None,
    gradient_tolerance: float | None,
    timeout: float,
    dry_run: bool,
    rank: int,
    form: str,
) -> int:
    """Check a plan, by numbers on local ranks or by a dry run.

    By numbers: the loss, every parameter's gradient, every buffer and the random generator after one step of the
    lowered program, dropout included, are compared with those of the model in a single process, under torch.autocast
    where the plan has such a precision.

    By a dry run, `verify PLAN.json --dry-run`: one rank's program takes steps on tensors without data, among ranks
    that are not there. The types of all values, every collective with its bytes, and memory at its peak (to 5 %) are
    compared with what the plan says.

    Ends with status 1 where something is off, and with 3 where all is right but the plan does not fit the memory.
    """
    if dry_run:
        return _dry_run(model, plan_file, search, rank, form)
    from shardwright.cli.models import Request, load

    with terminal.progress("verify") as progress:
        progress("loading the model")
        loaded = load(Request(**model))
        from shardwright.api import plan as best
        from shardwright.cli.numeric import NumericCheck, measure
        from shardwright.planning import certified_by

        if plan_file is None:
            plan = best(loaded.model, cluster, loaded.args, loaded.kwargs, **search, progress=progress)
        elif not (
            given := [
                f"--{name.replace('_', '-')}"
                for name, value in search.items()
                if value and name not in ("strict", "rules")
            ]
        ):
            plan = load_with_its_cluster(plan_file, cluster)
        else:
            what = " and ".join(given)
            raise PlanError(f"--plan was given together with {what}, which guide the search; give one or the other")
        progress(f"running one step in one process, and on {plan.cluster.num_devices} ranks")
        errors = measure(plan, loaded, certified_by(search["rules"], progress), timeout)
    usual = _tolerances(plan)
    given = (loss_tolerance, gradient_tolerance)
    tolerances = [default if chosen is None else chosen for chosen, default in zip(given, usual, strict=True)]
    check = NumericCheck(f"{plan.model} on mesh {plan.mesh}", errors, *tolerances)
    terminal.show(check, form)
    return status_of(plan) if check.passed else 1


def _tolerances(plan: Plan) -> tuple[float, float]:
    """Return the tolerances of the loss and of a gradient, by the values that are in 16 bits or sent encoded."""
    from shardwright.pcg.encodings import ENCODINGS
    from shardwright.pcg.precision import HALVES, low_dtype
    from shardwright.pcg.step.precisions import every

    encodings = [ENCODINGS[name] for _, name in plan.execution.encodings]
    if encodings:  # of a sum of two summands, encoded and encoded again
        return 1e-2, max(1e-1, *(4 * encoding.bound for encoding in encodings))
    if any(map(low_dtype, every(plan.precision))):
        return 1e-2, 1e-1
    return 1e-5, 1e-2 if plan.execution.reduce_dtype in HALVES else 1e-4


def _dry_run(model: Mapping[str, Any], plan_file: Path | None, search: Mapping[str, Any], rank: int, form: str) -> int:
    if any(search.values()) or model["hf_config"] is not None:
        raise PlanError("--dry-run takes a plan file alone; leave out what describes a model or guides a search")
    files = [Path(file) for file in (model["model"], plan_file) if file is not None]
    if len(files) != 1:
        raise PlanError(
            f"--dry-run takes one plan file, got {len(files)}; such as: shardwright verify plan.json --dry-run"
        )
    from shardwright.search.plan import Plan

    with terminal.progress("verify") as progress:
        progress("reading the plan")
        plan = Plan.load(files[0])
        progress(f"running the program of rank {rank} of {plan.cluster.num_devices} without data")
        from shardwright.cli.dryrun import DryRunReport
        from shardwright.lowering.trial.dryrun import dry_run

        report = DryRunReport(plan, dry_run(plan.graph, rank, plan.execution, plan.cluster.device.kind))
    terminal.show(report, form)
    return status_of(plan) if report.passed else 1
