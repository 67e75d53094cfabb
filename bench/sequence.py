"""Long sequences and small batches: the searched plan beside forced ones of every kind of sequence parallelism.

A kind is a set of roles of the axes: keys and values gathered (`context`), all-to-alls between heads and sequence
(`ulysses`), Megatron's tensor parallelism with what lies between its regions split and whole, ZeRO on the batch, and
two of them on two axes. Each is tuned on every mesh of it as the planner does: microbatches, recomputation, lifetimes
of weights, memory as the limit. The timeline costs them all.

    python -m bench.sequence [--only TEXT]      writes a section of docs/search.md where nothing is left out
"""

# pyright: reportCallIssue=false
# transformers' configurations take fields that their signatures do not name

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import date
from math import inf
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.decoders import Decoder, decoder
from bench.grid_cases import A100, H100, LLAMA_8B, Case, fake, llama, tokens
from bench.grid_page import SEQUENCE, replace_section
from bench.search import Example
from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.plan import Plan, most_frequent
from shardwright.search.request.asked import Bound
from shardwright.search.request.limits import NO_LIMITS, Limits
from shardwright.search.request.restrict import CONTEXT, DATA, RING, TENSOR, ULYSSES, ZERO
from shardwright.search.request.spaces import Space, degrees
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified

WHOLE = Limits(bounds=(Bound("no residual", "residual", 1, 1),))
"""What lies between products with weights is whole on each device: Megatron without `sequence_parallel`."""
KINDS: dict[str, tuple[tuple[tuple[str, ...], ...], Limits]] = {
    "context": (((CONTEXT,), (ZERO, CONTEXT)), NO_LIMITS),
    "ulysses": (((ULYSSES,), (ZERO, ULYSSES)), NO_LIMITS),
    "ring": (((RING,), (ZERO, RING)), NO_LIMITS),
    "context × ulysses": (((CONTEXT, ULYSSES),), NO_LIMITS),
    "ulysses × ring": (((ULYSSES, RING),), NO_LIMITS),
    "tensor": (((TENSOR,), (ZERO, TENSOR)), NO_LIMITS),
    "tensor, whole between": (((TENSOR,), (ZERO, TENSOR)), WHOLE),
    "context × tensor": (((CONTEXT, TENSOR),), NO_LIMITS),
    "ulysses × tensor": (((ULYSSES, TENSOR),), NO_LIMITS),
    "zero": (((ZERO,), (DATA, ZERO)), NO_LIMITS),
}
MOST_INNER = 8
"""Devices of an inner axis of heads or widths: those of one machine."""


def bert_large(batch: int, seq: int) -> Callable[[], Example]:
    """Return a constructor of BERT-large with `seq` positions."""

    def make() -> Example:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
                            max_position_embeddings=seq)  # fmt: skip
        return BertForMaskedLM(config), tokens(batch, seq)

    return fake(make)


def t5_3b(batch: int, seq: int, decoded: int) -> Callable[[], Example]:
    """A long encoder, a short decoder."""

    def make() -> Example:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(d_model=1024, d_ff=16384, num_heads=32, d_kv=128, num_layers=24, use_cache=False,
                          decoder_start_token_id=0)  # fmt: skip
        labels = torch.zeros(batch, decoded, dtype=torch.long)
        return T5ForConditionalGeneration(config), {"input_ids": torch.zeros(batch, seq).long(), "labels": labels}

    return fake(make)


def causal(sizes: Decoder, batch: int, seq: int) -> Callable[[], Example]:
    """Attention that is causal by itself, without a mask: of parts of its queries the last has the most work."""

    def build() -> Example:
        with FakeTensorMode():
            ids = torch.zeros(batch, seq, dtype=torch.long)
            return decoder(sizes, seq, blocks=sizes.layers), {"ids": ids, "labels": ids.clone()}

    return build


