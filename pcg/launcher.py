"""The launcher of this process: none, or torchrun, `srun`, `mpirun` or the like, which start many processes.

Launchers tell each process its number in environment variables. One row of `_LAUNCHERS` is one launcher's names for
them; the first row whose rank is set counts. torchrun comes first, as its processes inherit the variables of what
started it; Slurm comes after the MPI launchers, which start their daemons by `srun`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from zlib import crc32

from shardwright.pcg.errors import DistributedError
from shardwright.pcg.hostlist import hosts_of, tasks_per_node

DEFAULT_PORT = 29500  # torchrun's
_START = "start the run by torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"


@dataclass(frozen=True, slots=True)
class Launch:
    """A process of a run.

    Attributes:
        launcher: the launcher's name, for people.
        rank: its number in the run, from 0.
        world: the number of processes of the run.
        local_rank: its number on its machine; None where the launcher does not say.
        local_world: the number of the run's processes on its machine; None where the launcher does not say.
        on_nodes: the number of processes on each machine; empty where the launcher does not say.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int | None = None
    local_world: int | None = None
    on_nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Variables:
    """The names of a launcher's variables; of several, the first that is set counts.

    `sign` shows the launcher was there.
    """

    launcher: str
    sign: str
    rank: str
    world: tuple[str, ...]
    local_rank: str
    local_world: str = ""


