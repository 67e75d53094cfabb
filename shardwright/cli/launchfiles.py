"""Contents that the files of all launchers share: machines, ranks, and the words that start them on each machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Launched:
    """A run that a launcher starts.

    Attributes:
        name: of the job.
        about: a line for people who read the file.
        nodes: the numbers of machines that it may have.
        per_node: the number of ranks on each.
        on_gpus: whether ranks compute on GPUs.
        program: the words of `shardwright run` that say what is run, options first.
        arguments: the words after `--`.
        max_restarts: how often ranks start again where one has failed.
        grace_s: seconds that ranks have to save.
        time: the longest time of a job, as Slurm writes it.
    """

    name: str
    about: str
    nodes: range
    per_node: int
    on_gpus: bool
    program: Sequence[str]
    arguments: Sequence[str] = ()
    max_restarts: int = 3
    grace_s: int = 300
    time: str = "24:00:00"


def torchrun_words(job: Launched, nodes: str, endpoint: str, identity: str) -> list[str]:
    """Return the options by which machines meet; values may have variables of the launcher."""
    options = {
        "nnodes": nodes,
        "nproc-per-node": str(job.per_node),
        "rdzv-backend": "c10d",
        "rdzv-endpoint": endpoint,
        "rdzv-id": identity,
        "max-restarts": str(job.max_restarts),
    }
    return [f"--{name}={value}" for name, value in options.items()]


def program_words(job: Launched) -> list[str]:
    """Return the words of the user, which are passed on as they are."""
    return [*job.program, *(["--", *job.arguments] if job.arguments else [])]
