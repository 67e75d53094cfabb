"""Calibration of the local machine: the rates that its ranks reach when all of them work at once.

Each rank is a process of its own (`measure`), so that a caller's script is not imported again and threads of the caller
are not forked. Every visit is saved at once: the same command on the same day resumes an interrupted calibration. The
result is saved for `Cluster.local`.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

from shardwright.cost.calibration.calibrated import cluster_of, noise_warning
from shardwright.cost.calibration.probes import GPU_SIZES
from shardwright.cost.calibration.workload import (
    VISITS,
    WORKLOAD,
    Point,
    Workload,
    points_of,
    read_visits,
)
from shardwright.cost.clusters.cluster import Cluster, threads_per_rank
from shardwright.cost.clusters.local import cache_path, device_name, memory_per_rank_bytes
from shardwright.pcg import checks
from shardwright.pcg.errors import DistributedError, MachineError
from shardwright.pcg.files import require_writable

Tell = Callable[[str], None]
DEVICES = ("cpu", "cuda")
_THOROUGH = 5  # times as many passes


def calibrate(
    num_ranks: int,
    *,
    device: str = "cpu",
    thorough: bool = False,
    timeout_s: float | None = None,
    save: bool = True,
    progress: Tell | None = None,
    warn: Tell | None = None,
    workload: Workload | None = None,
) -> Cluster:
    """Measure this machine with `num_ranks` ranks working at once.

    Args:
        num_ranks: as many as a run would have; each gets `threads_per_rank(num_ranks)` threads, or a GPU.
        device: "cpu", under gloo, or "cuda", under NCCL.
        thorough: five times as many passes, and bfloat16 too.
        timeout_s: after this the ranks are ended and an error is raised; 240, or 1200 where `thorough`.
        save: keep the result where `Cluster.local(num_ranks)` finds it, and until then keep the visits.
        progress: called at the start of each pass with its name; by default passes go to stderr, one line each.
        warn: called with a description of any disturbance, which the provenance repeats; by default it goes to stderr.
        workload: the points to measure, in place of those that follow from the other arguments.

    Raises:
        ClusterError: an argument is wrong.
        MachineError: there are fewer GPUs than ranks, or the result cannot be saved.
        DistributedError: a rank failed (the message quotes its last line of output), or the time ran out. Points
            measured by then are kept.
    """
    num_ranks = checks.positive_int(num_ranks, "calibrate", "num_ranks", "how many processes share this machine")
    checks.choice(device, "calibrate", "device", DEVICES)
    limit_s = (1200.0 if thorough else 240.0) if timeout_s is None else timeout_s
    limit_s = checks.positive(limit_s, "calibrate", "timeout_s", "seconds")
    workload = workload or _workload(num_ranks, device, thorough, limit_s)
    _device_of(workload)  # raises before anything is measured
    load, num_cpus = os.getloadavg()[0], os.cpu_count() or 1
    target = cache_path(num_ranks, kind=workload.device)
    if save:
        require_writable(target, "the calibration", MachineError, make_folder=True)
    with _folder(target if save else None, workload) as folder:
        _run_ranks(workload, folder, limit_s, progress or _to_stderr)
        points = points_of(read_visits(folder / VISITS))
    cluster = measured_cluster(points, workload)
    if problem := noise_warning(points, load, num_cpus):
        (warn or _to_stderr)(problem)
        cluster = replace(cluster, provenance=f"{cluster.provenance}; {problem}")
    if save:
        cluster.save(target)
        _visits_path(target).unlink(missing_ok=True)
    return cluster


def measured_cluster(points: Mapping[str, Point], workload: Workload) -> Cluster:
    """Return this machine as a cluster, from its measured `points`."""
    name, memory_bytes = _device_of(workload)
    return cluster_of(points, workload, name, memory_bytes, version("torch"))


def _workload(num_ranks: int, device: str, thorough: bool, timeout_s: float) -> Workload:
    workload = Workload(num_ranks, threads_per_rank(num_ranks), timeout_s, device)
    if device == "cuda":
        large = (*workload.collective_bytes, 2**27)
        workload = replace(workload, dtypes=("float32", "bfloat16"), sizes=GPU_SIZES, collective_bytes=large)
    if thorough:
        seconds, num_passes = workload.seconds_per_point * _THOROUGH, workload.num_passes * _THOROUGH
        workload = replace(workload, dtypes=("float32", "bfloat16"), seconds_per_point=seconds, num_passes=num_passes)
    return workload


def _device_of(workload: Workload) -> tuple[str, int]:
    """Return the device's name and one rank's memory; raise `MachineError` unless torch sees a GPU per rank."""
    if workload.device == "cpu":
        return device_name(), memory_per_rank_bytes(workload.num_ranks)
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus < workload.num_ranks:
        advice = "give as many ranks as there are GPUs, or use device 'cpu'"
        raise MachineError(f"calibrate: {workload.num_ranks} ranks need a GPU each, torch sees {num_gpus}; {advice}")
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory


# ------------------------------------------------------------------------------------------------------- saved visits


def _visits_path(target: Path) -> Path:
    return target.with_suffix(".visits.jsonl")


@contextmanager
def _folder(target: Path | None, workload: Workload) -> Generator[Path]:
    """Yield a folder with the workload and the visits known so far; save all visits beside `target` at the end."""
    with tempfile.TemporaryDirectory(prefix="shardwright-calibrate-") as name:
        folder = Path(name)
        (folder / WORKLOAD).write_bytes(pickle.dumps(workload))
        if target is None:
            yield folder
            return
        header = _header(workload)
        _restore(_visits_path(target), header, folder / VISITS)
        try:
            yield folder
        finally:
            _keep(folder / VISITS, header, _visits_path(target))


def _header(workload: Workload) -> str:
    """Return the first line of a file of visits.

    Visits under another header belong to another machine, torch, workload or day, and are not used.
    """
    return json.dumps(
        [repr(replace(workload, timeout_s=0.0)), device_name(), version("torch"), date.today().isoformat()]
    )


def _restore(journal: Path, header: str, visits: Path) -> None:
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    if lines and lines[0] == header:
        visits.write_text("".join(f"{line}\n" for line in lines[1:]), encoding="utf-8")


def _keep(visits: Path, header: str, journal: Path) -> None:
    known = read_visits(visits)
    if known:
        lines = [header, *(json.dumps(visit._asdict()) for of_point in known.values() for visit in of_point)]
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# -------------------------------------------------------------------------------------------------------------- ranks


def _run_ranks(workload: Workload, folder: Path, timeout_s: float, progress: Tell) -> None:
    """Start the ranks and watch them to the end; no process outlives this call."""
    ranks = _Ranks(folder)
    try:
        ranks.start(workload)
        ranks.watch(time.monotonic() + timeout_s, timeout_s, progress)
    finally:
        ranks.end()


class _Ranks:
    """The processes of one calibration; their output goes to files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, workload: Workload) -> None:
        module = [sys.executable, "-m", "shardwright.cost.calibration.measure"]
        environ = _environment(workload.num_threads)
        for rank in range(workload.num_ranks):
            arguments = [str(rank), str(self.folder)]
            with (self.folder / f"{rank}.out").open("wb") as out, (self.folder / f"{rank}.err").open("wb") as err:
                self.processes.append(subprocess.Popen([*module, *arguments], stdout=out, stderr=err, env=environ))

    def watch(self, deadline: float, timeout_s: float, progress: Tell) -> None:
        """Wait for every rank to end well; raise `DistributedError` once a rank fails, or at the deadline."""
        num_told = 0
        while True:
            codes = [process.poll() for process in self.processes]
            passes = (self.folder / "0.out").read_text(encoding="utf-8").split("\n")[:-1]
            for name in passes[num_told:]:
                progress(name)
            num_told = len(passes)
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                ends = [f"rank {rank} ended with status {codes[rank]}: {self._last_words(rank)}" for rank in failed]
                raise DistributedError(f"calibrate: {'; '.join(ends)}; correct the cause and calibrate again")
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                last = passes[-1] if passes else "start"
                advice = "the machine may be loaded; the same call goes on from there, or give a longer timeout_s"
                raise DistributedError(f"calibrate: not done after {timeout_s:g} s, in '{last}'; {advice}")
            time.sleep(0.05)

    def end(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait(timeout=10)

    def _last_words(self, rank: int) -> str:
        lines = (self.folder / f"{rank}.err").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _environment(num_threads: int) -> dict[str, str]:
    """Return the caller's environment with its import path, `num_threads`, and gloo on loopback if there is one."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(num_threads)}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environ


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"calibrating: {text}\n")
