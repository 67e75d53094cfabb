"""`shardwright launch`: files for Slurm and Kubernetes, linted, and run by stand-ins of Slurm's commands."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from shardwright.cli import run as run_command
from shardwright.cli.launch import _checked_name, _name_of
from shardwright.cli.main import cli
from shardwright.cost.clusters.cluster import Cluster
from shardwright.stopping import AGAIN
from tests.each import each
from tests.shardwright.command import Run


@pytest.fixture
def plans(run: Run) -> Path:
    """A folder with plans for two machines and for one."""
    assert run("plan", "models.py:net", "--cluster", "local:2", "--for", "2,1", "-o", "plans")[0] == 0
    return Path("plans")


def lint(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if checker:
        subprocess.run([checker, "--severity=warning", script], check=True)


@pytest.mark.usefixtures("plans")
def test_a_batch_script(run: Run) -> None:
    written = run("launch", "--slurm", "plans/2.json", "train.py", "-o", "job.sh", "--", "--folder", "a b", "$(x)'\"`")
    assert written == (0, "", "saved job.sh; start the run with: sbatch job.sh\n")
    lint(Path("job.sh"))
    text = Path("job.sh").read_text()
    assert {"#SBATCH --nodes=1", "#SBATCH --cpus-per-task=2", "#SBATCH --signal=USR1@300"} <= {*text.splitlines()}
    folder = run(
        "launch", "--slurm", "plans", "a_b.py:net", "--nproc-per-node", "1", "--checkpoints", "c", "--grace", "9"
    )
    assert folder[0] == 0, folder
    lines = {line.strip(" \\") for line in folder[1].splitlines()}
    assert {"#SBATCH --nodes=1-2", "#SBATCH --job-name=a-b", "#SBATCH --signal=USR1@9", "a_b.py:net"} <= lines
    assert {"--plan=plans", "--checkpoints=c", '"--nnodes=$SLURM_NNODES"', '"--nproc-per-node=1"'} <= lines


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
export SLURM_STEP_TASKS_PER_NODE="1(x2)" SLURM_NTASKS_PER_NODE=1
for node in 0 1; do SLURM_PROCID=$node SLURM_NODEID=$node "$@" & pids[node]=$!; done
worst=0
for pid in "${pids[@]}"; do wait "$pid"; status=$?; (( status > worst )) && worst=$status; done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo localhost; echo localhost; else echo "$*" >> requeued; fi
"""
RANK = """
import os, sys
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
Path("rank-" + "-".join(os.environ[name] for name in names)).write_text(" ".join(sys.argv[1:]))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("plans")
def test_a_batch_script_runs(run: Run, tmp_path: Path) -> None:
    """Two nodes, on each a torchrun; ranks that made room send the job back to the queue."""
    Path("train.py").write_text(RANK)
    programs = {"srun": SRUN, "scontrol": SCONTROL}
    programs["shardwright"] = f'#!/bin/bash\nexec {sys.executable} -m shardwright "$@"\n'
    for name, text in programs.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "localhost,localhost"}
    environ = {**os.environ, **job, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    words = ("launch", "--slurm", "plans", "train.py", "--nproc-per-node", "1", "-o", "job.sh")
    assert run(*words, "--", str(AGAIN), "a b")[0] == 0
    done = subprocess.run(["bash", "job.sh"], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (AGAIN, ""), done
    assert Path("requeued").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    ranks = sorted(Path().glob("rank-*"))
    assert [file.name.rsplit("-", 1)[0] for file in ranks] == ["rank-0-0-2-1", "rank-1-0-2-1"]
    assert {file.read_text() for file in ranks} == {f"{AGAIN} a b"}


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("Train_GPT v2.py:make", "train-gpt-v2"),
        ("runs/2026-11.py", "run-2026-11"),
        ("ü_.py", "run"),
        ("a" * 60, "a" * 52),
    ],
)
def test_a_job_has_the_name_of_its_file(target: str, name: str) -> None:
    assert _name_of(target) == _checked_name(_name_of(target)) == name


@pytest.mark.usefixtures("plans")
def test_a_manifest(run: Run) -> None:
    words = ("--image", "my/image:1", "--volume", "data:/data", "--nproc-per-node", "1", "--checkpoints", "/data/run")
    status, out, err = run("launch", "--kubernetes", "plans", "models.py:net", "--name", "gpt", *words)
    assert (status, err) == (0, "")
    service, job = yaml.safe_load_all(out)
    if find_spec("kubernetes_validate"):
        validate = importlib.import_module("kubernetes_validate").validate
        for each_of_them in (service, job):
            validate(each_of_them, "1.31", strict=True)
    assert (service["kind"], service["spec"]["clusterIP"], service["metadata"]["name"]) == ("Service", "None", "gpt")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], spec["completionMode"], spec["completions"], spec["parallelism"]) == (
        "batch/v1", "Indexed", 2, 2,
    )  # fmt: skip
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [AGAIN]
    assert (pod["restartPolicy"], pod["subdomain"], pod["terminationGracePeriodSeconds"]) == ("Never", "gpt", 300)
    own = pod["containers"][0]
    assert (own["image"], own["workingDir"], own["resources"]) == ("my/image:1", "/data", {"limits": {"cpu": "1"}})
    assert {m["name"] for m in own["volumeMounts"]} == {v["name"] for v in pod["volumes"]} == {"shm", "data"}
    assert own["command"][:2] == ["shardwright", "run"]
    taken = run_command.run.make_context("run", own["command"][2:], **cli.context_settings).params
    assert {taken[f"torchrun_{name}"] for name in ("nnodes", "rdzv_endpoint")} == {"1:2", "gpt-0.gpt:29400"}
    assert (taken["plan_file"], taken["checkpoints"]) == (Path("plans"), Path("/data/run"))


@pytest.mark.usefixtures("plans")
def test_files_that_cannot_be_written(run: Run) -> None:
    """One after another, as all need the same plans."""
    assert run("plan", "models.py:net", "--cluster", "local:3", "--for", "3,1", "-o", "gap")[0] == 0
    assert run("plan", "models.py:net", "--cluster", "preset:dgx-h100:1:1+dgx-a100:1:1", "-o", "mixed.json")[0] == 0
    named = ("launch", "--slurm", "plans/1.json", "train.py")
    image = ("launch", "--kubernetes", "plans/1.json", "train.py")
    for words, problem in (
        (("launch", "plans", "train.py"), "say for what: --slurm or --kubernetes"),
        (("launch", "--slurm", "plans", "train.py"), "plans: 1 ranks are no whole machines of 2; say --nproc-per-node"),
        (
            ("launch", "--slurm", "mixed.json", "train.py"),
            "has machines of several kinds, for which no file is written",
        ),
        ((*named, "--checkpoints", "c"), "launch: --checkpoints goes with FILE.py:FUNCTION"),
        ((*named, "--name", "1/2"), "launch: --name '1/2': expected letters, digits and hyphens"),
        ((*named, "--time", "1 day"), "launch: --time '1 day': expected a time as Slurm writes it"),
        ((*named, "--image", "x"), "launch: --image and --volume go with --kubernetes"),
        (
            ("launch", "--slurm", "gap", "train.py", "--nproc-per-node", "1"),
            "gap: there is no plan for 2 machines, 2 ra",
        ),
        (image, "launch: --kubernetes needs --image"),
        (
            (*image, "--image", "x", "--volume", "data"),
            "launch: --volume 'data': expected a claim and an absolute path",
        ),
    ):
        status, _, err = run(*words)
        assert (status, problem in err) == (2, True), (words, err)


@each(
    ("cluster", "per_machine"),
    [
        (lambda: Cluster.preset("dgx-h100", 4), 8),
        (lambda: Cluster.preset("dgx-h100", 1, 4), 4),
        (lambda: Cluster.local(3), 3),
    ],
)
def test_the_devices_of_a_machine(cluster: Callable[[], Cluster], per_machine: int) -> None:
    assert cluster().per_machine == per_machine
