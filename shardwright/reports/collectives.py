"""Topologies, and schedules of collectives: their facts, the verdict on them, and each step drawn over its links."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from shardwright.cost.clusters.networks import Preset
from shardwright.cost.collectives.simulation import simulate
from shardwright.pcg.collectives.bounds import least_seconds_per_byte
from shardwright.pcg.collectives.builders.table import BUILDERS
from shardwright.pcg.collectives.plan import Plan, PlanRank
from shardwright.pcg.collectives.program import Program, RankProgram
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.timing import Timing
from shardwright.pcg.collectives.topology import Topology
from shardwright.pcg.units import seconds as seconds_text
from shardwright.pcg.units import size as size_text
from shardwright.reports.report import Paragraph, Report
from shardwright.verifier.collectives.verdict import ScheduleVerdict

if TYPE_CHECKING:
    from shardwright.search.collectives.frontier import Point
    from shardwright.search.collectives.synthesis import Synthesized

BAR = 20
MOST_ROWS = 40
"""Rows that a step shows; the others are counted."""


@dataclass(frozen=True)
class PresetsReport(Report):
    """All topologies with a name, and all builders."""

    presets: Mapping[str, Preset]

    def paragraphs(self) -> list[Paragraph]:
        topologies = [(name, "x".join(map(str, one.default)) or "-", one.about) for name, one in self.presets.items()]
        builders = [
            (name, one.sizes.text, ", ".join(one.makes), ", ".join(_proven(name)) or "-", one.about)
            for name, one in BUILDERS.items()
        ]
        return [
            Paragraph("topologies", [], ("name", "by default", "numbers"), topologies),
            Paragraph(
                "builders", [], ("name", "sizes", "collectives", "family proven for all sizes", "about"), builders
            ),
        ]

    def data(self) -> dict[str, Any]:
        topologies = [{"name": name, "default": one.default, "about": one.about} for name, one in self.presets.items()]
        builders = [{"name": name, "sizes": one.sizes.text, "collectives": list(one.makes), "about": one.about,
                     "family_proven_for_all_sizes": _proven(name)}
                    for name, one in BUILDERS.items()]  # fmt: skip
        return {"topologies": topologies, "builders": builders}


def _proven(builder: str) -> list[str]:
    """Return which collectives of a builder are of a family that is proven for all its sizes at once."""
    from shardwright.verifier.collectives.ways import proven_kinds  # loads Z3

    return proven_kinds(builder, BUILDERS[builder].makes)


@dataclass(frozen=True)
class TopologyReport(Report):
    """A topology: its links by rate, and what they share."""

    topology: Topology

    def paragraphs(self) -> list[Paragraph]:
        one = self.topology
        kinds = Counter((link.rate_bytes_per_s, link.latency_s) for link in one.links)
        rows = [(str(many), _rate(rate), seconds_text(latency)) for (rate, latency), many in sorted(kinds.items())]
        facts = [f"relays  {', '.join(one.relays)}"] if one.relays else []
        facts += [f"unit    {_rate(one.unit_rate)}, of which every rate is a multiple"]
        shared = [(share.name, _rate(share.rate_bytes_per_s), str(len(share.edges))) for share in one.resources]
        paragraphs = [Paragraph(f"{one.name}: {one.num_ranks} ranks", facts, (">links", ">rate", ">latency"), rows)]
        return [*paragraphs, *([Paragraph("shared", [], ("resource", ">rate", ">links"), shared)] if shared else [])]

    def data(self) -> dict[str, Any]:
        one = self.topology
        links = [[link.src, link.dst, float(link.rate_bytes_per_s), link.latency_s] for link in one.links]
        shared = [{"name": s.name, "rate_bytes_per_s": float(s.rate_bytes_per_s), "links": sorted(s.edges)}
                  for s in one.resources]  # fmt: skip
        return {"name": one.name, "num_ranks": one.num_ranks, "relays": one.relays, "links": links, "resources": shared}


@dataclass(frozen=True)
class VerdictReport(Report):
    """The verdict on a schedule or program of a file."""

    source: str
    form: str
    verdict: ScheduleVerdict

    def paragraphs(self) -> list[Paragraph]:
        certificate = self.verdict.certificate
        if certificate is None:
            return [Paragraph(f"{self.source}: {self.form}, refused", list(map(str, self.verdict.refusals)))]
        facts = [certificate.claim, *certificate.facts, _room(certificate.least_capacity)]
        facts += [f"certificate {certificate.subject} of judge {certificate.judge}"]
        return [Paragraph(f"{self.source}: {self.form}, certified", facts)]

    def data(self) -> dict[str, Any]:
        return {"file": self.source, "form": self.form, "certified": self.verdict.is_certified,
                **(asdict(self.verdict.certificate) if self.verdict.certificate else {}),
                "refusals": [refusal._asdict() for refusal in self.verdict.refusals]}  # fmt: skip


@dataclass(frozen=True)
class FrontierReport(Report):
    """The best schedules for each number of steps, and how far each is from what no schedule can beat."""

    topology: Topology
    kind: str
    points: Sequence[Point]

    def paragraphs(self) -> list[Paragraph]:
        if not self.points:
            return [
                Paragraph(f"{self.kind} on {self.topology.name}: no schedule found", ["give it more time or steps"])
            ]
        rows = [
            (str(point.pieces), str(point.steps), str(point.rounds), f"{_byte_rate(point.seconds_per_byte)} GB/s",
             f"{point.gap:.1%}", _proof(point))
            for point in self.points
        ]  # fmt: skip
        bound = self.points[-1].bound
        facts = [f"no schedule moves more than {_byte_rate(bound.seconds_per_byte)} GB/s of the whole: {bound.reason}"]
        columns = (">pieces", ">steps", ">rounds", ">of the whole", ">from the bound", "proven")
        return [Paragraph(f"{self.kind} on {self.topology.name}", facts, columns, rows)]

    def data(self) -> dict[str, Any]:
        points = [{"pieces": point.pieces, "steps": point.steps, "rounds": point.rounds, "gap": point.gap,
                   "seconds_per_byte": float(point.seconds_per_byte), "meets_bound": point.meets_bound,
                   "is_best": point.is_best} for point in self.points]  # fmt: skip
        return {"topology": self.topology.name, "kind": self.kind, "points": points}


@dataclass(frozen=True)
class SynthesisReport(Report):
    """Schedules for one size, each faster than the one before, beside what no schedule can beat."""

    topology: Topology
    kind: str
    num_bytes: int
    found: Sequence[Synthesized]

    def paragraphs(self) -> list[Paragraph]:
        title = f"{self.kind} of {size_text(self.num_bytes)} on {self.topology.name}"
        if not self.found:
            return [Paragraph(f"{title}: no schedule found", ["give it more time"])]
        rows = [
            (one.schedule.name, str(len(one.schedule.collective.chunks)), str(one.schedule.num_steps),
             str(len(one.schedule.transfers)), seconds_text(one.seconds), f"{1 / (1 + one.gap):.1%}")
            for one in self.found
        ]  # fmt: skip
        last = self.found[-1]
        facts = [f"no schedule takes less than {seconds_text(last.bound_s)}: {last.bound.reason}"]
        columns = ("schedule", ">chunks", ">steps", ">transfers", ">time", ">of the bound")
        return [Paragraph(title, facts, columns, rows)]

    def data(self) -> dict[str, Any]:
        rows = [{"name": one.schedule.name, "steps": one.schedule.num_steps, "transfers": len(one.schedule.transfers),
                 "seconds": one.seconds, "bound_s": one.bound_s, "gap": one.gap} for one in self.found]  # fmt: skip
        return {"topology": self.topology.name, "kind": self.kind, "bytes": self.num_bytes, "found": rows}


@dataclass(frozen=True)
class CostReport(Report):
    """The time of a schedule for several sizes, simulated link by link, in lock-step, and the bound."""

    schedule: Schedule
    topology: Topology
    sizes: Sequence[int]

    def paragraphs(self) -> list[Paragraph]:
        rows = [
            (size_text(row["bytes"]), seconds_text(row["seconds"]), seconds_text(row["lock_step_s"]),
             f"{row['bytes'] / row['seconds'] / 1e9:.4g} GB/s", f"{row['bound_s'] / row['seconds']:.1%}")
            for row in self.data()["sizes"]
        ]  # fmt: skip
        bound = least_seconds_per_byte(self.topology, self.schedule.collective)
        note = f"bound: {_byte_rate(bound.seconds_per_byte)} GB/s of the whole, latencies left out: {bound.reason}"
        columns = (">bytes", ">time", ">in lock-step", ">of the whole", ">of the bound")
        return [Paragraph(f"{self.schedule.name} on {self.topology.name}", [], columns, rows, [note])]

    def data(self) -> dict[str, Any]:
        least = float(least_seconds_per_byte(self.topology, self.schedule.collective).seconds_per_byte)
        sizes = [{"bytes": size, "seconds": simulate(self.schedule, self.topology, size).seconds,
                  "lock_step_s": self.schedule.time_s(self.topology, size), "bound_s": least * size}
                 for size in self.sizes]  # fmt: skip
        return {"name": self.schedule.name, "topology": self.topology.name, "sizes": sizes}


@dataclass(frozen=True)
class RunReport(Report):
    """The time of a schedule on ranks of this machine for several sizes, beside torch's own collective."""

    schedule: Schedule
    timings: Sequence[Timing]

    def paragraphs(self) -> list[Paragraph]:
        rows = [
            (size_text(timing.num_bytes), "right" if timing.is_right else "WRONG", seconds_text(timing.seconds),
             "–" if timing.torch_s is None else seconds_text(timing.torch_s),
             "–" if timing.torch_s is None else f"{timing.seconds / timing.torch_s:.2f}")
            for timing in self.timings
        ]  # fmt: skip
        columns = (">bytes", "result", ">time", ">gloo's own", ">ratio")
        where = f"{self.schedule.name} on {self.schedule.num_ranks} ranks of this machine"
        return [Paragraph(where, [], columns, rows, ["times: medians; of each run, its slowest rank"])]

    def data(self) -> dict[str, Any]:
        return {"name": self.schedule.name, "runs": [timing._asdict() for timing in self.timings]}


