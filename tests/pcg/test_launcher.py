"""Which process of a run this is, by what launchers set. The values are those of real launchers, of rank 5 of 8."""

import pytest

from shardwright.pcg.errors import DistributedError
from shardwright.pcg.launcher import DEFAULT_PORT, Launch, as_torchrun, device_index, find_launch, meeting_point
from tests.each import each

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "5", "PMIX_NAMESPACE": "1933770753",
}  # fmt: skip
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "6"}
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
DAEMON_OF_MPIRUN = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@each(
    ("environ", "expected"),
    [
        ({}, None),
        (BATCH, None),  # the script of a job is one process, whatever the job's size
        ({"WORLD_SIZE": "1"}, None),
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, Launch("torchrun", 5, 8)),
        (OPEN_MPI, Launch("Open MPI", 5, 8, 1, 4)),
        (MPICH, Launch("mpiexec", 5, 8, 1, 4)),
        ({k.replace("OMPI", "MV2"): v for k, v in OPEN_MPI.items()}, Launch("MVAPICH2", 5, 8, 1, 4)),
        (
            {f"JSM_NAMESPACE_{k.removeprefix('OMPI_COMM_WORLD_')}": v for k, v in OPEN_MPI.items() if "OMPI" in k},
            Launch("jsrun", 5, 8, 1, 4),
        ),
        (
            {"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PMI_RANK": "5"},
            Launch("Cray PALS", 5, 8, 1, 4),
        ),
        ({"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}, Launch("Flux", 5, 8, 1)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, Launch("a PMI launcher", 5, 8)),
        (SRUN, Launch("srun", 5, 8, 1, 4, (4, 4))),
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, Launch("srun", 5, 8, 1, 4, (4, 4))),  # srun --mpi=pmi2
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,5"}, Launch("srun", 5, 8, 1, 5, (3, 5))),
        (SRUN | TORCHRUN, Launch("torchrun", 5, 8, 1, 4)),  # torchrun, which srun started
        (DAEMON_OF_MPIRUN | OPEN_MPI, Launch("Open MPI", 5, 8, 1, 4)),  # mpirun in a job starts its daemons by srun
        (DAEMON_OF_MPIRUN | MPICH, Launch("mpiexec", 5, 8, 1, 4)),
    ],
)
def test_launches(environ: dict[str, str], expected: Launch | None) -> None:
    assert find_launch(environ) == expected


@each(
    ("environ", "problem"),
    [
        (
            {"RANK": "1"},
            r"RANK is set, so torchrun started this process, but WORLD_SIZE is missing; start .* or set RANK",
        ),
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE=4 without RANK: .* would train alone; start the run by torchrun, or unset"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"RANK=4 is no number below WORLD_SIZE=4; start .* torchrun, or unset both"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
            r"LOCAL_WORLD_SIZE=2 does not fit with LOCAL_RANK=3 and WORLD_SIZE=2; start .* or set all of them",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            r"LOCAL_WORLD_SIZE=4 does not fit with LOCAL_RANK=0 and WORLD_SIZE=2; start .* or set all of them",
        ),
        (
            {"RANK": "-1", "WORLD_SIZE": "4"},
            r"RANK: expected a whole number from 0, got '-1'; start the run by torchrun",
        ),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "x"},
            r"OMPI_COMM_WORLD_SIZE: expected a positive .*; did Open MPI set it",
        ),
        (
            {"PALS_RANKID": "5"},
            r"PALS_RANKID is set, so Cray PALS .* but PALS_SIZE or PMI_SIZE is missing; start the run",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2"}, r"so srun started this process, but SLURM_PROCID is missing"),
        ({"PMIX_RANK": "0"}, r"PMIX_RANK=0, so a launcher started .* does not say how many .*, or unset PMIX_RANK$"),
    ],
)
def test_contradictions(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(DistributedError, match=f"^environment: .*{problem}"):
        find_launch(environ)


def test_where_processes_meet() -> None:
    def met(environ: dict[str, str]) -> tuple[str, int]:
        launch = find_launch(environ)
        assert launch is not None
        return meeting_point(launch, environ)

    host, port = met(SRUN)
    assert host == "gpu07"
    assert 15000 <= port < 25000
    assert met(SRUN | {"SLURM_STEP_ID": "1"})[1] != port  # another step of the job may run at the same time
    assert met(SRUN | {"MASTER_PORT": "1234", "MASTER_ADDR": "head"}) == ("head", 1234)
    one_node = MPICH | {"MPI_LOCALNRANKS": "8"}
    assert met(one_node) == ("127.0.0.1", DEFAULT_PORT)
    assert met(MPICH | {"MASTER_ADDR": "head"}) == ("head", DEFAULT_PORT)
    with pytest.raises(
        DistributedError, match=r"^mpiexec started 8 processes .* set MASTER_ADDR to the host of rank 0"
    ):
        met(MPICH)
    with pytest.raises(DistributedError, match=r"^environment: MASTER_PORT: expected a number, got 'http'; correct or"):
        met(SRUN | {"MASTER_PORT": "http"})


def test_torchruns_variables_say_the_same() -> None:
    launch = find_launch(SRUN)
    assert launch is not None
    environ = SRUN | as_torchrun(launch, SRUN)
    assert environ["MASTER_ADDR"] == "gpu07"
    assert find_launch(environ) == Launch("torchrun", 5, 8, 1, 4)


BOUND = {"CUDA_VISIBLE_DEVICES": "0"}


@each(
    ("launch", "num_gpus", "environ", "expected"),
    [
        (Launch("torchrun", 5, 8, 1, 4), 0, {}, None),
        (Launch("torchrun", 5, 8, 1, 4), 4, {}, 1),
        (Launch("torchrun", 5, 8, 1, 4), 2, {}, None),  # more ranks than GPUs: all of them on the CPU
        (Launch("torchrun", 0, 8, 0, 4), 2, {}, None),
        (Launch("torchrun", 0, 2, 0, 2), 1, BOUND, None),
        (Launch("torchrun", 5, 8, 1), 4, {}, 1),
        (Launch("torchrun", 1, 2), 4, {}, 1),
        (Launch("srun", 5, 8, 1, 4, (4, 4)), 4, {}, 1),
        (Launch("srun", 5, 8, 1, 4, (4, 4)), 1, BOUND, 0),  # srun --gpus-per-task=1
    ],
)
def test_devices(launch: Launch, num_gpus: int, environ: dict[str, str], expected: int | None) -> None:
    assert device_index(launch, num_gpus, environ) == expected


def test_a_device_that_nobody_tells() -> None:
    problem = (
        r"^a PMI launcher started 16 processes and does not say .* which has 8 GPUs; set LOCAL_RANK and LOCAL_WORLD"
    )
    with pytest.raises(DistributedError, match=problem):
        device_index(Launch("a PMI launcher", 3, 16), 8, {})
