"""A step whose keys travel in a ring beside the same step with gathered keys, over a slow link: time and memory.

Two gloo ranks, each in a network namespace of its own, train the same GPT with the same weights on one long example,
whose sequence they share. The link between them is kept to a rate by the kernel's traffic shaping (`bench.throttled`).
In every round each contender takes one step; ratios are taken within a round. Run it with `python -m bench.ring`; it
ends docs/ring.md with its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from bench.allocations import live_storages, peak_bytes
from bench.gpt import Size, build, make_batch
from bench.over_link import command
from bench.plans import CERTIFIED
from bench.rounds import CPU, FORWARD_BACKWARD, Samples, quartiles, ratio, run_rounds, slowest_rank
from bench.throttled import as_nodes, enter
from bench.trainers import Trainer, lowered, serial_graph
from bench.zoo_times import Stepper
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime.attention import sdpa
from shardwright.lowering.runtime.collectives import gather_copy
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.striping import balanced
from shardwright.search.request.restrict import CONTEXT, RING
from shardwright.search.tree.planner import Planner

SIZE = Size(batch=1, vocab=512, hidden=256, heads=4, layers=2)
CASES = ((4096, 10e6), (4096, 5e6), (8192, 10e6))
"""Tokens, and bytes per second of the link, each way."""
STRIPED = "striped"
WAYS = (CONTEXT, RING)
"""The roles. `STRIPED` is the plan of a ring in which each rank has every second position."""
ALONE = 4096
"""The tokens of attention alone."""
MOST_APART = 1e-3
"""The largest difference of gradients between contenders, of the largest gradient."""


def graphs(size: Size) -> dict[str, Graph]:
    """The model with its sequence shared by two devices, by role, and balanced."""
    planner, serial = Planner(Cluster.local(2), CERTIFIED), serial_graph(size)
    found = {role: planner.solver.fastest_layouts(Folded(serial), Mesh.of(cp=2), (role,)) for role in WAYS}
    return {**found, STRIPED: balanced(found[RING], CERTIFIED)}


def race(found: dict[str, Graph], size: Size, other: int, num_rounds: int) -> dict[str, Samples]:
    """One rank's part: enter its node, make the contenders, see that they agree, time them."""
    enter(dist.get_rank(), other, per_node=1)
    trainers = [lowered(size, graph, role) for role, graph in found.items()]
    check_alike(trainers)
    return run_rounds(trainers, num_rounds, num_warmup=1)


def check_alike(trainers: Sequence[Trainer]) -> None:
    """Raise an `AssertionError` unless all contenders have the same loss and gradients."""
    outcomes = [(trainer.whole_loss(), trainer.gradients()) for trainer in trainers]
    (loss, gradients), *others = outcomes
    largest = max(float(grad.abs().max()) for grad in gradients.values())
    for other_loss, other in others:
        torch.testing.assert_close(other_loss, loss, rtol=1e-4, atol=0.0)
        for name, grad in gradients.items():
            assert float((other[name] - grad).abs().max()) <= MOST_APART * largest, name


def peak_on_rank(graph: Graph, size: Size) -> int:
    """The most bytes that this rank holds in a step."""
    before = live_storages()
    stepper = Stepper(lower(graph, build(size)), make_batch(size), before)
    stepper.step()
    return peak_bytes(stepper, 2)


def inside(seq: int, bytes_per_s: float, num_rounds: int) -> dict[str, Any]:
    """Measure one case; this process is the first node."""
    size = replace(SIZE, seq=seq)
    found, other = graphs(size), as_nodes(bytes_per_s)
    try:
        times = slowest_rank(run_ranks(race, 2, 900.0, args=(found, size, other.pid, num_rounds)))
    finally:
        other.kill()
    whole = times[CONTEXT]
    seconds, cluster = quartiles(whole[:, FORWARD_BACKWARD]).median, Cluster.local(2)
    return {
        "seq": seq, "rate": bytes_per_s, "whole_s": seconds,
        "sends": predict(found[CONTEXT], cluster).communication_bytes / bytes_per_s / seconds,
        "wall": [str(ratio(times[way], whole)) for way in (RING, STRIPED)],
        "cpu": [f"{ratio(times[way], whole, CPU).median:.2f}" for way in (RING, STRIPED)],
    }  # fmt: skip


