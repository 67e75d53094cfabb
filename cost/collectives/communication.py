"""Time of collectives along the axes of a mesh.

`groups.py` computes the links of a group, `algorithms.py` an algorithm's time on them; `nccl.py` and `gloo.py` make the
library's own choice of algorithm. On a grid (a torus, a mesh with `dims`) no library's choice is known: there the
fastest algorithm counts. **Bytes** are always those of the full tensor of one group. The time of a collective is a
chain of straight pieces over them (`curve.py`) that never falls.

Measured lines, where the cluster has them, replace all this; where one collective and group size has several, the
greatest counts (a flat one for small tensors, a steep one for large).

Curves are cached by the links of a group, so costs do not grow with the cluster where groups are alike. Where the
cluster has schedules, a curve has their times wherever one is picked (`scheduled.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf, log2, prod

from shardwright.cost.clusters.cluster import COLLECTIVES, Backend, Cluster, Collective, CollectiveLine
from shardwright.cost.collectives import algorithms, gloo, nccl
from shardwright.cost.collectives.algorithms import LinkUse
from shardwright.cost.collectives.curve import CostLine, Curve, highest, lowest, straight
from shardwright.cost.collectives.groups import Link, between, check_mesh, group_of, links_of, network_of, one_switch
from shardwright.cost.collectives.scheduled import Picks, picks
from shardwright.pcg.errors import ClusterError

NOTHING = straight(CostLine(0.0, 0.0), "nothing")
SCHEDULED: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""The collectives that can run by a schedule: those of moves, gathered parameters and gradients."""


class Communication:
    """Times of collectives along the axes of one mesh on one cluster.

    Args:
        factors: on NCCL's own latency and time per byte, by the phase of an algorithm under a protocol.

    Raises:
        ClusterError: a size is not a positive integer, or the mesh has more devices than the cluster.
    """

    def __init__(self, cluster: Cluster, mesh_sizes: Sequence[int], factors: nccl.Factors = nccl.untuned) -> None:
        self.cluster, self.factors = cluster, factors
        self.mesh_sizes = tuple(mesh_sizes)
        check_mesh(self.mesh_sizes, cluster.num_devices, cluster.name)
        self.groups = tuple(group_of(self.mesh_sizes, axis, cluster.levels) for axis in range(len(self.mesh_sizes)))
        self._curves: dict[tuple[Collective, int], Curve] = {}
        self._picks: dict[tuple[Collective, int], Picks] = {}

    def time_s(self, collective: Collective, axis: int, num_bytes: float) -> float:
        """Return the seconds of a collective along `axis`, an index into the mesh; zero if it has one device.

        `num_bytes`: of the full tensor of a group, or of each summand where there is a sum (`algorithms.py`).

        Raises:
            ClusterError: an unknown collective, no such axis, or bytes that are negative or not finite.
        """
        return self.curve(collective, axis).time_s(_sent(num_bytes))

    def send_s(self, source: int, target: int, num_bytes: float) -> float:
        """Return the seconds to send `num_bytes` from rank `source` to rank `target` while all others send too."""
        for rank in (source, target):
            if not 0 <= rank < self.cluster.num_devices:
                last = self.cluster.num_devices - 1
                raise ClusterError(f"cluster {self.cluster.name!r} has no rank {rank}; choose 0 to {last}")
        num_bytes = _sent(num_bytes)
        link = between(source, target, self.cluster.levels)
        return NOTHING.time_s(num_bytes) if link is None else self._sent_over_s(link, num_bytes)

    def permute_s(self, axis: int, num_bytes: float, *, straight: bool = False) -> float:
        """Return the seconds in which each device sends `num_bytes` to the next one along `axis`, as in a ring.

        `straight`: to one further away, over links that messages share as in an exchange. The slowest link counts.
        """
        links = self.links(axis)
        if straight:
            links = tuple(replace(link, bytes_per_s=link.exchange_bytes_per_s) for link in links)
        return max((self._sent_over_s(link, _sent(num_bytes)) for link in links), default=0.0)

    def _sent_over_s(self, link: Link, num_bytes: float) -> float:
        hop_s = 0.0 if link.kind == "host" else link.hop_s  # on a host, the hop is that of a collective, with its start
        start_s = hop_s + (nccl.send_base_s() if self.cluster.backend == "nccl" else gloo.SEND_S)
        measured = tuple(line for line in self.cluster.collectives if line.collective == "broadcast")
        if measured:  # a hop of a broadcast is a message whose receiver waits for it
            curve = _measured(measured, "broadcast", self.cluster.backend, 2)
            return start_s + curve.time_s(num_bytes) - curve.time_s(0.0)
        return CostLine(start_s, 1 / link.bytes_per_s).time_s(num_bytes)

    def links(self, axis: int) -> tuple[Link, ...]:
        """Return the links of a group of `axis`, one for each level that it spans."""
        if not 0 <= axis < len(self.groups):
            last = len(self.groups) - 1
            advice = f"choose 0 to {last}" if self.groups else "it has no axes: one device communicates with nobody"
            raise ClusterError(f"mesh {list(self.mesh_sizes)} has no axis {axis}; {advice}")
        return links_of(self.groups[axis], self.cluster.levels)

    def curve(self, collective: Collective, axis: int) -> Curve:
        """Return time over bytes of a collective along `axis`; its pieces are named by algorithm and protocol."""
        return self.picks(collective, axis).curve

    def picks(self, collective: Collective, axis: int) -> Picks:
        """Return the curve, and the schedules that are picked where the cluster has any."""
        key = (collective, axis)
        if key not in self._picks:
            library = self.library(collective, axis)
            schedules = self.cluster.schedules
            if schedules is None or collective not in SCHEDULED or library is NOTHING:
                self._picks[key] = Picks(library)
            else:
                network = network_of(self.groups[axis], self.cluster.levels, exchanges=collective == "all_to_all")
                self._picks[key] = picks(collective, network, schedules, self.cluster.backend, library)
        return self._picks[key]

    def library(self, collective: Collective, axis: int) -> Curve:
        """Return time over bytes of the library's own algorithms, whatever schedules the cluster has."""
        key = (collective, axis)
        if key not in self._curves:
            if collective not in COLLECTIVES:
                raise ClusterError(f"unknown collective {collective!r}; choose one of {', '.join(COLLECTIVES)}")
            self._curves[key] = self._new_curve(collective, self.links(axis))
        return self._curves[key]

    def _new_curve(self, collective: Collective, links: tuple[Link, ...]) -> Curve:
        if not links:
            return NOTHING
        measured = tuple(line for line in self.cluster.collectives if line.collective == collective)
        if measured:
            return _measured(measured, collective, self.cluster.backend, prod(link.split for link in links))
        if self.cluster.backend == "gloo":
            return gloo.curve(collective, links)
        if any(link.grid for link in links):
            return _least(collective, links)
        return nccl.curve(collective, links, nccl.generation(self.cluster.device.name), self.factors)