@dataclass(frozen=True)
class ScheduleReport(Report):
    """A schedule, step by step: who sends what to whom, and how busy each link is in the time of the step."""

    schedule: Schedule
    topology: Topology | None
    steps: Sequence[int]

    def paragraphs(self) -> list[Paragraph]:
        one, whole = self.schedule, self.schedule.collective
        pieces = f"{len(whole.chunks)} chunks" + ("" if whole.is_even else " of unequal sizes")
        facts = [
            f"{whole.kind} of {one.num_ranks} ranks: {pieces}, {one.num_steps} steps, {len(one.transfers)} transfers"
        ]
        if one.rounds:
            facts.append(f"{sum(one.rounds)} rounds: {' + '.join(map(str, one.rounds))}")
        if self.topology is not None:
            seconds = sum(one.seconds_per_byte(self.topology))
            latency_s = one.time_s(self.topology, 0)
            facts.append(
                f"on {self.topology.name}, in lock-step: {seconds_text(latency_s)} + {float(seconds):.4g} s per byte"
            )
        return [Paragraph(one.name, facts), *(self._step(step) for step in self.steps)]

    def data(self) -> dict[str, Any]:
        seconds = self.schedule.seconds_per_byte(self.topology) if self.topology else None
        steps = [{"step": step, "transfers": [t._asdict() for t in self.schedule.steps[step]],
                  "seconds_per_byte": float(seconds[step]) if seconds else None} for step in self.steps]  # fmt: skip
        return {"name": self.schedule.name, "kind": self.schedule.collective.kind, "steps": steps}

    def _step(self, step: int) -> Paragraph:
        moves = defaultdict[tuple[int, int, str], list[Transfer]](list)
        for transfer in self.schedule.steps[step]:
            moves[transfer.src, transfer.dst, transfer.op].append(transfer)
        loads = [(ends, transfers, self._busy(transfers)) for ends, transfers in sorted(moves.items())]
        longest = max(busy for _, _, busy in loads)
        rows = [
            (
                f"{src} → {dst}",
                f"{'+' if op == 'reduce' else ''}{runs([t.chunk for t in transfers])}",
                _bar(busy, longest),
            )
            for (src, dst, op), transfers, busy in loads[:MOST_ROWS]
        ]
        notes = [f"and {len(loads) - MOST_ROWS} more"] if len(loads) > MOST_ROWS else []
        notes += self._links(step)
        return Paragraph(f"step {step}", [], ("ranks", "chunks, + if added", "time"), rows, notes)

    def _busy(self, transfers: Sequence[Transfer]) -> Fraction:
        """Return how long the path of transfers is busy with them; without a topology, their share of the data."""
        share = sum((self.schedule.collective.chunks[t.chunk].size for t in transfers), Fraction(0))
        if self.topology is None:
            return share
        path = self.topology.path(transfers[0].src, transfers[0].dst, transfers[0].via)
        return share / min(self.topology.by_edge[edge].rate_bytes_per_s for edge in path)

    def _links(self, step: int) -> list[str]:
        if self.topology is None:
            return []
        shares = self.schedule.shares(self.topology, step)
        whole = self.topology.busy_s_per_byte(shares)
        idle = len(self.topology.links) - len(shares)
        used = sum(share / self.topology.by_edge[edge].rate_bytes_per_s for edge, share in shares.items())
        mean = float(used / whole / len(self.topology.links)) if whole else 0.0
        return [f"links are used {mean:.0%} of the step on average; {idle} of {len(self.topology.links)} are idle"]


