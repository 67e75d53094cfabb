"""The program of each rank of `shardwright run FILE.py:FUNCTION`: train a model on one batch, and time it."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from shardwright.api import compile
from shardwright.cli.models import load_model
from shardwright.cli.status import status_for
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.lowering.ranks.launch import leave
from shardwright.pcg.capture.capture import bind_arguments
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.step.late import check_backward
from shardwright.reports.units import seconds
from shardwright.search.plan import Plan

WARM_UP = 3
"""The number of first steps that are not timed, if there are more steps."""


def train(settings: dict[str, Any]) -> None:
    """Compile and train; rank 0 prints a line for every step."""
    torch.manual_seed(settings["seed"])
    loaded = load_model(settings["model"])
    cluster = Cluster.load(settings["cluster"])
    batch = bind_arguments(loaded.model, loaded.args, loaded.kwargs)
    plan = Plan.load(settings["plan"]) if settings["plan"] else None
    parallel = compile(
        loaded.model, cluster, kwargs=batch, plan=plan, check_capture=settings["check_capture"],
        weights=settings["weights"], **settings["options"],
    )  # fmt: skip
    check_backward(parallel.graph)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=settings["lr"])
    told = dist.get_rank() == 0
    times: list[float] = []
    for step in range(settings["steps"]):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = parallel.forward_backward(**batch)
        optimizer.step()
        times.append(time.perf_counter() - start)
        if told:
            click.echo(f"step {step + 1:>4}  loss {loss.item():.6f}  {seconds(times[-1])}")
    step_s = statistics.median(times[min(WARM_UP, len(times) - 1) :])
    if settings.get("profile"):
        from shardwright.cli.measured import measure

        def again() -> None:
            optimizer.zero_grad()
            parallel.forward_backward(**batch)
            optimizer.step()

        found = measure(parallel, again, settings["profiled_steps"])
        if told:
            Path(settings["profile"]).write_text(json.dumps({**found, "step_s": step_s}), encoding="utf-8")
    if told:
        predicted = predict(parallel.graph, cluster, parallel.execution).step_s
        click.echo(f"median step {seconds(step_s)}, predicted {seconds(predicted)}, {cluster.provenance}")


def main() -> None:
    """Read the settings file that `shardwright run` wrote; an error goes to a file beside it (`run.FAILURES`)."""
    try:
        train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except ShardwrightError as error:
        failure = {"message": str(error), "status": status_for(error)}
        file = Path(sys.argv[1]).with_name(f"failed-{int(os.environ.get('RANK', '0')):06}.json")
        file.write_text(json.dumps(failure), encoding="utf-8")
        if os.environ.get("SHARDWRIGHT_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        sys.exit(1)
    finally:
        leave()


if __name__ == "__main__":
    main()
