"""The changes that would make a plan fit.

For the plan itself, where nothing fits: all ways, the fastest first. More devices, a smaller batch and offload are
costed by the same model. Pipeline stages are not among them: the search has tried them. For the plans that it is
compared with: the cheapest way that is known without a search (`cheapest`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, prod

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.moves import AFTER_THE_LOOP_S
from shardwright.cost.predict import predict
from shardwright.cost.timeline.memory import SAFE_SHARE, safe_bytes
from shardwright.cost.timeline.program import may_offload
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import with_lifetimes
from shardwright.pcg.step.optimizers import OPTIMIZERS
from shardwright.pcg.step.recompute import RECOMPUTES
from shardwright.pcg.step.time import check_time
from shardwright.pcg.units import size as said
from shardwright.search.choices.domain import CertifiedSplits
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.exact.solving import Candidate, Solver, over_time, rank
from shardwright.search.exact.within import time_and_bytes
from shardwright.search.plan import Remedy, most_frequent
from shardwright.search.request.pins import Pins
from shardwright.search.request.restrict import DATA, EXPERT, FREE, ZERO
from shardwright.search.request.spaces import microbatch_counts
from shardwright.search.tree.byhand import by_people
from shardwright.search.tree.ways import Ways, named

_LARGER = (2, 4, 8, 16)
_MOST_SOLVED = 2
"""The most larger clusters on which a plan's layouts are solved anew: a tenth of a second each for 80 layers."""
_MOST_TIMES = 4
"""The factor on a device's memory beyond which no device can take its place."""
_BY_BATCH = (DATA, ZERO, EXPERT)


def remedies(graph: Graph, best: Candidate, ways: Ways) -> tuple[Remedy, ...]:
    """Return the changes after which the smallest plan, or another one, fits, the fastest first."""
    solver, pins = ways.solver, ways.pins.by_hand
    changes = (
        _without_pins(best, ways), _more_devices(graph, solver, pins, ways), _smaller_batch(ways),
        _offload(best, solver), _states_on_host(best, ways),
    )  # fmt: skip
    return tuple(sorted((remedy for change in changes for remedy in change), key=lambda remedy: remedy.step_s))


def _without_pins(best: Candidate, ways: Ways) -> Iterator[Remedy]:
    """Yield plans on the same devices that fit where more memory or other layouts may be used."""
    if ways.solver.limit_bytes < safe_bytes(ways.solver.cluster.device.memory_bytes):
        known = (c for c in (best, *ways.known.values()) if _fits_the_device(c))
        if (fastest := min(known, key=lambda c: c.prediction.step_s, default=None)) is not None:
            yield Remedy(f"{named(fastest)}, without the pin of memory", fastest.prediction.step_s)
    free = min((c for c in ways.known.values() if ways.pins.limits and not c.limits), key=rank, default=None)
    if free is not None and free.fits:
        yield Remedy(f"{free.name}, without the pins", free.prediction.step_s)


def _fits_the_device(c: Candidate) -> bool:
    """Return whether a plan can be run, and fits where all of the memory may be used."""
    problem, solution, _ = c.solved
    in_loop = time_and_bytes(problem, solution)[0] < AFTER_THE_LOOP_S
    return in_loop and c.prediction.memory.total_bytes <= safe_bytes(c.prediction.device_bytes)


def _more_devices(graph: Graph, solver: Solver, pins: Pins, ways: Ways) -> Iterator[Remedy]:
    for times in _LARGER:
        larger = _larger(solver.cluster, times)
        if larger is None:
            return
        candidate = _by_hand(graph, larger, solver.certified, pins, ways)
        if candidate is not None:
            yield Remedy(f"{larger.num_devices} devices", candidate.prediction.step_s)
            return


def _larger(cluster: Cluster, times: int) -> Cluster | None:
    """Return the same cluster with so many times the machines; None for a cluster of several kinds."""
    if cluster.parts or not cluster.levels:
        return None
    last = cluster.levels[-1]
    return replace(cluster, levels=(*cluster.levels[:-1], replace(last, size=times * last.size)))


def _by_hand(graph: Graph, cluster: Cluster, certified: CertifiedSplits, pins: Pins, like: Ways) -> Candidate | None:
    """Return the first plan that fits of those that people choose by hand: these are quickly found."""
    solver = Solver(cluster, certified)
    if pins.memory_bytes is not None:
        solver = solver.within(pins.memory_bytes)
    ways = Ways(solver, graph, like.execution, pins, lambda message: None)
    return next((candidate for candidate in by_people(ways, able=True) if candidate.fits), None)


