"""Devices, levels, clusters: every field is checked on construction."""

import math
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwright.cost
from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster, CollectiveLine, threads_per_rank
from shardwright.cost.clusters.device import Device
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg import checks
from shardwright.pcg.errors import ClusterError
from tests.each import each

GPU = Device("gpu", 80 * 10**9, 2e12, {"fp32": 2e13, "bf16": 3e14}, 0.8, 5e-6, "cuda")
CPU = Device("cpu", 8 * 10**9, 1e10, {"fp32": 5e10}, 0.9, 4e-6, "cpu")
NVLINK = Level("nvlink", 8, 2e11, 1e-6)
NETWORK = Level("network", 4, 2e10, 4e-6)
LINE = CollectiveLine("all_reduce", 2, 3e-4, 1e-9)

NOT_POSITIVE = [0, -3, -0.5, math.nan, math.inf, True, "9e9", None, [1]]


def test_num_devices_is_the_product_of_the_levels() -> None:
    cluster = Cluster("toy", GPU, (NVLINK, NETWORK), "nccl", "test")
    assert cluster.num_devices == 32
    assert cluster.summary() == "toy: 8 nvlink × 4 network, gpu (75 GiB), nccl; test"


def test_clusters_are_values() -> None:
    cluster = Cluster("toy", GPU, (NVLINK,), "nccl", "test")
    same = Cluster("toy", replace(GPU), (replace(NVLINK),), "nccl", "test")
    assert cluster == same
    assert hash(cluster) == hash(same)
    assert pickle.loads(pickle.dumps(cluster)) == cluster


def test_numbers_are_stored_in_one_type() -> None:
    level = Level("link", np.int64(8), np.float32(1e9), 0)  # type: ignore[arg-type]
    assert (type(level.size), type(level.bandwidth_bytes_per_s), type(level.latency_s)) == (int, float, float)
    assert Level("link", 8.0, 1e9, 0.0) == level  # type: ignore[arg-type]
    assert replace(GPU, memory_bytes=8e10).memory_bytes == 80_000_000_000


@each("value", NOT_POSITIVE)
@each("field", ["memory_bytes_per_s"])
def test_device_rates_are_positive(field: str, value: object) -> None:
    with pytest.raises(ClusterError, match=rf"^Device\.{field}: expected a positive number, got .*; give it in bytes"):
        replace(GPU, **{field: value})


@each("value", [*NOT_POSITIVE, 1.5])
def test_device_memory_is_a_positive_integer(value: object) -> None:
    with pytest.raises(
        ClusterError, match=r"^Device\.memory_bytes: expected a positive integer, got .*number of bytes"
    ):
        replace(GPU, memory_bytes=value)


@pytest.mark.parametrize("value", [5e-324, 1e31, 10**31, 1e308])
def test_figures_of_no_machine(value: float) -> None:
    problem = (
        r"^Level\.bandwidth_bytes_per_s: expected a positive number, got .*, beyond what a machine has; give it in"
    )
    with pytest.raises(ClusterError, match=problem):
        replace(NVLINK, bandwidth_bytes_per_s=value)
    for good in (checks.LEAST, checks.MOST):
        assert replace(NVLINK, bandwidth_bytes_per_s=good).bandwidth_bytes_per_s == good
    if value > 1:
        with pytest.raises(
            ClusterError, match=r"^Level\.latency_s: expected a number of at least 0, got .*, beyond what"
        ):
            replace(NVLINK, latency_s=value)


def test_more_devices_than_any_machine_has() -> None:
    cluster = Cluster.preset("dgx-h100", nodes=10**9)
    with pytest.raises(ClusterError, match=r"^mesh \[8000000000\] has 8000000000 devices, expected at most 16777216; "):
        Communication(cluster, (cluster.num_devices,))