@dataclass(frozen=True)
class ProgramReport(Report):
    """A program or a plan: the blocks of each rank, and their steps."""

    program: Program | Plan
    ranks: Sequence[int]

    def paragraphs(self) -> list[Paragraph]:
        one = self.program
        if isinstance(one, Plan):
            place = "in place" if one.in_place else "out of place"
            facts = f"{one.kind} of {one.num_ranks} ranks, {one.protocol}, {place}"
            return [Paragraph(one.name, [facts]), *(_plan_rank(rank, one.ranks[rank]) for rank in self.ranks)]
        modes = [text for text, is_so in (("in place", one.in_place), ("out of place", one.out_of_place)) if is_so]
        facts = (
            f"{one.kind} of {one.num_ranks} ranks, {one.num_chunks} chunks, {one.num_channels} channels, {one.protocol}"
        )
        title = Paragraph(one.name, [f"{facts}, {' and '.join(modes)}"])
        return [title, *(_program_rank(rank, one.ranks[rank]) for rank in self.ranks)]

    def data(self) -> dict[str, Any]:
        ranks = [
            {"rank": rank, "blocks": [block._asdict() for block in self.program.ranks[rank].blocks]}
            for rank in self.ranks
        ]
        return {"name": self.program.name, "kind": self.program.kind, "ranks": ranks}