def _smaller_batch(ways: Ways) -> Iterator[Remedy]:
    """Yield a smaller batch that fits, where the batch cannot be cut into microbatches; else that has been tried."""
    size, n = ways.pins.size, ways.solver.cluster.num_devices
    for count in microbatch_counts(size)[1:] if ways.obstacle else ():
        mesh = over_time(Mesh(("dp",), (n,)), count)
        for mode in ways.modes:
            execution = replace(ways.execution, recompute=mode)
            solved = _solved(ways, mesh, execution)
            if solved is None:
                continue
            if ways.solver.fits(solved.prediction) and size // count % n == 0:
                yield Remedy(f"a batch of {size // count} in place of {size}", solved.prediction.step_s / count)
                return


def _solved(ways: Ways, mesh: Mesh, execution: Execution) -> Candidate | None:
    """Return ZeRO-3 on this mesh, if it has layouts."""
    try:
        return ways.solver.solve(ways.folded, mesh, (ZERO,), "remedy", execution)
    except NoLayoutsError:
        return None


def _offload(best: Candidate, solver: Solver) -> Iterator[Remedy]:
    stored_bytes, device_bytes = best.prediction.memory.stored_bytes, best.prediction.device_bytes
    if (
        best.folded
        or solver.excess_bytes(stored_bytes, device_bytes)
        or not may_offload(solver.cluster, best.execution)
    ):
        return
    execution = replace(best.execution, offload="full")
    prediction = predict(best.graph, solver.cluster, execution)
    if solver.fits(prediction):
        yield Remedy("activations offloaded to the host's memory", prediction.step_s)


def _states_on_host(best: Candidate, ways: Ways) -> Iterator[Remedy]:
    """Yield the plan with optimizer states that lie on the host between updates."""
    solver, repeats = ways.solver, ways.folded.repeats if best.folded else {}
    on_host = f"{best.execution.assumed.optimizer}@host"
    if on_host not in OPTIMIZERS or not solver.cluster.device.host_bytes_per_s:
        return
    execution = best.execution.assuming(optimizer=on_host)
    prediction = solver.predicted(best.graph, execution, repeats)
    if solver.fits(prediction):
        yield Remedy(f"optimizer states in the host's memory, optimizer={on_host!r}", prediction.step_s)


# ---- of plans that it is compared with ----


def remedied(costed: Sequence[Candidate], ways: Ways) -> Mapping[int, str]:
    """Return, by identity, the cheapest change with which each of the smallest plans that do not fit would fit."""
    unfit = sorted((c for c in costed if not c.fits), key=rank)[: ways.effort.remedies]
    larger = _Larger(ways)
    return {id(c): cheapest(c, ways, larger) for c in unfit}


def cheapest(candidate: Candidate, ways: Ways, larger: _Larger) -> str:
    """Return the change with which a plan would fit: `with ZeRO-3`, `on 512 devices`; "" where none near is known.

    The smallest change comes first: how the same layouts are run, the batch, more machines, offload, larger devices.
    """
    changes = (
        _run_otherwise(candidate, ways), _in_microbatches(candidate, ways), _on_a_batch(candidate, ways),
        larger.fitting(candidate), _offloaded(candidate, ways),
    )  # fmt: skip
    needed_bytes = ceil(candidate.prediction.memory.total_bytes / SAFE_SHARE)
    is_near = needed_bytes <= _MOST_TIMES * candidate.prediction.device_bytes
    return next(
        (text for change in changes for text in change), f"on devices of {said(needed_bytes)}" if is_near else ""
    )


def _run_otherwise(c: Candidate, ways: Ways) -> Iterator[str]:
    """Yield ways to run the same layouts: with more recomputation, or with weights gathered for every use."""
    solver, repeats = ways.solver, ways.folded.repeats if c.folded else {}
    if isinstance(c.execution.recompute, str):
        for mode in RECOMPUTES[RECOMPUTES.index(c.execution.recompute) + 1 :]:
            with suppress(PlanError):
                run = replace(c.execution.scheduled(split=(), recompute_by_stage=()), recompute=mode)
                if solver.fits(solver.predicted(c.graph, run, repeats)):
                    yield f"with {mode} recomputation"
    if set(most_frequent(c.graph)) - {"zero-3"}:
        parameters = [leaf.name for leaf in c.graph.leaves("parameter")]
        graph = with_lifetimes(c.graph, dict.fromkeys(parameters, "zero-3"))
        if solver.fits(solver.predicted(graph, c.execution, repeats)):
            yield "with ZeRO-3"


