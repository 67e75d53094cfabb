"""Maximum flows in networks with whole capacities. Dinic, "Algorithm for solution of a problem of maximum flow" (1970).

Bounds of collectives ask for thousands of flows in small networks, so a network is built once, and its capacities are
set anew before each flow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Network:
    """A directed network. Edges are numbered in the order in which they were added."""

    def __init__(self, num_nodes: int, edges: Iterable[tuple[int, int]]) -> None:
        self._out: list[list[int]] = [[] for _ in range(num_nodes)]  # arcs; an edge's arc is 2 · number, and back + 1
        self._head: list[int] = []
        for src, dst in edges:
            self._out[src].append(len(self._head))
            self._out[dst].append(len(self._head) + 1)
            self._head += (dst, src)
        self._room: list[int] = []

    def max_flow(self, source: int, sink: int, capacities: Sequence[int], enough: int | None = None) -> int:
        """Return the maximum flow from source to sink, or `enough` once that much flows."""
        self._room = [room for capacity in capacities for room in (capacity, 0)]
        total, limit = 0, enough if enough is not None else sum(capacities)
        while total < limit:
            level = self._levels(source)
            if level[sink] < 0:
                break
            total += self._blocking(source, sink, level, limit - total)
        return total

    def source_side(self, source: int) -> set[int]:
        """Return the nodes that the source still reaches after a flow: the source's side of a least cut."""
        return {node for node, level in enumerate(self._levels(source)) if level >= 0}

    def flows(self) -> list[int]:
        """Return what flows over each edge."""
        return self._room[1::2]

    def _levels(self, source: int) -> list[int]:
        """Return each node's distance from the source over arcs with room; -1 if there is none."""
        level = [-1] * len(self._out)
        level[source] = 0
        queue, room, head = [source], self._room, self._head
        for node in queue:
            for arc in self._out[node]:
                if room[arc] and level[head[arc]] < 0:
                    level[head[arc]] = level[node] + 1
                    queue.append(head[arc])
        return level

    def _blocking(self, source: int, sink: int, level: list[int], limit: int) -> int:
        """Add a flow after which every shortest path has a full arc, or `limit`; return how much."""
        room, head, out = self._room, self._head, self._out
        turn, path, node, total = [0] * len(out), list[int](), source, 0
        while True:
            if node == sink:
                least = min([limit - total, *(room[arc] for arc in path)])
                total += least
                for arc in path:
                    room[arc] -= least
                    room[arc ^ 1] += least
                if total == limit:
                    return total
                full = next(i for i, arc in enumerate(path) if not room[arc])
                node = head[path[full] ^ 1]
                del path[full:]
                continue
            arcs = out[node]
            while turn[node] < len(arcs):
                arc = arcs[turn[node]]
                if room[arc] and level[head[arc]] == level[node] + 1:
                    path.append(arc)
                    node = head[arc]
                    break
                turn[node] += 1
            else:
                if node == source:
                    return total
                level[node] = -1
                node = head[path.pop() ^ 1]
