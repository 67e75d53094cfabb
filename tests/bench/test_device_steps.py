"""The benchmark of one GPU: it runs in small on a CPU, counts what it says, and has every row. Times are not judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import device_operators, device_steps
from bench.device_models import MODELS
from bench.device_operators import Measured, Operator
from bench.device_page import Result, Row, data_name, page
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.local import default_cluster
from shardwright.cost.timeline.memory import Memory
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.analysis import written
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.precisions import Precision
from tests.each import each, in_whole_grids

LLAMA_BLOCK = 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048 + 2 * 2048
NUM_PARAMETERS = {
    "gpt2-medium": 354_823_168,  # as transformers' gpt2-medium has
    "llama-1b": 16 * LLAMA_BLOCK + 2 * 32000 * 2048 + 2048,
    "resnext50": 25_028_904,  # as torchvision's resnext50_32x4d has
}


@pytest.mark.parametrize("name", MODELS)
def test_the_models_are_those_that_are_named(name: str) -> None:
    with FakeTensorMode():
        model, batch = MODELS[name].whole(5)
    assert sum(p.numel() for p in model.parameters()) == NUM_PARAMETERS[name]
    assert {len(tensor) for tensor in batch.values()} == {5}


@pytest.mark.parametrize("name", MODELS)
def test_small_models_are_small(name: str) -> None:
    model, batch = MODELS[name].small(3)
    assert sum(p.numel() for p in model.parameters()) < 10**6
    assert {len(tensor) for tensor in batch.values()} == {3}


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in ([], ["--device", "cuda", "--small"]):
        with pytest.raises(SystemExit) as ended:
            device_steps.main(arguments)
        assert ended.value.code == 2
        assert device_steps.NO_GPU in capsys.readouterr().err


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets them for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_noise_needs_two_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        device_steps.main(["--device", "cpu", "--rounds", "1"])
    assert "--rounds: expected at least 2, got 1; " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch", "--operators"])
def test_numbers_are_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        device_steps.main(["--device", "cpu", option, "0"])
    assert f"{option}: expected at least 1, got 0" in capsys.readouterr().err


@in_whole_grids
def test_the_command_in_small(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With figures that nobody measured, and without a C++ compiler."""
    monkeypatch.setattr(device_steps, "calibrated", lambda device: default_cluster(1))
    monkeypatch.setattr(device_steps, "BACKEND", "aot_eager")
    found: list[Result] = []
    monkeypatch.setattr(device_steps, "page", lambda result: found.append(result) or page(result))
    options = ["--device", "cpu", "--models", "gpt2-medium", "--small", "--rounds", "2", "--operators", "12", "--dry"]
    assert device_steps.main(options) == 0
    text, (result,) = capsys.readouterr().out, found
    assert [(row.model, row.mode) for row in result.rows] == [("GPT-2 medium", mode) for mode in device_steps.MODES]
    for row in result.rows:
        assert f"| {row.model} | {row.mode} | " in text
        assert len(row.seconds) == 2
        assert row.memory_error == pytest.approx(0, abs=0.3)
    assert len(result.operators) == 12
    heavy = [sum(o.predicted_s) * o.count for o in result.operators]
    assert heavy == sorted(heavy, reverse=True)
    assert len({(o.op, o.operands) for o in result.operators}) == 12
    assert {"linear", "sdpa", "cross_entropy_sum"} <= {o.op for o in result.operators}
    assert all(forward > 0 for forward, _ in (o.measured_s for o in result.operators))
    data = json.loads(json.dumps(result.to_json()))
    assert (data["torch"], data["precision"], len(data["steps"])) == (torch.__version__, "fp32", 2)
    assert Cluster.from_json(data["cluster"]) == result.cluster


# ---- operators ----


@cache
def captured(name: str) -> Graph:
    return capture(*MODELS[name].small(2)).graph


class Untimed(Measured):
    """Every operator takes a second forward and two backward."""

    def measured_s(self, node: Node) -> tuple[float, float]:
        return 1.0, 2.0


