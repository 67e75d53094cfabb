"""Every precision: its bytes, its rates, and what a device or a graph without it makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.compute.compute import matmul_share
from shardwright.cost.compute.kernels import Kernel
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.steps import OperationCost, Steps
from shardwright.cost.timeline.timeline import Timeline, simulate
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.operations import Operation
from shardwright.pcg.step.precisions import DTYPES, PRECISIONS, Precision
from shardwright.pcg.types import ITEM_BYTES
from shardwright.search.request.restrict import DATA
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.search.graphs import cluster, every_choice

WIDTH = 4096
precisions = each("precision", PRECISIONS)


def product(dtype: str = "float32") -> Graph:
    b = GraphBuilder()
    x = b.leaf("x", "input", (WIDTH, WIDTH), dtype, "x")
    w = b.leaf("w", "parameter", (WIDTH, WIDTH), dtype, "w", grad=True)
    return b.graph([("loss", b.op("sum", b.op("relu", b.op("linear", x, w)), dims=(0, 1), keepdim=False))])


def run(precision: Precision | None, gpu: Cluster, graph: Graph) -> Timeline:
    return simulate(program(graph, gpu, Execution(precision)))


def linear(precision: Precision | None, machine: Cluster, dtype: str = "float32") -> OperationCost:
    found = Steps(product(dtype), machine, Execution(precision))
    return found.costs[weighted(found).name]


def weighted(found: Steps) -> Operation:
    return next(operation for operation in found.listed if operation.weights)


def linear_bytes(precision: Precision | None, machine: Cluster, dtype: str = "float32") -> float:
    return weighted(Steps(product(dtype), machine, Execution(precision))).num_bytes


def linear_s(precision: Precision | None, machine: Cluster) -> float:
    return linear(precision, machine).forward_s


def cast_s(machine: Cluster) -> float:
    """Of the activation into fp8: read in 16 bits, read again, written and written transposed in 8."""
    return 6 * WIDTH**2 / machine.device.memory_bytes_per_s + machine.device.kernel_s


@precisions
def test_products_run_at_the_rate_of_their_precision(precision: Precision) -> None:
    """Large enough that only the peak tells the times apart, on a device that has them all."""
    gpu = Cluster.preset("dgx-h100", 1, 1)
    dtypes = DTYPES[precision]
    rate = gpu.device.peak_flops_per_s(dtypes.rates.get("matmul", dtypes.compute)) * gpu.device.matmul_efficiency
    casts_s = cast_s(gpu) if precision == "fp8" else 0.0
    assert linear_s(precision, gpu) - casts_s == pytest.approx(2 * WIDTH**3 / rate, rel=0.05)


@precisions
def test_one_gradient_of_two_takes_half_of_the_measured_dispatch(precision: Precision) -> None:
    """The batch gets none; dispatch is as slow as can be, so that it does not hide behind the work."""
    machine = cluster(1)
    machine = replace(machine, device=replace(machine.device, operators={"linear": (1e3, 1e4)}))
    assert linear(precision, machine).weight_s == pytest.approx(5e3, rel=1e-3)


@precisions
def test_values_take_the_bytes_of_their_precision(precision: Precision) -> None:
    assert linear_bytes(precision, Cluster.preset("dgx-h100", 1, 1)) == WIDTH**2 * ITEM_BYTES[DTYPES[precision].compute]


@each(("precision", "twin"), [("amp_fp16", "amp_bf16"), ("fp16", "bf16"), ("tf32", "fp32"), ("fp8", "amp_bf16")])
def test_memory_and_time_differ_from_the_twin_by_the_rate_alone(precision: Precision, twin: Precision) -> None:
    """bf16 and fp16 have equal rates and bytes on this device; a loss scaler passes over the gradients once more."""
    gpu = Cluster.preset("dgx-a100", 1, 1)
    ours, theirs = (run(p, gpu, product()) for p in (precision, twin))
    assert ours.fullest.memory == theirs.fullest.memory
    if precision == "tf32":
        assert ours.step_s < theirs.step_s / 3  # 156 TFLOP/s against 19.5
    else:  # without a rate for fp8 its products stay in bf16
        scaler_s = 2 * 4 * WIDTH**2 / gpu.device.memory_bytes_per_s if precision == "amp_fp16" else 0.0
        assert ours.step_s == pytest.approx(theirs.step_s + scaler_s)


@each(("precision", "same"), [("tf32", "fp32"), ("fp16", "fp32"), ("bf16", "fp32"), ("fp8", "bf16")])
def test_a_cpu_without_a_rate_falls_back(precision: Precision, same: Precision) -> None:
    """It saves bytes at most; the product is bound by its arithmetic."""
    slow = cluster(1)
    assert linear_s(precision, slow) == pytest.approx(linear_s(same, slow))


def test_without_tf32_a_measured_kernel_in_fp32_still_counts() -> None:
    plain = cluster(1)
    flops, num_bytes = 2.0 * WIDTH**3, 12.0 * WIDTH**2
    kernel = Kernel("matmul", (1, WIDTH, WIDTH, WIDTH), flops, num_bytes, "float32", seconds=123.0)
    measured = replace(plain, device=replace(plain.device, kernels=(kernel,)))
    assert linear_s("tf32", measured) == linear_s("fp32", measured) == pytest.approx(123.0, rel=1e-3)


def test_a_gpu_with_bf16_runs_fp16_as_fast_and_one_with_fp16_alone_has_no_bf16() -> None:
    a100, v100 = Cluster.preset("dgx-a100", 1, 1), Cluster.preset("dgx-1-v100", 1, 1)
    rates = {name: rate for name, rate in a100.device.flops_per_s.items() if name != "fp16"}
    calibrated = replace(a100.device, flops_per_s=rates)
    assert calibrated.peak_flops_per_s("float16") == rates["bf16"]
    assert replace(calibrated, kind="cpu").peak_flops_per_s("float16") == rates["fp32"]
    assert v100.device.peak_flops_per_s("bfloat16") == v100.device.flops_per_s["fp32"]
    assert linear_s("amp_fp16", v100) < 0.2 * linear_s("amp_bf16", v100)


def test_rows_of_tf32_are_aligned_as_those_of_32_bits() -> None:
    assert matmul_share((1, 8192, 8192, 8196), "tf32", 132) == matmul_share((1, 8192, 8192, 8196), "float32", 132)


@precisions
@each("own", ["bfloat16", "float16"])
def test_a_graph_in_16_bits_keeps_its_values(own: str, precision: Precision) -> None:
    gpu, wanted = Cluster.preset("dgx-h100", 1, 1), DTYPES[precision].compute
    if wanted == own:
        assert linear_bytes(precision, gpu, own) == 2 * WIDTH**2
        return
    good = " or ".join(sorted({wanted, "float32"}))
    advice = "leave the precision out, or plan the model in float32"
    with pytest.raises(PlanError) as error:
        linear(precision, gpu, own)
    assert str(error.value) == f"precision '{precision}': expected parameters in {good}, got {own}; {advice}"


def test_the_gradient_of_a_weight_that_the_program_casts_takes_its_time() -> None:
    """Its readers see an activation, so their backward is in one part; all of it is in the timeline."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (64, 512), "bfloat16", "x")
    w, v = (b.leaf(name, "parameter", (512, 512), "float32", name, grad=True) for name in ("w", "v"))
    y = b.op("relu", b.op("linear", x, b.op("cast", w, dtype="bfloat16")))
    y = b.op("linear", y, b.op("cast", v, dtype="bfloat16"))
    graph = b.graph([("loss", b.op("sum", y, dims=(0, 1), keepdim=False))])
    machine = cluster(2)
    found = Planner(machine, every_choice).solve(graph, Mesh.of(x=2), (DATA,), "data")
    steps = Steps(found.graph, machine, Execution())
    products = [o for o in steps.listed if found.graph.by_name[o.name].op == "linear"]
    assert [(o.split_backward, steps.costs[o.name].weight_s) for o in products] == [(False, 0.0)] * 2
    nodes_s = found.prediction.compute_s + found.prediction.optimizer_s
    assert simulate(program(found.graph, machine)).busiest.compute_s == pytest.approx(nodes_s, rel=1e-2)
