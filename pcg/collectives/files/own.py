"""Our own files of topologies and schedules: JSON with a version, fractions exact, every field checked.

    {"format": "shardwright-topology", "version": 1, "name": "pair", "num_ranks": 2, "relays": [], "resources": [],
     "links": [[0, 1, 25000000000, 1e-06], [1, 0, 25000000000, 1e-06]]}

    {"format": "shardwright-schedule", "version": 1, "name": "swap", "rounds": [], "collective":
     {"kind": "all_gather", "num_ranks": 2, "reduces": false, "root": 0, "chunks": [["1/2", [0], [0, 1]], …]},
     "transfers": [[0, 0, 1, 0, "copy"], …]}

A link is [from, to, bytes per second, seconds], a chunk [share, sources, targets], a transfer [step, from, to, chunk,
operation], and the relays on its way where they are not the topology's choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import get_args

from shardwright.pcg.collectives.collective import KINDS, MOST_CHUNKS, Chunk, Collective
from shardwright.pcg.collectives.files.documents import Node, read_json
from shardwright.pcg.collectives.schedule import MOST_TRANSFERS, Op, Schedule, Transfer
from shardwright.pcg.collectives.topology import MOST_NODES, Link, Resource, Topology

TOPOLOGY, SCHEDULE, VERSION = "shardwright-topology", "shardwright-schedule", 1
_OPS: tuple[Op, ...] = get_args(Op)


def write_topology(topology: Topology) -> str:
    """Return a topology as JSON, a link in a line."""
    links = [[link.src, link.dst, _exact(link.rate_bytes_per_s), link.latency_s] for link in topology.links]
    shared = [[one.name, _exact(one.rate_bytes_per_s), sorted(one.edges)] for one in topology.resources]
    head = {"format": TOPOLOGY, "version": VERSION, "name": topology.name, "num_ranks": topology.num_ranks}
    return _text({**head, "relays": topology.relays}, {"links": links, "resources": shared})


def read_topology(text: str, source: str = "topology") -> Topology:
    """Return the topology of a file.

    Raises:
        ScheduleError, ClusterError: naming the place, what was expected, what was found and what to do.
    """
    top = _top(read_json(text, source), TOPOLOGY, ("name", "num_ranks", "relays", "links", "resources"))
    return Topology(
        name=top.get("name").text(),
        num_ranks=top.get("num_ranks").number(1, MOST_NODES),
        links=tuple(map(_link, top.get("links").items())),
        relays=tuple(relay.text() for relay in top.get("relays").items()),
        resources=tuple(map(_resource, top.get("resources").items())),
    )


def write_schedule(schedule: Schedule) -> str:
    """Return a schedule as JSON, a chunk or a transfer in a line."""
    whole = schedule.collective
    chunks = [[_exact(chunk.size), chunk.sources, chunk.targets] for chunk in whole.chunks]
    transfers = [[*t[:5], *([t.via] if t.via else [])] for t in schedule.transfers]
    head = {"format": SCHEDULE, "version": VERSION, "name": schedule.name, "rounds": schedule.rounds,
            "kind": whole.kind, "num_ranks": whole.num_ranks, "reduces": whole.reduces, "root": whole.root}  # fmt: skip
    return _text(head, {"chunks": chunks, "transfers": transfers})


def read_schedule(text: str, source: str = "schedule") -> Schedule:
    """Return the schedule of a file; `verifier.collectives.verify_schedule` says whether it is right.

    Raises:
        ScheduleError: naming the place, what was expected, what was found and what to do.
    """
    fields = ("name", "rounds", "kind", "num_ranks", "reduces", "root", "chunks", "transfers")
    top = _top(read_json(text, source), SCHEDULE, fields)
    num_ranks = top.get("num_ranks").number(1, MOST_NODES)
    chunks = tuple(_chunk(chunk, num_ranks) for chunk in top.get("chunks").items())
    kind = top.get("kind").one_of(KINDS)
    whole = Collective(kind, num_ranks, chunks, top.get("reduces").flag(), top.get("root").number(0, num_ranks - 1))
    rounds = top.get("rounds").numbers(1, MOST_TRANSFERS)
    return Schedule(top.get("name").text(), whole, tuple(map(_transfer, top.get("transfers").items())), rounds)


def _top(node: Node, form: str, fields: Sequence[str]) -> Node:
    node.get("format").one_of((form,))
    node.get("version").number(VERSION, VERSION)
    return node.known(("format", "version", *fields))


def _link(node: Node) -> Link:
    src, dst, rate, latency = _entries(node, 4, 4)
    return Link(src.number(0, MOST_NODES), dst.number(0, MOST_NODES), rate.fraction(), latency.real())


def _resource(node: Node) -> Resource:
    name, rate, edges = _entries(node, 3, 3)
    ends = ([end.number(0, MOST_NODES) for end in _entries(edge, 2, 2)] for edge in edges.items())
    return Resource(name.text(), rate.fraction(), frozenset((src, dst) for src, dst in ends))


def _chunk(node: Node, num_ranks: int) -> Chunk:
    size, sources, targets = _entries(node, 3, 3)
    return Chunk(size.fraction(), sources.numbers(0, num_ranks - 1), targets.numbers(0, num_ranks - 1))


def _transfer(node: Node) -> Transfer:
    step, src, dst, chunk, op, *via = _entries(node, 5, 6)
    ranks = (src.number(0, MOST_NODES), dst.number(0, MOST_NODES))
    relays = via[0].numbers(0, MOST_NODES) if via else ()
    return Transfer(step.number(0, MOST_TRANSFERS), *ranks, chunk.number(0, MOST_CHUNKS), op.one_of(_OPS), relays)


def _entries(node: Node, least: int, most: int) -> list[Node]:
    items = node.items()
    if not least <= len(items) <= most:
        raise node.error(f"expected {least} to {most} entries, got {len(items)}; correct it")
    return items


def _exact(value: Fraction) -> int | str:
    return int(value) if value.denominator == 1 else str(value)


def _text(head: Mapping[str, object], lists: Mapping[str, Sequence[object]]) -> str:
    """Return JSON with a line for each entry of a list."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, entries in lists.items():
        inside = ",\n  ".join(map(json.dumps, entries))
        lines.append(f" {json.dumps(key)}: [\n  {inside}\n ]" if entries else f" {json.dumps(key)}: []")
    return "{\n" + ",\n".join(lines) + "\n}\n"
