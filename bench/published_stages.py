"""Published Megatron configurations with pipeline stages beside the plans that the search finds for the same model.

Both are costed by the same timeline, under bf16 autocast, as plans are run (the published runs multiplied in 8 bits):
theirs as `bench.published_plans` lays it out, with their stages, chunks and microbatches, and ZeRO-1; ours from the
search, for the same sequences in a step, with `stages="auto"`. Fused pointwise operators are costed for both.

    python -m bench.published_stages [--only TEXT]    prints a table; 1 where a plan is slower
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.decoders import decoder as build
from bench.published import Run, megatron_bridge
from bench.published_plans import cluster, decoder, execution, planned
from shardwright.cost.predict import predict
from shardwright.cost.prediction import Prediction
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified


def theirs(run: Run, certified: Certified) -> Prediction:
    """The published configuration."""
    own = planned(run, certified)
    return predict(own.graph, own.cluster, fused(execution(run)), own.repeats)


def ours(run: Run, certified: Certified) -> Plan:
    """The plan that the search finds."""
    planner = Planner(cluster(run.gpu, run.num_gpus), certified, rules=certified.by_name(), precision="amp_bf16")
    return planner.plan(whole(run), run.model, stages="auto")


def whole(run: Run) -> Graph:
    """The model with all its blocks, for all sequences of a step."""
    sizes, batch = decoder(run), run.data * run.microbatch * run.num_microbatches
    with FakeTensorMode():
        model = build(sizes, run.seq, even=run.context > 1, blocks=sizes.layers)
        ids = torch.zeros(batch, run.seq, dtype=torch.long)
        return capture(model, {"ids": ids, "labels": ids.clone()}).graph


def fused(run: Execution) -> Execution:
    """The same under bf16 autocast, pointwise operators fused."""
    return run.having(precision="amp_bf16", compiled=True)


def main(arguments: list[str] | None = None) -> int:
    """Compare; 1 where a plan is slower."""
    parser = argparse.ArgumentParser(prog="python -m bench.published_stages", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT", help='configurations that hold it, as "llama3-70b"')
    only, slower, certified = parser.parse_args(arguments).only, 0, Certified()
    torch.set_num_threads(1)
    for run in (r for r in megatron_bridge()[0] if only in r.name):
        given, start = theirs(run, certified), time.process_time()
        plan = ours(run, certified)
        seconds = time.process_time() - start
        own, how = predict(plan.graph, plan.cluster, fused(plan.execution)), plan.execution.schedule
        slower += own.step_s > given.step_s * (1 + 1e-9)
        print(
            f"{run.name}: theirs {given.step_s * 1e3:.0f} ms, {given.memory.total_bytes / 2**30:.1f} GiB; plan "
            f"{own.step_s * 1e3:.0f} ms, {own.memory.total_bytes / 2**30:.1f} GiB ({how.num_stages} stages of "
            f"{plan.mesh}, {how.name} × {how.chunks_per_stage}); {given.step_s / own.step_s - 1:+.1%}; "
            f"{seconds:.0f} s of CPU with capture",
            flush=True,
        )
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
