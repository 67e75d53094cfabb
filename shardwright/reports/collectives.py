"""Topologies, and schedules of collectives: their facts, the verdict on them, and each step drawn over its links."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from shardwright.cost.clusters.networks import Preset
from shardwright.pcg.collectives.builders.table import BUILDERS
from shardwright.pcg.collectives.plan import Plan, PlanRank
from shardwright.pcg.collectives.program import Program, RankProgram
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Topology
from shardwright.pcg.units import seconds as seconds_text
from shardwright.reports.report import Paragraph, Report
from shardwright.verifier.collectives.verdict import ScheduleVerdict

BAR = 20
MOST_ROWS = 40
"""Rows that a step shows; the others are counted."""


@dataclass(frozen=True)
class PresetsReport(Report):
    """All topologies with a name, and all builders."""

    presets: Mapping[str, Preset]

    def paragraphs(self) -> list[Paragraph]:
        topologies = [(name, "x".join(map(str, one.default)) or "-", one.about) for name, one in self.presets.items()]
        builders = [(name, one.sizes.text, ", ".join(one.makes), one.about) for name, one in BUILDERS.items()]
        return [
            Paragraph("topologies", [], ("name", "by default", "numbers"), topologies),
            Paragraph("builders", [], ("name", "sizes", "collectives", "about"), builders),
        ]

    def data(self) -> dict[str, Any]:
        topologies = [{"name": name, "default": one.default, "about": one.about} for name, one in self.presets.items()]
        builders = [{"name": name, "sizes": one.sizes.text, "collectives": list(one.makes), "about": one.about}
                    for name, one in BUILDERS.items()]  # fmt: skip
        return {"topologies": topologies, "builders": builders}


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
        found = [Paragraph(f"{one.name}: {one.num_ranks} ranks", facts, (">links", ">rate", ">latency"), rows)]
        return [*found, *([Paragraph("shared", [], ("resource", ">rate", ">links"), shared)] if shared else [])]

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
    found = list[list[int]]()
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in found)


def _room(capacity: int | None) -> str:
    if not capacity:
        return "nothing blocks" + (", even if every send waits for its receive" if capacity == 0 else "")
    return f"nothing blocks if every queue has room for {capacity} message{'s' if capacity > 1 else ''}, and no fewer"


def _bar(value: Fraction, most: Fraction) -> str:
    share = float(value / most) if most else 0.0
    return f"{'█' * max(1, round(share * BAR))} {share:.0%}"


def _peer(rank: int) -> str:
    return "-" if rank < 0 else str(rank)


def _rate(rate: Fraction) -> str:
    return f"{float(rate) / 1e9:.4g} GB/s"
