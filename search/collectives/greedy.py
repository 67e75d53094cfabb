"""Large networks: a greedy schedule over time. Whenever links are free, they carry the rarest chunk that helps.

Won et al., "TACOS: Topology-Aware Collective Algorithm Synthesizer" (MICRO 2024), matches chunks to links in rounds;
here time is continuous, so links may have any rates, share resources and lead over relays. Ranks that the network
cannot tell apart decide alike: one decision is made for an orbit of channels. So a torus costs what one rank does.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from shardwright.pcg.collectives.bounds import islands
from shardwright.pcg.collectives.collective import Collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Edge, Topology
from shardwright.pcg.errors import ScheduleError
from shardwright.search.collectives.channels import limits, orbits
from shardwright.search.collectives.symmetry import Permutation, chunk_images, fitting
from shardwright.search.collectives.timing import in_steps


def greedy(
    topology: Topology,
    collective: Collective,
    num_bytes: float,
    group: Sequence[Permutation],
    seed: int = 0,
    paths: Mapping[int, Sequence[int]] | None = None,
    channels: Container[Edge] | None = None,
) -> Schedule:
    """Return a schedule of a collective that copies, timed for `num_bytes`.

    Every rank may pass on what it is a target of; so targets have to be reached over others of the same chunk. Where
    `paths` are given, each chunk instead passes these ranks, and whatever has the longest way left goes first.

    `seed`: breaks ties.
    `channels`: those that are used, by default all; the group has to keep them.
    """
    return _Greedy(topology, collective, num_bytes, fitting(collective, group), seed, paths, channels).schedule()


class _Channel:
    """A channel that stands for its orbit: its servers with the seconds per byte that a decision takes of each.

    `near`: the ranks that can bring the receiver what it lacks sooner than the sender can, the nearest first.
    """

    def __init__(self, edge: Edge, servers: Mapping[int, float], latency_s: float, near: Sequence[int]) -> None:
        self.src, self.dst = edge
        self.near = near
        self.servers = list(servers.items())
        self.latency_s = latency_s


class _Greedy:
    def __init__(
        self,
        topology: Topology,
        collective: Collective,
        num_bytes: float,
        group: Sequence[Permutation],
        seed: int,
        paths: Mapping[int, Sequence[int]] | None,
        channels: Container[Edge] | None,
    ) -> None:
        images = chunk_images(collective, group)
        assert images is not None
        self.topology, self.collective, self.group, self.images = topology, collective, group, images
        self.draw = random.Random(seed)
        self.sizes = [float(chunk.size) * num_bytes for chunk in collective.chunks]
        ranks, num_chunks = range(topology.num_ranks), len(collective.chunks)
        self.has = [0] * len(ranks)
        self.lacks = [0] * len(ranks)  # what is needed and not under way
        self.holders = [0] * num_chunks
        self.levels = {0: (1 << num_chunks) - 1}  # of how many ranks have a chunk or get it: those chunks
        self.over: dict[Edge, int] = dict.fromkeys(topology.channels, (1 << num_chunks) - 1 if paths is None else 0)
        for index, chunk in enumerate(collective.chunks):
            for rank in chunk.sources:
                self.has[rank] |= 1 << index
            for rank in () if paths else set(chunk.targets) - set(chunk.sources):
                self.lacks[rank] |= 1 << index
            self._count(index, len(chunk.sources))
        for chunk, path in (paths or {}).items():
            for image, moved in zip(group, images, strict=True):
                self._count(moved[chunk], -len(path))
                for src, dst in pairwise(path):
                    self.over[image[src], image[dst]] |= 1 << moved[chunk]
                    self.lacks[image[dst]] |= 1 << moved[chunk]
        self.free: dict[int, float] = defaultdict(float)
        self.channels = list(self._channels(channels))
        self.sent = list[tuple[float, Transfer]]()

    def schedule(self) -> Schedule:
        """Serve all channels at every moment at which a link becomes free or a chunk arrives.

        Raises:
            ScheduleError: a chunk cannot reach one of its targets over the others.
        """
        moments, arriving = [0.0], defaultdict[float, list[tuple[int, int]]](list)
        while moments:
            now = heapq.heappop(moments)
            while moments and moments[0] <= now:
                heapq.heappop(moments)
            for rank, chunk in arriving.pop(now, ()):
                self.has[rank] |= 1 << chunk
            for channel, chunk in self._decisions(now):
                duration = 0.0
                for server, pace in channel.servers:
                    self.free[server] = now + self.sizes[chunk] * pace
                    heapq.heappush(moments, self.free[server])
                    duration = max(duration, self.sizes[chunk] * pace)
                arrival = now + duration + channel.latency_s
                heapq.heappush(moments, arrival)
                arriving[arrival] += self._send(channel, chunk, now)
        rank = next((rank for rank, lacks in enumerate(self.lacks) if lacks), None)
        if rank is not None:
            chunk = self.lacks[rank].bit_length() - 1
            problem = f"expected a way for chunk {chunk} to rank {rank} over its other targets, got none"
            raise ScheduleError(f"{self.collective.kind} on {self.topology.name!r}: {problem}; give its path")
        return in_steps(
            f"{self.topology.name} {self.collective.kind}, greedy", self.collective, self.sent, self._shortest()
        )

    def _shortest(self) -> float:
        paces = [pace for channel in self.channels for _, pace in channel.servers]
        return min(paces) * min(filter(None, self.sizes), default=0.0)

    def _decisions(self, now: float) -> Iterator[tuple[_Channel, int]]:
        """Yield what is sent now, over channels in random order."""
        self.draw.shuffle(self.channels)
        for channel in self.channels:
            useful = self.has[channel.src] & self.lacks[channel.dst] & self.over[channel.src, channel.dst]
            if useful and all(self.free[server] <= now for server, _ in channel.servers):
                for rank in channel.near:
                    useful = useful & self.lacks[rank] or useful
                yield channel, self._rarest(useful)

    def _rarest(self, useful: int) -> int:
        """Return a chunk that the fewest ranks have or get, a random one of them."""
        fewest = next(useful & self.levels[level] for level in sorted(self.levels) if useful & self.levels[level])
        skipped = self.draw.randrange(fewest.bit_length())
        above = fewest >> skipped
        return skipped + (above & -above).bit_length() - 1

    def _send(self, channel: _Channel, chunk: int, now: float) -> list[tuple[int, int]]:
        reached = list[tuple[int, int]]()
        for image, chunks in zip(self.group, self.images, strict=True):
            src, dst, moved = image[channel.src], image[channel.dst], chunks[chunk]
            self.sent.append((now, Transfer(0, src, dst, moved)))
            self.lacks[dst] &= ~(1 << moved)
            self._count(moved, 1)
            reached.append((dst, moved))
        return reached

    def _count(self, chunk: int, more: int) -> None:
        count = self.holders[chunk]
        self.levels[count] &= ~(1 << chunk)
        if not self.levels[count]:
            del self.levels[count]
        self.holders[chunk] = count + more
        self.levels[count + more] = self.levels.get(count + more, 0) | 1 << chunk

    def _channels(self, used: Container[Edge] | None) -> Iterator[_Channel]:
        """Yield one channel of each orbit. A limit is taken as often as channels of the orbit pass it."""
        stands = orbits(self.topology, self.group)
        rates = sorted({link.rate_bytes_per_s for link in self.topology.links}, reverse=True)
        parts = [(rate, islands(self.topology, rate)) for rate in rates]
        paces: dict[Edge, dict[int, float]] = defaultdict(dict)
        for number, limit in enumerate(limits(self.topology, self.group)):
            for channel, times in Counter(stands[channel] for channel in limit.channels).items():
                paces[channel][number] = times / float(limit.rate)
        for channel, path in self.topology.channels.items():
            if stands[channel] == channel and (used is None or channel in used):
                near = _nearer(self.topology, channel, parts)
                yield _Channel(channel, paces[channel], self.topology.latency_s(path), near)


def _nearer(topology: Topology, channel: Edge, parts: Sequence[tuple[Fraction, list[frozenset[int]]]]) -> list[int]:
    """Return the ranks that hang together with the receiver by faster links than those of the channel.

    `parts`: the parts of the network that hang together by links faster than each rate, the highest rate first.
    """
    src, dst = channel
    slowest = min(topology.by_edge[edge].rate_bytes_per_s for edge in topology.channels[channel])
    nearer = dict[int, None]()
    for rate, islands_of in parts:
        near = next(part for part in islands_of if dst in part)
        if rate < slowest or src in near:
            break
        nearer |= dict.fromkeys(rank for rank in sorted(near) if rank < topology.num_ranks and rank != dst)
    return list(nearer)
