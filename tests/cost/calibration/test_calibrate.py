"""Calibration: a real run on tiny sizes, going on after an interruption, noise, and what happens when a rank fails."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from shardwright.cost.calibration import calibrate as module
from shardwright.cost.calibration import measure
from shardwright.cost.calibration.calibrate import calibrate
from shardwright.cost.calibration.calibrated import cluster_of, fit_errors, noise_warning
from shardwright.cost.calibration.probes import (
    CPU_SIZES,
    GPU_SIZES,
    Probe,
    Sizes,
    common_probes,
    dispatch_probes,
    kernel_probes,
    pace_probes,
)
from shardwright.cost.calibration.samples import LOOPS, samples
from shardwright.cost.calibration.workload import (
    Point,
    Visit,
    Workload,
    read_visits,
    trimmed_mean,
)
from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster
from shardwright.cost.clusters.detect import detect_cluster
from shardwright.cost.clusters.device import Device
from shardwright.cost.clusters.local import cache_path
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.compute.compute import Compute
from shardwright.cost.compute.kernels import measured
from shardwright.cost.compute.work import Work
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime import kernels as runtime
from shardwright.pcg.errors import ClusterError, DistributedError, MachineError
from shardwright.pcg.optable import ROWS
from tests.each import each, in_whole_grids
from tests.forked import Forked

TINY = Sizes(
    matmuls=((1, 8, 16, 16), (1, 64, 64, 64), (4, 16, 16, 16)),
    convolutions=((1, 2, 2, 1, 4, 1),),
    attentions=((2, 8, 8, False), (2, 16, 8, True)),
    elements=(2**8, 2**12),
    width=16,
    side=8,
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tiny(num_ranks: int, timeout_s: float = 120.0, **changes: Any) -> Workload:
    sizes = {"sizes": TINY, "collective_bytes": (2**10, 2**20), "seconds_per_point": 0.0, "num_passes": 2}
    return replace(Workload(num_ranks, 1, timeout_s), **(sizes | changes))


def ignore(text: str) -> None:
    """Tells nobody: other work on the machine that runs the tests is no concern of theirs."""


def invented(workload: Workload, seconds: Callable[[str], float] = lambda key: 1e-3, spread: float = 0.02) -> Any:
    """A point for everything in the workload."""
    alone = measure.Rank(0, replace(workload, num_ranks=1), Path("none"))
    keys = [task.key for group in alone._tasks() for task in group]
    groups = [(name, size) for name in COLLECTIVES for size in workload.group_sizes]
    keys += [f"{name} {size} {n}" for name, size in groups for n in workload.collective_bytes]
    return {key: Point(seconds(key), spread) for key in keys}


# --------------------------------------------------------------------------------------------------------------- a run


def test_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks; of the start of new processes, the rank that fails tells."""
    monkeypatch.setattr("subprocess.Popen", Forked)
    told: list[str] = []
    cluster = calibrate(2, workload=tiny(2, num_passes=1), progress=told.append, warn=ignore)
    assert (cluster.num_devices, cluster.backend, cluster.levels[0].kind) == (2, "gloo", "host")
    assert cluster.provenance.startswith("measured 2")
    assert "2 ranks × 1 threads, torch 2." in cluster.provenance
    assert "; repeats spread by " in cluster.provenance
    assert {(line.collective, line.group_size) for line in cluster.collectives} == {(name, 2) for name in COLLECTIVES}
    assert all(line.fit_error is not None for line in cluster.collectives)
    device = cluster.device
    assert 1e7 < device.flops_per_s["fp32"] < 1e13
    assert 1e-7 < device.op_overhead_s < 1e-3
    assert set(device.operators) == set(samples())
    assert {kernel.kind for kernel in device.kernels} == {
        "matmul", "conv", "attention", "pointwise", "reduction", "lookup", "random", "copy",
    }  # fmt: skip
    assert 1e-6 < Communication(cluster, (2,)).time_s("all_reduce", 0, 2**20) < 1
    assert set(device.paces) == {probe.op for probe in pace_probes(TINY, "float32")}
    assert all(0 < pace < 1e4 for pace, _ in device.paces.values())
    assert set(device.first_uses) == set(samples())
    assert told == ["pass 1 of 1"]
    assert Cluster.local(2) == cluster == Cluster.load(cache_path(2))
    assert [path.name for path in cache_path(2).parent.iterdir()] == ["local-2.json"]


