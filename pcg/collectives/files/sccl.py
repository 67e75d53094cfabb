"""SCCL's JSON, as msccl-tools 030a750f writes it: topologies, and algorithms with their collective.

Every object says what it is in `msccl_type`, or `sccl_type` in older files. A send moves all contributions that its
sender holds under an address. Matrices of links have the receiver first. Chunks have no bytes and links no rates: a
link's number is how many chunks it carries in a round.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from shardwright.pcg.collectives.collective import MOST_CHUNKS, RULES, Chunk, Collective, collective
from shardwright.pcg.collectives.files.documents import Node, read_json
from shardwright.pcg.collectives.schedule import Op, Schedule, Transfer
from shardwright.pcg.collectives.topology import Link, Resource, Topology

MOST_RANKS = 4096
ROUND_RATE = 10**9
"""The rate of a link that carries one chunk in a round, in bytes per second, where nothing else is said."""
_Held = dict[tuple[int, int], frozenset[int]]


def read_sccl_topology(text: str, source: str = "topology", round_rate: Fraction | int = ROUND_RATE) -> Topology:
    """Return the topology of a file, or that of an algorithm's file.

    Raises:
        ScheduleError, ClusterError: naming the place, what was expected, what was found and what to do.
    """
    node = read_json(text, source)
    return _topology(node.get("topology") if _kind(node) == "algorithm" else node, Fraction(round_rate))


def read_sccl(
    text: str, source: str = "algorithm", round_rate: Fraction | int = ROUND_RATE
) -> tuple[Schedule, Topology]:
    """Return the schedule of an algorithm's file, and the topology that it was made for.

    Raises:
        ScheduleError, ClusterError: naming the place, what was expected, what was found and what to do.
    """
    top = read_json(text, source)
    if _kind(top) != "algorithm":
        raise top.error(f"expected an algorithm, got {_kind(top)}; is it another of SCCL's files?")
    topology = _topology(top.get("topology"), Fraction(round_rate))
    whole, addresses, contributions = _collective(top.get("collective"), topology.num_ranks)
    steps = top.get("steps").items()
    rounds = tuple(step.get("rounds").number(1, 1 << 20) for step in steps)
    transfers, held = list[Transfer](), contributions
    for number, step in enumerate(steps):
        sends = [_send(send, number, addresses, topology.num_ranks) for send in step.get("sends").items()]
        arriving = [(t, held.get((t.src, t.chunk), frozenset[int]())) for t in sends]
        for transfer, values in arriving:
            mine = held.get((transfer.dst, transfer.chunk), frozenset[int]())
            op: Op = "copy" if mine <= values else "reduce"
            transfers.append(transfer._replace(op=op if whole.reduces else "copy"))
            held[transfer.dst, transfer.chunk] = mine | values
    return Schedule(top.get("name").text(), whole, tuple(transfers), rounds), topology


def _kind(node: Node) -> str:
    return node.get("msccl_type" if node.has("msccl_type") else "sccl_type").text()


def _topology(node: Node, round_rate: Fraction) -> Topology:
    rows = node.get("links").items()
    links = list[Link]()
    for dst, row in enumerate(rows):
        entries = row.items()
        if len(entries) != len(rows) or len(rows) > MOST_RANKS:
            raise row.error(
                f"expected {len(rows)} numbers, at most {MOST_RANKS}, got {len(entries)}; correct the matrix"
            )
        for src, entry in enumerate(entries):
            if many := entry.number(0, 1 << 20):
                links.append(Link(src, dst, many * round_rate))
    edges = {(link.src, link.dst) for link in links}
    shared = tuple(_switch(switch, edges, len(rows), round_rate) for switch in node.get("switches").items())
    return Topology(node.get("name").text(), len(rows), tuple(links), resources=shared)


def _switch(node: Node, edges: set[tuple[int, int]], num_ranks: int, round_rate: Fraction) -> Resource:
    entries = node.items()
    if len(entries) != 4:
        raise node.error(f"expected [sources, destinations, chunks in a round, name], got {len(entries)} entries")
    sources, destinations = (set(entry.numbers(0, num_ranks - 1)) for entry in entries[:2])
    through = frozenset((src, dst) for src, dst in edges if src in sources and dst in destinations)
    return Resource(entries[3].text(), entries[2].number(1, 1 << 20) * round_rate, through)


def _collective(node: Node, num_ranks: int) -> tuple[Collective, dict[int, int], _Held]:
    """Return the collective, our chunk of each address, and the contributions that each cell holds before."""
    if node.get("nodes").number(1, MOST_RANKS) != num_ranks:
        raise node.get("nodes").error(f"expected {num_ranks} ranks, as the topology has; correct one of them")
    parts: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for chunk in node.get("chunks").items():
        ranks = (tuple(sorted(set(chunk.get(end).numbers(0, num_ranks - 1)))) for end in ("pre", "post"))
        sources, targets = ranks
        if not sources:
            raise chunk.error("expected a rank that holds it before, got none; correct pre")
        parts[chunk.get("addr").number(0, MOST_CHUNKS)].append((sources, targets))
    addresses = {address: index for index, address in enumerate(sorted(parts))}
    reduces, size = any(len(part) > 1 for part in parts.values()), Fraction(1, max(1, len(parts)))
    chunks, held = list[Chunk](), _Held()
    for address, index in addresses.items():
        part = parts[address]
        sources = tuple(sorted(rank for ranks, _ in part for rank in ranks))
        if reduces and (any(len(ranks) > 1 for ranks, _ in part) or len(set(sources)) < len(sources)):
            raise node.error(f"address {address}: expected one summand from each rank, got several; correct pre")
        if len({targets for _, targets in part}) > 1:
            raise node.error(
                f"address {address}: expected one set of ranks that need the sum, got several; correct post"
            )
        chunks.append(Chunk(size, sources, part[0][1]))
        held |= {(rank, index): frozenset((rank if reduces else sources[0],)) for rank in sources}
    return _named(Collective("custom", num_ranks, tuple(chunks), reduces)), addresses, held


def _named(custom: Collective) -> Collective:
    """Return the collective under a name that libraries know, if it is one of theirs with its chunks in their order."""
    for kind, rule in RULES.items():
        pieces, rest = divmod(len(custom.chunks), rule.num_units(custom.num_ranks))
        if rest or rule.num_cells(custom.num_ranks) * pieces != custom.num_cells:
            continue
        first = custom.chunks[0]
        roots = {"broadcast": first.sources, "scatter": first.sources, "reduce": first.targets, "gather": first.targets}
        known = collective(kind, custom.num_ranks, pieces, root=next(iter(roots.get(kind, ())), 0))
        if (known.chunks, known.reduces) == (custom.chunks, custom.reduces):
            return known
    return custom


def _send(node: Node, step: int, addresses: dict[int, int], num_ranks: int) -> Transfer:
    entries = node.items()
    if len(entries) < 3:
        raise node.error(f"expected [address, from, to], got {len(entries)} entries; correct it")
    address, src, dst = (entry.number(0, MOST_CHUNKS) for entry in entries[:3])
    if address not in addresses or max(src, dst) >= num_ranks:
        raise node.error(f"expected an address of a chunk and ranks below {num_ranks}, got {[address, src, dst]}")
    return Transfer(step, src, dst, addresses[address])