def _in_microbatches(c: Candidate, ways: Ways) -> Iterator[str]:
    """Yield as many microbatches as leave every device an example, where another number was asked for."""
    if ways.pins.microbatches is None or ways.obstacle or FREE in c.roles:
        return
    degree, devices = _data_degree(c), _devices(c)
    counts = [n for n in microbatch_counts(ways.pins.size) if ways.pins.size // n % degree == 0]
    if counts and counts[-1] > c.mesh.num_microbatches:
        candidate = _on_another_mesh(c, ways.solver, ways, over_time(devices, counts[-1]))
        if candidate is not None and candidate.fits:
            yield f"in {counts[-1]} microbatches"


def _on_a_batch(c: Candidate, ways: Ways) -> Iterator[str]:
    """Yield a batch with one example per device, if the plan would fit by what it keeps.

    Only where the batch does not divide, and devices have more than one example.
    """
    degree, count = _data_degree(c), c.mesh.num_microbatches
    examples = ways.pins.size // count
    if examples < 2 or examples % degree == 0:
        return
    for role, extent in zip(c.roles, _devices(c).sizes, strict=True):
        examples //= extent if role in _BY_BATCH and examples % extent == 0 else 1
    memory = c.prediction.memory
    values = memory.activations_bytes + memory.temporary_bytes + memory.slack_bytes
    used_bytes = memory.total_bytes - values * (1 - 1 / examples)
    if used_bytes <= ways.solver.limit_of(c.prediction.device_bytes):
        yield f"with a batch of {degree * count}"


def _offloaded(c: Candidate, ways: Ways) -> Iterator[str]:
    if not may_offload(ways.solver.cluster, c.execution) or c.execution.schedule.num_stages > 1:
        return
    repeats = ways.folded.repeats if c.folded else {}
    with suppress(PlanError):
        if ways.solver.fits(ways.solver.predicted(c.graph, replace(c.execution, offload="full"), repeats)):
            yield "with activations offloaded to the host's memory"


class _Larger:
    """Clusters of more machines, on which plans are laid out in the same way along longer axes."""

    def __init__(self, ways: Ways) -> None:
        self.ways, self._solvers = ways, dict[int, Solver]()

    def fitting(self, c: Candidate) -> Iterator[str]:
        """Yield more devices along the outermost axis; clusters are left out on which the plan cannot shrink enough."""
        if FREE in c.roles or c.roles[0] not in _BY_BATCH or c.limits or c.execution.schedule.stage_sizes:
            return
        likely = [times for times in _LARGER if self._least_bytes(c, times) <= self.ways.solver.limit_bytes]
        for times in likely[:_MOST_SOLVED]:
            solver = self._solver(times)
            if solver is None:
                return
            devices = _devices(c)
            wider = Mesh(devices.names, (times * devices.sizes[0], *devices.sizes[1:]))
            candidate = _on_another_mesh(c, solver, self.ways, over_time(wider, c.mesh.num_microbatches))
            if candidate is not None and candidate.fits:
                yield f"on {solver.cluster.num_devices} devices"

    def _least_bytes(self, c: Candidate, times: int) -> float:
        """Return the least that is left of a plan's memory with so many times the devices."""
        memory, share = c.prediction.memory, 1 - 1 / times
        sharded = memory.stored_bytes if c.roles[0] == ZERO else 0
        divides = self.ways.pins.size // c.mesh.num_microbatches % (times * _data_degree(c)) == 0
        values = memory.activations_bytes + memory.temporary_bytes + memory.slack_bytes if divides else 0
        return memory.total_bytes - share * (sharded + values)

    def _solver(self, times: int) -> Solver | None:
        if times not in self._solvers:
            cluster = _larger(self.ways.solver.cluster, times)
            if cluster is None:
                return None
            self._solvers[times] = Solver(cluster, self.ways.solver.certified).within(self.ways.solver.limit_bytes)
        return self._solvers[times]


def _on_another_mesh(c: Candidate, solver: Solver, ways: Ways, mesh: Mesh) -> Candidate | None:
    """Return a plan with the same roles, run in the same way, on another mesh, or None where there is none."""
    with suppress(PlanError):
        run = c.execution.scheduled(split=(), recompute_by_stage=())
        solved = solver.solve(ways.folded, mesh, c.roles, c.name, run, (c.lifetimes,), c.priced, limits=c.limits)
        if mesh.num_microbatches > 1:
            check_time(solved.graph, solved.execution)
        return solved
    return None


def _devices(c: Candidate) -> Mesh:
    """Return a plan's mesh without the axis of time."""
    first = TIME in c.mesh.names
    return Mesh(c.mesh.names[first:], c.mesh.sizes[first:])


def _data_degree(c: Candidate) -> int:
    """Return the number of devices that the batch is divided among."""
    return prod(extent for role, extent in zip(c.roles, _devices(c).sizes, strict=True) if role in _BY_BATCH)
