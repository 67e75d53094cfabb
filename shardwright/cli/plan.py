"""`shardwright plan`: search a plan, show it, save it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli import terminal
from shardwright.cli.options import (
    check_capture_option,
    cluster_option,
    examples,
    format_option,
    model_options,
    output_option,
    search_options,
)
from shardwright.cli.planfiles import status_of, status_said

if TYPE_CHECKING:
    from shardwright.checking import CheckCapture
    from shardwright.cost.clusters.cluster import Cluster


@click.command(
    epilog=examples(
        "plan examples/zoo.py:gpt2 --cluster local:4 --output plan.json",
        "plan train.py:make --cluster cluster.json --mesh dp=4,tp=2 --roles data,tensor",
        "plan train.py:make --cluster local:4 --pin 'tensor<=2' --pin 'no context' --pin 'lm_head.weight=S(0)'",
        "plan --hf-config config.json --batch-size 64 --seq-len 4096 --cluster preset:dgx-h100:8 -o plan.json",
    )
)
@model_options
@cluster_option
@search_options
@check_capture_option("never")
@output_option("Save the plan in this file.")
@format_option
def plan(
    model: Mapping[str, Any],
    cluster: Cluster,
    search: Mapping[str, Any],
    check_capture: CheckCapture,
    output: Path | None,
    form: str,
) -> int:
    """Search the best plan for a model on a cluster.

    The model is FILE.py:FUNCTION, where the function returns (model, batch): a module whose forward gives a loss, and
    one global batch of example inputs; or (model, batch, loss_fn), as `shardwright.plan` takes them. With --hf-config
    it is built from a transformers config, without memory for its weights. Nothing is run but what --check-capture
    says, and the cluster need not be at hand.

    Ends with status 3 where no plan fits the memory; the smallest is shown, with what would fit.
    """
    from shardwright.cli.models import Request, load

    with terminal.progress("plan") as progress:
        progress("loading torch and the model")
        loaded = load(Request(**model), fake=True)
        from shardwright.api import plan as best

        found = best(
            loaded.model, cluster, loaded.args, loaded.kwargs, **search, progress=progress, check_capture=check_capture
        )
    if output is not None:
        found.save(output)
        terminal.note(
            f"saved {output}; look at it with: shardwright view {output} --output {output.with_suffix('.html')}"
        )
    if form == "json":
        terminal.show_json(found.to_json())
        if output is None:
            return status_of(found)
    from shardwright.reports.shown import Shown

    shown = Shown.of_plan(found)
    if output is not None:
        shown.keep(found.text().encode())
    if form != "json":
        terminal.show(shown, form)
    return status_said(shown.unfit)