@in_whole_grids
def test_what_is_interrupted_goes_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle keeps every visit; the same call makes the others only, and takes these as they are."""

    def interrupt(stage: str) -> None:
        if stage == "pass 2 of 2":  # which takes seconds
            raise KeyboardInterrupt

    workload = tiny(1)
    monkeypatch.setattr("subprocess.Popen", Forked)
    with pytest.raises(KeyboardInterrupt):
        calibrate(1, workload=workload, progress=interrupt)
    kept = cache_path(1).with_suffix(".visits.jsonl")
    first = read_visits(kept)
    assert {"forward add", "chain 4", "backward"} <= set(first)
    assert not cache_path(1).exists()

    used: dict[str, list[Visit]] = {}
    monkeypatch.setattr(module, "read_visits", lambda path: used.update(read_visits(path)) or read_visits(path))
    cluster = calibrate(1, workload=workload, warn=ignore)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "calibrating: pass 2 of 2\n"
    assert all(used[key][: len(visits)] == visits for key, visits in first.items())
    assert {len(visits) for visits in used.values()} == {2}
    assert cluster.collectives == ()  # one rank has nothing to send
    assert not kept.exists()


@pytest.mark.parametrize("change", ["workload", "day", "machine"])
def test_points_of_another_measurement_are_not_used(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, kept = tiny(1), cache_path(1).with_suffix(".visits.jsonl")
    with module._folder(cache_path(1), workload) as folder:
        (folder / "visits.jsonl").write_text(json.dumps(Visit("forward add", [1.0])._asdict()) + '\n{"key": ')
    assert set(read_visits(kept)) == {"forward add"}
    with module._folder(cache_path(1), replace(workload, timeout_s=1.0)) as folder:  # how long one waits is no matter
        assert set(read_visits(folder / "visits.jsonl")) == {"forward add"}
    if change == "workload":
        workload = replace(workload, num_threads=2)
    elif change == "machine":
        monkeypatch.setattr(module, "device_name", lambda: "elsewhere")
    else:
        monkeypatch.setattr(
            module, "date", SimpleNamespace(today=lambda: SimpleNamespace(isoformat=lambda: "1999-12-31"))
        )
    with module._folder(cache_path(1), workload) as folder:
        assert read_visits(folder / "visits.jsonl") == {}


def test_a_rank_that_fails_ends_the_calibration() -> None:
    problem = r"^calibrate: rank \d ended with status 1: .*No module named 'nowhere'.*; correct the cause and calibrate"
    with pytest.raises(DistributedError, match=problem):
        calibrate(1, workload=tiny(1, overheads="nowhere"))
    assert not cache_path(1).exists()


def test_the_time_limit_ends_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[module._Ranks] = []
    start = module._Ranks.start

    def watched(ranks: module._Ranks, workload: Workload) -> None:
        started.append(ranks)
        start(ranks, workload)

    monkeypatch.setattr(module._Ranks, "start", watched)
    problem = (
        r"^calibrate: not done after 0\.3 s, in 'start'; the machine may be loaded; the same call goes on "
        r"from there, or give a longer timeout_s"
    )
    with pytest.raises(DistributedError, match=problem):
        calibrate(2, workload=tiny(2), timeout_s=0.3)
    assert [process.poll() for process in started[0].processes] == [-9, -9]


@pytest.mark.parametrize(
    ("num_ranks", "options", "problem"),
    [
        (0, {}, r"calibrate\.num_ranks: expected a positive integer, got 0; it is how many processes share"),
        (2, {"timeout_s": 0.0}, r"calibrate\.timeout_s: expected a positive number, got 0\.0; give it in seconds"),
        (2, {"device": "tpu"}, r"calibrate\.device: expected one of 'cpu', 'cuda', got 'tpu'; choose one of them"),
    ],
)
def test_bad_arguments(num_ranks: int, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ClusterError, match=f"^{problem}"):
        calibrate(num_ranks, **options)


@pytest.mark.parametrize(("available", "count", "seen"), [(False, 8, 0), (True, 1, 1)])
def test_every_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, available: bool, count: int, seen: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    problem = rf"^calibrate: 2 ranks need a GPU each, torch sees {seen}; give as many ranks as there are GPUs"
    with pytest.raises(MachineError, match=problem):
        calibrate(2, device="cuda", save=False)


def test_what_could_not_be_kept_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(module, "_run_ranks", lambda *given: pytest.fail("measured"))
    with pytest.raises(MachineError, match="cannot write the calibration"):
        calibrate(1)


# --------------------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize(
    ("spread", "load", "expected"),
    [
        (0.02, 0.5, ""),
        (0.5, 0.5, "noisy: repeats differ by 50% at the median, 50% at worst; calibrate again on an idle machine"),
        (0.02, 3.0, "noisy: 3.0 processes were running on 4 CPUs before it began; calibrate again on an idle machine"),
        (0.5, 3.0, "noisy: 3.0 processes were running on 4 CPUs before it began and repeats differ by 50%"),
    ],
)
def test_noise_is_told(spread: float, load: float, expected: str) -> None:
    found = noise_warning(invented(tiny(1), spread=spread), load, 4)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_a_loaded_machine_is_in_the_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(module, "_run_ranks", lambda workload, folder, *_: _write(invented(workload), folder))
    told: list[str] = []
    cluster = calibrate(2, workload=tiny(2), warn=told.append)
    assert told[0].startswith("noisy: 99.0 processes were running on ")
    assert cluster.provenance.endswith(told[0])
    assert Cluster.local(2).provenance == cluster.provenance


def _write(points: dict[str, Point], folder: Path) -> None:
    visits = [Visit(key, [point.seconds] * 2) for key, point in points.items()]
    (folder / "visits.jsonl").write_text("".join(json.dumps(visit._asdict()) + "\n" for visit in visits))


# ------------------------------------------------------------------------------------------------------------- results


def test_figures_come_from_the_points() -> None:
    """A machine of 1 GFLOP/s, 10 + 5 µs per parameter, 1 µs for each dispatch and 3 µs after others.

    Backward, 2 µs with a root of 0.5 µs, takes no longer after others. The first of an operator in a step takes 5 µs;
    gradients of `num_common` common operators then take 4 µs each. At the larger size an operator takes 7 µs.
    """
    workload = tiny(2)
    probes = {probe.key: probe for probe in kernel_probes(workload.sizes, "float32")}

    def seconds(key: str) -> float:
        name = key.removesuffix(" backward")
        if name in probes:
            passes = probes[name].passes()
            return 1e-6 + max((passes.forward[0].flops, passes.backward[0].flops)[name != key], 1000) / 1e9
        if key.startswith("chain"):
            return 10e-6 + 5e-6 * int(key.split()[1])
        if key == "backward":
            return 0.5e-6
        if key in ("backward in one", "backward in two"):
            return 10e-6 if key.endswith("two") else 8e-6
        if not key.startswith(COLLECTIVES):
            if key.startswith("pace"):
                return 7e-6
            if key.startswith("cold"):
                return 4e-6 if "backward" in key else 5e-6
            return 2e-6 if "backward" in key else 3e-6 if key.startswith("first") else 1e-6
        return 1e-4 + 1e-9 * int(key.split()[2])

    cluster = cluster_of(invented(workload, seconds), workload, "invented", 10**9, "2.0")
    device = cluster.device
    assert device.operators["add"] == pytest.approx((3e-6, 1.5e-6))
    assert device.operators["grouped_mm"] == pytest.approx((3e-6 / 4, 1.5e-6 / 4))  # of one of its four groups
    assert device.op_overhead_s == pytest.approx(2.25e-6)
    probes_, common = pace_probes(workload.sizes, "float32"), common_probes("float32")
    (tanh,) = (probe.passes() for probe in probes_ if probe.op == "tanh")
    alone = Compute(replace(device, paces={}))
    forward_s, backward_s = (sum(map(alone.work_s, works)) for works in (tanh.forward, tanh.backward))
    assert device.paces["tanh"] == pytest.approx((6e-6 / forward_s, 5e-6 / backward_s))
    assert "linear" not in device.paces  # has kernels of its own shapes
    assert len(common) * 2e-6 > len({probe.op for probe in common}) * 2e-6
    assert device.first_uses["tanh"] == pytest.approx((2e-6, 2e-6))  # backward as much as forward, at most
    assert device.update_overhead_s == pytest.approx(5e-6 - 2.5e-6)
    assert device.step_overhead_s == pytest.approx(10e-6 - 2.5e-6)
    assert device.put_off_s == pytest.approx(3 * 2e-6)  # a linear takes three times as long among others
    big = max((k for k in device.kernels if k.kind == "matmul"), key=lambda k: k.flops)
    assert big.seconds == pytest.approx(big.flops / 1e9)
    assert Compute(device).work_s(big) == pytest.approx(big.seconds, rel=0.3)
    assert cluster.collectives[0].latency_s == pytest.approx(1e-4, rel=1e-3)
    assert cluster.collectives[0].s_per_byte == pytest.approx(1e-9, rel=1e-3)
    assert all(error < 0.5 for error in fit_errors(device).values())
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_fit_errors_leave_out_one_kernel_only() -> None:
    """A product that memory bounds has a curve of its own, but speaks for those of like shape on the other, too."""
    device = Device("cpu", 10**9, 1e10, {"fp32": 1e11}, 0.9, 3e-6, "cpu")
    shapes, num_bytes = ((32, 32, 32), (64, 64, 64), (128, 128, 128), (64, 64, 32), (4096, 1, 1)), (1, 1, 1, 1e6, 1e6)
    works = [
        Work("matmul", (1, m, n, k), 2.0 * m * n * k, size, "float32")
        for (m, n, k), size in zip(shapes, num_bytes, strict=True)
    ]
    seconds = (1e-6, 9e-6, 7e-5, 1e-4, 9e-4)
    kernels = [measured(work, s) for work, s in zip(works, seconds, strict=True)]
    predicted_s = Compute(replace(device, kernels=[k for k in kernels if k.shape != (1, 64, 64, 64)])).work_s(works[1])
    without_likeness_s = Compute(replace(device, kernels=[kernels[0], kernels[2]])).work_s(works[1])
    assert fit_errors(replace(device, kernels=kernels)) == {"matmul": pytest.approx(abs(predicted_s / 9e-6 - 1))}
    assert predicted_s != pytest.approx(without_likeness_s, rel=0.05)


def test_a_dispatch_above_the_whole_time_leaves_a_kernel() -> None:
    points = invented(tiny(1), lambda key: 1e-3 if key.startswith("forward") else 1e-4)
    cluster = cluster_of(points, tiny(1), "invented", 10**9, "2.0")
    halves = {5e-5}  # of a convolution's gradients, which take as long as each other
    assert {round(kernel.seconds, 9) for kernel in cluster.device.kernels} == {1e-5, 1e-4} | halves


def test_both_gradients_of_a_convolution_share_the_time_that_they_take_together() -> None:
    took = {"backward": 10e-3, "gradient 0": 6e-3, "gradient 1": 8e-3}  # together less than one after the other

    def seconds(key: str) -> float:
        return next((s for end, s in took.items() if key.startswith("conv2d") and key.endswith(end)), 1e-6)

    device = cluster_of(invented(tiny(1), seconds), tiny(1), "invented", 10**9, "2.0").device
    forward, of_image, of_weight = (kernel for kernel in device.kernels if kernel.kind == "conv")
    assert (forward.backward, of_image.backward, of_weight.backward) == (False, True, True)
    assert of_image.seconds / of_weight.seconds == pytest.approx(6 / 8)
    assert of_image.seconds + of_weight.seconds == pytest.approx(10e-3, rel=1e-3)


@each("probe", list(kernel_probes(TINY, "float32")), ids=lambda probe: probe.key)
def test_every_gradient_that_has_kernels_of_its_own_is_timed(probe: Probe) -> None:
    """Attention's take one kernel, a convolution's two; those of all others are like other kernels."""
    num_kernels = len(probe.passes().backward)
    expected = {"sdpa": [3], "conv2d": [2, 1, 1]}.get(probe.op, [])
    operands = probe.operands("cpu")
    assert [len(operands[trained]) for trained in probe.gradients.values()] == expected
    assert not expected or num_kernels == max(1, len(expected) - 1)


def test_gpus_are_called_so() -> None:
    workload = tiny(2, device="cuda", dtypes=("float32", "bfloat16"))
    cluster = cluster_of(invented(workload), workload, "NVIDIA H100 80GB HBM3", 8 * 10**10, "2.0")
    assert (cluster.name, cluster.backend, cluster.device.kind) == ("local-cuda-2", "nccl", "cuda")
    assert set(cluster.device.flops_per_s) == {"fp32", "bf16"}
    seconds = {kernel.seconds for kernel in cluster.device.kernels}  # events do not time dispatch
    assert seconds == {1e-3, 5e-4}  # a half: of a convolution's gradients, which take as long as each other


def test_calibrated_gpus_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=8 * 10**10, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(module, "_run_ranks", lambda workload, folder, *_: _write(invented(workload), folder))
    cluster = calibrate(2, device="cuda")
    assert cluster.device.memory_bytes == 8 * 10**10
    assert detect_cluster({}) == cluster
    gpu.name = "NVIDIA A100-SXM4-80GB"
    assert detect_cluster({}).name == "detected-A100-80"


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workloads_are_data(device: str, thorough: bool) -> None:
    workload = module._workload(4, device, thorough, 9.0)
    assert hash(workload) == hash(replace(workload))
    assert workload.group_sizes == [2, 4]
    assert ("bfloat16" in workload.dtypes) == (thorough or device == "cuda")
    assert workload.num_passes == (30 if thorough else 6)
    assert workload.seconds_per_point / workload.num_passes == pytest.approx(0.005)


# -------------------------------------------------------------------------------------------------------------- probes


@each("probe", [*dispatch_probes("float32"), *pace_probes(CPU_SIZES, "float32")], ids=lambda probe: probe.key)
def test_every_sample_runs(probe: Probe) -> None:
    operands = probe.operands("cpu")
    result = probe.function(runtime)(*operands)
    if result.requires_grad:
        trained = [x for x in operands if x.requires_grad]
        assert len(torch.autograd.grad(result.sum(), trained)) == len(trained)


@each("probe", list(kernel_probes(TINY, "float32")), ids=lambda probe: probe.key)
def test_kernels_are_what_their_rows_say(probe: Probe) -> None:
    result = probe.function(runtime)(*probe.operands("cpu"))
    assert tuple(result.shape) == ROWS[probe.op].signature(probe.shapes, probe.attrs).result_shape
    assert probe.passes().forward[0].num_bytes > 0
    assert probe.passes().backward
    assert probe.passes().groups == 1


@each("probe", dispatch_probes("float32"), ids=lambda probe: probe.op)
def test_only_grouped_products_loop_over_groups(probe: Probe) -> None:
    """Over four matrices for each product that they are made of."""
    assert probe.passes().groups == (1 if probe.op not in LOOPS else 8 if probe.op == "experts" else 4)


@pytest.mark.parametrize("sizes", [CPU_SIZES, GPU_SIZES])
def test_keys_are_unique(sizes: Sizes) -> None:
    keys = [probe.key for dtype in ("float32", "bfloat16") for probe in kernel_probes(sizes, dtype)]
    assert len(set(keys)) == len(keys)


def test_bfloat16() -> None:
    probe = Probe("linear", ((4, 8), (2, 8)), "bfloat16")
    assert probe.function(runtime)(*probe.operands("cpu")).dtype == torch.bfloat16


# --------------------------------------------------------------------------------------------------------------- clocks


class FakeGpu:
    """Events and a host whose clock a test moves: each call is dispatched in 1 s, and runs on the device for 5 s."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0
        self.calls = 0

    def call(self) -> None:
        self.calls += 1
        self.host_s += 1.0
        self.device_s = max(self.device_s, self.host_s) + 5.0

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.device_s)

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at_s=0.0, synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at_s", max(self.device_s, self.host_s))
        event.elapsed_time = lambda end: (end.at_s - event.at_s) * 1e3
        return event


