"""`shardwright run`: train on ranks, by torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli import terminal
from shardwright.cli.options import (
    PATH,
    check_capture_option,
    cluster_option,
    examples,
    model_options_as,
    search_options,
)
from shardwright.cli.planfiles import is_given, load_with_its_cluster, status_of
from shardwright.cli.status import ENVIRONMENT, FINDING, INTERRUPTED
from shardwright.cli.torchrun import Start, given, start_of, torchrun_options
from shardwright.pcg.errors import MachineError, ShardwrightError
from shardwright.stopping import AGAIN, SIGNALS

if TYPE_CHECKING:
    from shardwright.cost.clusters.cluster import Cluster
    from shardwright.options import CheckCapture
    from shardwright.search.plan import Plan

DEFAULTS: Mapping[str, object] = {
    "cluster": None, "plan": None, "options": {}, "check_capture": "first", "lr": 1e-3, "weights": None,
    "checkpoints": None, "save_every": 100,
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
        "run train.py:make --nproc-per-node 4 --max-restarts 3 --checkpoints run/ --steps 1000",
        "run train.py --nnodes 2:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node1:29400 --max-restarts 9",
    )
)
@model_options_as("[SCRIPT.py|FILE.py:FUNCTION]")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]")
@cluster_option
@click.option(
    "--plan",
    "plan_file",
    type=PATH,
    help="Run this plan, which has a cluster of its own; of a folder (`plan --for`), the one for the ranks that run.",
)
@search_options
@check_capture_option("first")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="With a model.")
@click.option("--lr", type=float, default=1e-3, show_default=True, help="Learning rate of AdamW, with a model.")
@click.option(
    "--weights",
    type=PATH,
    help="Read the weights from safetensors, a file of torch.save or a DCP folder, each rank its own part, with "
    "a model; FILE.py:FUNCTION may build it inside shardwright.fake().",
)
@click.option(
    "--checkpoints",
    type=PATH,
    help="Go on from the last checkpoint in this folder, and save there, with a model. SIGTERM and SIGUSR1 save and "
    f"end with status {AGAIN}.",
)
@click.option("--save-every", type=click.IntRange(1), default=100, show_default=True, help="Steps, with --checkpoints.")
@torchrun_options
def run(
    model: Mapping[str, Any],
    arguments: tuple[str, ...],
    cluster: Cluster,
    plan_file: Path | None,
    search: Mapping[str, Any],
    check_capture: CheckCapture,
    steps: int,
    lr: float,
    weights: Path | None,
    checkpoints: Path | None,
    save_every: int,
    torchrun: Mapping[str, Any],
) -> int:
    """Train on ranks of this machine, or of several (torchrun, whose options it takes in both spellings).

    SCRIPT.py is your own training loop, which calls shardwright.compile. FILE.py:FUNCTION names a model and its batch,
    as for `plan`, and so does --hf-config; it is trained on that one batch, and the time of a step is shown beside the
    predicted one.

    With --max-restarts, all ranks start again after one has failed, as many as there are then: by the plan for so many
    in a folder, or planned anew. Your own loop begins with shardwright.load, so that it goes on from its last
    checkpoint. Status 75 says that a run was asked to make room, has saved, and wants to be started again.
    """
    options = {name: value for name, value in search.items() if value not in (None, False, ())}
    start, plans = _plans(plan_file, cluster, given(torchrun))
    if unfit := [plan for plan in plans if plan.prediction.memory.total_bytes > plan.prediction.device_bytes]:
        return status_of(*unfit)
    target = None if start.is_sized and not is_given("cluster") else cluster
    for each in [plan.cluster for plan in plans] or filter(None, [target]):
        _check(each, start)
    with tempfile.TemporaryDirectory(prefix="shardwright-run-") as folder:
        if model["hf_config"] is not None or ":" in (model["model"] or ""):
            values = {
                "plan": str(plan_file.resolve()) if plan_file else None, "options": _plain(options),
                "check_capture": check_capture, "steps": steps, "lr": lr, "save_every": save_every,
                "weights": str(weights.resolve()) if weights else None,
                "checkpoints": str(checkpoints.resolve()) if checkpoints else None,
            }  # fmt: skip
            return train_on_ranks(model, start, None if plans else target, Path(folder), values)
        is_module = bool(torchrun["torchrun_module"])
        if not is_module and not Path(model["model"] or "").is_file():
            raise ShardwrightError(
                f"run: there is no file {model['model']}; give a script, a model as FILE.py:FUNCTION, or --hf-config"
            )
        if plan_file is not None:
            terminal.note("--plan is the script's own business: pass it to shardwright.compile(plan=...)")
        each = {**options, **({"check_capture": check_capture} if check_capture != "first" else {})}
        each |= {"weights": weights} if weights else {}
        for name in each:
            terminal.note(f"{name} is the script's own business: pass it to shardwright.compile({name}=...)")
        if checkpoints is not None:
            terminal.note("--checkpoints is the script's own business: call shardwright.load and shardwright.save")
        return launch([*(["-m"] if is_module else []), model["model"], *arguments], start)


def _plans(plan_file: Path | None, cluster: Cluster, torchrun: Mapping[str, str]) -> tuple[Start, list[Plan]]:
    """Return the ranks to start, and the plan for each number of them that the run may have."""
    if plan_file is None:
        return start_of(torchrun, cluster), []
    from shardwright.plans import plan_file as of_folder
    from shardwright.search.plan import Plan

    if plan_file.is_dir():
        start = start_of(torchrun, cluster)
        return start, [Plan.load(of_folder(plan_file, world)) for world in start.worlds]
    plan = load_with_its_cluster(plan_file, cluster)
    return start_of(torchrun, plan.cluster), [plan]


def _check(cluster: Cluster, start: Start) -> None:
    """Raise an error unless the ranks that start are those of a cluster, and are on machines that can be had."""
    if not start.is_sized:
        refuse_remote(cluster, "run")
    elif cluster.num_devices not in start.worlds:
        raise ShardwrightError(
            f"run: {cluster.name} has {cluster.num_devices} devices, and torchrun's options ask for "
            f"{' or '.join(map(str, start.worlds))} ranks; let them agree, or leave out --cluster and --plan to plan "
            "for the ranks that run"
        )
    refuse_missing(cluster, "run", start.per_node)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `shardwright.compile` as JSON can say them."""
    mesh, rules = options.get("mesh"), options.get("rules")
    plain = {**options, "mesh": mesh and dict(zip(mesh.names, mesh.sizes, strict=True)), "rules": rules and str(rules)}
    return {name: plain[name] for name in options}


