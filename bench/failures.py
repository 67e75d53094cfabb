"""Every phase of a run × three plans × a fault of one rank: `python -m bench.failures`, docs/failures.md.

Two forked gloo ranks train a small model and save every second step. In each case one rank is killed or sleeps in one
phase, or has a NaN, a full disk or a wrong batch. The other must end within the timeout, with a message that names the
rank. The next case goes on from the checkpoint that this one has left, and every loss must be that of a run that
nothing disturbed, bit for bit.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw
from shardwright import api, programs, saving
from shardwright.lowering import module, private
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks import rollcall
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.rollcall import PATIENCE_S
from shardwright.lowering.runtime.inputs import Inputs
from shardwright.lowering.runtime.pipeline import Pipeline
from shardwright.lowering.runtime.runner import Runner
from shardwright.lowering.store import sources
from shardwright.lowering.store.checkpoint_folder import CheckpointFolder, Writer
from shardwright.pcg.errors import DistributedError, ShardwrightError

TIMEOUT_S = 5.0
LATE_S = 2 * TIMEOUT_S + PATIENCE_S
"""The longest that the other rank may take to end: a save waits twice, for the files and for all ranks."""
TRIES = 4
"""The most runs of a case in which the fault does not come."""
PAGE = Path(__file__).parent.parent / "docs" / "failures.md"
PLANS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO": {"mesh": {"x": 2}, "roles": "zero"},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
    "stages": {"stages": 2, "microbatches": 2},
}
Kind = Literal["killed", "stuck", "NaN", "full disk", "wrong batch"]
KINDS: tuple[Kind, ...] = ("killed", "stuck")
"""The faults that come in every phase."""
_COLLECTIVES = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "isend", "irecv")


class Net(nn.Module):
    """Four equal blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def batch(step: int) -> dict[str, Tensor]:
    """Return the batch of a step."""
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(step))}


@dataclass(frozen=True)
class Phase:
    """A place in a run: what fails there on one rank, from which step of its run on, in which plans and ways."""

    name: str
    places: Sequence[tuple[Any, str]]
    rank: int = 1
    steps: int = 0
    plans: Sequence[str] = tuple(PLANS)
    kinds: Sequence[Kind] = KINDS


def _phases() -> Iterator[Phase]:
    """Yield the phases in the order of a run."""
    one = ("ZeRO", "tensor")
    yield Phase("start", [(api, "check_device")])
    yield Phase("capture", [(programs, "captured_for")], rank=0)
    yield Phase("comparison of models", [(programs, "model_facts")])
    yield Phase("sharing of values", [(sources, "share_values")])
    yield Phase("lowering", [(module, "Entry")])
    yield Phase("load: files are checked", [(saving, "_checked")])
    yield Phase("load: values are read", [(saving, "_read")])
    yield Phase("comparison of inputs", [(Inputs, "take")], steps=2)
    yield Phase("forward", [(Runner, "run")], steps=2, plans=one)
    yield Phase("backward", [(Tensor, "backward")], steps=2, plans=one)
    yield Phase("stage action: forward", [(Pipeline, "forward")], steps=2, plans=["stages"])
    yield Phase("stage action: backward", [(Pipeline, "backward")], steps=2, plans=["stages"])
    yield Phase("loss of the last stage", [(Pipeline, "tell")], steps=2, plans=["stages"])
    yield Phase("collective", [(dist, name) for name in _COLLECTIVES], steps=2)
    yield Phase("clipping", [(ParallelModule, "clip_grad_norm_")], steps=2, kinds=(*KINDS, "NaN"))
    yield Phase("optimizer step", [(torch.optim.AdamW, "step")], steps=2)
    yield Phase("loading of data", [(sys.modules[__name__], "batch")], steps=2, kinds=(*KINDS, "wrong batch"))
    yield Phase("signals", [(sw.StopSignals, "asked")], steps=2)
    yield Phase("evaluation", [(ParallelModule, "evaluate")], steps=2)
    yield Phase("save: states are gathered", [(saving, "_by_rank")], steps=2)
    yield Phase("save: files are written", [(Writer, "write_data")], steps=2, kinds=(*KINDS, "full disk"))
    yield Phase("save: the folder gets its name", [(CheckpointFolder, "end")], rank=0, steps=2)


