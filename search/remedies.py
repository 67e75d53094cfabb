"""What would make a model fit that does not, the fastest way first.

More devices, a smaller batch and offload are costed by the same model. Pipeline stages are none of it: the search has
tried them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.cost.timeline.memory import safe_bytes
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.search.domain import CertifiedSplits
from shardwright.search.pins import Pins
from shardwright.search.plan import Remedy
from shardwright.search.problem import NoLayoutsError
from shardwright.search.restrict import ZERO
from shardwright.search.solving import Candidate, Solver, over_time, rank
from shardwright.search.spaces import microbatch_counts
from shardwright.search.tuning import Tuner

_LARGER = (2, 4, 8, 16)


def remedies(graph: Graph, best: Candidate, tuner: Tuner) -> tuple[Remedy, ...]:
    """Changes after which the smallest plan, or another one, fits, the fastest first."""
    solver, pins = tuner.solver, tuner.pins.by_hand
    ways = (
        _without_pins(best, tuner), _more_devices(graph, solver, pins, tuner), _smaller_batch(tuner),
        _offload(best, solver),
    )  # fmt: skip
    return tuple(sorted((found for way in ways for found in way), key=lambda remedy: remedy.step_s))


def _without_pins(best: Candidate, tuner: Tuner) -> Iterator[Remedy]:
    """What is there on the same devices, where more memory or other layouts may be used."""
    limit = safe_bytes(tuner.solver.cluster.device.memory_bytes)
    if tuner.solver.limit_bytes < limit and best.prediction.memory.total_bytes <= limit:
        yield Remedy("without the pin of memory", best.prediction.step_s)
    free = min((c for c in tuner.tried if tuner.pins.limits and not c.limits), key=rank, default=None)
    if free is not None and free.fits:
        yield Remedy(f"{free.name}, without the pins", free.prediction.step_s)


def _more_devices(graph: Graph, solver: Solver, pins: Pins, tuner: Tuner) -> Iterator[Remedy]:
    for times in _LARGER:
        larger = _larger(solver.cluster, times)
        if larger is None:
            return
        found = _by_hand(graph, larger, solver.certified, pins, tuner)
        if found is not None:
            yield Remedy(f"{larger.num_devices} devices", found.prediction.step_s)
            return


def _larger(cluster: Cluster, times: int) -> Cluster | None:
    """The same cluster with so many times the machines; None for one of several kinds."""
    if cluster.parts or not cluster.levels:
        return None
    last = cluster.levels[-1]
    return replace(cluster, levels=(*cluster.levels[:-1], replace(last, size=times * last.size)))


def _by_hand(graph: Graph, cluster: Cluster, certified: CertifiedSplits, pins: Pins, like: Tuner) -> Candidate | None:
    """The first that fits of the plans that people choose by hand: they are quickly found."""
    solver = Solver(cluster, certified)
    if pins.memory_bytes is not None:
        solver = solver.within(pins.memory_bytes)
    tuner = Tuner(solver, graph, like.execution, pins, lambda message: None)
    return next((found for found in tuner.baselines() if found.fits), None)


def _smaller_batch(tuner: Tuner) -> Iterator[Remedy]:
    """Where the batch cannot be cut into microbatches; else that has been tried."""
    size, n = tuner.pins.size, tuner.solver.cluster.num_devices
    for count in microbatch_counts(size)[1:] if tuner.obstacle else ():
        mesh = over_time(Mesh(("dp",), (n,)), count)
        for mode in tuner.modes:
            execution = replace(tuner.execution, recompute=mode)
            found = _solved(tuner, mesh, execution)
            if found is None:
                continue
            if tuner.solver.fits(found.prediction) and size // count % n == 0:
                yield Remedy(f"a batch of {size // count} in place of {size}", found.prediction.step_s / count)
                return


def _solved(tuner: Tuner, mesh: Mesh, execution: Execution) -> Candidate | None:
    """ZeRO-3 on this mesh, if it has layouts."""
    try:
        return tuner.solver.solve(tuner.folded, mesh, (ZERO,), "remedy", execution)
    except NoLayoutsError:
        return None


def _offload(best: Candidate, solver: Solver) -> Iterator[Remedy]:
    stored_bytes, device_bytes = best.prediction.memory.stored_bytes, best.prediction.device_bytes
    if best.folded or solver.cluster.device.kind == "cpu" or solver.excess_bytes(stored_bytes, device_bytes):
        return
    execution = replace(best.execution, offload=True)
    prediction = predict(best.graph, solver.cluster, execution)
    if solver.fits(prediction):
        yield Remedy("activations offloaded to the host's memory (costed, not run)", prediction.step_s)
