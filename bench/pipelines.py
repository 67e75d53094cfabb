"""Pipeline stages against `torch.distributed.pipelining`, side by side in one run, and bubbles against predictions.

Two and four gloo ranks with one thread each train the same GPT with the same weights on the same batch, in the same
stages, microbatches and order of these. In every round each contender takes one step; ratios are taken within a round,
and their median is reported. A bubble is the share of a step in which a stage has nothing to do.

    python -m bench.pipelines            writes the last section of docs/speed.md
    python -m bench.pipelines --rounds 2 --dry
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional as F

from bench.gpt import GPT, Size, build, make_batch
from bench.plans import CERTIFIED
from bench.rounds import CPU, FORWARD_BACKWARD, STEP, Samples, quartiles, ratio, run_rounds, slowest_rank
from bench.speed import BOUND, PAGE, check_agreement
from bench.trainers import Trainer, adamw, whole_gradients
from bench.zoo_times import WORKLOAD, passes
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.channels import Channel, Incoming, Outgoing
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime.pipeline import Pipeline
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.pipelining import ScheduleName
from shardwright.search.request.restrict import DATA
from shardwright.search.tree.planner import Planner

HEADING = "## Pipeline stages"
TIMEOUT_S = 900.0
THEIRS: Mapping[ScheduleName, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
"""With one stage on each rank, the last one is ZB-H1, as ours is."""
SMALL, LARGE = Size(batch=8, seq=128, hidden=128, heads=4), Size(batch=8, seq=128)
LONG = replace(LARGE, layers=8)


@dataclass(frozen=True)
class Way:
    """A model, its stages, and the order of its microbatches. `tied`: the head's weight is the embedding's."""

    size: Size
    num_stages: int
    schedule: ScheduleName
    many: int = 8
    tied: bool = False

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "interleaved" else 1

    @property
    def blocks(self) -> list[range]:
        """Return the range of blocks of each virtual stage."""
        parts = self.num_stages * self.chunks
        ends = [self.size.layers * number // parts for number in range(parts + 1)]
        return [range(*pair) for pair in pairwise(ends)]

    @property
    def execution(self) -> Execution:
        """The embedding is a section of its own before the first block, the head behind the last one."""
        split = [len(blocks) for blocks in self.blocks]
        split[0], split[-1] = split[0] + 1, split[-1] + 1
        return Execution.of(
            num_stages=self.num_stages, chunks_per_stage=self.chunks, schedule=self.schedule, split=tuple(split)
        )

    @property
    def name(self) -> str:
        return f"{self.num_stages} stages, width {self.size.hidden}, {self.schedule}{', tied' if self.tied else ''}"

    def model(self) -> GPT:
        model = build(self.size)
        if self.tied:
            model.head.weight = model.tok.weight
        return model

    def plan(self) -> Graph:
        """Return the graph on the mesh of a stage, which is one device."""
        serial = capture(self.model(), make_batch(self.size)).graph
        planner = Planner(Cluster.local(1), CERTIFIED)
        return planner.solve(serial, Mesh.of(mb=self.many, x=1), (DATA,), "GPT").graph


RACES: Sequence[Sequence[Way]] = (
    (*(Way(LARGE, 2, schedule) for schedule in THEIRS), Way(LARGE, 2, "1f1b", tied=True)),
    tuple(Way(SMALL, 2, schedule) for schedule in THEIRS),
    tuple(Way(LONG, 4, schedule) for schedule in THEIRS),
)
"""What takes turns in one run."""


# ---- contenders ----


@dataclass(frozen=True)
class Staged(Trainer):
    """One rank's part of a pipeline. `loss_rank`: the one that has the loss; None: all have."""

    loss_rank: int | None = None

    def whole_loss(self) -> Tensor:
        loss = self.forward_backward().detach().clone()
        if self.loss_rank is not None:
            dist.broadcast(loss, self.loss_rank)
        return loss