def _program_rank(rank: int, one: RankProgram) -> Paragraph:
    rows = [
        (
            str(index),
            _peer(block.send),
            _peer(block.receive),
            str(block.channel),
            " ".join(step.op for step in block.steps),
        )
        for index, block in enumerate(one.blocks)
    ]
    return Paragraph(f"rank {rank}", [_sizes(one)], (">block", ">to", ">from", ">channel", "steps"), rows)


def _plan_rank(rank: int, one: PlanRank) -> Paragraph:
    rows = [(str(index), " ".join(action.name for action in block.actions)) for index, block in enumerate(one.blocks)]
    return Paragraph(f"rank {rank}", [_sizes(one)], (">block", "operations"), rows)


def _sizes(one: RankProgram | PlanRank) -> str:
    return f"{one.input_chunks} chunks of input, {one.output_chunks} of output, {one.scratch_chunks} of scratch"


def runs(numbers: Sequence[int]) -> str:
    """Return numbers with runs drawn together: 0–3, 7, 9."""
    intervals = list[list[int]]()
    for number in sorted(numbers):
        if intervals and number == intervals[-1][1] + 1:
            intervals[-1][1] = number
        else:
            intervals.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in intervals)


def _room(capacity: int | None) -> str:
    if not capacity:
        return "nothing blocks" + (", even if every send waits for its receive" if capacity == 0 else "")
    return f"nothing blocks if every queue has room for {capacity} message{'s' if capacity > 1 else ''}, and no fewer"


def _proof(point: Point) -> str:
    if point.meets_bound:
        return "meets the bound: no schedule has more"
    if point.is_best:
        return "the best of so few steps"
    return "the best of so few steps and pieces" if point.is_best_of_pieces else "the best that was found"


def _byte_rate(seconds_per_byte: Fraction) -> str:
    return f"{1e-9 / float(seconds_per_byte):.4g}"


def _bar(value: Fraction, most: Fraction) -> str:
    share = float(value / most) if most else 0.0
    return f"{'█' * max(1, round(share * BAR))} {share:.0%}"


def _peer(rank: int) -> str:
    return "-" if rank < 0 else str(rank)


def _rate(rate: Fraction) -> str:
    return f"{float(rate) / 1e9:.4g} GB/s"
