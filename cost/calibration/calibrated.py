"""The cluster that measured points describe; its provenance has date, ranks, errors of the fits and noise."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date

from shardwright.cost.calibration.fit import Fit, fit_line
from shardwright.cost.calibration.probes import common_probes, dispatch_probes, kernel_probes, pace_probes
from shardwright.cost.calibration.samples import Probe
from shardwright.cost.calibration.workload import CHAINS, Point, Workload
from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster, Collective, CollectiveLine
from shardwright.cost.clusters.device import PRECISION_OF_DTYPE, Device, DeviceKind
from shardwright.cost.clusters.presets import CONTEXT_BYTES
from shardwright.cost.clusters.topology import Level
from shardwright.cost.compute.compute import Compute
from shardwright.cost.compute.kernels import Kernel, measured
from shardwright.cost.compute.work import Work

_LEAST_SHARE = 0.1
"""The least share of an operator's time on the host that is its kernel, whatever its measured dispatch."""
_LOUD = 0.15
"""The largest median spread of repeats (upper over lower quartile, minus 1) that is not called noisy."""
_BASIC = ("add", "mul", "relu", "neg")


def cluster_of(
    points: Mapping[str, Point], workload: Workload, name: str, memory_bytes: int, torch_version: str
) -> Cluster:
    """Return the measured machine as a cluster; `name` is its device's name."""
    device = _device(points, workload, name, memory_bytes)
    fits: dict[tuple[Collective, int], Fit] = {
        (collective, size): _fit(points, workload, collective, size)
        for collective in COLLECTIVES
        for size in workload.group_sizes
    }
    lines = tuple(
        CollectiveLine(collective, size, fit.latency_s, fit.s_per_byte, fit.median_error)
        for (collective, size), fit in fits.items()
    )
    level = _level(workload, fits.get(("all_gather", workload.num_ranks)))
    where = "local" if workload.device == "cpu" else "local-cuda"
    backend = "gloo" if workload.device == "cpu" else "nccl"
    provenance = _provenance(points, workload, device, fits, torch_version)
    return Cluster(f"{where}-{workload.num_ranks}", device, (level,), backend, provenance, lines)


def noise(points: Mapping[str, Point]) -> tuple[float, float]:
    """Return the median and the largest spread of the repeats, over all points."""
    spreads = [point.spread for point in points.values()]
    return statistics.median(spreads), max(spreads)


def noise_warning(points: Mapping[str, Point], load: float, num_cpus: int) -> str:
    """Return a warning if other work or noise disturbed the measurement, or "".

    `load` is the number of running processes before the measurement began.
    """
    median, worst = noise(points)
    causes = [f"{load:.1f} processes were running on {num_cpus} CPUs before it began"] if load > num_cpus / 2 else []
    if median > _LOUD:
        causes.append(f"repeats differ by {median:.0%} at the median, {worst:.0%} at worst")
    return f"noisy: {' and '.join(causes)}; calibrate again on an idle machine" if causes else ""


def fit_errors(device: Device) -> dict[str, float]:
    """Return the median relative error, by kind, of predicting a measured kernel from the others of its kind.

    A kernel counts only if it lies between two others on the roofline's curve that bounds it.
    """
    compute, curves = Compute(device), dict[tuple[str, str, bool, bool], list[tuple[float, Kernel]]]()
    for kernel in device.kernels:
        compute_s, memory_s = compute.bounds(kernel)
        key = (kernel.kind, kernel.dtype, kernel.backward, memory_s > compute_s)
        curves.setdefault(key, []).append((max(compute_s, memory_s), kernel))
    errors: dict[str, list[float]] = {}
    for (kind, dtype, *_), curve in sorted(curves.items()):
        alike = [kernel for kernel in device.kernels if (kernel.kind, kernel.dtype) == (kind, dtype)]
        for _, kernel in sorted(curve, key=lambda entry: entry[0])[1:-1]:
            others = replace(device, kernels=[other for other in alike if other is not kernel])
            errors.setdefault(kind, []).append(abs(Compute(others).work_s(kernel) / kernel.seconds - 1))
    return {kind: statistics.median(of_kind) for kind, of_kind in errors.items()}


# ------------------------------------------------------------------------------------------------------------- device