def test_kernels_of_gpus_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr("time.perf_counter", lambda: gpu.host_s)
    clock = measure.Clock("cuda", 1)
    assert clock.kernel_s(gpu.call) == pytest.approx(5.1)  # ten calls; the first waits for its dispatch
    assert clock.together_s(gpu.call) == pytest.approx(5.1)
    gpu.device_s = 1000.0
    assert clock.dispatch_s(gpu.call) == pytest.approx(1.0)


def test_other_processes_do_not_count_where_a_rank_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what reading a clock takes: a quarter and half a second. A call takes 1 s of its thread's, and 7 s."""
    now = {"thread_time": 0.0, "perf_counter": 0.0}

    def reading(clock: str, seconds: float) -> float:
        now[clock] += seconds
        return now[clock]

    def call() -> None:
        reading("thread_time", 1.0)
        reading("perf_counter", 7.0)

    monkeypatch.setattr("time.thread_time", lambda: reading("thread_time", 0.25))
    monkeypatch.setattr("time.perf_counter", lambda: reading("perf_counter", 0.5))
    clock = measure.Clock("cpu", 1)
    assert (clock.kernel_s(call), clock.dispatch_s(call), clock.together_s(call)) == (1.0, 1.0, 7.0)
    assert clock.kernel_s(lambda: reading("thread_time", -0.1)) == 0.0
    assert measure.Clock("cpu", 2).kernel_s(call) == 7.0


