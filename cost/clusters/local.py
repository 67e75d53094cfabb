"""The local machine as a cluster: CPU ranks under gloo, as calibrated, or else by defaults."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path

from shardwright.cost.clusters.cluster import Cluster, Collective, CollectiveLine, Level, threads_per_rank
from shardwright.cost.clusters.device import Device
from shardwright.pcg import checks
from shardwright.pcg.errors import ClusterError
from shardwright.pcg.files import cache_folder

DEFAULT = "default"

# One rank with one thread, two such ranks at once: our own calibration of a 2-core EPYC (Zen 4, AVX-512), torch 2.13.
_FLOPS_PER_S_PER_THREAD = 100e9
_MATMUL_EFFICIENCY = 0.95
_MEMORY_BYTES_PER_S = 20e9
_OP_OVERHEAD_S = 3.5e-6
_LINK_BYTES_PER_S, _LINK_HOP_S = 0.9e9, 230e-6
# (collective, latency_s, s_per_byte) between two ranks. A reduce-scatter, which under gloo the lowering makes of an
# all-to-all and a sum, counts as an all-reduce and a copy of the slice: it takes no longer.
_LINES: tuple[tuple[Collective, float, float], ...] = (
    ("all_reduce", 400e-6, 0.75e-9),
    ("all_gather", 230e-6, 0.55e-9),
    ("reduce_scatter", 403.5e-6, 0.8e-9),
    ("all_to_all", 190e-6, 0.16e-9),
    ("broadcast", 150e-6, 0.26e-9),
)


def cache_path(num_ranks: int, environ: Mapping[str, str] = os.environ, *, kind: str = "cpu") -> Path:
    """Return the file of this machine's calibration for `num_ranks` ranks, on its CPU or of kind "cuda"."""
    return cache_folder(environ) / ("local-" + ("" if kind == "cpu" else f"{kind}-") + f"{num_ranks}.json")


def device_name() -> str:
    """Return a name of this machine, so that a calibration is not taken for another's."""
    return f"{socket.gethostname()}, {os.cpu_count()} CPUs"


def local_cluster(num_ranks: int) -> Cluster:
    """Return `num_ranks` ranks on this machine: the saved calibration, or else `default_cluster`."""
    num_ranks = checks.positive_int(num_ranks, "Cluster.local", "num_ranks", "how many processes share this machine")
    return saved_cluster(num_ranks, device_name()) or default_cluster(num_ranks)


def saved_cluster(num_ranks: int, device: str, kind: str = "cpu") -> Cluster | None:
    """Return the saved calibration of `num_ranks` ranks on this `device`, or None.

    A file that cannot be read is ignored with a warning; a file of another machine, silently.
    """
    path = cache_path(num_ranks, kind=kind)
    if not path.exists():
        return None
    try:
        saved = Cluster.load(path)
    except ClusterError as error:
        advice = "run `shardwright calibrate` again or delete the file"
        warnings.warn(f"the saved calibration is not used, costs are defaults: {error}; {advice}", stacklevel=3)
        return None
    return saved if saved.device.name == device and saved.num_devices == num_ranks else None


def default_cluster(num_ranks: int) -> Cluster:
    """Return `num_ranks` ranks of a machine without measurements, at typical figures; provenance "default"."""
    threads = threads_per_rank(num_ranks)
    device = Device(
        name=device_name(),
        memory_bytes=memory_per_rank_bytes(num_ranks),
        memory_bytes_per_s=_MEMORY_BYTES_PER_S,
        flops_per_s={"fp32": _FLOPS_PER_S_PER_THREAD * threads},
        matmul_efficiency=_MATMUL_EFFICIENCY,
        op_overhead_s=_OP_OVERHEAD_S,
        kind="cpu",
    )
    lines = tuple(CollectiveLine(name, 2, alpha, beta) for name, alpha, beta in _LINES)
    level = Level("rank", num_ranks, _LINK_BYTES_PER_S, _LINK_HOP_S, "host")
    return Cluster(f"local-{num_ranks}", device, (level,), "gloo", DEFAULT, lines)


def memory_per_rank_bytes(num_ranks: int) -> int:
    """Return an equal share of this machine's memory, or of its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            limit = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        total = min(total, int(limit)) if limit.isdigit() else total
    return total // num_ranks