def _sent(num_bytes: float) -> float:
    """Return `num_bytes`; raise `ClusterError` unless it is a finite number of at least zero."""
    if not 0 <= num_bytes < inf:
        raise ClusterError(
            f"num_bytes: expected a finite number of at least 0, got {num_bytes}; give the tensor's bytes"
        )
    return num_bytes


@lru_cache(maxsize=4096)
def _least(collective: Collective, links: tuple[Link, ...]) -> Curve:
    """Return the least time of the algorithms at every size."""
    base_s = nccl.BASE_US["ring"][0] * 1e-6
    forms = [(form.name, form.line) for form in algorithms.candidates(collective, links)]
    return lowest([(name, CostLine(base_s + line.latency_s, line.s_per_byte)) for name, line in forms])


# ------------------------------------------------------------------------------------------------------ measured lines


@lru_cache(maxsize=4096)
def _measured(measured: tuple[CollectiveLine, ...], collective: Collective, backend: Backend, size: int) -> Curve:
    """Return the curve of groups of `size`: measured, or scaled from the nearest size by hops and volume."""
    nearest = min((line.group_size for line in measured), key=lambda n: abs(log2(n / size)))
    ours, theirs = (_on_a_switch(collective, backend, n) for n in (size, nearest))
    lines = [
        CostLine(line.latency_s * ours.hops / theirs.hops, line.s_per_byte * float(ours.share / theirs.share))
        for line in measured
        if line.group_size == nearest
    ]
    return highest([("measured", line) for line in lines])


def _on_a_switch(collective: Collective, backend: Backend, n: int) -> LinkUse:
    if backend == "gloo":
        return gloo.algorithm(collective, (one_switch(n),)).steps[0]
    return algorithms.on_a_switch(collective, n)
