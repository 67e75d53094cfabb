"""Writes the page of a schedule: who sends what when, over each connection, and how busy each link is.

One HTML file without scripts. Times are those of the simulation, so ranks are not in lock-step.
"""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from shardwright.cost.collectives.simulation import Simulated, simulate
from shardwright.pcg.collectives.bounds import least_latency_s, least_seconds_per_byte
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Edge, Topology
from shardwright.pcg.errors import ScheduleError
from shardwright.pcg.files import write_whole
from shardwright.pcg.units import seconds as seconds_text
from shardwright.pcg.units import size as size_text

MOST_TRANSFERS = 20_000
"""The most transfers that a page draws: each is a box of its own."""
ROW, GAP, WIDTH, LABEL = 16, 4, 1000, 90
COLOURS = ("--batch", "--sequence", "--communication", "--buffers", "--end", "--features")
"""One for each step in turn, from the style of pages."""


def schedule_page(schedule: Schedule, topology: Topology, num_bytes: int) -> str:
    """Return the page of a schedule of `num_bytes` of the whole on a topology. It loads nothing.

    Raises:
        ScheduleError: more transfers than a page can draw.
        ClusterError: a transfer has no path.
    """
    if len(schedule.transfers) > MOST_TRANSFERS:
        problem = f"expected at most {MOST_TRANSFERS} transfers, got {len(schedule.transfers)}"
        raise ScheduleError(f"{schedule.name}: {problem}; use `collectives show` with --steps")
    simulated = simulate(schedule, topology, num_bytes)
    parts = {
        "title": html.escape(f"{schedule.name} on {topology.name}"),
        "style": files("shardwright.view").joinpath("page.css").read_text(encoding="utf-8"),
        "facts": html.escape(_facts(schedule, topology, num_bytes, simulated)),
        "legend": "".join(_legend(schedule)),
        "chart": _chart(schedule, simulated),
        "links": "\n".join(_links(topology, simulated)),
    }
    text = files("shardwright.view").joinpath("schedule.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], text)


def write_schedule_page(schedule: Schedule, topology: Topology, num_bytes: int, target: Path) -> None:
    """Write the page; an existing file is replaced only once the new one is complete."""
    write_whole(target, schedule_page(schedule, topology, num_bytes), "the page", ScheduleError)


def _facts(schedule: Schedule, topology: Topology, num_bytes: int, simulated: Simulated) -> str:
    bound = least_seconds_per_byte(topology, schedule.collective)
    bound_s = max(float(bound.seconds_per_byte) * num_bytes, least_latency_s(topology, schedule.collective))
    share = f", {bound_s / simulated.seconds:.1%} of the bound: {bound.reason}" if simulated.seconds else ""
    what = f"{schedule.collective.kind} of {size_text(num_bytes)} on {schedule.num_ranks} ranks"
    return f"{what}: {seconds_text(simulated.seconds)} in {schedule.num_steps} steps{share}"


def _legend(schedule: Schedule) -> Iterator[str]:
    for step in range(min(schedule.num_steps, len(COLOURS))):
        later = " and so on" if step == len(COLOURS) - 1 and schedule.num_steps > len(COLOURS) else ""
        yield f'<span><i style="background:var({COLOURS[step]})"></i>step {step}{later}</span>'


def _chart(schedule: Schedule, simulated: Simulated) -> str:
    """Return a drawing with a row for each pair of ranks, and a box for each transfer from its start to its arrival."""
    rows = defaultdict[Edge, list[int]](list)
    for index, transfer in enumerate(schedule.transfers):
        rows[transfer.src, transfer.dst].append(index)
    drawn, scale = list[str](), WIDTH / (simulated.seconds or 1.0)
    for number, ((src, dst), numbers) in enumerate(sorted(rows.items())):
        y = number * (ROW + GAP)
        drawn.append(f'<text x="0" y="{y + ROW - 4}">{src} → {dst}</text>')
        drawn += (
            _box(schedule.transfers[i], simulated.starts_s[i], simulated.arrivals_s[i], scale, y) for i in numbers
        )
    height = len(rows) * (ROW + GAP)
    return f'<svg viewBox="0 0 {LABEL + WIDTH} {height}" width="100%" role="img">{"".join(drawn)}</svg>'


def _box(transfer: Transfer, start_s: float, end_s: float, scale: float, y: int) -> str:
    colour = COLOURS[transfer.step % len(COLOURS)]
    place = f'x="{LABEL + start_s * scale:.2f}" y="{y}" width="{max(1.0, (end_s - start_s) * scale):.2f}"'
    verb = "added" if transfer.op == "reduce" else "copied"
    about = f"{transfer}, {verb}: {seconds_text(start_s)} to {seconds_text(end_s)}"
    return f'<rect {place} height="{ROW}" rx="2" fill="var({colour})"><title>{html.escape(about)}</title></rect>'


def _links(topology: Topology, simulated: Simulated) -> Iterator[str]:
    """Yield a row for each link, the busiest first."""
    shares = {edge: simulated.utilisation(edge) for edge in topology.by_edge}
    for edge, share in sorted(shares.items(), key=lambda item: (-item[1], item[0])):
        link = topology.by_edge[edge]
        name = f"{topology.node_name(link.src)} → {topology.node_name(link.dst)}"
        rate = f"{float(link.rate_bytes_per_s) / 1e9:.4g} GB/s"
        bar = f'<div class="bar thin"><i style="width:{share:.1%};background:var(--communication)"></i></div>'
        cells = f'<td class="right">{rate}</td><td class="right">{share:.0%}</td><td class="wide">{bar}</td>'
        yield f"<tr><td>{html.escape(name)}</td>{cells}</tr>"