def memory(seq: int) -> dict[str, float]:
    """Return the peak with gathered keys, and the ring's as a share of it."""
    size = replace(SIZE, seq=seq)
    peaks = {role: max(run_ranks(partial(peak_on_rank, g, size), 2, 900.0)) for role, g in graphs(size).items()}
    return {"peak": peaks[CONTEXT], "memory": peaks[STRIPED] / peaks[CONTEXT]}


# ---- attention alone ----


class Alone:
    """Attention without a mask, forward and backward, on one rank's part of the sequence; and its memory."""

    def __init__(self, role: str) -> None:
        self.role, self.axis = role, Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
        shape = (1, SIZE.heads, ALONE // self.axis.size, SIZE.hidden // SIZE.heads)
        self.operands = [torch.randn(shape, requires_grad=True) for _ in range(3)]

    def step(self) -> None:
        q, *keys = self.operands
        if self.role == RING:
            y = sdpa(False, None, 0, q, *keys, ring=self.axis)
        else:
            y = sdpa(False, None, 0, q, *(gather_copy(x, self.axis, 2) for x in keys))
        y.backward(torch.ones_like(y))
        for x in self.operands:
            x.grad = None

    def resident_bytes(self) -> int:
        return sum(x.nbytes for x in self.operands)


def alone(num_ranks: int) -> dict[str, float]:
    """Return the peak of attention alone with gathered keys, and the ring's as a share of it."""
    peaks = {role: max(run_ranks(lambda own=role: peak_bytes(Alone(own), 2), num_ranks, 600.0)) for role in WAYS}
    return {"ranks": num_ranks, "peak": peaks[CONTEXT], "memory": peaks[RING] / peaks[CONTEXT]}


def section(found: Sequence[dict[str, Any]], parts: Sequence[dict[str, float]], num_rounds: int) -> str:
    """The section of the page."""
    rows = [
        f"| {one['seq']} | {one['rate'] / 1e6:.0f} MB/s | {one['whole_s'] * 1e3:.0f} ms | {one['sends']:.0%} | "
        f"{' | '.join(chain(*zip(one['wall'], one['cpu'], strict=True)))} | "
        f"{one['peak'] / 1e6:.0f} MB | {one['memory']:.2f} |"
        for one in found
    ]
    return f"""A GPT ({SIZE.layers} blocks of
width {SIZE.hidden}, {SIZE.heads} heads, causal, fp32) on one example, whose sequence the ranks share.

Forward and backward, on the slower rank; *sends* is what a rank sends, at that rate, as a share of the step with
gathered keys. Ratios are medians over {num_rounds} interleaved rounds, with quartiles; CPU time is that of a rank's
process. *Peak* is all that a rank's tensors take at once in a step with AdamW.

| tokens | link | gathered | sends | ring ÷ | CPU time ÷ | balanced ÷ | CPU time ÷ | peak, gathered | balanced ÷ |
|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
{chr(10).join(rows)}

In a *ring* each rank has half of the sequence; *balanced*, it has every second position. Where the link is slower than
attention a ring gains nothing: it sends half as much again.

The peak with gathered keys has a mask of each rank's queries and all keys, which causal attention makes on CPUs
([limits](limits.md)); a ring makes none, and kernels on GPUs do not. Attention alone without a mask, {ALONE} tokens,
forward and backward:

| ranks | peak, gathered | ring ÷ |
|--:|--:|--:|
{chr(10).join(f"| {p['ranks']} | {p['peak'] / 1e6:.0f} MB | {p['memory']:.2f} |" for p in parts)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    def measured(seq: str, rate: float, rounds: int) -> dict[str, Any]:
        return inside(int(seq), rate, rounds)

    def written(found: Sequence[dict[str, Any]], rounds: int) -> str:
        own = [one | memory(one["seq"]) for one in found]
        return section(own, [alone(num_ranks) for num_ranks in (2, 4, 8)], rounds)

    return command("ring", CASES, measured, written, arguments, about=__doc__, rounds=7, timeout_s=1800.0)


if __name__ == "__main__":
    raise SystemExit(main())