GPT = Decoder("mpt", 24, 2048, 16, 16, 8192, 50304)
CAUSAL_8B = Decoder("llama", 32, 4096, 32, 8, 14336, 128256)
CAUSAL_405B = Decoder("llama", 126, 16384, 128, 8, 53248, 128256)
FEW_KEYS = Decoder("llama", 28, 3072, 24, 2, 8192, 128256)
LLAMA_3B = (3072, 28, 8192, 24)
CASES = (
    *(
        Case(f"Llama-8B, {batch} × {seq}", llama(*LLAMA_8B, batch=batch, seq=seq), clusters)
        for batch, seq, clusters in (
            (1, 8192, ((H100, 1), (H100, 2))),
            (8, 8192, ((H100, 1), (H100, 8), (A100, 2))),
            (1, 32768, ((H100, 2), (A100, 2))),
            (2, 32768, ((H100, 2), (H100, 8), (A100, 2))),
            (1, 131072, ((H100, 8), (A100, 8))),
            (8, 131072, ((H100, 8),)),
        )
    ),
    Case("BERT-large, 8 × 2047", bert_large(8, 2047), ((H100, 1), (H100, 2)), "amp_bf16"),
    Case("BERT-large, 2 × 8192", bert_large(2, 8192), ((H100, 1), (H100, 2)), "amp_bf16"),
    Case("GPT 1.3B, causal, 4 × 16384", causal(GPT, 4, 16384), ((H100, 1), (H100, 2), (A100, 2)), "amp_bf16"),
    Case("T5-3B, 4 × 8192 to 512", t5_3b(4, 8192, 512), ((H100, 2),), "amp_bf16"),
    Case("Llama-3B, causal, 2 key heads, 2 × 32768", causal(FEW_KEYS, 2, 32768), ((H100, 1), (H100, 2)), "amp_bf16"),
    Case("Llama-8B, causal, 1 × 1048576", causal(CAUSAL_8B, 1, 1 << 20), ((H100, 8),), "amp_bf16"),
    Case("Llama-405B, causal, 8 × 131072", causal(CAUSAL_405B, 8, 1 << 17), ((H100, 128),), "amp_bf16"),
    Case("Llama-3B, 1 × 21504", llama(*LLAMA_3B, batch=1, seq=21504), (("3", 1), ("7", 1), ("7", 3))),
)


class Found(NamedTuple):
    """The searched plan of a case, and by kind the best forced plan that fits (None: none does)."""

    case: str
    plan: Plan
    forced: dict[str, Plan | None]
    plan_s: float
    forced_s: float

    @property
    def best(self) -> tuple[str, float]:
        """The kind of the fastest forced plan, and its step in seconds."""
        steps = {kind: p.prediction.step_s for kind, p in self.forced.items() if p is not None}
        return min(steps.items(), key=lambda item: item[1], default=("", inf))

    @property
    def gap(self) -> float:
        """Return by how much the plan is slower than the fastest forced one; below 0 it is faster."""
        return self.plan.prediction.step_s / self.best[1] - 1


def cluster(preset: str, nodes: int) -> Cluster:
    """A preset's machines, or, of a number, machines of so many H100."""
    return Cluster.preset(H100, nodes, int(preset)) if preset.isdecimal() else Cluster.preset(preset, nodes)


def where(preset: str, nodes: int) -> str:
    """Return the cluster's name in reports."""
    return f"{nodes} × {preset} H100" if preset.isdecimal() else f"{nodes} × {preset}"


def spaces(setups: Sequence[tuple[str, ...]], limits: Limits, num_devices: int) -> Iterator[Space]:
    """A space for each mesh of these roles."""
    for roles in setups:
        inner = degrees(num_devices)[-1:] if len(roles) == 1 else degrees(num_devices)[:-1]
        for size in inner:
            outer = num_devices // size
            if roles[-1] in (TENSOR, ULYSSES) and size > MOST_INNER:
                continue
            sizes = (size,) if len(roles) == 1 else (outer, size)
            yield Space(" × ".join(roles), Mesh(tuple("xy"[: len(sizes)]), sizes), roles, limits=limits)


def compare(name: str, graph: Graph, on: Cluster, kinds: Collection[str] = tuple(KINDS)) -> Found:
    """The searched plan of a graph and the best of each of some kinds."""
    start = time.process_time()
    plan = Planner(on, Certified()).plan(graph)
    planned = time.process_time()
    planner = Planner(on, Certified())
    forced = {kind: best(planner, graph, spaces(*own, on.num_devices)) for kind, own in KINDS.items() if kind in kinds}
    return Found(name, plan, forced, planned - start, time.process_time() - planned)