@pytest.mark.parametrize(
    ("waits", "allowed_s", "samples"), [(False, 12.0, 6), (True, 1.0, 4), (False, 0.0, 2), (True, 99.0, 10)]
)
def test_a_visit_has_samples_for_its_part_of_the_time(waits: bool, allowed_s: float, samples: int) -> None:
    rank = measure.Rank(0, tiny(1, seconds_per_point=allowed_s), Path("none"))
    rank._slowest = lambda seconds: [*seconds]
    times = iter([1.0, *[6.0] * samples])  # the first tells how many more
    task = measure._Task("key", lambda: int, lambda clock, call: next(times), calls=3, waits=waits)
    assert rank._visit(task) == ("key", [2.0] * samples)
    assert next(times, None) is None


def test_a_point_is_the_mean_of_all_visits_but_for_the_slowest_tenth() -> None:
    visits = [Visit("key", [1.0, 1.0, 1.0]), Visit("key", [2.0, 4.0, 2.0]), Visit("key", [4.0, 3.0, 4.0, 99.0])]
    assert Point.of(visits) == (pytest.approx(22 / 9), 4.0 / 1.25 - 1)
    assert Point.of([Visit("key", [0.0, 0.0])]).seconds == 1e-9  # what no clock has seen


@given(st.lists(st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)), min_size=1, max_size=40))
@example([(0.6179081731137949, 0.14731447292907124)] * 3)  # whose mean is rounded up
def test_the_mean_of_a_step_is_at_least_the_sum_of_its_parts_means(parts: list[tuple[float, float]]) -> None:
    """Whatever the parts have to do with each other; exactly that sum, where nothing is trimmed."""
    steps = [sum(part) for part in parts]
    of_parts = sum(trimmed_mean(part) for part in zip(*parts, strict=True))
    assert of_parts * (1 - 1e-9) <= trimmed_mean(steps) <= max(steps) * (1 + 1e-9)
    if len(parts) < 10:
        assert trimmed_mean(steps) == pytest.approx(of_parts)


