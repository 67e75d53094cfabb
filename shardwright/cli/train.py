"""The program of each rank of `shardwright run` with a model: train it on one batch, and time a step."""

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

import shardwright as sw
from shardwright.api import compile
from shardwright.cli.models import Request, load
from shardwright.cli.status import status_for
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.lowering.ranks.launch import leave
from shardwright.pcg.capture.capture import bind_arguments
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.step.late import check_backward
from shardwright.plans import plan_file
from shardwright.ranks import world_size
from shardwright.reports.units import seconds
from shardwright.search.plan import Plan
from shardwright.stopping import AGAIN, StopSignals

WARM_UP = 3
"""The number of first steps that are not timed, if there are more steps."""


def train(settings: dict[str, Any]) -> int:
    """Compile and train; rank 0 prints a line for every step. Return the exit status."""
    loaded = load(Request(**settings["model"]))
    batch = bind_arguments(loaded.model, loaded.args, loaded.kwargs)
    plan = Plan.load(plan_file(Path(settings["plan"]), world_size())) if settings["plan"] else None
    given = Cluster.load(settings["cluster"]) if settings["cluster"] else None
    cluster = plan.cluster if plan else given or Cluster.detect()
    parallel = compile(
        loaded.model, cluster, kwargs=batch, plan=plan, check_capture=settings["check_capture"],
        weights=settings["weights"], **settings["options"],
    )  # fmt: skip
    check_backward(parallel.graph)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=settings["lr"])
    is_first = dist.get_rank() == 0
    folder, last, every = settings["checkpoints"], settings["steps"], settings["save_every"]
    signals = StopSignals() if folder else None
    times: list[float] = []
    for step in range((folder and sw.load(folder, parallel, optimizer)) or 0, last):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = parallel.forward_backward(**batch)
        optimizer.step()
        times.append(time.perf_counter() - start)
        if is_first:
            click.echo(f"step {step + 1:>4}  loss {loss.item():.6f}  {seconds(times[-1])}")
        ends = signals is not None and signals.asked(parallel)
        if folder and (ends or (step + 1) % every == 0 or step + 1 == last):
            sw.save(folder, parallel, optimizer, step=step + 1, keep=2)
        if ends:
            return AGAIN
    if not times:
        return 0
    step_s = statistics.median(times[min(WARM_UP, len(times) - 1) :])
    if settings.get("profile"):
        from shardwright.cli.measured import measure

        def train_step() -> None:
            optimizer.zero_grad()
            parallel.forward_backward(**batch)
            optimizer.step()

        seconds_by_place = measure(parallel, train_step, settings["profiled_steps"])
        if is_first:
            Path(settings["profile"]).write_text(json.dumps({**seconds_by_place, "step_s": step_s}), encoding="utf-8")
    if is_first:
        predicted = predict(parallel.graph, cluster, parallel.execution).step_s
        click.echo(f"median step {seconds(step_s)}, predicted {seconds(predicted)}, {cluster.provenance}")
    return 0


def main() -> None:
    """Read the settings file that `shardwright run` wrote; an error goes to a file beside it (`run.FAILURES`)."""
    try:
        status = train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except ShardwrightError as error:
        failure = {"message": str(error), "status": status_for(error)}
        file = Path(sys.argv[1]).with_name(f"failed-{int(os.environ.get('RANK', '0')):06}.json")
        file.write_text(json.dumps(failure), encoding="utf-8")
        if reply := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # for the line before a restart
            Path(reply).write_text(json.dumps({"message": str(error), "timestamp": int(time.time())}), encoding="utf-8")
        if os.environ.get("SHARDWRIGHT_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        sys.exit(1)
    finally:
        leave()
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