def train_on_ranks(
    model: Mapping[str, Any],
    start: Start,
    cluster: Cluster | None,
    folder: Path,
    values: Mapping[str, object],
    *,
    quiet: bool = False,
) -> int:
    """Train a model on ranks as `train.train` does with these settings; return the exit status.

    `model`: fields of `models.Request`. `cluster`: None: what the ranks detect, or that of the plan. `folder`: for the
    files that ranks read. `quiet`: the ranks' output goes to stderr.
    """
    settings, cluster_file = folder / "settings.json", folder / "cluster.json"
    settings_of_run = {
        **DEFAULTS,
        **values,
        "model": {name: str(v) if isinstance(v, Path) else v for name, v in model.items()},
    }
    if cluster is not None:
        cluster.save(cluster_file)
        settings_of_run["cluster"] = str(cluster_file)
    settings.write_text(json.dumps(settings_of_run), encoding="utf-8")
    status = launch(["-m", "shardwright.cli.train", str(settings)], start, quiet=quiet)
    return status and (_told(folder) or status)


def launch(command: list[str], start: Start, *, quiet: bool = False) -> int:
    """Run a script (or `-m` module) on ranks by torchrun; return the exit status (`elastic`).

    `quiet`: its output goes to stderr. Signals that ask this process to make room go to torchrun.
    """
    torchrun = [sys.executable, "-m", "shardwright.cli.elastic", *start.words]
    process = subprocess.Popen([*torchrun, *command], env=environment(start), stdout=sys.stderr if quiet else None)
    with passed_on(process):
        status = process.wait()
    return status if status in (0, ENVIRONMENT, AGAIN, INTERRUPTED) else FINDING


@contextmanager
def passed_on(process: subprocess.Popen[bytes]) -> Generator[None]:
    """Pass signals that ask to make room on to a process, while the block runs."""
    before = {number: signal.signal(number, lambda came, _: process.send_signal(came)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _told(folder: Path) -> int:
    """Print the errors of ranks, each message once; return the exit status, 0 where no rank left a message."""
    failures = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(FAILURES))]
    messages = list[str]()
    for failure in failures:
        if not any(text in failure["message"] for text in messages):
            messages.append(failure["message"])
            terminal.note(f"error: {failure['message']}")
    statuses = (failure["status"] for failure in failures)  # ranks that only lost another one end with the highest
    return min(statuses, default=0)


def environment(start: Start) -> dict[str, str]:
    """Return the caller's environment, with a fair share of threads for each rank; on one machine, gloo on loopback."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    from shardwright.cost.clusters.cluster import threads_per_rank

    variables = {"OMP_NUM_THREADS": str(threads_per_rank(start.per_node)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if start.nodes[-1] == 1 and any(name == "lo" for _, name in socket.if_nameindex()):
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), root]))
    return {**variables, **os.environ, "PYTHONPATH": path}


def refuse_missing(cluster: Cluster, command: str, wanted: int) -> None:
    """Raise an error if there are fewer GPUs than ranks: on CPUs, predicted times would mean nothing."""
    if cluster.device.kind == "cpu":
        return
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus < wanted:
        what = f"{cluster.name} has {wanted} ({cluster.device.name})"
        raise MachineError(
            f"{command} starts ranks on this machine, which has {num_gpus} GPUs, and {what}; plan for it with "
            f"`shardwright plan`, or run on CPU ranks with --cluster local:{min(wanted, 4)}"
        )


def refuse_remote(cluster: Cluster, command: str) -> None:
    """Raise an error if ranks of other machines are needed."""
    num_machines = cluster.num_devices // cluster.per_machine if len(cluster.levels) > 1 else 1
    if num_machines > 1:
        raise MachineError(
            f"{command} starts ranks on this machine only, and {cluster.name} has {num_machines} machines; start it on "
            f"each of them with --nnodes {num_machines} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        )