def _device(points: Mapping[str, Point], workload: Workload, name: str, memory_bytes: int) -> Device:
    kind: DeviceKind = "cpu" if workload.device == "cpu" else "cuda"
    operators = _operators(points, workload)
    among_others = _among_others(points, operators, workload.dtypes[0])
    probes = [probe for dtype in workload.dtypes for probe in kernel_probes(workload.sizes, dtype)]
    rates = _matmul_rates(points, probes)
    largest = [p for p in probes if p.op == "add" and p.dtype == workload.dtypes[0]][-1]
    parameter_s, step_s = _overheads(points)
    bare = Device(
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=largest.passes().forward[0].num_bytes / points[largest.key].seconds,
        flops_per_s={PRECISION_OF_DTYPE[dtype]: max(measured_rates) for dtype, measured_rates in rates.items()},
        matmul_efficiency=min(
            statistics.median(measured_rates) / max(measured_rates) for measured_rates in rates.values()
        ),
        op_overhead_s=statistics.median(seconds for op in _BASIC for seconds in among_others[op]),
        kind=kind,
        update_overhead_s=max(0.0, parameter_s - sum(operators["mul"])),
        step_overhead_s=max(0.0, step_s - sum(operators["sum"])),
        put_off_s=_put_off_s(points, among_others["linear"][0] / operators["linear"][0]) if kind == "cpu" else 0.0,
        context_bytes=CONTEXT_BYTES if kind == "cuda" else 0,
        operators=operators,
    )
    kernels = tuple(_kernels(points, probes, bare))
    vector = [k.flops / k.seconds for k in kernels if k.kind == "pointwise" and k.flops > k.num_bytes]
    known = replace(bare, kernels=kernels, vector_flops_per_s=statistics.median(vector))
    first_uses = _first_uses(points, workload) if kind == "cpu" else {}
    return replace(known, operators=among_others, paces=_paces(points, workload, known), first_uses=first_uses)


def _overheads(points: Mapping[str, Point]) -> tuple[float, float]:
    """Return a step's seconds per parameter, multiplication included, and without parameters, sum included."""
    few, many = (points[f"chain {length}"].seconds for length in CHAINS)
    parameter_s = max(0.0, (many - few) / (CHAINS[1] - CHAINS[0]))
    return parameter_s, few - CHAINS[0] * parameter_s


def _put_off_s(points: Mapping[str, Point], longer: float) -> float:
    """Return how much longer a product takes if its weight's gradient waits for a second part, scaled by `longer`."""
    return longer * max(0.0, points["backward in two"].seconds - points["backward in one"].seconds)


def _operators(points: Mapping[str, Point], workload: Workload) -> dict[str, tuple[float, float]]:
    """Return every operator's dispatch seconds, (forward, backward); for a loop over groups, those of one group."""
    root_s = points["backward"].seconds
    passes_s: dict[str, tuple[float, float]] = {}
    for probe in dispatch_probes(workload.dtypes[0], workload.device):
        forward, backward = (points[f"{way} {probe.op}"].seconds for way in ("forward", "backward"))
        groups = probe.passes().groups
        passes_s[probe.op] = forward / groups, max(0.0, backward - root_s) / groups
    return passes_s


def _among_others(
    points: Mapping[str, Point], operators: Mapping[str, tuple[float, float]], dtype: str
) -> dict[str, tuple[float, float]]:
    """Return dispatch seconds in a model, where different operators alternate: two to three times those in a loop.

    Forward is measured, operator by operator. Backward is scaled by the ratio that common operators show together; the
    scale is smaller for operators whose forward slows down less, such as those that consist of many.
    """
    longer = {op: max(1.0, points[f"first {op}"].seconds / points[f"forward {op}"].seconds) for op in operators}
    probes = common_probes(dtype)
    alone_s = statistics.mean(operators[probe.op][1] for probe in probes)
    together_s = points["common backward"].seconds - points["backward"].seconds
    common = statistics.median(longer[probe.op] for probe in probes)
    slope = max(0.0, together_s / max(alone_s, 1e-9) - 1) / max(common - 1, 1e-9)
    return {op: (f * longer[op], b * (1 + slope * (longer[op] - 1))) for op, (f, b) in operators.items()}


def _first_uses(points: Mapping[str, Point], workload: Workload) -> dict[str, tuple[float, float]]:
    """Return how much longer an operator's first dispatch in a step takes than its dispatch among others.

    Forward is measured. Backward is measured for common operators together and divided in proportion to forward. It is
    at most as large as forward, so that noise in small times does not become large.
    """
    dtype = workload.dtypes[0]
    longer = {
        probe.op: max(0.0, points[f"cold {probe.op}"].seconds - points[f"first {probe.op}"].seconds)
        for probe in dispatch_probes(dtype, workload.device)
    }
    probes = common_probes(dtype)
    backward_s = len(probes) * (points["cold common backward"].seconds - points["common backward"].seconds)
    forward_s = sum(longer[op] for op in {probe.op for probe in probes})
    share = max(0.0, backward_s) / max(forward_s, backward_s, 1e-9)
    return {op: (seconds, share * seconds) for op, seconds in longer.items()}


