"""`shardwright run`: train on local ranks, by torchrun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli import terminal
from shardwright.cli.options import (
    PATH,
    check_capture_option,
    cluster_option,
    examples,
    search_options,
)
from shardwright.cli.planfiles import load_with_its_cluster, status_of
from shardwright.cli.status import ENVIRONMENT, FINDING
from shardwright.pcg.errors import MachineError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.checking import CheckCapture
    from shardwright.cost.clusters.cluster import Cluster

DEFAULTS: Mapping[str, object] = {
    "plan": None, "options": {}, "check_capture": "first", "lr": 1e-3, "seed": 0, "weights": None,
}  # fmt: skip
"""Settings of ranks that a command does not give."""
FAILURES = "failed-*.json"
"""The files beside the settings in which ranks say why they ended."""


@click.command(
    epilog=examples(
        "run examples/zoo.py:gpt2 --cluster local:2 --steps 20",
        "run train.py --cluster local:4 -- --epochs 3",
        "run train.py:make --plan plan.json",
        "run train.py:make --plan plan.json --weights checkpoint/",
    )
)
@click.argument("target", metavar="SCRIPT.py|FILE.py:FUNCTION")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]")
@cluster_option
@click.option("--plan", "plan_file", type=PATH, help="Run this plan, which has a cluster of its own.")
@search_options
@check_capture_option("first")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="With FILE.py:FUNCTION.")
@click.option(
    "--lr", type=float, default=1e-3, show_default=True, help="Learning rate of AdamW, with FILE.py:FUNCTION."
)
@click.option("--seed", type=int, default=0, show_default=True, help="With FILE.py:FUNCTION.")
@click.option(
    "--weights",
    type=PATH,
    help="Read the weights from safetensors, a file of torch.save or a DCP folder, each rank its own part, with "
    "FILE.py:FUNCTION; the model may be built inside shardwright.fake().",
)
def run(
    target: str,
    arguments: tuple[str, ...],
    cluster: Cluster,
    plan_file: Path | None,
    search: Mapping[str, Any],
    check_capture: CheckCapture,
    steps: int,
    lr: float,
    seed: int,
    weights: Path | None,
) -> int:
    """Train on ranks of this machine (torchrun).

    SCRIPT.py is your own training loop, which calls shardwright.compile. FILE.py:FUNCTION names a model and its batch,
    as for `plan`; it is trained on that one batch, and the time of a step is shown beside the predicted one.
    """
    options = {name: value for name, value in search.items() if value not in (None, False, ())}
    if plan_file is not None:
        plan = load_with_its_cluster(plan_file, cluster)
        if plan.prediction.memory.total_bytes > plan.prediction.device_bytes:
            return status_of(plan)
        cluster = plan.cluster
    refuse_remote(cluster, "run")
    refuse_missing(cluster, "run")
    with tempfile.TemporaryDirectory(prefix="shardwright-run-") as folder:
        if ":" in target:
            values = {"plan": str(plan_file) if plan_file else None, "options": _plain(options),
                      "check_capture": check_capture, "steps": steps, "lr": lr, "seed": seed,
                      "weights": str(weights.resolve()) if weights else None}  # fmt: skip
            return train_on_ranks(target, cluster, Path(folder), values)
        if not Path(target).is_file():
            raise ShardwrightError(f"run: there is no file {target}; give a script, or a model as FILE.py:FUNCTION")
        if plan_file is not None:
            terminal.note("--plan is the script's own business: pass it to shardwright.compile(plan=...)")
        own = {**options, **({"check_capture": check_capture} if check_capture != "first" else {})}
        own |= {"weights": weights} if weights else {}
        for name in own:
            terminal.note(f"{name} is the script's own business: pass it to shardwright.compile({name}=...)")
        return launch([target, *arguments], cluster.num_devices)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `shardwright.compile` as JSON can say them."""
    mesh, rules = options.get("mesh"), options.get("rules")
    plain = {**options, "mesh": mesh and dict(zip(mesh.names, mesh.sizes, strict=True)), "rules": rules and str(rules)}
    return {name: plain[name] for name in options}


def train_on_ranks(
    model: str, cluster: Cluster, folder: Path, values: Mapping[str, object], *, quiet: bool = False
) -> int:
    """Train a model on local ranks as `train.train` does with these settings; return the exit status.

    `folder`: for the files that ranks read. `quiet`: the ranks' output goes to stderr.
    """
    settings, cluster_file = folder / "settings.json", folder / "cluster.json"
    cluster.save(cluster_file)
    own = {**DEFAULTS, **values, "model": model, "cluster": str(cluster_file)}
    settings.write_text(json.dumps(own), encoding="utf-8")
    status = launch(["-m", "shardwright.cli.train", str(settings)], cluster.num_devices, quiet=quiet)
    return _told(folder) or status


def launch(command: list[str], num_ranks: int, *, quiet: bool = False) -> int:
    """Run a script (or `-m` module) on this many local ranks by torchrun; return the exit status (`elastic`).

    `quiet`: its output goes to stderr.
    """
    torchrun = [sys.executable, "-m", "shardwright.cli.elastic", "--standalone", "--nproc-per-node", str(num_ranks)]
    out = sys.stderr if quiet else None
    status = subprocess.run([*torchrun, *command], env=environment(num_ranks), stdout=out, check=False).returncode
    return status if status in (0, ENVIRONMENT) else FINDING


def _told(folder: Path) -> int:
    """Print the errors of ranks, each message once; return the exit status, 0 where no rank left a message."""
    failures = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(FAILURES))]
    told = list[str]()
    for failure in failures:
        if not any(text in failure["message"] for text in told):
            told.append(failure["message"])
            terminal.note(f"error: {failure['message']}")
    statuses = (failure["status"] for failure in failures)  # ranks that only lost another one end with the highest
    return min(statuses, default=0)


def environment(num_ranks: int) -> dict[str, str]:
    """Return the caller's environment, with a fair share of threads for each rank, and gloo on loopback."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    from shardwright.cost.clusters.cluster import threads_per_rank

    found = {"OMP_NUM_THREADS": str(threads_per_rank(num_ranks)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        found["GLOO_SOCKET_IFNAME"] = "lo"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), root]))
    return {**found, **os.environ, "PYTHONPATH": path}


def refuse_missing(cluster: Cluster, command: str) -> None:
    """Raise an error if there are fewer GPUs than ranks: on CPUs, predicted times would mean nothing."""
    if cluster.device.kind == "cpu":
        return
    import torch

    found, wanted = torch.cuda.device_count() if torch.cuda.is_available() else 0, cluster.num_devices
    if found < wanted:
        what = f"{cluster.name} has {wanted} ({cluster.device.name})"
        raise MachineError(
            f"{command} starts ranks on this machine, which has {found} GPUs, and {what}; plan for it with "
            f"`shardwright plan`, or run on CPU ranks with --cluster local:{min(wanted, 4)}"
        )


def refuse_remote(cluster: Cluster, command: str) -> None:
    """Raise an error if ranks of other machines are needed."""
    if len(cluster.levels) > 1 and cluster.levels[-1].size > 1:
        raise MachineError(
            f"{command} starts ranks on this machine only, and {cluster.name} has {cluster.levels[-1].size} machines; "
            f"start your script there with torchrun --nnodes {cluster.levels[-1].size}"
        )