def _mpi(launcher: str, prefix: str, between: str = "_") -> _Variables:
    """Return the variables of a launcher whose names differ only in their prefix."""
    names = [f"{prefix}{between}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return _Variables(launcher, names[0], names[0], (names[1],), names[2], names[3])


_LAUNCHERS = (
    _Variables("torchrun", "RANK", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _mpi("Open MPI", "OMPI_COMM_WORLD"),
    _mpi("MVAPICH2", "MV2_COMM_WORLD"),
    _mpi("jsrun", "JSM_NAMESPACE"),
    _Variables(
        "Cray PALS", "PALS_RANKID", "PALS_RANKID", ("PALS_SIZE", "PMI_SIZE"), "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"
    ),
    _Variables("Flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID"),
    # MPICH's and Intel's; `srun --mpi=pmi2` sets the rank and the size as well, but no local rank
    _Variables("mpiexec", "MPI_LOCALRANKID", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # the size of a step, which only `srun` sets: a batch script is one process, and has the job's size
    _Variables("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS",), "SLURM_LOCALID"),
    _mpi("a PMI launcher", "PMI"),
)
_JOBS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "LSB_JOBID", "FLUX_JOB_ID")


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return how a process with this environment was started; None if it was started alone.

    Raises:
        DistributedError: a launcher's variables contradict each other, or some are missing.
    """
    row = next((row for row in _LAUNCHERS if row.sign in environ), None)
    if row is None:
        _check_nothing_is_left_over(environ)
        return None
    rank = _number(environ, row, (row.rank,), least=0)
    world = _number(environ, row, row.world, least=1)
    if rank is None or world is None:
        missing = row.rank if rank is None else " or ".join(row.world)
        raise DistributedError(
            f"environment: {row.sign} is set, so {row.launcher} started this process, but {missing} is missing; "
            f"{_START}"
        )
    if rank >= world:
        raise DistributedError(
            f"environment: {row.rank}={rank} is no number below {row.world[0]}={world}; start the run by torchrun, or "
            "unset both"
        )
    local_rank = _number(environ, row, (row.local_rank,), least=0)
    local_world = _number(environ, row, (row.local_world,), least=1)
    if local_world is not None and not (local_rank or 0) < local_world <= world:
        raise DistributedError(
            f"environment: {row.local_world}={local_world} does not fit with {row.local_rank}={local_rank} and "
            f"{row.world[0]}={world}; start the run by torchrun, or set all of them"
        )
    launch = Launch(row.launcher, rank, world, local_rank, local_world)
    return _on_slurms_nodes(launch, environ) if row.launcher == "srun" else launch


def meeting_point(launch: Launch, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and port at which the processes of a run find each other: rank 0's.

    They are `MASTER_ADDR` and `MASTER_PORT` if these are set; else Slurm's first host, or this machine if it holds the
    whole run, and a port that follows from the job's number.

    Raises:
        DistributedError: the launcher does not say where rank 0 is.
    """
    job = next((environ[name] for name in _JOBS if environ.get(name)), "")
    given = environ.get("MASTER_PORT", "")
    if given and not given.isdecimal():
        raise DistributedError(f"environment: MASTER_PORT: expected a number, got {given!r}; correct or unset it")
    port = int(given or "0")
    if not port:
        step = environ.get("SLURM_STEP_ID", "")
        port = 15000 + crc32(f"{job}.{step}".encode()) % 10000 if job else DEFAULT_PORT
    if host := environ.get("MASTER_ADDR", ""):
        return host, port
    if launch.launcher == "srun" and environ.get("SLURM_STEP_NODELIST"):
        return hosts_of(environ["SLURM_STEP_NODELIST"])[0], port
    if launch.local_world == launch.world:
        return "127.0.0.1", port
    raise DistributedError(
        f"{launch.launcher} started {launch.world} processes and does not say where the first of them is; set "
        "MASTER_ADDR to the host of rank 0, on every process (Open MPI: mpirun -x MASTER_ADDR=...; MPICH: mpiexec -genv"
        " MASTER_ADDR ...)"
    )


def as_torchrun(launch: Launch, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that torchrun would have set, which torch and other libraries read."""
    host, port = meeting_point(launch, environ)
    everywhere = {"RANK": launch.rank, "WORLD_SIZE": launch.world, "MASTER_ADDR": host, "MASTER_PORT": port}
    local = {"LOCAL_RANK": launch.local_rank, "LOCAL_WORLD_SIZE": launch.local_world}
    return {name: str(value) for name, value in (everywhere | local).items() if value is not None}


def device_index(launch: Launch, num_gpus: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of the visible GPU that this process computes on; None: on the CPU.

    If `local_world` is known, all processes of a machine compute on the same kind of device.

    If a launcher gives each process a GPU of its own, that is the only one it sees.

    Raises:
        DistributedError: there are GPUs, and the launcher does not say which of them is this process's.
    """
    if num_gpus == 0:
        return None
    local_rank = launch.rank if launch.local_rank is None and launch.world <= num_gpus else launch.local_rank
    local_world = launch.world if launch.local_world is None and launch.world <= num_gpus else launch.local_world
    if local_rank is None:
        raise DistributedError(
            f"{launch.launcher} started {launch.world} processes and does not say which of them are on this machine, "
            f"which has {num_gpus} GPU{'s' * (num_gpus > 1)}; set LOCAL_RANK and LOCAL_WORLD_SIZE, or start the run by "
            "torchrun"
        )
    is_bound = launch.launcher != "torchrun" and num_gpus == 1 and bool(environ.get("CUDA_VISIBLE_DEVICES"))
    if is_bound:
        return 0
    if local_world is None:
        return local_rank if local_rank < num_gpus else None
    return local_rank if local_world <= num_gpus else None


def _check_nothing_is_left_over(environ: Mapping[str, str]) -> None:
    world = environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise DistributedError(
            f"environment: WORLD_SIZE={world} without RANK: this process does not know which of them it is, and would "
            "train alone; start the run by torchrun, or unset WORLD_SIZE"
        )
    if "PMIX_RANK" in environ:
        raise DistributedError(
            f"environment: PMIX_RANK={environ['PMIX_RANK']}, so a launcher started this process, but it does not say "
            f"how many there are; {_START}, or unset PMIX_RANK"
        )


def _on_slurms_nodes(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """Return the launch with the number of the step's tasks on each node, and on this one."""
    counts, node = environ.get("SLURM_STEP_TASKS_PER_NODE", ""), environ.get("SLURM_NODEID", "0")
    on_nodes = tasks_per_node(counts) if counts else ()
    is_told = node.isdecimal() and int(node) < len(on_nodes)
    return replace(launch, on_nodes=on_nodes, local_world=on_nodes[int(node)] if is_told else None)


def _number(environ: Mapping[str, str], row: _Variables, names: tuple[str, ...], least: int) -> int | None:
    name = next((name for name in names if name in environ), None)
    if name is None:
        return None
    value = environ[name]
    if not value.isdecimal() or int(value) < least:
        advice = (
            "start the run by torchrun, or unset it" if row.launcher == "torchrun" else f"did {row.launcher} set it?"
        )
        kind = "a positive integer" if least else "a whole number from 0"
        raise DistributedError(f"environment: {name}: expected {kind}, got {value!r}; {advice}")
    return int(value)