def two_layers() -> Graph:
    """relu(x wᵀ + b), twice; transposed, flattened, cut in two, and the loss of a sum of the halves."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 4, 16), "float32", "x")
    for layer in range(2):
        w = b.leaf(f"w{layer}", "parameter", (16, 16), "float32", f"layers.{layer}.weight", grad=True)
        bias = b.leaf(f"b{layer}", "parameter", (16,), "float32", f"layers.{layer}.bias", grad=True)
        x = b.op("relu", b.op("add", b.op("linear", x, w), bias))
    x = b.op("reshape", b.op("permute", x, dims=(1, 0, 2)), shape=(32, 16))
    halves = [b.op("slice", x, dim=1, start=start, stop=start + 8, step=1) for start in (0, 8)]
    labels = b.leaf("labels", "input", (32,), "int64", "labels")
    x = b.op("add", b.op("mul", halves[0], 2.0), halves[1])
    return b.graph([("loss", b.op("cross_entropy_sum", x, labels, ignore_index=-100, label_smoothing=0.0))])


FLOATS = "float32 8×4×16"


def test_equal_operators_are_one_and_what_has_no_kernel_is_none() -> None:
    """The first product's input gets no gradient; its bias is written into it. A view has no kernel, a part no own."""
    found = list(Untimed("toy", two_layers(), default_cluster(1), Execution()).heaviest(100))
    assert sorted((o.op, o.count, o.operands[0]) for o in found) == [
        ("add", 1, "float32 32×8"),
        ("cross_entropy_sum", 1, "float32 32×8"),
        ("linear + add", 1, FLOATS),
        ("linear + add", 1, FLOATS),
        ("mul", 1, "float32 32×8"),
        ("relu", 2, FLOATS),
        ("reshape", 1, "float32 4×8×16"),
    ]
    few = list(Untimed("toy", two_layers(), default_cluster(1), Execution()).heaviest(3))
    assert few == found[:3]


def test_what_is_computed_once_is_not_timed() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (4, 8), "float32", "x")
    w = b.leaf("w", "parameter", (4, 8), "float32", "w", grad=True)
    table = b.op("cast", b.op("arange", start=0, stop=8, step=1, dtype="int64"), dtype="float32")
    graph = b.graph([("loss", b.op("sum", b.op("linear", b.op("add", x, table), w), dims=(0, 1), keepdim=False))])
    found = Untimed("toy", graph, default_cluster(1), Execution()).heaviest(100)
    assert {operator.op for operator in found} == {"add", "linear", "sum"}


@each("precision", ["fp32", "amp_bf16"])
@each("name", MODELS)
def test_nothing_of_a_step_is_counted_twice_or_forgotten(name: str, precision: Precision) -> None:
    graph, execution = captured(name), Execution(precision)
    measured = Untimed(name, graph, default_cluster(1), execution)
    found = list(measured.heaviest(10**6))
    left_out = {node.name for node in graph.nodes if written(graph, node) == "part" or not node.inputs}
    bare = replace(default_cluster(1).device, op_overhead_s=0.0)
    costs = Steps(graph, replace(default_cluster(1), device=bare), execution)
    steps = [cost for name, cost in costs.costs.items() if name not in left_out]
    for direction, every in enumerate(([s.forward_s for s in steps], [s.backward_s + s.weight_s for s in steps])):
        assert sum(o.count * o.predicted_s[direction] for o in found) == pytest.approx(sum(every))
    dtype = "float32" if precision == "fp32" else "bfloat16"
    assert all(text.startswith(dtype) for o in found if o.op == "relu" for text in o.operands)


def test_operands_are_as_the_model_has_them() -> None:
    graph = two_layers()
    measured = Measured("toy", graph, default_cluster(1), Execution("amp_bf16"))
    read = {op: [node for node in graph.nodes if node.op == op] for op in ("linear", "reshape", "cross_entropy_sum")}
    for node, grad in zip(read["linear"], (False, True), strict=True):
        x, weight = (measured.operand(node, name) for name in node.inputs)
        assert (tuple(x.shape), x.dtype, x.requires_grad) == ((8, 4, 16), torch.bfloat16, grad)
        assert weight.requires_grad
    permuted = measured.operand(read["reshape"][0], read["reshape"][0].inputs[0])
    assert tuple(permuted.shape) == (4, 8, 16)
    assert permuted.stride() == torch.empty(8, 4, 16).permute(1, 0, 2).stride()
    assert permuted.is_leaf
    assert permuted.requires_grad
    labels = measured.operand(read["cross_entropy_sum"][0], "labels")
    assert labels.dtype == torch.int64
    assert int(labels.max()) < 8


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_of_the_models_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_operators, "NUM_SAMPLES", 1)
    graph = captured(name)
    for operator in Measured(name, graph, default_cluster(1), Execution("amp_bf16")).heaviest(10**6):
        assert all(m > 0 for p, m in zip(operator.predicted_s, operator.measured_s, strict=True) if p), operator