def _matmul_rates(points: Mapping[str, Point], probes: Sequence[Probe]) -> dict[str, list[float]]:
    """Return the FLOP per second of every matrix multiplication, by dtype."""
    rates: dict[str, list[float]] = {}
    for probe in probes:
        if probe.op in ("linear", "matmul"):
            rates.setdefault(probe.dtype, []).append(probe.passes().forward[0].flops / points[probe.key].seconds)
    return rates


def _kernels(points: Mapping[str, Point], probes: Sequence[Probe], device: Device) -> list[Kernel]:
    """Return the measured kernels, without the dispatch that a measurement on the host includes."""
    kernels: list[Kernel] = []
    for probe in probes:
        passes, dispatch_s = probe.passes(), device.operators[probe.op]
        kernels.append(measured(passes.forward[0], _kernel_s(points[probe.key].seconds, dispatch_s[0], device)))
        if keys := list(probe.gradients):
            together, *alone = (points[key].seconds for key in keys)
            backward_s = _kernel_s(together, dispatch_s[1], device)
            shares = [seconds / sum(alone) for seconds in alone] or [1.0]
            kernels += [measured(work, s * backward_s) for work, s in zip(passes.backward, shares, strict=True)]
    return kernels


def _paces(points: Mapping[str, Point], workload: Workload, device: Device) -> dict[str, tuple[float, float]]:
    """Return each operator's measured kernel seconds over the seconds that `device`'s kernels of its kind predict."""
    compute = Compute(device)

    def pace(works: Sequence[Work], paced: str, dispatch: str) -> float:
        """Return 1 where there is no kernel to compare, as in the backward of a sum, which is only a view."""
        predicted_s = sum(map(compute.work_s, works))
        if not predicted_s:
            return 1.0
        return _kernel_s(points[paced].seconds, points[dispatch].seconds, device) / predicted_s

    paces: dict[str, tuple[float, float]] = {}
    for probe in pace_probes(workload.sizes, workload.dtypes[0]):
        op, passes = probe.op, probe.passes()
        forward = pace(passes.forward, f"pace {op}", f"forward {op}")
        paces[op] = forward, pace(passes.backward, f"pace {op} backward", f"backward {op}")
    return paces


def _kernel_s(seconds: float, dispatch_s: float, device: Device) -> float:
    """Return the kernel's part of an operator's `seconds`: on the host, without its dispatch."""
    return max(seconds - dispatch_s, seconds * _LEAST_SHARE) if device.kind == "cpu" else seconds


# -------------------------------------------------------------------------------------------------------- collectives


def _fit(points: Mapping[str, Point], workload: Workload, collective: str, size: int) -> Fit:
    seconds = [points[f"{collective} {size} {num_bytes}"].seconds for num_bytes in workload.collective_bytes]
    fit = fit_line(workload.collective_bytes, seconds)
    # A line without slope means that no size was large enough; the links are then as fast as memory.
    return fit if fit.s_per_byte > 0 else Fit(fit.latency_s, 1e-12, fit.median_error, fit.worst_error)


def _level(workload: Workload, all_gather: Fit | None) -> Level:
    """Return the links that explain the all-gather's times: (n−1)/n of the bytes in n−1 hops."""
    num_ranks = workload.num_ranks
    name, kind = ("rank", "host") if workload.device == "cpu" else ("gpu", "nvlink")
    if all_gather is None:
        return Level(name, num_ranks, 1e12, 0.0, kind)  # one rank: nothing is ever sent
    hops = num_ranks - 1
    return Level(name, num_ranks, hops / num_ranks / all_gather.s_per_byte, all_gather.latency_s / hops, kind)


def _provenance(
    points: Mapping[str, Point],
    workload: Workload,
    device: Device,
    fits: Mapping[tuple[Collective, int], Fit],
    torch_version: str,
) -> str:
    ranks = f"{workload.num_ranks} ranks × {workload.num_threads} threads"
    by_kind = [f"{kind} {error:.0%}" for kind, error in fit_errors(device).items()]
    for collective in dict.fromkeys(name for name, _ in fits):
        errors = [fit.median_error for (name, _), fit in fits.items() if name == collective]
        by_kind.append(f"{collective} {statistics.median(errors):.0%}")
    median, worst = noise(points)
    return (
        f"measured {date.today().isoformat()}, {ranks}, torch {torch_version}; median error of the fits: "
        f"{', '.join(by_kind)}; repeats spread by {median:.0%} at the median, {worst:.0%} at worst"
    )
