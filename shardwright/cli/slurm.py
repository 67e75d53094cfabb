"""A batch script for Slurm: one torchrun on each node, a signal before the time is over, a requeue on status 75."""

from __future__ import annotations

import shlex

from shardwright.cli.launchfiles import Launched, program_words, torchrun_words
from shardwright.stopping import AGAIN

_SCRIPT = """\
#!/bin/bash
# {about}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH {devices}
#SBATCH --exclusive
#SBATCH --time={time}
#SBATCH --signal=USR1@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -uo pipefail

# Slurm sends USR1 to all ranks {grace} s before the time is over, and TERM before it takes nodes away. The ranks save
# and end with status {again}: the job goes back to the queue, and on from its last checkpoint.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))
run="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"

# A machine that is done must not end the others, which may still save.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 \\
    {command}
status=$?
if [ "$status" -eq {again} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def script(job: Launched) -> str:
    """Return the text of the batch script; nodes find plan and program in the folder that it is sent from."""
    devices = f"--gpus-per-node={job.per_node}" if job.on_gpus else f"--cpus-per-task={job.per_node}"
    words = [f'"{word}"' for word in torchrun_words(job, "$SLURM_NNODES", "${hosts[0]}:$port", "$run")]
    words += [shlex.quote(word) for word in program_words(job)]
    return _SCRIPT.format(
        about=job.about, name=job.name, nodes=_range(job), devices=devices, time=job.time, grace=job.grace_s,
        again=AGAIN, command=" \\\n        ".join(["shardwright run", *words]),
    )  # fmt: skip


def _range(job: Launched) -> str:
    fewest, most = job.nodes[0], job.nodes[-1]
    return str(most) if fewest == most else f"{fewest}-{most}"