# ---- the page ----


def row(model: str, mode: str, predicted_s: float, **changes: Any) -> Row:
    memory = Memory(parameters_bytes=90, context_bytes=7, communication_bytes=5, slack_bytes=3)
    return replace(Row(model, mode, predicted_s, memory, (1e-3, 1.03e-3), 100, 120), **changes)


def test_errors_are_of_what_the_allocator_hands_out() -> None:
    one = row("toy", "eager", 1.2e-3)
    assert one.predicted_bytes == 90
    assert one.memory_error == pytest.approx(-0.1)
    assert one.time_error == pytest.approx(1.2e-3 / 1.015e-3 - 1)


def operator(op: str, predicted_s: tuple[float, float], measured_s: tuple[float, float] = (1e-6, 1e-6)) -> Operator:
    return Operator("toy", op, ("float32 8×4", "float32 4"), 3, predicted_s, measured_s)


def test_the_page_has_every_row_the_worst_first_and_medians() -> None:
    rows = [row("A", "eager", 1e-3), row("A", "compiled", 2e-3), row("B", "eager", 1e-3, allocated_bytes=45)]
    adds = [operator("add", (1.1e-6, 0.0), (1e-6, 0.0)), operator("add", (1.3e-6, 3e-6))]
    operators = [*adds, operator("mul", (5e-7, 1e-6))]
    result = Result("Some GPU-80", "amp_bf16", default_cluster(1), rows, operators, ["C, eager"])
    text = page(result)
    assert "Some GPU-80" in text
    assert f"torch {torch.__version__}, amp_bf16" in text
    assert "`bench/data/device-some-gpu-80.json`" in text
    assert "Median error, all: " in text
    assert "Median error, compiled: 97.0% of a step's time, 10.0% of memory." in text
    assert "mean of 2 rounds of\nsteps" in text
    assert "Not enough memory (a smaller `--batch` may do): C, eager." in text
    assert text.index("| A | compiled | 2.00 ms") < text.index("| A | eager |") < text.index("| B | eager |")
    assert "| 3% | 0.0 MB | 0.0 MB | +100% |" in text
    assert "| add | 2 | 20.0% | 200.0% |\n| mul | 1 | 50.0% | 0.0% |\n| all | 3 | 30.0% | 100.0% |\n" in text
    assert "| toy | mul | float32 8×4, float32 4 | 3 | forward | 0.5 µs | 1.0 µs | -50% |" in text
    assert "| toy | add | float32 8×4, float32 4 | 3 | backward | 3.0 µs | 1.0 µs | +200% |" in text


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H100 80GB HBM3", "device-nvidia-h100-80gb-hbm3.json"), ("Tesla T4 ", "device-tesla-t4.json")],
)
def test_data_is_named_by_the_device(device: str, name: str) -> None:
    assert data_name(device) == name


def test_only_whole_models_on_a_gpu_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result("gpu", "amp_bf16", default_cluster(1), [row("A", "eager", 1e-3)], [], [])
    monkeypatch.setattr(device_steps, "run", lambda *setup: result)
    monkeypatch.setattr(device_steps, "PAGE", tmp_path / "device.md")
    monkeypatch.setattr(device_steps, "DATA", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for dry in (["--dry"], ["--small"], ["--device", "cpu"]):
        device_steps.main(dry)
        assert list(tmp_path.iterdir()) == []
    device_steps.main([])
    assert (tmp_path / "device.md").read_text() == page(result)
    written = json.loads((tmp_path / "device-gpu.json").read_text())
    assert (written["device"], written["steps"][0]["model"]) == ("gpu", "A")
