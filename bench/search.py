"""Measure planning: the demo's model for two local ranks, large models on fake tensors, 10,000 operators.

Each in a process of its own, stage by stage. Run it with `make bench-search`; it ends docs/search.md with its table.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.entangled import Example, densenet, fake, lstm, unrepeated
from bench.grid_page import TIME_NEEDED, replace_section
from examples import demo_model
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.local import default_cluster
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import capture
from shardwright.search.check import check_plan
from shardwright.search.request.asked import Stages
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified


@dataclass(frozen=True)
class Task:
    """A model to plan and the cluster to plan it for; `bound_s` is what planning may take after capture.

    `stages`: as the planner takes them; None: tried where they may pay.
    """

    name: str
    build: Callable[[], Example]
    cluster: Callable[[], Cluster]
    bound_s: float
    stages: Stages | None = 1


@dataclass(frozen=True)
class Timing:
    """Seconds by stage, and what came out.

    `after_capture_cpu_s` is the CPU time of what comes after capture: on one thread, the wall time of a quiet machine.
    """

    build_s: float
    capture_s: float
    certificates_s: float
    plan_s: float
    check_s: float
    after_capture_cpu_s: float
    num_nodes: int
    mesh: str
    gap: float
    peak_bytes: int

    @property
    def after_capture_s(self) -> float:
        return self.certificates_s + self.plan_s + self.check_s


def demo() -> Example:
    """The demo's GPT-2, 11 M parameters."""
    return demo_model.model(), next(demo_model.batches(1))


def llama_8b(num_layers: int = 32, batch: int = 64, seq: int = 4096) -> Example:
    """transformers' Llama with the sizes of Llama-3-8B, in bf16 on fake tensors."""
    return fake_llama(batch, seq, num_hidden_layers=num_layers, hidden_size=4096, intermediate_size=14336,
                      num_attention_heads=32)  # fmt: skip


def llama_70b() -> Example:
    """transformers' Llama with the sizes of Llama-3-70B."""
    return fake_llama(64, 4096, num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)


def llama_405b() -> Example:
    """transformers' Llama with the sizes of Llama-3.1-405B."""
    return fake_llama(
        2048, 8192, num_hidden_layers=126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128
    )


@fake
def deepseek_v3() -> Example:
    """transformers' DeepSeek-V3, 671 billion parameters in fp32: as its configuration is without arguments."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    ids = torch.zeros(2048, 4096, dtype=torch.long)
    return DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False)).train(), {"input_ids": ids, "labels": ids.clone()}


@fake
def gemma3_12b() -> Example:
    """transformers' Gemma 3 with the sizes of Gemma-3-12B's text: each sixth layer attends to all, the others slide."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, vocab_size=262208, sliding_window=1024, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(64, 4096, dtype=torch.long)
    return Gemma3ForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


@fake
def gpt_oss_120b() -> Example:
    """transformers' gpt-oss with the sizes of gpt-oss-120B: sliding and full attention take turns, all with experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    ids = torch.zeros(64, 4096, dtype=torch.long)
    config = GptOssConfig(num_hidden_layers=36, num_local_experts=128, use_cache=False)
    return GptOssForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


def fake_llama(batch: int, seq: int, **sizes: Any) -> Example:
    """transformers' Llama 3 of these sizes, with its vocabulary and 8 key-value heads, in bf16 on fake tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False, **sizes
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # fake parameters cannot be cast in place
    try:
        with FakeTensorMode():
            ids = torch.zeros(batch, seq, dtype=torch.long)
            return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}
    finally:
        torch.set_default_dtype(before)


def h100(nodes: int) -> Callable[[], Cluster]:
    return lambda: Cluster.preset("dgx-h100", nodes=nodes)


TASKS = (
    Task("demo GPT-2, 6 layers, 2 local ranks", demo, lambda: default_cluster(2), 5.0),
    Task("Llama-8B, 64 × 4096, 8 × 8 H100", llama_8b, h100(8), 3.0),
    Task("Llama-70B, 64 × 4096, 32 × 8 H100", llama_70b, h100(32), 5.0),
    Task("Llama-405B, 2048 × 8192, 2048 × 8 H100", llama_405b, h100(2048), 15.0),
    Task("DeepSeek-V3, 2048 × 4096, 256 × 8 H100", deepseek_v3, h100(256), 15.0),
    Task("Gemma-3-12B, 64 × 4096, 8 × 8 H100", gemma3_12b, h100(8), 15.0),
    Task("gpt-oss-120B, 64 × 4096, 8 × 8 H100", gpt_oss_120b, h100(8), 15.0),
    Task("Llama-70B, with stages", llama_70b, h100(32), 8.0, None),
    Task("Llama-405B, with stages", llama_405b, h100(2048), 15.0, None),
    Task("DeepSeek-V3, with stages", deepseek_v3, h100(256), 15.0, None),
    Task("10,000 operators, none repeated, 8 H100", fake(partial(unrepeated, unit=32)), h100(1), 20.0),
    Task("10,000 operators of twice the width, which do not fit", fake(unrepeated), h100(1), 20.0),
)

