"""A tensor-parallel step with its moves in pieces beside the same step with whole moves, over a slow link.

Two gloo ranks, each in a network namespace of its own, train the same GPT with the same weights on the same batch. The
link between them is kept to a rate by the kernel's traffic shaping (`bench.throttled`). In every round each contender
takes one step; ratios are taken within a round. Run it with `python -m bench.pieces`; it ends docs/pieces.md with its
table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch.distributed as dist

from bench.gpt import Size
from bench.over_link import command
from bench.rounds import CPU, FORWARD_BACKWARD, Samples, quartiles, ratio, run_rounds, slowest_rank
from bench.speed import check_agreement
from bench.throttled import as_nodes, enter
from bench.trainers import eager, lowered, serial_graph
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.types import TensorType
from tests.lowering.parallelize import follow, parallelize

SIZE = Size(batch=8, seq=128, hidden=512, layers=2)
TOKENS = (SIZE.batch, SIZE.seq, SIZE.hidden)
RATES = (50e6, 25e6)
"""Bytes per second of the link, each way."""
PIECES = (1, 2, 4, 8)


WIDE = (".q.", ".k.", ".v.", ".up.")
"""Linears whose results are split, with their biases; of the others in blocks, operands are."""


def layouts(between: str) -> Graph:
    """Tensor parallelism as Megatron-LM has it; `between` products, tokens are whole or split along the sequence."""
    serial, mesh = serial_graph(SIZE), Mesh.of(tp=2)
    names = [str(leaf.attr("target")) for leaf in serial.leaves("parameter")]
    stored = {name: (S(0),) for name in names if any(part in name for part in WIDE)}
    stored |= {name: (S(1),) for name in names if name.endswith((".proj.weight", ".down.weight"))}
    others = follow(serial, mesh)

    def choose(node: Node, axis: int, operands: list[TensorType]) -> str:
        signature = ROWS[node.op].signature([kind.shape for kind in operands], dict(node.attrs))
        if node.op == "linear":
            weight = operands[1].layouts[axis]
            return signature.factors[signature.operands[1][weight.dim][0]].name if weight.is_shard else "R"
        by_width = any(len(kind.shape) == 3 and kind.layouts[axis] == S(2) for kind in operands)
        by_token = node.op in ("layer_norm", "embedding", "add") and serial.types[node.name].shape == TOKENS
        if between == "split" and by_token and not by_width:
            return signature.factors[signature.result[1][0]].name
        return others(node, axis, operands)

    return parallelize(serial, mesh, choose, stored)


def race(graph: Graph, other: int, num_rounds: int) -> dict[str, Samples]:
    """One rank's part: enter its node, make the contenders, see that they agree, time them."""
    enter(dist.get_rank(), other, per_node=1)
    trainers = [lowered(SIZE, graph, str(count), Execution(pieces=count)) for count in PIECES]
    reference = eager(SIZE)
    expected = reference.whole_loss(), reference.gradients()
    for trainer in trainers:
        check_agreement(trainer, *expected)
    return run_rounds(trainers, num_rounds, num_warmup=1)


def inside(between: str, bytes_per_s: float, num_rounds: int) -> dict[str, Any]:
    """Measure one layout at one rate; this process is the first node."""
    graph, other = layouts(between), as_nodes(bytes_per_s)
    try:
        times = slowest_rank(run_ranks(race, 2, 600.0, args=(graph, other.pid, num_rounds)))
    finally:
        other.kill()
    whole, own = times["1"], [str(count) for count in PIECES[1:]]
    seconds = quartiles(whole[:, FORWARD_BACKWARD]).median
    return {
        "between": between, "rate": bytes_per_s, "whole_s": seconds,
        "sends": predict(graph, Cluster.local(2)).communication_bytes / bytes_per_s / seconds,
        "pairs": Counter(pair.function for pair in Operations(graph, Execution(pieces=2)).pairs),
        "wall": [str(ratio(times[name], whole)) for name in own],
        "cpu": [f"{ratio(times[name], whole, CPU).median:.2f}" for name in own],
    }  # fmt: skip


def section(found: Sequence[dict[str, Any]], num_rounds: int) -> str:
    """The section of the page."""
    counts = PIECES[1:]
    pairs = {one["between"]: one["pairs"] for one in found}
    told = "; ".join(
        f"*{between}*: " + ", ".join(f"{count} × `{function}`" for function, count in own.items())
        for between, own in pairs.items()
    )
    rows = [
        " | ".join((f"| {one['between']}", f"{one['rate'] / 1e6:.0f} MB/s", f"{one['whole_s'] * 1e3:.0f} ms",
                    f"{one['sends']:.0%}", *one["wall"], ", ".join(one["cpu"]) + " |"))
        for one in found
    ]  # fmt: skip
    heads = [f"{count} pieces ÷ whole" for count in counts]
    head = " | ".join(("| between products", "link", "whole", "sends", *heads, "CPU time ÷ whole |"))
    return f"""A GPT ({SIZE.layers} blocks of
width {SIZE.hidden}, {SIZE.batch} × {SIZE.seq} tokens, fp32), tensor parallel, whose tokens are whole between products
or split along the sequence. Pairs that run in pieces: {told}.

Forward and backward, on the slower rank; *sends* is what a rank sends, at that rate, as a share of the step with whole
moves. Ratios are medians over {num_rounds} interleaved rounds, with quartiles; CPU time is that of a rank's process.

{head}
|---|--:|--:|--:|{"--:|" * len(counts)}---|
{chr(10).join(rows)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    return command("pieces", product(("whole", "split"), RATES), inside, section, arguments, about=__doc__, rounds=15)


if __name__ == "__main__":
    raise SystemExit(main())