def test_the_extremes_have_costs() -> None:
    slow = replace(NVLINK, bandwidth_bytes_per_s=checks.LEAST, latency_s=checks.MOST)
    fast = replace(NVLINK, bandwidth_bytes_per_s=checks.MOST, latency_s=0)
    for level in (slow, fast):
        costs = Communication(Cluster("odd", GPU, (level,), "nccl", "test"), (level.size,))
        for collective in COLLECTIVES:
            assert 0 < costs.time_s(collective, 0, 1e12) < math.inf


@each("value", [*NOT_POSITIVE, 1.01])
def test_device_efficiency_is_a_share(value: object) -> None:
    with pytest.raises(
        ClusterError, match=r"^Device\.matmul_efficiency: expected a number above 0 and at most 1, got "
    ):
        replace(GPU, matmul_efficiency=value)


@each("value", NOT_POSITIVE[1:])
def test_device_overhead_is_not_negative(value: object) -> None:
    with pytest.raises(ClusterError, match=r"^Device\.op_overhead_s: expected a number of at least 0, got .*seconds"):
        replace(GPU, op_overhead_s=value)
    assert replace(GPU, op_overhead_s=0).op_overhead_s == 0


@each("value", [*NOT_POSITIVE[1:], 1.5])
@each("field", ["num_units", "context_bytes"])
def test_what_is_counted_may_be_nothing(field: str, value: Any) -> None:
    with pytest.raises(ClusterError, match=rf"^Device\.{field}: expected a positive integer, got .*, or 0$"):
        replace(GPU, **{field: value})
    assert getattr(replace(GPU, **{field: 0.0}), field) == 0


@pytest.mark.parametrize("context_bytes", [GPU.memory_bytes, GPU.memory_bytes + 1])
def test_the_context_leaves_some_memory(context_bytes: int) -> None:
    problem = f"expected less than the memory of {GPU.memory_bytes} bytes, got {context_bytes}; correct the one or"
    with pytest.raises(ClusterError, match=rf"^Device\.context_bytes: {problem} the other$"):
        replace(GPU, context_bytes=context_bytes)
    assert replace(GPU, context_bytes=GPU.memory_bytes - 1).context_bytes == GPU.memory_bytes - 1


@each(
    ("flops", "problem"),
    [
        ({}, r"flops_per_s: missing 'fp32', got nothing"),
        ({"bf16": 1e12}, r"flops_per_s: missing 'fp32', got bf16"),
        ({"fp32": 1e12, "fp4": 1e15}, r"flops_per_s: unknown precision 'fp4'; .* one of fp64, fp32, tf32, bf16, fp16"),
        ({"fp32": -1}, r"flops_per_s\.fp32: expected a positive number, got -1; give it in FLOP per second"),
        (1e12, r"flops_per_s: expected a mapping of precision to FLOP per second, got 1"),
    ],
)
def test_device_flops(flops: object, problem: str) -> None:
    with pytest.raises(ClusterError, match=rf"^Device\.{problem}"):
        replace(GPU, flops_per_s=flops)


@pytest.mark.parametrize(("field", "value"), [("name", ""), ("name", "  "), ("name", 3)])
def test_names_are_text(field: str, value: object) -> None:
    for part in (GPU, NVLINK, Cluster("toy", GPU, (NVLINK,), "nccl", "test")):
        problem = rf"^{type(part).__name__}\.{field}: expected a non-empty string, got "
        with pytest.raises(ClusterError, match=problem):
            replace(part, **{field: value})


def test_device_kind() -> None:
    with pytest.raises(ClusterError, match=r"^Device\.kind: expected one of 'cuda', 'cpu', got 'tpu'; choose one"):
        replace(GPU, kind="tpu")