_LIMIT_S = 1800.0

ENTANGLED = (
    Task("DenseNet-121, 256 images, 4 × 8 H100", fake(densenet), lambda: Cluster.preset("dgx-h100", nodes=4), 40.0),
    Task("LSTM cell, 16 steps, 4 × 8 H100", lstm, lambda: Cluster.preset("dgx-h100", nodes=4), 15.0),
)
"""Printed only: what joins many operators with many takes longer than its size says."""


def measure(task: Task) -> Timing:
    """Time the stages of planning in this process."""
    gc.unfreeze()  # as in a process that was not forked: where anything is frozen, the collector looks at all of a plan
    start = time.perf_counter()

    def lap() -> float:
        nonlocal start
        now = time.perf_counter()
        passed, start = now - start, now
        return passed

    model, batch = task.build()
    build_s = lap()
    graph = capture(model, batch).graph
    capture_s, start_cpu = lap(), time.process_time()
    certified = Certified()
    certificates_s = lap()
    planner = Planner(task.cluster(), certified, rules=certified.by_name())
    plan = planner.plan(graph, task.name, stages=task.stages)
    plan_s = lap()
    check_plan(plan, graph, certified, certified.by_name())
    check_s, cpu_s = lap(), time.process_time() - start_cpu
    gap = plan.prediction.step_s / plan.report.bound_s - 1 if plan.report.bound_s else float("inf")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stages = (build_s, capture_s, certificates_s, plan_s, check_s, cpu_s)
    return Timing(*stages, len(graph.nodes), str(plan.mesh), gap, peak)


# ---- the page ----


INTRODUCTION = """\
{heading}

Within what planning may take by our aims (*at most*): {good} of these {count}. The others miss it. What comes on top,
and how to end planning early: [limits](limits.md#the-search).

Written by `make bench-search` on {date}: {cpus}-core CPU, torch {torch}, one thread, each in a process of its own.

* *build* includes importing transformers.
* *CPU time* is that of all after capture: what it would take were the machine otherwise idle. *at most* is of it.
* *with stages*: pipeline stages are tried too, on the same cluster; the other rows leave them out.
* *gap*: how far the plan's predicted time may be above the optimum of the space searched.

| model and cluster | nodes | build | capture | certificates | search | check | after capture | CPU time \
| at most | mesh | gap | peak memory |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|
"""


def section(timings: Sequence[tuple[Task, Timing]]) -> str:
    """The table as Markdown."""
    head = INTRODUCTION.format(
        heading=TIME_NEEDED, date=date.today().isoformat(), cpus=os.cpu_count(), torch=torch.__version__,
        good=sum(t.after_capture_cpu_s <= task.bound_s for task, t in timings), count=len(timings),
    )  # fmt: skip
    return head + "\n".join(_row(task, timing) for task, timing in timings) + "\n"


def _row(task: Task, t: Timing) -> str:
    stages = (t.build_s, t.capture_s, t.certificates_s, t.plan_s, t.check_s, t.after_capture_s, t.after_capture_cpu_s)
    cells = [task.name, str(t.num_nodes), *(f"{s:.1f} s" for s in (*stages, task.bound_s))]
    cells += [t.mesh, f"{t.gap:.1%}", f"{t.peak_bytes / 1e9:.1f} GB"]
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Time every task and write the section; 1 where one takes longer than it may, by its CPU time."""
    parser = argparse.ArgumentParser(prog="python -m bench.search", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print the section, do not write it")
    parser.add_argument("--entangled", action="store_true", help="models that join many operators with many; as --dry")
    options = parser.parse_args(arguments)
    tasks = ENTANGLED if options.entangled else TASKS
    torch.set_num_threads(1)
    timings = [(task, run_ranks(measure, 1, _LIMIT_S, args=(task,))[0]) for task in tasks]
    text = section(timings)
    print(text)
    if not (options.dry or options.entangled):
        replace_section(TIME_NEEDED, text)
    slow = [(task, t) for task, t in timings if t.after_capture_cpu_s > task.bound_s]
    for task, t in slow:
        print(f"{task.name}: {t.after_capture_cpu_s:.1f} s after capture, at most {task.bound_s:g}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
