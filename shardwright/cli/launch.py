"""`shardwright launch`: files that start a run under Slurm or Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.cli import terminal
from shardwright.cli.launchfiles import Launched
from shardwright.cli.options import PATH, examples, output_option
from shardwright.pcg.errors import MachineError, PlanError, ShardwrightError
from shardwright.pcg.files import write_whole
from shardwright.plans import plan_file, sizes_of

if TYPE_CHECKING:
    from shardwright.search.plan import Plan


@click.command(
    epilog=examples(
        "launch --slurm plan.json train.py -o job.sh -- --folder runs/gpt --plan plan.json",
        "launch --slurm plans/ train.py:make --checkpoints runs/gpt -o job.sh",
        "launch --kubernetes plan.json train.py --image my/image:1 --volume data:/data -o job.yaml",
    )
)
@click.argument("plan_path", metavar="PLAN.json|PLANS", type=PATH)
@click.argument("target", metavar="SCRIPT.py|FILE.py:FUNCTION")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]")
@click.option("--slurm", "form", flag_value="slurm", help="A batch script for sbatch.")
@click.option("--kubernetes", "form", flag_value="kubernetes", help="An Indexed Job and its Service, for kubectl.")
@click.option("--name", help="The job's name; by default the program's.")
@click.option("--nproc-per-node", "--nproc_per_node", "per_node", type=click.IntRange(1),
              help="Ranks on each machine; by default the plan's devices of a machine.")  # fmt: skip
@click.option("--max-restarts", "--max_restarts", type=click.IntRange(0), default=3, show_default=True,
              help="How often all ranks start again where one has failed.")  # fmt: skip
@click.option("--grace", "grace_s", type=click.IntRange(1), default=300, show_default=True,
              help="Seconds that ranks have to save when they are asked to make room.")  # fmt: skip
@click.option("--time", default="24:00:00", show_default=True, help="The longest time of a job, with --slurm.")
@click.option("--checkpoints", type=PATH, help="The folder to save to and go on from, with FILE.py:FUNCTION.")
@click.option("--steps", type=click.IntRange(1), help="With FILE.py:FUNCTION.")
@click.option("--image", help="The container's image, with --kubernetes.")
@click.option("--volume", "volumes", multiple=True, metavar="CLAIM:PATH",
              help="A claim of a persistent volume and where it is mounted, with --kubernetes; the program starts in "
              "the first. May be repeated.")  # fmt: skip
@output_option("Write the file here; by default to stdout.")
def launch(
    plan_path: Path,
    target: str,
    arguments: tuple[str, ...],
    form: str | None,
    name: str | None,
    per_node: int | None,
    max_restarts: int,
    grace_s: int,
    time: str,
    checkpoints: Path | None,
    steps: int | None,
    image: str | None,
    volumes: tuple[str, ...],
    output: Path | None,
) -> None:
    """Write a file that starts a run on a cluster: a batch script for Slurm, or a manifest for Kubernetes.

    On each machine it starts `shardwright run`, with the plan's number of machines and ranks; with a folder of plans
    (`plan --for`), between the fewest and the most. Ranks that are asked to make room save and end with status 75,
    upon which the job goes back to the queue. Your own script passes its plan to shardwright.compile itself.
    """
    if form is None:
        raise click.UsageError("say for what: --slurm or --kubernetes")
    plans = _plans(plan_path)
    per_node = per_node or plans[-1].cluster.per_machine
    is_model = ":" in target
    options = {"checkpoints": checkpoints, "steps": steps}
    if not is_model and (model_options := [f"--{name}" for name, value in options.items() if value is not None]):
        raise ShardwrightError(f"launch: {model_options[0]} goes with FILE.py:FUNCTION; a script has its own, after --")
    words = {"plan": plan_path, **options} if is_model else {}
    job = Launched(
        name=_name_of(target) if name is None else _checked_name(name),
        about=" ".join(f"Written by `shardwright launch` for {plan_path}: {plans[-1].model}".split()),
        nodes=_nodes(plans, per_node, plan_path),
        per_node=per_node,
        on_gpus=plans[-1].cluster.device.kind != "cpu",
        program=[*(f"--{option}={value}" for option, value in words.items() if value is not None), target],
        arguments=arguments,
        max_restarts=max_restarts,
        grace_s=grace_s,
        time=_checked_time(time),
    )
    text = _text(form, job, image, volumes)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(output, text, "the file", MachineError)
        start = f"sbatch {output}" if form == "slurm" else f"kubectl apply -f {output}"
        terminal.note(f"saved {output}; start the run with: {start}")


def _text(form: str, job: Launched, image: str | None, volumes: Sequence[str]) -> str:
    if form == "slurm":
        from shardwright.cli.slurm import script

        if image or volumes:
            raise ShardwrightError("launch: --image and --volume go with --kubernetes")
        return script(job)
    from shardwright.cli.kubernetes import manifest

    if not image:
        raise ShardwrightError("launch: --kubernetes needs --image, which has torch, Shardwright and your program")
    return manifest(job, image, dict(map(_volume, volumes)))


def _plans(path: Path) -> list[Plan]:
    """Return the plan, or those of a folder, the fewest ranks first."""
    from shardwright.search.plan import Plan

    plans = [Plan.load(plan_file(path, size)) for size in (sizes_of(path) or [0])]
    if mixed := next((plan for plan in plans if plan.cluster.parts), None):
        raise PlanError(
            f"{path}: {mixed.cluster.name} has machines of several kinds, for which no file is written; start "
            "`shardwright run` on each of them, with --node-rank in the order of the cluster"
        )
    return plans


def _nodes(plans: Sequence[Plan], per_node: int, path: Path) -> range:
    """Return the numbers of machines of plans; raise `PlanError` unless there is a plan for every one between them."""
    sizes = [plan.cluster.num_devices for plan in plans]
    if uneven := [size for size in sizes if size % per_node]:
        raise PlanError(f"{path}: {uneven[0]} ranks are no whole machines of {per_node}; say --nproc-per-node")
    nodes = range(sizes[0] // per_node, sizes[-1] // per_node + 1)
    for number in nodes:
        if number * per_node not in sizes:
            raise PlanError(
                f"{path}: there is no plan for {number} machines, {number * per_node} ranks, but for fewer and for "
                f"more; add it with `shardwright plan --for {number * per_node} --output {path}`"
            )
    return nodes


def _name_of(target: str) -> str:
    """Return the name of a job from that of its file."""
    words = re.findall(r"[a-z0-9]+", Path(target.partition(":")[0]).stem.lower())
    return re.sub(r"^(?![a-z])", "run-", "-".join(words))[:52].rstrip("-")


def _checked_name(name: str) -> str:
    """Return the name of a job as clusters take it: lower case, digits and hyphens; raise an error for other ones."""
    plain = name.lower().replace("_", "-")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", plain):
        raise ShardwrightError(
            f"launch: --name {name!r}: expected letters, digits and hyphens, a letter first, at most 52"
        )
    return plain


def _checked_time(time: str) -> str:
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", time):
        raise ShardwrightError(
            f"launch: --time {time!r}: expected a time as Slurm writes it, such as 24:00:00 or 2-12:00"
        )
    return time


def _volume(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim) or not path.startswith("/"):
        raise ShardwrightError(f"launch: --volume {text!r}: expected a claim and an absolute path, such as data:/data")
    return claim, path