def test_every_pass_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set against one another stays together; an interrupted pass goes on with what it lacks."""
    rank = measure.Rank(1, tiny(1), Path("none"))
    monkeypatch.setattr(rank, "_visit", lambda task: made.append(task.key))
    orders: list[list[str]] = []
    for number in (0, 1, 1):
        made: list[str] = []
        assert len(list(rank.visits(number))) == len(made)
        orders.append(made)
    assert orders[1] == orders[2] != orders[0]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(set(orders[0]))
    for order in orders:
        place = order.index("forward add")
        assert order[place : place + 4] == ["forward add", "backward add", "first add", "cold add"]
    made = []
    known = dict.fromkeys(orders[1][:-3], 2) | dict.fromkeys(orders[1][-3:], 1)
    assert len(list(rank.visits(1, known))) == 3
    assert made == orders[1][-3:]


@pytest.mark.parametrize("op", ["add", *measure._OPENERS])
def test_what_is_timed_cold_was_not_warmed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, done = measure.Rank(0, tiny(1), Path("none")), list[str]()
    monkeypatch.setattr(rank, "_work", lambda: done.append("others"))
    rank._work_backward = lambda: done.append("backward")
    rank._chains = {measure.CHAINS[-1]: lambda: done.append("update")}
    openers: dict[str, Any] = {name: (lambda n=name: done.append(n), []) for name in measure._OPENERS}
    rank._openers = openers
    (task,) = [task for group in rank._tasks() for task in group if task.key == f"cold {op}"]
    task.clock(rank.clock, lambda: done.append("timed"))
    assert done[:3] == ["others", "backward", "update"]
    assert done[-1] == "timed"
    assert len(done[3:-1]) == 2
    assert op not in done[3:-1]


def test_hosts_of_gpus_hide_what_is_cold() -> None:
    rank = measure.Rank(0, tiny(1, device="cuda"), Path("none"))
    assert not [task.key for group in rank._tasks() for task in group if "cold" in task.key]


def test_of_each_sample_the_slowest_rank_counts() -> None:
    """One rank or another is slow more often than each of them is."""
    found = run_ranks(_slowest_of_two, 2, 60.0)
    assert found == [[3.0, 4.0]] * 2


def _slowest_of_two() -> list[float]:
    rank = dist.get_rank()
    return measure.Rank(rank, tiny(2), Path("none"))._slowest([1.0, 4.0] if rank else [3.0, 2.0])


def test_collectives_are_timed_after_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, many = (measure.Rank(0, tiny(number), Path("none")) for number in (1, 2))
    monkeypatch.setattr(many, "_group", lambda size: None)
    done: list[str] = []
    monkeypatch.setattr(many, "_work", lambda: done.append("work"))
    every, without = ([task for group in rank._tasks() for task in group] for rank in (many, alone))
    collectives = [task for task in every if task.waits]
    assert {task.key for task in collectives} == {task.key for task in every} - {task.key for task in without}
    collectives[0].clock(many.clock, lambda: done.append("collective"))
    assert done == ["work", "collective"]
