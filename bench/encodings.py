"""A step whose weights and gradients are sent encoded beside the same step with exact ones, over a slow link.

Two gloo ranks, each in a network namespace of its own, train the same GPT with the same weights on the same batch. The
link between them is kept to a rate by the kernel's traffic shaping (`bench.throttled`). In every round each contender
takes one step; ratios are taken within a round. Then each trains a smaller GPT on new batches, without the link. Run it
with `python -m bench.encodings`; it ends docs/encodings.md with its tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist

from bench.gpt import Size, build, make_batch
from bench.over_link import command
from bench.rounds import CPU, FORWARD_BACKWARD, Samples, quartiles, ratio, run_rounds, slowest_rank
from bench.throttled import as_nodes, enter
from bench.trainers import adamw, lowered, serial_graph
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner

SIZE = Size(batch=8, seq=64, hidden=384, layers=4)
SMALL = Size(batch=16, seq=32, vocab=64, hidden=128, heads=4, layers=2)
RATES = (100e6, 25e6)
"""Bytes per second of the link, each way."""
WAYS: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "data": ({}, {"gradients": "int8"}, {"gradients": "int4"}),
    "zero": ({}, {"weights": "int8"}, {"gradients": "int4"}, {"weights": "int8", "gradients": "int4"},
             {"weights": "fp8", "gradients": "int8"}),
}  # fmt: skip
"""By role, what is sent encoded."""
NAMES = {"data": "data parallel", "zero": "ZeRO-3"}
STEPS, EVERY = 200, 50


def shown(encodings: Mapping[str, str]) -> str:
    return ", ".join(f"{what} {name}" for what, name in encodings.items()) or "exact"


def run_of(encodings: Mapping[str, str]) -> Execution:
    return Execution.of(encodings=dict(encodings))


def graph_of(size: Size, role: str) -> Graph:
    """The model on two ranks that share the batch, and under "zero" each weight."""
    planner = Planner(Cluster.local(2), certified_choices())
    return planner.solve(serial_graph(size), Mesh.of(dp=2), (role,), role).graph


def race(graph: Graph, role: str, other: int, num_rounds: int) -> dict[str, Samples]:
    """One rank's part: enter its node, make the contenders, time them."""
    enter(dist.get_rank(), other, per_node=1)
    trainers = [lowered(SIZE, graph, shown(own), run_of(own)) for own in WAYS[role]]
    exact, *others = [trainer.whole_loss() for trainer in trainers]
    assert all(abs(loss - exact) < 0.01 * exact for loss in others), (exact, others)
    for trainer in trainers:
        trainer.optimizer.zero_grad(set_to_none=True)
    return run_rounds(trainers, num_rounds, num_warmup=1)


def inside(role: str, bytes_per_s: float, num_rounds: int) -> list[dict[str, Any]]:
    """Measure one role at one rate; this process is the first node."""
    graph, other = graph_of(SIZE, role), as_nodes(bytes_per_s)
    try:
        times = slowest_rank(run_ranks(race, 2, 600.0, args=(graph, role, other.pid, num_rounds)))
    finally:
        other.kill()
    exact = times[shown({})]
    return [
        {
            "role": role, "rate": bytes_per_s, "sent": shown(own),
            "bytes": predict(graph, Cluster.local(2), run_of(own)).communication_bytes,
            "step_s": quartiles(times[shown(own)][:, FORWARD_BACKWARD]).median,
            "wall": str(ratio(times[shown(own)], exact)),
            "cpu": f"{ratio(times[shown(own)], exact, CPU).median:.2f}",
        }
        for own in WAYS[role]
    ]  # fmt: skip


def batches(size: Size, number: int) -> list[dict[str, torch.Tensor]]:
    """Walks over tokens: four of five steps go where a fixed map says, the others anywhere."""
    generator = torch.Generator().manual_seed(5)
    following = torch.randperm(size.vocab, generator=generator)
    found = list[dict[str, torch.Tensor]]()
    for _ in range(number):
        walk = torch.randint(size.vocab, (size.batch, size.seq + 1), generator=generator)
        leaps = torch.rand(walk.shape, generator=generator) < 0.2
        for place in range(1, size.seq + 1):
            walk[:, place] = torch.where(leaps[:, place], walk[:, place], following[walk[:, place - 1]])
        found.append({"ids": walk[:, :-1].contiguous(), "targets": walk[:, 1:].contiguous()})
    return found


def trained(role: str) -> dict[str, list[float]]:
    """The losses of each way to send: means over `EVERY` steps."""
    graph, data = graph_of(SMALL, role), batches(SMALL, STEPS)
    assert {key: x.shape for key, x in data[0].items()} == {key: x.shape for key, x in make_batch(SMALL).items()}

    def losses(encodings: Mapping[str, str]) -> list[float]:
        parallel = lower(graph, build(SMALL), execution=run_of(encodings))
        optimizer, found = adamw(list(parallel.parameters())), list[float]()
        for batch in data:
            found.append(float(parallel.forward_backward(**batch)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return torch.tensor(found).view(-1, EVERY).mean(1).tolist()

    ranks = run_ranks(lambda: {shown(own): losses(own) for own in WAYS[role]}, 2, 900.0)
    assert ranks[0] == ranks[1]
    return ranks[0]


def section(found: Sequence[dict[str, Any]], curves: Mapping[str, Mapping[str, Sequence[float]]], rounds: int) -> str:
    """The section of the page."""
    rows = [
        f"| {NAMES[one['role']]} | {one['rate'] / 1e6:.0f} MB/s | {one['sent']} | {one['bytes'] / 1e6:.1f} MB "
        f"| {one['step_s'] * 1e3:.0f} ms | {one['wall']} | {one['cpu']} |"
        for one in found
    ]
    heads = [f"{end - EVERY + 1}–{end}" for end in range(EVERY, STEPS + 1, EVERY)]
    losses = [
        f"| {NAMES[role]} | {name} | " + " | ".join(f"{loss:.4f}" for loss in own) + " |"
        for role, curve in curves.items() for name, own in curve.items()
    ]  # fmt: skip
    return f"""A GPT ({SIZE.layers} blocks of
width {SIZE.hidden}, {SIZE.batch} × {SIZE.seq} tokens, fp32). Forward and backward, on the slower rank; *sends* is what
a rank sends in a step. Ratios are medians over {rounds} interleaved rounds, with quartiles; CPU time is that of a
rank's process.

| weights and batch | link | sent as | sends | step | ÷ exact | CPU time ÷ exact |
|---|--:|---|--:|--:|--:|--:|
{chr(10).join(rows)}

A smaller GPT ({SMALL.layers} blocks of width {SMALL.hidden}) trains with AdamW on {STEPS} batches of walks over
{SMALL.vocab} tokens. Losses are means over so many steps:

| weights and batch | sent as | {" | ".join(heads)} |
|---|---|{"--:|" * len(heads)}
{chr(10).join(losses)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    def written(found: Sequence[Sequence[dict[str, Any]]], rounds: int) -> str:
        return section(list(chain.from_iterable(found)), {role: trained(role) for role in WAYS}, rounds)

    return command("encodings", product(WAYS, RATES), inside, written, arguments, about=__doc__, rounds=15)


if __name__ == "__main__":
    raise SystemExit(main())