def from_all_ranks(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all stages."""
    found: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, whole_gradients(model))
    return {name: gradient for part in found for name, gradient in part.items()}


class Part(nn.Module):
    """Some blocks of a GPT, with what comes before the first one and after the last one, by the model's own names."""

    def __init__(self, model: GPT, blocks: range) -> None:
        super().__init__()
        first, last = blocks.start == 0, blocks.stop == len(model.blocks)
        self.tok, self.pos = (model.tok, model.pos) if first else (None, None)
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        self.ln, self.head = (model.ln, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Run on token ids or hidden states. The last part returns logits."""
        if self.tok is not None and self.pos is not None:
            x = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.ln is None or self.head is None else self.head(self.ln(x))


def by_torch(way: Way, name: str) -> Trainer:
    """`torch.distributed.pipelining`, with the loss divided by hand, which saves it a pass over the gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, batch, blocks = way.model(), make_batch(way.size), way.blocks
    own = range(rank, len(blocks), ranks)
    parts = nn.ModuleList(Part(model, blocks[number]) for number in own)
    stages = [PipelineStage(p, k, len(blocks), torch.device("cpu")) for k, p in zip(own, parts, strict=True)]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / way.many

    make = THEIRS[way.schedule]
    several = way.schedule in ("interleaved", "zero-bubble")
    runtime = make(stages if several else stages[0], way.many, loss_of, scale_grads=False)
    tied = model.tok.weight if way.tied and rank in (0, ranks - 1) else None
    between = dist.new_group([0, ranks - 1])

    def forward_backward() -> Tensor:
        losses = list[Tensor]()
        first = (batch["ids"],) if rank == 0 else ()
        last = {"target": batch["targets"], "losses": losses} if rank == ranks - 1 else {}
        runtime.step(*first, **last, return_outputs=False)
        if tied is not None:
            dist.all_reduce(tied.grad, group=between)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())

    def gradients() -> dict[str, Tensor]:
        found = from_all_ranks(parts)
        plain = {name.partition(".")[2]: gradient for name, gradient in found.items()}
        if way.tied:
            plain.pop("head.weight", None)
        return plain

    return Staged(name, forward_backward, adamw(list(parts.parameters())), gradients, loss_rank=ranks - 1)


def ours(way: Way, graph: Graph, name: str) -> Trainer:
    """A lowered plan with stages."""
    parallel = lower(graph, way.model(), execution=way.execution)
    step = partial(parallel.forward_backward, **make_batch(way.size))
    return Staged(name, step, adamw(list(parallel.parameters())), lambda: from_all_ranks(parallel))


def whole(way: Way) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    model = way.model()
    loss = model(**make_batch(way.size))
    loss.backward()
    return loss.detach(), whole_gradients(model)


# ---- running ----


def race(ways: Sequence[Way], graphs: Sequence[Graph], num_rounds: int) -> tuple[dict[str, Samples], list[Idle]]:
    """Return on a rank the times of ours and of theirs in every way; and, by way, how ours waits."""
    trainers = list[Trainer]()
    for way, graph in zip(ways, graphs, strict=True):
        expected = whole(way)
        for trainer in (ours(way, graph, f"ours, {way.name}"), by_torch(way, f"theirs, {way.name}")):
            check_agreement(trainer, *expected)
            trainers.append(trainer)
    times = run_rounds(trainers, num_rounds)
    return times, [idle(trainer, num_rounds) for trainer in trainers[::2]]


class Span(NamedTuple):
    """The time span of a call, by the machine's clock, which all ranks read."""

    start: float
    end: float


class Idle(NamedTuple):
    """A rank's share of every step in which it waits for other stages; what it sent and took in them, by channel."""

    shares: list[float]
    sent: dict[str, list[Span]]
    taken: dict[str, list[Span]]


def idle(trainer: Trainer, num_rounds: int) -> Idle:
    """Measure the waits of this rank."""
    found = Idle([], defaultdict(list), defaultdict(list))
    with (
        spans((Channel, "wait"), (Pipeline, "tell")) as waits,
        spans((Outgoing, "send")) as sent,
        spans((Incoming, "take")) as taken,
    ):
        for _ in range(num_rounds):
            dist.barrier()
            waits.clear()
            start = time.perf_counter()
            trainer.step()
            own_s = time.perf_counter() - start
            slowest = torch.tensor(own_s)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            waited_s = sum(span.end - span.start for _, span in waits)
            found.shares.append((waited_s + float(slowest) - own_s) / float(slowest))
    for calls, messages in ((sent, found.sent), (taken, found.taken)):
        for channel, span in calls:
            messages[channel.group.group_name].append(span)
    return found


def delays(ranks: Sequence[Idle]) -> list[float]:
    """Seconds from when each message that its receiver waits for is sent until that goes on."""
    sent, taken = ({k: v for own in ranks for k, v in getattr(own, what).items()} for what in ("sent", "taken"))
    pairs = chain.from_iterable(zip(sent[channel], taken[channel], strict=True) for channel in sent)
    return [its.end - own.start for own, its in pairs if its.start < own.start]


@contextmanager
def spans(*places: tuple[type, str]) -> Generator[list[tuple[Any, Span]]]:
    """Collects when some methods are called: on what object, from when to when."""
    found = list[tuple[Any, Span]]()

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def run(owner: object, *operands: object) -> object:
            start = time.perf_counter()
            try:
                return call(owner, *operands)
            finally:
                found.append((owner, Span(start, time.perf_counter())))

        return run

    patches = [patch.object(owner, name, timed(getattr(owner, name))) for owner, name in places]
    for one in patches:
        one.start()
    try:
        yield found
    finally:
        for one in patches:
            one.stop()


@dataclass(frozen=True)
class Result:
    """A way's result: its plan, seconds of ours and theirs, the share of a step that ours waits by stage, `delays`."""

    way: Way
    graph: Graph
    ours: Samples
    theirs: Samples
    measured: list[float]
    delays: list[float]


def results(ways: Sequence[Way], num_rounds: int) -> list[Result]:
    """One run, in which all of these take turns."""
    graphs = [way.plan() for way in ways]
    by_rank = run_ranks(race, ways[0].num_stages, TIMEOUT_S, args=(ways, graphs, num_rounds))
    times, found = slowest_rank([rank[0] for rank in by_rank]), list[Result]()
    for number, (way, graph) in enumerate(zip(ways, graphs, strict=True)):
        idles = [rank[1][number] for rank in by_rank]
        measured = [float(np.median(rank.shares)) for rank in idles]
        own, its = (times[f"{whose}, {way.name}"] for whose in ("ours", "theirs"))
        found.append(Result(way, graph, own, its, measured, delays(idles)))
    return found


def bubbles(one: Result, cluster: Cluster) -> list[float]:
    """Return the predicted bubbles by stage, as shares of the predicted step."""
    timeline = simulate(program(one.graph, cluster, one.way.execution))
    return [stage.bubble_s / timeline.step_s for stage in timeline.stages]


# ---- the page ----

INTRODUCTION = """

Written by `python -m bench.pipelines` (`make bench`) on {date}: {cpus} cores, no GPU, torch {torch}, gloo ranks with
one thread each, {rounds} interleaved rounds, load {before:.1f} before and {after:.1f} after. GPTs as above; a step is
8 × 128 tokens in 8 microbatches. Two stages share 4 blocks, four stages 8 blocks; embedding and head are in the first
and the last one. *Interleaved* has two virtual stages on each rank. Theirs is `torch.distributed.pipelining` with the
same cuts, microbatches and schedule: `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B`, and
`ScheduleInterleavedZeroBubble` with one stage on each rank, which is ZB-H1 as ours (`ScheduleZBVZeroBubble` places
stages in a V, which ours has not); `scale_grads=False`, `return_outputs=False`; a tied weight's gradient is summed by
hand. Losses and gradients of both were seen to equal the single process's. **Four ranks share two cores**, so these
rows say what the runtime costs, not how much faster stages make a step.

| stages | width | schedule | forward and backward, ours to theirs | whole step, AdamW | CPU time | ours | theirs |
|--:|--:|---|---|---|---|--:|--:|
"""
BUBBLES = """
**Bubbles** of the two stages of the above, as shares of a step (the first stage, the second one). Predicted by a
calibration of the same minutes; measured: the time in which a rank waits for the other one, the median of as many
steps. Their error is of the mean of both stages; the aim is 10 % at most. One slow moment of a rank is a wait of the
other one. *Message*: from when a message is sent until its receiver, which waits for it, goes on; predicted and the
median of those measured.

| width | schedule | predicted | measured | error | message |
|--:|---|---|---|--:|--:|
"""


def section(found: Sequence[Result], cluster: Cluster, num_rounds: int, loads: tuple[float, float]) -> str:
    """The results as Markdown."""
    head = INTRODUCTION.format(
        date=date.today().isoformat(), cpus=os.cpu_count(), torch=torch.__version__, rounds=num_rounds,
        before=loads[0], after=loads[1],
    )  # fmt: skip
    rows = [_row(one) for one in found]
    shares = [_shares(one, cluster) for one in found if one.way.num_stages == cluster.num_devices]
    return HEADING + head + "".join(rows) + BUBBLES + "".join(shares)


def _row(one: Result) -> str:
    ratios = [str(ratio(one.ours, one.theirs, quantity)) for quantity in (FORWARD_BACKWARD, STEP, CPU)]
    ms = [f"{quartiles(times[:, FORWARD_BACKWARD]).median * 1e3:.0f} ms" for times in (one.ours, one.theirs)]
    schedule = f"{one.way.schedule}{', tied head' if one.way.tied else ''}"
    return "| " + " | ".join([str(one.way.num_stages), str(one.way.size.hidden), schedule, *ratios, *ms]) + " |\n"


def _shares(one: Result, cluster: Cluster) -> str:
    predicted = bubbles(one, cluster)
    both = [", ".join(f"{share:.1%}" for share in shares) for shares in (predicted, one.measured)]
    hops_s = (program(one.graph, cluster, one.way.execution).hops_s[0], float(np.median(one.delays)))
    message = ", ".join(f"{seconds * 1e3:.2f} ms" for seconds in hops_s)
    error = float(np.mean(predicted) / np.mean(one.measured) - 1)
    schedule = f"{one.way.schedule}{', tied head' if one.way.tied else ''}"
    return "| " + " | ".join([str(one.way.size.hidden), schedule, *both, f"{error:+.0%}", message]) + " |\n"


def write(text: str) -> None:
    """The page with this as its last section."""
    page = PAGE.read_text(encoding="utf-8").split(HEADING)[0].rstrip() + "\n\n"
    PAGE.write_text(page + text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and write the section; 1 where a median ratio is above the bound."""
    parser = argparse.ArgumentParser(prog="python -m bench.pipelines", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--passes", type=int, default=WORKLOAD.num_passes, help="of the calibration")
    parser.add_argument("--races", type=int, nargs="*", default=range(len(RACES)), help="by number; default: all")
    parser.add_argument("--dry", action="store_true", help="print the section, do not write it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    before, found = os.getloadavg()[0], list[Result]()
    for number in options.races:
        found += results(RACES[number], options.rounds)
        print("".join(_row(one) for one in found[-len(RACES[number]) :]), file=sys.stderr, flush=True)
    cluster = passes([], 2, options.passes).cluster()
    text = section(found, cluster, options.rounds, (before, os.getloadavg()[0]))
    print(text)
    if not options.dry:
        write(text)
    slow = [one.way.name for one in found if ratio(one.ours, one.theirs, STEP).median > BOUND]
    for name in slow:
        print(f"above {BOUND}: {name}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