@dataclass
class Seen:
    """The outcome of a run: losses by step; the other rank's error, its words and its seconds to the end.

    `began`: whether the fault came. On a busy machine, a rank may wait too long for another before.
    """

    losses: dict[int, float] = field(default_factory=dict[int, float])
    error: str = ""
    words: str = ""
    seconds: float = 0.0
    began: bool = False


def train(place: str, plan: sw.Plan, last: int, phase: Phase | None = None, kind: Kind = "killed") -> None:
    """Train from the last checkpoint to a step; with a phase, one rank fails there. Losses go to files by rank."""
    folder, rank = Path(place), dist.get_rank()
    failing = phase is not None and rank == phase.rank
    shown, began = folder / f"shown-{rank}", folder / "began"
    try:
        _train(folder, plan, last, _Fault(phase, kind, folder) if failing and phase else None, shown)
    except ShardwrightError as error:
        since = time.time() - float(began.read_text()) if began.exists() else 0.0
        (folder / f"ended-{rank}").write_text(json.dumps([type(error).__name__, str(error), since]))
        raise


class _Fault:
    """Puts a fault in its place on this rank."""

    def __init__(self, phase: Phase, kind: Kind, folder: Path) -> None:
        self.phase, self.folder = phase, folder
        self.kind: Kind = kind

    def arm(self, step: int) -> None:
        if step == self.phase.steps:
            for owner, name in self.phase.places:
                if hasattr(owner, name):
                    setattr(owner, name, self.instead_of(getattr(owner, name)))

    def instead_of(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*given: Any, **options: Any) -> Any:  # noqa: ANN401
            (self.folder / "began").write_text(str(time.time()))
            _FAULTS[self.kind](self.folder, *given)
            result = real(*given, **options)
            return {key: value[1:] for key, value in result.items()} if self.kind == "wrong batch" else result

        return failing


def _killed(*_: object) -> None:
    """Kill this rank, but not while its thread writes into the file that is the store of forked ranks.

    That would leave half an entry, which torch's `FileStore` reads on and on, without a timeout. A `TCPStore`, which
    launchers have, is not harmed.
    """
    rollcall.leave()
    os.kill(os.getpid(), signal.SIGKILL)


def _stuck(folder: Path, *_: object) -> None:
    end = time.monotonic() + 4 * LATE_S
    while time.monotonic() < end and not list(folder.glob("ended-*")):
        time.sleep(0.05)
    os._exit(1)


def _nan(_: Path, parallel: ParallelModule, *__: object) -> None:
    """Put a NaN into this rank's part of a gradient."""
    gradient = next(p.grad for p in parallel.parameters() if p.grad is not None)
    private.unwrap(gradient).fill_(math.nan)


def _full_disk(_: Path, writer: Writer, *__: object) -> None:
    """Let this rank write to a device that has no space left."""
    (Path(writer.path) / f"__{dist.get_rank()}_0.distcp").symlink_to("/dev/full")


_FAULTS: Mapping[Kind, Callable[..., None]] = {
    "killed": _killed, "stuck": _stuck, "NaN": _nan, "full disk": _full_disk, "wrong batch": lambda *_: None,
}  # fmt: skip


