"""Synthesis of collectives beside what others publish: writes docs/collectives.md. Four minutes on two cores.

Each schedule is judged by `verifier.collectives`, and its seconds are simulated (`cost.collectives.simulation`). What
others reach, and in how long, stands in the tables with its source.

    python -m bench.synthesis [--dry]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fractions import Fraction
from pathlib import Path
from random import Random
from time import process_time

from bench import throttled
from bench.schedule_times import fits, least_error, nccls_rings
from shardwright.cost.clusters.networks import DGX1_NVLINKS, GB, preset_topology
from shardwright.cost.clusters.shapes import grid
from shardwright.cost.collectives.simulation import simulate
from shardwright.pcg.collectives.bounds import least_seconds_per_byte
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.collectives.topology import Link, Topology, joined
from shardwright.search.collectives.frontier import Walk
from shardwright.search.collectives.sketch import Sketch
from shardwright.search.collectives.splitting import split
from shardwright.search.collectives.synthesis import Synthesized, synthesize
from shardwright.search.collectives.trees import two_way
from shardwright.verifier.collectives import verify_schedule

PAGE = Path(__file__).parents[1] / "docs" / "collectives.md"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Best:
    """The last schedule of a synthesis, and its CPU seconds."""

    found: Synthesized
    cpu_s: float

    @property
    def share(self) -> float:
        return 1 / (1 + self.found.gap)


def best(topology: Topology, kind: str, num_bytes: float, *pieces: int, weights: Sequence[int] | None = None) -> Best:
    """Synthesize with some numbers of pieces, or with all that are tried, and judge the result."""
    start = process_time()
    sketch = Sketch(pieces=pieces) if pieces else None
    *_, found = synthesize(topology, kind, num_bytes, weights=weights, sketch=sketch)
    cpu_s = process_time() - start
    judge(found.schedule, topology)
    return Best(found, cpu_s)


def judge(schedule: Schedule, topology: Topology) -> None:
    refusals = verify_schedule(schedule, topology).refusals
    assert not refusals, refusals[0]


# ---- exact


SCCL_S = {("dgx1", "all_gather"): "14 to 21", ("dgx1", "all_to_all"): "62.5 for the point, no proof",
          ("dgx1", "gather"): "9", ("dgx1", "broadcast"): "not done in 60"}  # fmt: skip
"""Seconds of SCCL's synthesizer (microsoft/msccl-tools 030a750f, Z3 5.4) on two cores."""


def exact_rows() -> Iterator[str]:
    kinds = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "all_reduce", "broadcast", "reduce")
    for name in ("dgx1", "amd-z52"):
        for kind in kinds:
            start = process_time()
            points = list(Walk(preset_topology(name), kind, most_pieces=6).points())
            cpu_s = process_time() - start
            for point in points:
                judge(point.schedule, preset_topology(name))
            shown = ", ".join(f"({p.pieces}, {p.steps}, {p.rounds}){_proof(p.is_best, p.meets_bound)}" for p in points)
            yield f"| {name} | {kind} | {shown} | {cpu_s:.2f} | {SCCL_S.get((name, kind), '')} |"


def _proof(is_best: bool, meets_bound: bool) -> str:
    return "**" if meets_bound else "*" if is_best else ""


# ---- optima


FORESTCOLL = (("dgx-a100:1", 342.857, 0.05), ("dgx-a100:2", 346.667, 0.43), ("dgx-a100:4", 266.667, 1.63),
              ("mi250:1", 342.857, 0.23), ("mi250:2", 354.133, 1.44))  # fmt: skip
"""Optima of all-gather in GB/s, and seconds (liangyuRain/ForestColl 3c13aee8, run on two cores)."""


def optimum_rows() -> Iterator[str]:
    for name, optimum, seconds in FORESTCOLL:
        topology = preset_topology(name)
        start = process_time()
        bound = least_seconds_per_byte(topology, collective("all_gather", topology.num_ranks))
        bound_s = process_time() - start
        reached = best(topology, "all_gather", GIB, 32)
        rate = float(1 / bound.seconds_per_byte) / GB
        yield (f"| {name} | {optimum} | {rate:.3f} | {bound_s:.3f} | {seconds} | {reached.share:.1%} "
               f"| {reached.cpu_s:.2f} | {bound.reason} |")  # fmt: skip


# ---- two machines over one NIC