def test_peak_by_precision_and_by_dtype() -> None:
    assert GPU.peak_flops_per_s("bf16") == GPU.peak_flops_per_s("bfloat16") == 3e14
    assert GPU.peak_flops_per_s("fp32") == GPU.peak_flops_per_s("float32") == GPU.peak_flops_per_s("int64") == 2e13
    assert GPU.peak_flops_per_s("tf32") == 2e13  # not in the table
    assert GPU.peak_flops_per_s("float16") == 3e14  # tensor cores that know bf16
    assert replace(GPU, kind="cpu").peak_flops_per_s("float16") == 2e13
    assert GPU.peak_flops_per_s("float64") == 1e13
    with pytest.raises(
        ClusterError, match=r"^device 'gpu': no peak rate for dtype 'complex64'; choose one of \['fp64'"
    ):
        GPU.peak_flops_per_s("complex64")


@each("value", [*NOT_POSITIVE, 2.5])
def test_level_size(value: object) -> None:
    with pytest.raises(ClusterError, match=r"^Level\.size: expected a positive integer, got .*; it is how many units"):
        replace(NVLINK, size=value)


@each("value", NOT_POSITIVE)
def test_level_bandwidth(value: object) -> None:
    with pytest.raises(
        ClusterError, match=r"^Level\.bandwidth_bytes_per_s: expected a positive number, got .*; give it"
    ):
        replace(NVLINK, bandwidth_bytes_per_s=value)


@each("value", NOT_POSITIVE[1:])
def test_level_latency(value: object) -> None:
    with pytest.raises(
        ClusterError, match=r"^Level\.latency_s: expected a number of at least 0, got .*; give it in sec"
    ):
        replace(NVLINK, latency_s=value)


@each(
    ("field", "value", "problem"),
    [
        ("collective", "all_reduces", r"collective: expected one of 'all_reduce', .*, got 'all_reduces'; choose one"),
        ("group_size", 1, r"group_size: expected at least 2, got 1; one rank alone communicates nothing, remove"),
        ("group_size", 0, r"group_size: expected a positive integer, got 0; it is how many ranks took part"),
        ("latency_s", -1, r"latency_s: expected a number of at least 0, got -1; give it in seconds"),
        ("s_per_byte", 0, r"s_per_byte: expected a positive number, got 0; give it in seconds per byte"),
        ("fit_error", math.nan, r"fit_error: expected a number of at least 0, got nan; give it in shares"),
    ],
)
def test_collective_lines(field: str, value: object, problem: str) -> None:
    with pytest.raises(ClusterError, match=rf"^CollectiveLine\.{problem}"):
        replace(LINE, **{field: value})


@each(
    ("field", "value", "problem"),
    [
        ("device", "h100", r"device: expected a Device, got 'h100'; construct one"),
        ("levels", (), r"levels: expected at least one level, got none; give the innermost first"),
        ("levels", NVLINK, r"levels: expected a tuple of Level, got Level"),
        ("levels", (8,), r"levels: expected a tuple of Level, got \(8,\)"),
        ("collectives", (8,), r"collectives: expected a tuple of CollectiveLine, got \(8,\)"),
        (
            "collectives",
            (LINE,),
            r"collectives: measured lines describe a cluster of one level, this one has 2; remove",
        ),
        ("backend", "mpi", r"backend: expected one of 'nccl', 'gloo', got 'mpi'; choose one"),
        ("device", CPU, r"backend: expected 'gloo' for a device of kind 'cpu', got 'nccl'; NCCL moves data between"),
        ("provenance", "", r"provenance: expected a non-empty string, got ''; it is where the figures come from"),
    ],
)
def test_clusters(field: str, value: object, problem: str) -> None:
    with pytest.raises(ClusterError, match=rf"^Cluster\.{problem}"):
        replace(Cluster("toy", GPU, (NVLINK, NETWORK), "nccl", "test"), **{field: value})


def test_threads_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert [threads_per_rank(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    with pytest.raises(ClusterError, match=r"^threads_per_rank\.num_ranks: expected a positive integer, got 0"):
        threads_per_rank(0)


def test_planning_needs_no_torch() -> None:
    folder = Path(shardwright.cost.__file__).parent
    modules = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py") if path.stem != "__init__"]
    imports = "; ".join(f"import shardwright.cost.{'.'.join(module.parts)}" for module in modules)
    code = f"{imports}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