def _train(folder: Path, plan: sw.Plan, last: int, fault: _Fault | None, shown: Path) -> None:
    if fault is not None:
        fault.arm(0)
    torch.manual_seed(0)
    net = Net()  # of which other programs are made as long as it lives
    parallel = sw.compile(
        net, kwargs=batch(0), plan=plan, timeout_s=TIMEOUT_S, check_capture="never", check_inputs="always"
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    signals = sw.StopSignals()
    first = sw.load(folder / "saved", parallel, optimizer) or 0
    for step in range(first, last):
        if fault is not None and step > first:
            fault.arm(step - first)
        loss = parallel.forward_backward(**batch(step))
        parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        with shown.open("a") as file:
            file.write(json.dumps([step, loss.item()]) + "\n")
        parallel.evaluate(**batch(step))
        signals.asked(parallel)
        if step % 2:
            sw.save(folder / "saved", parallel, optimizer, step=step + 1, keep=2)


def run(place: Path, plan: sw.Plan, last: int, phase: Phase | None = None, kind: Kind = "killed") -> Seen:
    """Run ranks that train, and return what they have shown."""
    for file in [*place.glob("ended-*"), *place.glob("shown-*"), *place.glob("began")]:
        file.unlink()
    seen = Seen()
    try:
        run_ranks(train, 2, 60.0, args=(str(place), plan, last, phase, kind), grace_s=3 * LATE_S)
    except DistributedError as error:
        if phase is None:
            raise
        seen.words = str(error)
    for file in place.glob("shown-*"):
        seen.losses |= dict(map(json.loads, file.read_text().splitlines()))
    if phase is not None and (ended := place / f"ended-{1 - phase.rank}").exists():
        seen.error, seen.words, seen.seconds = json.loads(ended.read_text())
    seen.began = (place / "began").exists()
    return seen


def run_until_fault(place: Path, plan: sw.Plan, last: int, phase: Phase, kind: Kind, tries: int = TRIES) -> Seen:
    """Run a case, and again where its fault has not come."""
    seen = run(place, plan, last, phase, kind)
    return seen if seen.began or tries == 1 else run_until_fault(place, plan, last, phase, kind, tries - 1)


_ENDS: Mapping[Kind, tuple[str, str]] = {
    "killed": ("DistributedError", "rank {} does not answer"),
    "stuck": ("DistributedError", "rank {} is at "),
    "NaN": ("NumericError", ".weight (ranks {})"),
    "full disk": ("CheckpointError", "rank {}: OSError: [Errno 28] No space left on device"),
    "wrong batch": ("DistributedError", "rank {} waits in the meeting to make a program for a batch of another shape"),
}
"""The error of the other rank, and what it says of the one that fails."""


def judged(seen: Seen, phase: Phase, kind: Kind, whole: Mapping[int, float]) -> str:
    """Return what is wrong with a case; "" for nothing."""
    error, who = _ENDS[kind][0], _ENDS[kind][1].format(phase.rank)
    if wrong := [step for step, loss in seen.losses.items() if whole[step] != loss]:
        return f"another loss in step {wrong[0]}"
    if not seen.began:
        return f"no fault: {seen.words}"
    if error != seen.error or who not in seen.words:
        return f"does not say {who!r} in a {error}: {seen.error}: {seen.words}"
    return "" if seen.seconds < LATE_S else f"took {seen.seconds:.1f} s"


@dataclass(frozen=True)
class Cell:
    """A case's outcome."""

    problem: str
    seconds: float


def measured(
    name: str, cases: Sequence[tuple[Phase, Kind]], tell: Callable[[str], None] = lambda _: None
) -> dict[tuple[str, Kind], Cell]:
    """Run cases under a plan, one after another from the checkpoint that the one before has left."""
    plan = sw.plan(Net(), sw.Cluster.local(2), kwargs=batch(0), **PLANS[name])
    found = dict[tuple[str, Kind], Cell]()
    with tempfile.TemporaryDirectory() as whole_place, tempfile.TemporaryDirectory() as place:
        last = 2 * len(cases) + 4  # no case gets further than two steps
        whole = run(Path(whole_place), plan, last).losses
        run(Path(place), plan, 2)
        for phase, kind in cases:
            seen = run_until_fault(Path(place), plan, last, phase, kind)
            found[phase.name, kind] = Cell(judged(seen, phase, kind, whole), seen.seconds)
            tell(f"{name}, {phase.name}, {kind}: {found[phase.name, kind]}")
        reached = max(CheckpointFolder(Path(place) / "saved").steps(), default=0)
        end = run(Path(place), plan, last)
        rest = {step: loss for step, loss in whole.items() if step >= reached}
        found["the end of all", "killed"] = Cell("" if end.losses == rest else "other losses at the end", 0.0)
    return found


def phases() -> dict[str, Phase]:
    """Return the phases by name, in the order of a run."""
    return {phase.name: phase for phase in _phases()}


def page(cells: Mapping[str, Mapping[tuple[str, Kind], Cell]], phases: Sequence[Phase]) -> str:
    """Return the page with its two tables."""
    good = sum(not cell.problem for found in cells.values() for cell in found.values())
    total = sum(map(len, cells.values()))
    lines = [
        _INTRODUCTION.format(good=good, total=total, timeout=TIMEOUT_S, late=LATE_S, date=date.today()),
        "| phase | rank | " + " | ".join(f"{name}: {kind}" for name in PLANS for kind in KINDS) + " |",
        "|---|--:|" + "--:|" * (2 * len(PLANS)),
    ]
    for phase in phases:
        row = [_shown(cells[name].get((phase.name, kind))) for name in PLANS for kind in KINDS]
        lines.append(f"| {phase.name} | {phase.rank} | {' | '.join(row)} |")
    lines += [
        "",
        "| fault of rank 1 | the other rank ends with | " + " | ".join(PLANS) + " |",
        "|---|---|" + "--:|" * len(PLANS),
    ]
    for phase in phases:
        for kind in phase.kinds[len(KINDS) :]:
            row = [_shown(cells[name].get((phase.name, kind))) for name in PLANS]
            lines.append(f"| {_WORDS[kind]} | {_ending(kind, phase)} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = (
    "# Failures\n\n"
    "Two gloo ranks train a small model, and save every second step. In each case one rank has a fault in one phase of "
    "the run: it is killed (SIGKILL), sleeps, or has a NaN, a full disk or another batch. The timeout of collectives "
    "is {timeout:g} s. A case passes if\n\n"
    "* the other rank ends within {late:g} s, as a save waits twice: for the files, and for all ranks;\n"
    "* its error names the rank and what is wrong: a `DistributedError` with `rank 1 does not answer: killed, stopped "
    "or gone` or `rank 1 is at train.py:33 in load`; the second table has the others;\n"
    "* every loss is that of a run that nothing disturbed, bit for bit, as each case goes on from the checkpoint that "
    "the case before has left, and the last one trains to the end.\n\n"
    "{good} of {total} cases pass; the last of each plan has no fault and trains to the end. The tables have the "
    "seconds from the fault to the end of the other rank. In "
    "*lowering*, ranks meet before they connect: the timeout passes before the rank is called. `make failures` writes "
    "this page (two cores, no GPU, {date:%Y-%m-%d}).\n"
)
_WORDS: Mapping[Kind, str] = {
    "NaN": "a NaN in a gradient", "full disk": "no space left for its file of a checkpoint",
    "wrong batch": "a batch with one row less",
}  # fmt: skip


def _ending(kind: Kind, phase: Phase) -> str:
    error, words = _ENDS[kind]
    return f"`{error}`: `… {words.format(phase.rank)}`"


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{cell.seconds:.1f}" if not cell.problem else f"**{cell.problem[:60]}**"


def main() -> None:
    """Run all cases, or those of the phases that are named; with all, write the page."""
    chosen = [phase for name, phase in phases().items() if name in sys.argv[1:] or not sys.argv[1:]]
    cells = dict[str, dict[tuple[str, Kind], Cell]]()
    for name in PLANS:
        cases: list[tuple[Phase, Kind]] = [
            (phase, kind) for phase in chosen if name in phase.plans for kind in phase.kinds
        ]
        cells[name] = measured(name, cases, partial(print, flush=True))
    if not sys.argv[1:]:
        PAGE.write_text(page(cells, chosen), encoding="utf-8")
    sys.exit(any(cell.problem for found in cells.values() for cell in found.values()))


if __name__ == "__main__":
    main()
