"""A plan's prediction beside the dry run of its program: messages, memory at the peak, types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.lowering.trial.dryrun import DryRun
from shardwright.pcg.stages import cut
from shardwright.pcg.step.meshes import first_ranks, stage_meshes, stage_of
from shardwright.pcg.step.messages import Message
from shardwright.pcg.step.time import as_run
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.units import percent, plural, seconds, size
from shardwright.search.plan import Plan

TOLERANCE = 0.05
"""The largest error of the predicted peak, relative to that of the dry run."""
UNSEEN = ("context", "communication", "slack")
"""Categories of memory that are not tensors: the driver's, the library's and what the allocator holds beyond."""
MOST_SHOWN = 20
_Key = tuple[str, str, str]
"""A collective, its axis, and the kind of data that it sends."""


class DryRunReport(Report):
    """The prediction, the dry run, and their differences."""

    def __init__(self, plan: Plan, run: DryRun) -> None:
        self.plan, self.run = plan, run
        lowered = as_run(plan.graph, plan.execution).validate()
        meshes = stage_meshes(plan.mesh, plan.execution)
        self.stage = stage_of(meshes, run.rank)
        self.mesh = meshes[self.stage]
        place = stage_meshes(lowered.mesh, plan.execution)[self.stage].coordinate(
            run.rank - first_ranks(meshes)[self.stage]
        )
        self.program = program(lowered, plan.cluster, plan.execution, place=place)
        self.messages = self.program.messages(self.stage)
        if plan.execution.schedule.num_stages > 1:
            self.messages += cut(lowered, plan.execution).messages(run.rank)
        timeline = simulate(self.program.without(UNSEEN)).stages[self.stage]
        memory = timeline.memory.by_category()
        self.memory = {name: num_bytes for name, num_bytes in memory.items() if name not in UNSEEN}
        self.peak_at = timeline.peak_at
        self.findings = [*run.misshapen, *self._wrong_messages(), *self._wrong_memory()]

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def predicted_bytes(self) -> int:
        """The predicted bytes of tensors at the peak."""
        return sum(self.memory.values())

    @property
    def memory_error(self) -> float:
        """The error of the predicted peak, relative to that of the dry run."""
        return self.predicted_bytes / self.run.peak_bytes - 1

    def _wrong_messages(self) -> Iterable[str]:
        for message in sorted({*self.messages, *self.run.messages}):
            expected, got = self.messages.get(message, 0), self.run.messages.get(message, 0)
            if expected != got:
                what = f"{message.collective} of {message.kind} along {message.axis} of {message.num_bytes:,} bytes"
                yield f"{what}: predicted {plural(expected, 'time')}, the dry run has {got}"

    def _wrong_memory(self) -> Iterable[str]:
        if abs(self.memory_error) > TOLERANCE:
            sides = f"predicted {size(self.predicted_bytes)}, the dry run has {size(self.run.peak_bytes)}"
            yield f"memory at the peak: {sides}, which is more than {percent(TOLERANCE)} off"
        said, now = self.plan.prediction.memory.total_bytes, simulate(self.program).fullest.memory.total_bytes
        if abs(said / now - 1) > TOLERANCE:
            yield f"memory in all: the plan says {size(said)}, this Shardwright predicts {size(now)}; plan again"

    # ---- for people ----

    def paragraphs(self) -> list[Paragraph]:
        run, mesh = self.run, self.mesh
        title = f"{'PASSED' if self.passed else 'FAILED'}: dry run of {self.plan.model} on mesh {mesh}"
        size, count, who = self.plan.cluster.num_devices, self.plan.execution.schedule.num_stages, "which all"
        if count > 1:
            who = f"in pipeline stage {self.stage} of {count}, whose ranks all"
        ranks = f"rank {run.rank} of {size}, {who} run the same program on parts of the same shapes"
        shown = [*self.findings[:MOST_SHOWN]]
        more = len(self.findings) - len(shown)
        shown += [f"and {more} more"] if more > 0 else []
        lines = [f"{ranks}; {seconds(run.seconds)}", *shown]
        return [Paragraph(title, lines), self._sent(), self._memory()]

    def _sent(self) -> Paragraph:
        predicted, run_totals = totals(self.messages), totals(self.run.messages)
        rows = [
            (*key, *(str(side.get(key, (0, 0))[0]) for side in (predicted, run_totals)),
             *(size(side.get(key, (0, 0))[1]) for side in (predicted, run_totals)),
             "ok" if self._equal(key) else "OFF")
            for key in sorted({*predicted, *run_totals})
        ]  # fmt: skip
        columns = ("collective", "axis", "of", ">predicted", ">dry run", ">predicted", ">dry run", "")
        lines = ["what a rank sends in a step; bytes are those of the whole tensor of a group"]
        return Paragraph("Collectives", lines, columns, rows)

    def _equal(self, key: _Key) -> bool:
        sides = ({m: n for m, n in side.items() if _key(m) == key} for side in (self.messages, self.run.messages))
        return next(sides) == next(sides)

    def _memory(self) -> Paragraph:
        run = self.run
        names = [name for name in dict.fromkeys((*self.memory, *run.memory)) if self._most(name)]
        rows = [(name, size(self.memory.get(name, 0)), size(run.memory.get(name, 0))) for name in names]
        rows.append(("in all", size(self.predicted_bytes), size(run.peak_bytes)))
        lines = [
            f"{self.memory_error:+.1%}: predicted for {self.peak_at}; in the dry run {run.during}",
            f"not seen by a dry run, and left out: {', '.join(UNSEEN)}",
        ]
        return Paragraph("Memory of tensors at the peak", lines, ("category", ">predicted", ">dry run"), rows)

    def _most(self, name: str) -> int:
        return max(self.memory.get(name, 0), self.run.memory.get(name, 0))

    # ---- for programs ----

    def data(self) -> dict[str, object]:
        messages = sorted({*self.messages, *self.run.messages})
        return {
            "passed": self.passed,
            "findings": self.findings,
            "rank": self.run.rank,
            "seconds": self.run.seconds,
            "collectives": [
                {**m._asdict(), "predicted": self.messages.get(m, 0), "found": self.run.messages.get(m, 0)}
                for m in messages
            ],
            "memory": {
                "predicted": self.memory,
                "found": dict(self.run.memory),
                "predicted_bytes": self.predicted_bytes,
                "found_bytes": self.run.peak_bytes,
                "during": self.run.during,
            },
        }


def totals(messages: Mapping[Message, int]) -> dict[_Key, tuple[int, int]]:
    """Return the number and the total bytes of each collective along each axis, by the kind of data."""
    by_key: dict[_Key, tuple[int, int]] = {}
    for message, times in messages.items():
        count, total = by_key.get(_key(message), (0, 0))
        by_key[_key(message)] = count + times, total + times * message.num_bytes
    return by_key


def _key(message: Message) -> _Key:
    return message.collective, message.axis, message.kind
