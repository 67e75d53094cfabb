"""Fewer devices than a cluster has, where a batch does not divide among all of them.

Otherwise there is a mesh of all devices on which each has its share. On some sub-clusters the batch divides, or a part
of it and some other dimension do. Of these, the search plans for the ones on which a bound allows a faster step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import islice
from math import inf
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.smaller import smaller_cluster
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.search.choices.domain import CertifiedSplits
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.exact.folding import fold
from shardwright.search.exact.solving import Solver
from shardwright.search.plan import Alternative, Idle, Plan, most_frequent
from shardwright.search.request.restrict import FREE
from shardwright.search.request.spaces import batch_size, degrees

WORTH = 0.9
"""The share of a step on all devices that a step on fewer may take: about as far as predictions can be wrong."""
_MOST_PLANNED = 2
"""The most sub-clusters that are planned for, each of which takes about as long as all devices do."""


class _Smaller(NamedTuple):
    least_s: float
    cluster: Cluster


def asked_for(cluster: Cluster, mesh: Mesh | None, stages: tuple[int, ...] = ()) -> tuple[Cluster, Idle]:
    """Return the part of a cluster that a mesh of fewer devices runs on, or stages of so many devices.

    Raises `PlanError` where there is no such part.
    """
    num_asked = sum(stages) if mesh is None or stages else mesh.num_devices
    what = f"stages={list(stages)}" if stages else f"mesh {mesh}"
    part, total = smaller_cluster(cluster, num_asked), cluster.num_devices
    if part is None:
        sizes = " × ".join(str(level.size) for level in reversed(cluster.levels))
        raise PlanError(
            f"{what} {'have' if stages else 'has'} {num_asked} devices: of cluster {cluster.name} ({sizes}), no equal "
            f"shares of its units have so many; choose {'stages' if stages else 'a mesh'} of {total} devices, or of "
            "as many on each of some units"
        )
    reason = f"stages of {num_asked} devices were asked for" if stages else f"a mesh of {num_asked} was asked for"
    return part, Idle(cluster.name, total - num_asked, reason)


def with_idle(plan: Plan, graph: Graph, execution: Execution, certified: CertifiedSplits,
              planned: Callable[[Cluster], Plan]) -> Iterator[Plan]:  # fmt: skip
    """Yield the plan for all devices of its cluster, then better plans of `planned` that leave some idle."""
    best, whole = plan, plan.cluster
    yield plan
    most_s = plan.prediction.step_s * WORTH if _fits(plan) else inf
    for smaller in list(_promising(whole, most_s, graph, execution, certified))[:_MOST_PLANNED]:
        if _fits(best) and smaller.least_s >= _most_s(plan, best):
            return
        try:
            smaller_plan = planned(smaller.cluster)
        except NoLayoutsError:  # the sub-cluster allows no layouts that keep to the request
            continue
        if _fits(smaller_plan) and not (_fits(best) and smaller_plan.prediction.step_s >= _most_s(plan, best)):
            best = smaller_plan
        yield best if best is plan else _with_reason(best, plan, batch_size(graph), whole)


def on_a_part(cluster: Cluster, graph: Graph, execution: Execution, certified: CertifiedSplits,
              planned: Callable[[Cluster], Plan]) -> Iterator[Plan]:  # fmt: skip
    """Yield plans that leave devices idle, where no layouts on all of a cluster keep to the request."""
    for smaller in list(_promising(cluster, inf, graph, execution, certified))[:_MOST_PLANNED]:
        with suppress(NoLayoutsError):
            plan = planned(smaller.cluster)
            why = f"{_among(batch_size(graph), cluster)}, and on all of them nothing keeps to what was asked for"
            yield replace(plan, idle=Idle(cluster.name, cluster.num_devices - plan.cluster.num_devices, why))


def _most_s(plan: Plan, best: Plan) -> float:
    """Return the step that a plan on fewer devices has to beat."""
    return plan.prediction.step_s * WORTH if best is plan else best.prediction.step_s


def _fits(plan: Plan) -> bool:
    return plan.prediction.memory.total_bytes <= plan.report.limit_bytes


def _with_reason(best: Plan, plan: Plan, size: int, whole: Cluster) -> Plan:
    """Return the plan with the reason for idle devices, and with the plan for all devices among its alternatives."""
    took = f"a step takes {plan.prediction.step_s / best.prediction.step_s:.2g} times as long"
    why = f"{_among(size, whole)}, and on all of them {took if _fits(plan) else 'no plan fits'}"
    alternative = Alternative(
        f"search on {plan.mesh}", plan.mesh, plan.prediction, _fits(plan), plan.execution, most_frequent(plan.graph)
    )
    idle = Idle(whole.name, whole.num_devices - best.cluster.num_devices, why)
    return replace(best, idle=idle, alternatives=(*best.alternatives, alternative))


def _among(size: int, cluster: Cluster) -> str:
    return f"the batch of {size} does not divide among {cluster.num_devices}" if size else "work does not divide"


def _promising(
    whole: Cluster, most_s: float, graph: Graph, execution: Execution, certified: CertifiedSplits
) -> Iterator[_Smaller]:
    """Yield sub-clusters on which a step could take less than `most_s`, the likeliest first."""
    size, n = batch_size(graph), whole.num_devices
    if n == 1 or (size and size % n == 0):
        return
    folded, solver = fold(graph), Solver(whole, certified)
    work_s = cache(lambda mesh: sum(solver.work_s(folded, execution, mesh).values()))
    best_of_size = dict[int, _Smaller]()
    for cluster, mesh in parts_with_shares(whole, graph):
        if any(work_s(part) / (cluster.num_devices // part.num_devices) >= most_s for part in _odd(cluster)):
            continue
        solver = Solver(cluster, certified)
        least_s = solver.least_s(folded, mesh, (FREE,) * len(mesh), execution)
        known = best_of_size.get(cluster.num_devices)
        if least_s < (most_s if known is None else known.least_s):
            best_of_size[cluster.num_devices] = _Smaller(least_s, cluster)
    yield from sorted(best_of_size.values(), key=lambda smaller: smaller.least_s)


def _odd(cluster: Cluster) -> Iterator[Mesh]:
    """Yield a mesh of one device, and one whose axes are the odd primes of the number of devices, if one or two.

    Work that has no shares on such a mesh has none on all devices, except by the other devices.
    """
    yield Mesh(("x",), (1,))
    odd, primes = cluster.num_devices, list[int]()
    for prime in (2, *range(3, odd + 1, 2)):
        while odd % prime == 0:
            odd //= prime
            primes += [prime] if prime > 2 else []
    if 0 < len(primes) <= 2:
        yield Mesh(tuple("xy"[: len(primes)]), tuple(primes))


def parts_with_shares(cluster: Cluster, graph: Graph) -> Iterator[tuple[Cluster, Mesh]]:
    """Yield, per degree that divides the batch, the most devices to which other dimensions give shares; and one device.

    Also the most that divide the number of devices: all work that has shares on those has shares on these.
    """
    n, size, known = cluster.num_devices, batch_size(graph), set[Mesh]()
    extents = {extent for kind in graph.types.values() for extent in kind.shape}
    batches = [1, *(degrees(size) if size > 1 else ())]
    most = [((n - 1) // data, data) for data in batches if data < n]
    dividing = [(n // data // degrees(n)[0], data) for data in batches if n // degrees(n)[0] % data == 0]
    for largest, data in [*most, *dividing, (1, 1)]:
        shares = (other for other in range(largest, 0, -1) if other == 1 or any(e and e % other == 0 for e in extents))
        parts = ((other, part) for other in shares if (part := smaller_cluster(cluster, data * other)) is not None)
        for other, part in islice(parts, 1):
            mesh = Mesh(("x", "y"), (data, other)) if min(data, other) > 1 else Mesh(("x",), (data * other,))
            if mesh not in known:
                known.add(mesh)
                yield part, mesh
