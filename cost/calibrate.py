"""Quick calibration of the local machine: what its CPU ranks reach under gloo, all of them working at once.

Each rank is a process of its own (`cost.measure`), so that a caller's script is not imported again and threads of the
caller are not forked. Under 10 s for two ranks; the result is kept for `Cluster.local`.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, cast

from shardwright.cost import checks
from shardwright.cost.cluster import COLLECTIVES, Cluster, Collective, CollectiveLine, Level, threads_per_rank
from shardwright.cost.device import Device
from shardwright.cost.fit import Fit, fit_line
from shardwright.cost.local import cache_path, device_name, memory_per_rank_bytes
from shardwright.cost.measure import Workload
from shardwright.pcg.errors import ClusterError

Progress = Callable[[str], None]


def calibrate(
    num_ranks: int,
    *,
    timeout_s: float = 120.0,
    save: bool = True,
    progress: Progress | None = None,
    workload: Workload | None = None,
) -> Cluster:
    """Measure this machine with `num_ranks` ranks working at once.

    Args:
        num_ranks: as many as a run would have; each gets `threads_per_rank(num_ranks)` threads.
        timeout_s: after this the ranks are ended and an error is raised.
        save: keep the result where `Cluster.local(num_ranks)` finds it.
        progress: called with the name of each stage; by default stages go to stderr, one line each.
        workload: what to measure, for tests.

    Raises:
        ClusterError: a rank failed, or the time was not enough; the message has the rank's last words.
    """
    num_ranks = checks.positive_int(num_ranks, "calibrate", "num_ranks", "how many processes share this machine")
    timeout_s = checks.positive(timeout_s, "calibrate", "timeout_s", "seconds")
    workload = workload or Workload(num_ranks, threads_per_rank(num_ranks), timeout_s)
    figures = _run_ranks(workload, timeout_s, progress or _to_stderr)
    cluster = _cluster_of(figures, workload)
    if save:
        cluster.save(cache_path(num_ranks))
    return cluster


# ------------------------------------------------------------------------------------------------------------- results


def _cluster_of(figures: dict[str, Any], workload: Workload) -> Cluster:
    """The cluster that measured `figures` describe."""
    rates = [2 * size**3 / seconds for size, seconds in figures["matmul"]]
    device = Device(
        name=device_name(),
        memory_bytes=memory_per_rank_bytes(workload.num_ranks),
        memory_bytes_per_s=statistics.median(3 * size / seconds for size, seconds in figures["memory"]),
        flops_per_s={"fp32": max(rates)},
        matmul_efficiency=statistics.median(rates) / max(rates),
        op_overhead_s=figures["op_overhead_s"],
        kind="cpu",
    )
    fits: dict[tuple[Collective, int], Fit] = {
        (collective, size): _fit_collective(figures["collectives"], collective, size)
        for collective in COLLECTIVES
        for size in workload.group_sizes
    }
    lines = tuple(
        CollectiveLine(collective, size, fit.latency_s, fit.s_per_byte, fit.median_error)
        for (collective, size), fit in fits.items()
    )
    return Cluster(
        name=f"local-{workload.num_ranks}",
        device=device,
        levels=(_level(workload.num_ranks, fits.get(("all_gather", workload.num_ranks))),),
        backend="gloo",
        provenance=_provenance(figures["torch"], workload, list(fits.values())),
        collectives=lines,
    )


def _fit_collective(samples: Sequence[Sequence[Any]], collective: Collective, size: int) -> Fit:
    points = [sample[2:] for sample in samples if (sample[0], sample[1]) == (collective, size)]
    fit = fit_line(*zip(*points, strict=True))
    # A line without slope means that no size was large enough to tell; memory speed is the least that it can be.
    return fit if fit.s_per_byte > 0 else Fit(fit.latency_s, 1e-12, fit.median_error, fit.worst_error)


def _level(num_ranks: int, all_gather: Fit | None) -> Level:
    """The links as the all-gather saw them: (n−1)/n of the bytes in n−1 hops."""
    if all_gather is None:
        return Level("rank", num_ranks, 1e12, 0.0, "host")  # one rank: nothing is ever sent
    hops = num_ranks - 1
    return Level("rank", num_ranks, hops / num_ranks / all_gather.s_per_byte, all_gather.latency_s / hops, "host")


def _provenance(torch_version: str, workload: Workload, fits: list[Fit]) -> str:
    threads = f"{workload.num_ranks} ranks × {workload.num_threads} threads"
    text = f"measured {date.today().isoformat()}, {threads}, torch {torch_version}"
    if not fits:
        return text
    median = statistics.median(fit.median_error for fit in fits)
    return f"{text}; collectives fitted to {median:.0%} median, {max(fit.worst_error for fit in fits):.0%} at worst"


# -------------------------------------------------------------------------------------------------------------- ranks


def _run_ranks(workload: Workload, timeout_s: float, progress: Progress) -> dict[str, Any]:
    """Start the ranks, watch them to the end, and return what rank 0 found; no process outlives this call."""
    with tempfile.TemporaryDirectory(prefix="shardwright-calibrate-") as folder:
        ranks = _Ranks(Path(folder))
        try:
            ranks.start(workload)
            ranks.watch(time.monotonic() + timeout_s, timeout_s, progress)
        finally:
            ranks.end()
        return cast("dict[str, Any]", json.loads(ranks.result.read_text(encoding="utf-8")))


class _Ranks:
    """The processes of one calibration, their output in files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.result = folder / "result.json"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, workload: Workload) -> None:
        module = [sys.executable, "-m", "shardwright.cost.measure"]
        environ = _environment(workload.num_threads)
        for rank in range(workload.num_ranks):
            arguments = [str(rank), str(self.folder / "store"), json.dumps(asdict(workload)), str(self.result)]
            with (self.folder / f"{rank}.out").open("wb") as out, (self.folder / f"{rank}.err").open("wb") as err:
                self.processes.append(subprocess.Popen([*module, *arguments], stdout=out, stderr=err, env=environ))

    def watch(self, deadline: float, timeout_s: float, progress: Progress) -> None:
        """Wait for every rank to end well; a `ClusterError` as soon as one does not, or at the deadline."""
        num_told = 0
        while True:
            codes = [process.poll() for process in self.processes]
            stages = (self.folder / "0.out").read_text(encoding="utf-8").split("\n")[:-1]
            for stage in stages[num_told:]:
                progress(stage)
            num_told = len(stages)
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                ends = [f"rank {rank} ended with status {codes[rank]}: {self._last_words(rank)}" for rank in failed]
                raise ClusterError(f"calibrate: {'; '.join(ends)}; correct the cause and calibrate again")
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                stage = stages[-1] if stages else "start"
                advice = "the machine may be loaded; try again or give a longer timeout_s"
                raise ClusterError(f"calibrate: not done after {timeout_s:g} s, in the stage '{stage}'; {advice}")
            time.sleep(0.05)

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait(timeout=10)

    def _last_words(self, rank: int) -> str:
        lines = (self.folder / f"{rank}.err").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _environment(num_threads: int) -> dict[str, str]:
    """The caller's, with its import path, its threads, and gloo on the loopback device where there is one."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(num_threads)}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environ


def _to_stderr(stage: str) -> None:
    sys.stderr.write(f"calibrating: {stage}\n")