def ndv2() -> Topology:
    """Two NDv2 as TE-CCL takes them (microsoft/TE-CCL c128bf24, teccl/topologies/ndv2.py): one cable each way."""
    inside = [
        (box + a, box + b, Fraction(25 * many * GB), 0.7e-6) for box in (0, 8) for (a, b), many in DGX1_NVLINKS.items()
    ]
    across = (Link(8, 1, Fraction(25 * GB, 2), 1.3e-6), Link(0, 9, Fraction(25 * GB, 2), 1.3e-6))
    return Topology("ndv2 x2 of TE-CCL", 16, (*joined(inside), *across))


def without_first(topology: Topology) -> Topology:
    """GPU 0 as a switch, which holds nothing and needs nothing: rank r is GPU r + 1."""
    links = tuple(
        Link((link.src - 1) % 16, (link.dst - 1) % 16, link.rate_bytes_per_s, link.latency_s) for link in topology.links
    )
    return Topology("ndv2 x2 without GPU 0", 15, links, ("GPU 0",))


def ndv2_rows() -> Iterator[str]:
    topology = ndv2()
    gather = best(topology, "all_gather", GB)
    every = best(topology, "all_to_all", 16 * GB)
    fewer = best(without_first(topology), "all_to_all", 225 / 16 * GB)
    for what, one, theirs, their_s in (
        ("all-gather", gather, 22.86, 43.4),
        ("all-to-all, all 16 GPUs", every, 3.125, 1214.7),
        ("all-to-all as TE-CCL has it, without GPU 0", fewer, 3.52, 1481.8),
    ):
        reached, bound = 1 / one.found.seconds, 1 / one.found.bound_s
        yield f"| {what} | {reached:.3f} | {bound:.3f} | {one.cpu_s:.2f} | {theirs} | {their_s} |"


# ---- grids


def grid_rows() -> Iterator[str]:
    small = grid((4, 3), 50 * 2**30, 0.5e-6)
    for name, topology, num_bytes, pieces, theirs in (
        ("4 × 3 mesh, 12 MiB", small, 12 * 2**20, (2, 4), "119.18 µs (TACOS, 1811f1fb)"),
        ("16 × 16 mesh, 1 GiB", preset_topology("mesh:16x16"), GIB, (1,), ""),
        ("8 × 8 × 8 torus, 1 GiB", preset_topology("torus:8x8x8"), GIB, (1,), ""),
    ):
        one = best(topology, "all_gather", num_bytes, *pieces)
        times = f"{one.found.seconds * 1e6:.2f} | {one.found.bound_s * 1e6:.2f}"
        yield f"| {name} | {times} | {one.share:.1%} | {one.cpu_s:.1f} | {theirs} |"


def part_of_torus(*, routers: bool) -> Topology:
    """Half of an 8 × 8 torus, four rows of it; the other nodes pass data on (`routers`), or are not there."""
    whole = preset_topology("torus:8x8")
    links = tuple(link for link in whole.links if routers or max(link.src, link.dst) < 32)
    names = tuple(f"node {node}" for node in range(32, 64)) if routers else ()
    return Topology("32 of 64", 32, links, names)


def part_rows() -> Iterator[str]:
    for kind in ("all_gather", "all_reduce"):
        part = part_of_torus(routers=False)
        ring = simulate(_snake(kind), part, GIB).seconds
        for routers in (False, True):
            one = best(part_of_torus(routers=routers), kind, GIB, 64)
            others = "pass data on" if routers else "are not there"
            times = f"{ring * 1e3:.2f} | {one.found.seconds * 1e3:.2f} | {ring / one.found.seconds:.2f}"
            yield f"| {kind}, the other 32 {others} | {times} | {ring / one.found.bound_s:.2f} | {one.cpu_s:.1f} |"


def scattered(nodes: Sequence[int]) -> Topology:
    """These nodes of an 8 × 8 torus as ranks; the others pass data on."""
    whole = preset_topology("torus:8x8")
    others = [node for node in range(64) if node not in nodes]
    at = {node: place for place, node in enumerate((*nodes, *others))}
    links = (replace(link, src=at[link.src], dst=at[link.dst]) for link in whole.links)
    return Topology(f"{len(nodes)} of 64", len(nodes), tuple(links), tuple(f"node {node}" for node in others))


