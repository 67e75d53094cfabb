"""`shardwright timeline`: the simulated step of a plan. Needs neither torch nor the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli import terminal
from shardwright.cli.options import (
    CLUSTER_FORMS,
    PATH,
    examples,
    format_option,
    optimizer_option,
    parse_cluster,
    parse_one_precision,
    parse_reduce_dtype,
    parse_sent,
    parse_sizes,
    plan_argument,
    writable,
)
from shardwright.pcg.errors import PlanError
from shardwright.pcg.files import write_whole
from shardwright.pcg.step.execution import REDUCE_DTYPES
from shardwright.pcg.step.pipelining import SCHEDULES
from shardwright.pcg.step.precisions import PRECISIONS
from shardwright.pcg.step.recompute import OFFLOADS, RECOMPUTES

if TYPE_CHECKING:
    from shardwright.cost.clusters.cluster import Cluster
    from shardwright.pcg.step.execution import Execution

_OPTIONS = {"num_microbatches": "--microbatches", "num_stages": "--stages", "stage_sizes": "--stage-sizes",
            "chunks_per_stage": "--chunks"}  # fmt: skip
"""Fields of `Execution` whose options have other names."""


@click.command(
    epilog=examples(
        "timeline plan.json --trace trace.json",
        "timeline plan.json --cluster preset:dgx-h100:4 --stages 4 --microbatches 16 --precision amp_bf16",
    )
)
@plan_argument
@click.option("--trace", "trace_file", type=PATH, callback=writable,
              help="Write the tasks here, for ui.perfetto.dev or chrome://tracing.")  # fmt: skip
@click.option("--cluster", type=parse_cluster, metavar="CLUSTER",
              help=f"Where it runs, by default on the plan's own cluster: {CLUSTER_FORMS}")  # fmt: skip
@click.option("--microbatches", "num_microbatches", type=click.IntRange(1), default=1, show_default=True,
              help="Batches whose gradients a step accumulates.")  # fmt: skip
@click.option("--precision", type=parse_one_precision, metavar="PRECISION",
              help=f"One of {', '.join(PRECISIONS)}; by default the plan's own. fp32 and tf32 want a model planned in "
              "fp32.")  # fmt: skip
@click.option("--reduce-dtype", type=parse_reduce_dtype, metavar="DTYPE",
              help=f"What gradients are sent in, to be summed: {', '.join(REDUCE_DTYPES)}; by default the "
              "plan's.")  # fmt: skip
@click.option("--compiled", is_flag=True, help="Chains of pointwise operators are fused, as torch.compile does.")
@click.option("--recompute", type=click.Choice(RECOMPUTES),
              help="What backward computes again: nothing, attention, every block; by default the plan's.")  # fmt: skip
@click.option("--pieces", type=click.IntRange(1),
              help="In how many pieces changes of layout run beside products; by default the plan's.")  # fmt: skip
@click.option("--encodings", type=parse_sent, metavar="PAIRS",
              help="What weights and gradients are sent in, such as weights=int8,gradients=int4; 'exact': as they are. "
              "By default the plan's.")  # fmt: skip
@click.option("--offload", type=click.Choice(OFFLOADS), is_flag=False, flag_value="full",
              help="What waits for backward in the host's memory: nothing, or all that is not made again; by default "
              "the plan's.")  # fmt: skip
@optimizer_option("; by default the plan's")
@click.option("--shard-optimizer", is_flag=True,
              help="ZeRO-1: optimizer states are sharded over the axes that gradients are summed over.")  # fmt: skip
@click.option("--stages", "num_stages", type=click.IntRange(1),
              help="Pipeline stages, each with the plan's mesh; the cluster needs devices for all. By default the "
              "plan's.")  # fmt: skip
@click.option("--stage-sizes", type=parse_sizes, metavar="N,N",
              help="Stages of unlike sizes: of each, the devices along the first axis of its mesh; the plan's mesh is "
              "that of the largest.")  # fmt: skip
@click.option("--chunks", "chunks_per_stage", type=click.IntRange(1),
              help="Virtual stages of each stage, with --schedule interleaved; by default the plan's.")  # fmt: skip
@click.option("--schedule", type=click.Choice(SCHEDULES),
              help="The order of microbatches on a stage; by default the plan's.")  # fmt: skip
@click.option("--overlap/--no-overlap", default=True, show_default=True,
              help="Whether collectives of parameters run beside compute.")  # fmt: skip
@click.option("--late-gathers", is_flag=True,
              help="Backward gathers a block's weights when it is through with the one before (BACKWARD_POST of FSDP), "
              "not beside it.")  # fmt: skip
@format_option
def timeline(plan_file: Path, trace_file: Path | None, cluster: Cluster | None, form: str, **ways: Any) -> None:
    """Simulate a step of a plan.

    How busy compute and communication are, what communication is exposed, and when memory is at its peak. The options
    cost ways to run a plan that `run` does not offer yet. The plan's
    batch is one microbatch of these, which the plan may cut further.
    """
    from shardwright.reports.timeline import TimelineReport, moved, plan_timeline, step_trace
    from shardwright.search.plan import Plan

    plan = Plan.load(plan_file)
    run = _execution(ways, plan.execution)
    if cluster is not None:
        plan = moved(plan, cluster)
    simulated = plan_timeline(plan, run)
    if trace_file is not None:
        write_whole(trace_file, json.dumps(step_trace(plan, simulated)) + "\n", "the trace", PlanError)
    terminal.show(TimelineReport(replace(plan, execution=run), simulated), form)


def _execution(ways: Mapping[str, Any], execution: Execution) -> Execution:
    """Return the plan's own execution with the options' changes; errors on contradictions name the options."""
    from shardwright.pcg.checks import FieldError

    given = {name: value for name, value in ways.items() if value is not None}
    if sizes := given.get("stage_sizes"):
        given = {"num_stages": len(sizes), **given}
    if given.keys() & {"num_stages", "chunks_per_stage"}:
        given = {"stage_sizes": (), **given, "split": ()}
    try:
        return execution.having(**given)
    except FieldError as error:
        option = _OPTIONS.get(error.field, f"--{error.field}")
        raise click.UsageError(f"{option}: {error.problem}") from error
