"""`shardwright plan`: search a plan, show it, save it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli import terminal
from shardwright.cli.options import (
    PATH,
    check_capture_option,
    cluster_option,
    examples,
    format_option,
    model_options,
    search_options,
)
from shardwright.cli.planfiles import status_of
from shardwright.pcg.errors import MachineError, ShardwrightError
from shardwright.pcg.files import require_writable
from shardwright.plans import file_for

if TYPE_CHECKING:
    from shardwright.cli.models import Request
    from shardwright.cost.clusters.cluster import Cluster
    from shardwright.options import CheckCapture
    from shardwright.reports.facts import PlanFacts
    from shardwright.search.plan import Plan
    from shardwright.search.tree.planner import Progress


def _sizes(context: click.Context, parameter: click.Parameter, text: str | None) -> Sequence[int]:
    """Return the numbers in `64,56,48`; raise an error early if there is no folder for their plans."""
    if text is None:
        return ()
    sizes = text.replace(" ", "").split(",")
    if not all(size.isdecimal() and int(size) for size in sizes) or len(set(sizes)) < len(sizes):
        raise ShardwrightError(f"--for {text!r}: expected different numbers of ranks, such as 64,56,48")
    return [int(size) for size in sizes]


def _parts(cluster: Cluster, sizes: Sequence[int]) -> list[Cluster]:
    """Return a part of the cluster for each number of ranks; raise `ShardwrightError` where there is none."""
    from shardwright.cost.clusters.smaller import smaller_cluster

    parts = {size: smaller_cluster(cluster, size) for size in sizes}
    if missing := [size for size, part in parts.items() if part is None]:
        raise ShardwrightError(
            f"--for {missing[0]}: {cluster.name} has {cluster.num_devices} devices, of which no equal shares of its "
            f"units are {missing[0]}; choose as many on each of some machines, or a larger --cluster"
        )
    return [part for part in parts.values() if part is not None]


def _saved_for_each(folder: Path, plans: Sequence[Plan], form: str) -> int:
    """Save plans in a folder, each by its number of ranks, and show them beside each other; return the status."""
    from shardwright.reports.comparison import ComparisonReport

    saved = {str(file_for(folder, plan.cluster.num_devices)): plan for plan in plans}
    for file, plan in saved.items():
        plan.save(file)
        if plan.idle is not None and plan.idle.reason:
            num_devices = plan.cluster.num_devices + plan.idle.num_devices
            terminal.note(
                f"{file}: of {num_devices} ranks, the best plan leaves {plan.idle.num_devices} idle; start fewer"
            )
    terminal.note(f"saved {', '.join(saved)}; run them with: shardwright run ... --plan {folder}")
    terminal.show(ComparisonReport(saved), form)
    return status_of(*plans)


@click.command(
    epilog=examples(
        "plan examples/zoo.py:gpt2 --cluster local:4 --output plan.json",
        "plan train.py:make --cluster cluster.json --mesh dp=4,tp=2 --roles data,tensor",
        "plan train.py:make --cluster local:4 --pin 'tensor<=2' --pin 'no context' --pin 'lm_head.weight=S(0)'",
        "plan --hf-config config.json --batch-size 64 --seq-len 4096 --cluster preset:dgx-h100:8 -o plan.json",
        "plan train.py:make --cluster preset:dgx-h100:8 --for 64,56,48 -o plans/",
    )
)
@model_options
@cluster_option
@search_options
@check_capture_option("never")
@click.option("--output", "-o", type=PATH, help="Save the plan in this file, or, with --for, the plans in this folder.")
@click.option("--for", "sizes", metavar="RANKS,...", callback=_sizes,
              help="A plan for each of these numbers of ranks, on a part of the cluster: `run --plan FOLDER` takes the "
              "one for the ranks that it finds.")  # fmt: skip
@format_option
def plan(
    model: Mapping[str, Any],
    cluster: Cluster,
    search: Mapping[str, Any],
    check_capture: CheckCapture,
    output: Path | None,
    sizes: Sequence[int],
    form: str,
) -> int:
    """Search the best plan for a model on a cluster.

    The model is FILE.py:FUNCTION, where the function returns (model, batch): a module whose forward gives a loss, and
    one global batch of example inputs; or (model, batch, loss_fn), as `shardwright.plan` takes them. With --hf-config
    it is built from a transformers config, without memory for its weights. Nothing is run but what --check-capture
    says, and the cluster need not be at hand.

    Ends with status 3 where no plan fits the memory; the smallest is shown, with what would fit.
    """
    from shardwright.cli.models import Request

    if sizes and output is None:
        raise ShardwrightError("--for writes a plan for each number of ranks: say in which folder, by --output FOLDER")
    parts = _parts(cluster, sizes)
    for file in [file_for(output, size) for size in sizes] if sizes and output else filter(None, [output]):
        require_writable(file, "the result", MachineError, make_folder=bool(sizes))
    with terminal.progress("plan") as progress:
        progress("loading the model")
        planned = _planner(Request(**model), check_capture, search, progress)
        if parts and output:
            return _saved_for_each(output, [planned(part).plan for part in parts], form)
        facts = planned(cluster)
    if output is not None:
        facts.plan.save(output)
        terminal.note(
            f"saved {output}; look at it with: shardwright view {output} --output {output.with_suffix('.html')}"
        )
    if form == "json":
        terminal.show_json(facts.plan.to_json())
    else:
        from shardwright.reports.plan import PlanReport

        terminal.show(PlanReport(facts.plan, facts=facts), form)
    return status_of(facts.plan)


def _planner(
    request: Request, check_capture: CheckCapture, search: Mapping[str, Any], progress: Progress
) -> Callable[[Cluster], PlanFacts]:
    """Return a function that plans the requested model for a cluster."""
    if request.model is None and request.hf_config is not None and check_capture == "never":
        from shardwright.cli.configured import plan_of_config

        return partial(plan_of_config, request, progress=progress, **search)
    from shardwright.api import plan as best
    from shardwright.cli.models import load
    from shardwright.reports.facts import PlanFacts

    loaded = load(request, fake=True)
    planned = partial(
        best, loaded.model, args=loaded.args, kwargs=loaded.kwargs, progress=progress, check_capture=check_capture,
        **search,
    )  # fmt: skip
    return lambda cluster: PlanFacts(planned(cluster))