def scattered_rows() -> Iterator[str]:
    chess = [node for node in range(64) if (node // 8 + node % 8) % 2 == 0]
    drawn = sorted(Random(0).sample(range(64), 32))
    for name, nodes in (("every second, as on a chessboard", chess), ("drawn at random", drawn)):
        for kind in ("all_gather", "all_reduce"):
            split.cache_clear()
            one = best(scattered(nodes), kind, GIB, 16)
            times = f"{one.found.seconds * 1e3:.2f} | {one.found.bound_s * 1e3:.2f}"
            yield f"| {kind}, {name} | {times} | {one.share:.1%} | {one.cpu_s:.1f} |"


def _snake(kind: str) -> Schedule:
    """A ring both ways along a Hamiltonian circle of four rows of eight."""
    rows = [[8 * row + column for column in range(1, 8)][:: 1 if row % 2 == 0 else -1] for row in range(4)]
    circle = [0, *(rank for row in rows for rank in row), 24, 16, 8]
    schedule = build("two-way-ring", kind, (32,), 2)
    moves = [t._replace(src=circle[t.src], dst=circle[t.dst]) for t in schedule.transfers]
    assert all((t.src, t.dst) in part_of_torus(routers=False).by_edge for t in moves)
    assert sorted(circle) == list(range(32))
    return Schedule("snake", schedule.collective, tuple(moves))


# ---- all-reduce on meshes


def mesh_rows() -> Iterator[str]:
    for side in (4, 6, 8, 16):
        mesh = preset_topology(f"mesh:{side}x{side}")
        shards = least_seconds_per_byte(mesh, collective("all_gather", side * side)).seconds_per_byte
        two_phases = 2 * float(shards) * GIB
        start = process_time()
        trees = 1024 if side == 16 else 512
        schedule = two_way(mesh, trees, GIB)
        cpu_s = process_time() - start
        judge(schedule, mesh)
        seconds = simulate(schedule, mesh, GIB).seconds
        bound = float(least_seconds_per_byte(mesh, schedule.collective).seconds_per_byte) * GIB
        data = GIB / (50 * GB)
        tidal = simulate(build("tidal", "all_reduce", (side, side), 4), mesh, GIB).seconds if side < 16 else None
        cells = [f"{bound / data:.4f}", f"{two_phases / data:.4f}", f"{seconds / data:.4f}", f"{bound / seconds:.1%}"]
        cells += [f"{tidal / data:.4f}" if tidal else "", f"{cpu_s:.1f}"]
        yield f"| {side} × {side} | {' | '.join(cells)} |"


# ---- other inputs


def other_rows() -> Iterator[str]:
    experts = [(7 * a + 3 * b) % 5 * (b % 3) for a in range(16) for b in range(16)]
    cases = [
        ("dgx-a100:2", "all_to_all", experts, "experts: 0 to 8 units for each pair"),
        ("dgx-a100:2", "all_gather", [1 + rank % 4 for rank in range(16)], "shards of 1 to 4 units"),
        ("unlike", "all_gather", None, "a DGX H100 and a DGX A100"),
        ("unlike", "all_to_all", None, "the same"),
        ("dragonfly:4x4x2", "all_to_all", None, "32 ranks"),
        ("fat-tree:4x8x2", "all_gather", None, "32 ranks, uplinks 2:1 oversubscribed"),
    ]
    for name, kind, weights, about in cases:
        one = best(preset_topology(name), kind, GIB, *((4,) if kind == "all_to_all" else (16,)), weights=weights)
        yield f"| {name} | {kind} | {about} | {one.share:.1%} | {one.cpu_s:.2f} |"


def time_rows() -> Iterator[str]:
    """The simulation beside measured times of given schedules."""
    for what, found in zip(
        ("links of 64 GB/s alone", "and a start and a rate of a block per protocol"), fits(), strict=True
    ):
        yield f"| {what} | {found.num_rows} | {found.error:.1%} | {found.ordered:.1%} |"
    num_rows, error = nccls_rings()
    yield f"| NCCL's own rings, links alone | {num_rows} | {error:.1%} |  |"


TEXT = """\
# Synthesized collectives

What synthesis reaches beside its bounds and beside what others publish ([how it works](inside/collectives.md)).
Written by `python -m bench.synthesis` (`make bench-collectives`) on {date}: {cpus} cores, no GPU; seconds are CPU
seconds of this run. Times of schedules are simulated link by link, and every schedule passes the judge.

## Exact

Points of the frontier as (chunks of a rank or pair, steps, rounds). Two stars: the bound of bandwidth is met. One
star: the best of as many steps, with any number of chunks.

| network | collective | frontier | CPU s | SCCL's s |
|---|---|---|--:|---|
{exact}

SCCL's seconds are those of its synthesizer on two cores. It takes its own bound of 5/3 for an all-to-all; what passes
between the sockets gives 8/3.

## Optima by flows

All-gather of 1 GiB. *optimum* is exact, by maximum flows. ForestColl's figures are those of its program on two cores.

| network | ForestColl, GB/s | optimum, GB/s | CPU s | ForestColl's s | schedule, of it | CPU s | what bounds it |
|---|--:|--:|--:|--:|--:|--:|---|
{optimum}

## Two machines over one NIC

Two NDv2 with 1 GB for each rank, in GB/s. TE-CCL's topology leaves GPU 0 out of an all-to-all, as it takes node 0 for
a switch. Both problems are here: for all 16 GPUs the bound is what TACCL reaches.

| collective | reached | bound | CPU s | theirs | their solver's s |
|---|--:|--:|--:|--:|--:|
{ndv2}

## Grids

| all-gather | µs | bound, µs | of the bound | CPU s | others |
|---|--:|--:|--:|--:|---|
{grid}

Half of an 8 × 8 torus, 1 GiB, beside a ring both ways along a circle of its nodes. *allowed* is the ring's time over
the bound.

| 32 of 64 nodes | ring, ms | here, ms | times faster | allowed | CPU s |
|---|--:|--:|--:|--:|--:|
{part}

Half of the nodes scattered over the torus, 1 GiB; the others pass data on.

| 32 of 64 nodes | ms | bound, ms | of the bound | CPU s |
|---|--:|--:|--:|--:|
{scattered}

## All-reduce on meshes

In units of (bytes / rate of a link). *two phases* is the bound of a reduce-scatter and an all-gather of equal shards;
*tidal* is the builder of that name, with four pieces.

| mesh | bound | two phases | trees | of the bound | tidal | CPU s |
|---|--:|--:|--:|--:|--:|--:|
{mesh}

## Uneven chunks, unlike nodes

| network | collective | | of the bound | CPU s |
|---|---|---|--:|--:|
{other}

## Simulated beside measured times

Schedules of MSCCL under RCCL 2.21.5 on eight MI300X, from 1 MiB on (rouge3877/ns3-msccl-data, a third of its table).
No schedule there comes near the rate of a link: what limits it is how fast the thread blocks of a connection copy, and
that depends on protocol and number of blocks. Links alone say the same of all of these, so the median error of such a
prediction is at least {least}, whatever it says; 20 % cannot be met from links alone. The second row takes two figures
of each protocol from three schedules, the seconds before it copies and the rate of a block; the others judge it.
NCCL's own rings fill their links: the last row is all-gathers of eight H100 from 32 MiB on, published by nccl-tests.

| rates | times | median error | order of pairs right |
|---|--:|--:|--:|
{times}

## On ranks, over a slow link

Eight gloo ranks in two network namespaces, whose one link the kernel keeps to {rate} MB/s each way: an all-reduce of
{size} MiB, and a data-parallel step whose gradients are as large (`bench/throttled.py`). The planner picks the
schedule, and `compile` runs it. gloo's own all-reduce is a ring, which sends more over the link. Medians of {repeats}
rounds; eight ranks share {cpus} cores.

| | predicted, ms | measured, ms | of gloo's |
|---|--:|--:|--:|
{throttled}
"""


def page() -> str:
    rows = {"exact": exact_rows, "optimum": optimum_rows, "ndv2": ndv2_rows, "grid": grid_rows, "part": part_rows,
            "scattered": scattered_rows,
            "mesh": mesh_rows, "other": other_rows, "times": time_rows, "throttled": throttled.rows}  # fmt: skip
    tables = {}
    for name, make in rows.items():
        tables[name] = "\n".join(make())
        print(tables[name], flush=True)
    slow: dict[str, object] = {
        "rate": throttled.BYTES_PER_S / 1e6,
        "size": throttled.NUM_BYTES >> 20,
        "repeats": throttled.REPEATS,
    }
    slow["least"] = f"{least_error():.1%}"
    return TEXT.format(date=date.today().isoformat(), cpus=os.cpu_count(), **slow, **tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print the tables and leave the page")
    dry = parser.parse_args().dry
    text = page()
    if not dry:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
