"""`shardwright profile`: a few real steps of a plan, laid over its prediction."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click

from shardwright.cli import terminal
from shardwright.cli.options import examples, format_option, output_option, plan_argument
from shardwright.cli.planfiles import facts_to_show, status_of, target_beside
from shardwright.cli.run import refuse_missing, refuse_remote, train_on_ranks
from shardwright.cli.torchrun import Start


@click.command(
    epilog=examples(
        "profile plan.json examples/zoo.py:gpt2",
        "profile plan.json train.py:make --steps 10 -o profile.json",
        "view plan.json --profile profile.json",
    )
)
@plan_argument
@click.argument("model", metavar="FILE.py:FUNCTION")
@output_option("Write the profile here; by default beside the plan, as plan.profile.json.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="To profile, after 8 that are not.")
@click.option("--seed", type=int, default=0, show_default=True)
@format_option
def profile(plan_file: Path, model: str, output: Path | None, steps: int, seed: int, form: str) -> int:
    """Run a few real steps and lay what they take over the prediction.

    The plan runs on ranks of this machine, as by `run`, first without a profiler, then under torch.profiler. What was
    measured and what is predicted is shown by kind of operator and of communication, by block, and one by one, what is
    the most off first. The profile is a file that `view --profile` shows on the page.
    """
    from shardwright.reports.profile import FORMAT, VERSION, Profile, ProfileReport

    target = target_beside(plan_file, output, ".profile.json", "the profile")
    facts = facts_to_show(plan_file)
    plan = facts.plan
    if plan.prediction.memory.total_bytes > plan.prediction.device_bytes:
        return status_of(plan)
    refuse_remote(plan.cluster, "profile")
    refuse_missing(plan.cluster, "profile", plan.cluster.num_devices)
    with tempfile.TemporaryDirectory(prefix="shardwright-profile-") as folder:
        profile_file = Path(folder) / "profile.json"
        settings = {"plan": str(plan_file), "steps": 8, "profile": str(profile_file), "profiled_steps": steps}
        model_words, start = {"model": model, "seed": seed}, Start.local(plan.cluster.num_devices)
        if status := train_on_ranks(model_words, start, None, Path(folder), settings, quiet=True):
            return status
        measurements = json.loads(profile_file.read_text(encoding="utf-8"))
    about = {"model": plan.model, "fingerprint": plan.fingerprint, "mesh": str(plan.mesh)}
    measured = Profile.from_json({"format": FORMAT, "version": VERSION, **about, **measurements}, "profile")
    measured.save(target)
    terminal.note(f"saved {target}; look at it with: shardwright view {plan_file} --profile {target}")
    terminal.show(ProfileReport(facts, measured), form)
    return status_of(plan)