def best(planner: Planner, graph: Graph, kind: Iterator[Space]) -> Plan | None:
    """The fastest plan of these spaces that fits, each tuned by itself."""
    found: Plan | None = None
    for space in kind:
        try:
            plan = planner.plan(graph, spaces=[space], compared=False)
        except PlanError:  # heads or a sequence that do not divide, a role that leaves an operator nothing
            continue
        fits = plan.prediction.memory.total_bytes <= planner.limit_bytes
        if fits and (found is None or plan.prediction.step_s < found.prediction.step_s):
            found = plan
    return found


# ---- the page ----


INTRODUCTION = """\
{heading}

Long sequences and small batches can be split in many ways. In {count} cases the searched plan is at most {most:.1%}
slower than the fastest plan that is forced to one kind of split, and up to {least:.1%} faster.

Written by `python -m bench.sequence` on {date}. Each forced kind is the best of its meshes, tuned as the planner does:

* *context*: keys and values are gathered. *ring*: they travel. *ulysses*: all-to-alls change between heads and
  sequence.
* *tensor*: Megatron's tensor parallelism, with what lies between its regions split; *whole between*: not split.
* *zero*: ZeRO on the batch. *a × b*: two of them on two axes.

The columns:

* *gap*: how much slower the plan's step is than that of the fastest forced one. Below 0 it is faster.
* *attention*: what each axis of the plan splits it along.
* The named kinds: the step of the best forced plan. An empty cell: nothing of the kind fits or can be laid out.
* *planning*, *forced*: CPU time.

"""


def section(found: Sequence[Found]) -> str:
    """The table as Markdown."""
    gaps = [f.gap for f in found]
    head = INTRODUCTION.format(
        heading=SEQUENCE, date=date.today().isoformat(), count=len(found), most=max(gaps), least=-min(gaps)
    )
    kinds = found[0].forced
    head += f"| model | cluster | gap | plan | attention | step | {' | '.join(kinds)} | planning | forced |\n"
    head += f"|---|---|--:|---|---|--:|{'--:|' * len(kinds)}--:|--:|\n"
    return head + "".join(map(_row, found))


def _row(f: Found) -> str:
    model, _, on = f.case.rpartition(", ")
    way = ", ".join([str(f.plan.mesh), *most_frequent(f.plan.graph)])
    kinds = (_step(p) for p in f.forced.values())
    cells = [model, on, f"{f.gap:+.1%}", way, attention(f.plan.graph), _step(f.plan), *kinds,
             f"{f.plan_s:.0f} s", f"{f.forced_s:.0f} s"]  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


def _step(plan: Plan | None) -> str:
    return "" if plan is None else f"{plan.prediction.step_s:.3f} s"


def attention(graph: Graph) -> str:
    """Return the dimensions along which the axes of devices split the first attention of a plan."""
    first = next((n for n in graph.nodes if n.op in ("sdpa", "softmax") and graph.types[n.name].grad), None)
    if first is None:
        return ""
    kind = graph.types[first.name]
    dims = {0: "batch", len(kind.shape) - 3: "heads", len(kind.shape) - 2: "sequence"}
    return ", ".join(dims.get(layout.dim, "keys") if layout.is_shard else "whole" for layout in kind.layouts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all cases and write the section; 1 where a plan is slower than a forced one by more than 0.1 %."""
    parser = argparse.ArgumentParser(prog="python -m bench.sequence", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT", help='cases that hold it, as "Llama-8B, 1"; prints only')
    parser.add_argument("--kinds", default=",".join(KINDS), help="with --only: these kinds, as context,ring")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = list[Found]()
    for case in CASES:
        todo = [(f"{case.name}, {where(preset, nodes)}", preset, nodes) for preset, nodes in case.clusters]
        if not (todo := [entry for entry in todo if options.only in entry[0]]):
            continue
        model, batch = case.build()
        graph = capture(model, batch, precision=case.precision).graph
        for name, preset, nodes in todo:
            found.append(compare(name, graph, cluster(preset, nodes), options.kinds.split(",")))
            print(_row(found[-1]), end="", file=sys.stderr, flush=True)
    text = section(found)
    print(text)
    if not options.only:
        replace_section(SEQUENCE, text)
    return int(any(f.gap > 1e-3 for f in found))


if __name__ == "__main__":
    sys.exit(main())
