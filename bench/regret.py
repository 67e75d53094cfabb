"""Look for pins that make a plan faster than the free search does.

A case is a model and a cluster. It is planned free, then under 20 random pins: mesh, roles, microbatches,
recomputation, stages, schedule, precision (the free search chooses among those of a case), one to three of them at
once; every second pin is what the free plan chose, with one thing moved. The *regret* of a pin is how much slower the
free plan is than the pinned one, by the cost model; below 0 the pin costs time. No regret may be above 0.5 %.

    python -m bench.regret [--only TEXT] [--pins N]     goes on where it was ended; writes a section of docs/search.md
    python -m bench.regret --free [--only TEXT]         plans the free plans anew, and compares them with what is kept

`bench/data/regret.jsonl` has a line for each case; delete lines to have these cases planned again.
"""

# pyright: reportCallIssue=false
# transformers' configurations take fields that their signatures do not name

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from bench.grid_cases import LLAMA_1B, LLAMA_8B, bert_large, fake, gpt2_xl, mixtral, qwen3_moe, tokens
from bench.grid_page import REGRET, replace_section
from bench.search import Example
from shardwright.cost.clusters.cluster import Cluster, Level
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.parameters import blocks_of
from shardwright.pcg.step.pipelining import SCHEDULES
from shardwright.pcg.step.precisions import Precision
from shardwright.pcg.step.recompute import RECOMPUTES
from shardwright.search.plan import Plan
from shardwright.search.request.restrict import DATA, FREE, TENSOR, ZERO
from shardwright.search.request.spaces import batch_size, degrees, meshes, microbatch_counts
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified

KEPT = Path(__file__).parent / "data" / "regret.jsonl"
MOST = 5e-3
"""The largest regret that is no fault."""
ROLES = (FREE, ZERO, ZERO, DATA, TENSOR)
Pin = dict[str, Any]
"""Arguments of `Planner.plan`, and `precision`, as JSON has them."""


class Model(NamedTuple):
    """A model: the function that builds it, and the precisions among which a free search chooses."""

    build: Callable[[], Example]
    precisions: tuple[Precision | None, ...] = ("amp_bf16",)


class Case(NamedTuple):
    """A model by name, and the clusters that it is planned for, by name."""

    model: str
    clusters: Sequence[str]


def llama(sizes: tuple[int, int, int, int], batch: int, seq: int, keys: int = 8) -> Callable[[], Example]:
    """transformers' Llama 3 of these sizes, in fp32 weights."""
    hidden, layers, inner, heads = sizes

    def make() -> Example:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128256, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner,
            num_attention_heads=heads, num_key_value_heads=keys, max_position_embeddings=seq, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config), tokens(batch, seq)

    return fake(make)


def gpt2(batch: int, seq: int, width: int = 768, layers: int = 12, heads: int = 12) -> Callable[[], Example]:
    """transformers' GPT-2 of these sizes."""

    def make() -> Example:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=seq, use_cache=False)
        return GPT2LMHeadModel(config), tokens(batch, seq)

    return fake(make)


def t5(batch: int, seq: int) -> Callable[[], Example]:
    """T5-large's widths."""

    def make() -> Example:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(d_model=1024, d_ff=4096, num_heads=16, d_kv=64, num_layers=24, use_cache=False,
                          decoder_start_token_id=0)  # fmt: skip
        return T5ForConditionalGeneration(config), tokens(batch, seq)

    return fake(make)


def vit(batch: int, width: int = 1280, layers: int = 32) -> Callable[[], Example]:
    """ViT-H by default."""

    def make() -> Example:
        from transformers import ViTConfig, ViTForImageClassification
        from transformers.initialization import no_init_weights

        config = ViTConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4 * width,
            patch_size=14, num_labels=1000,
        )  # fmt: skip
        images = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
        with no_init_weights():  # trunc_normal_ asks for values
            return ViTForImageClassification(config), dict(zip(("pixel_values", "labels"), images, strict=True))

    return fake(make)


def deepseek(batch: int, seq: int) -> Callable[[], Example]:
    """DeepSeek-V3's layers at a quarter of their widths: latent attention, 64 experts, 6 of which are used."""

    def make() -> Example:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        config = DeepseekV3Config(
            vocab_size=32000, hidden_size=1792, intermediate_size=4608, moe_intermediate_size=512, num_hidden_layers=16,
            num_attention_heads=32, num_key_value_heads=32, n_routed_experts=64, num_experts_per_tok=6, n_group=4,
            topk_group=2, q_lora_rank=384, kv_lora_rank=256, max_position_embeddings=seq, first_k_dense_replace=1,
            use_cache=False,
        )  # fmt: skip
        return DeepseekV3ForCausalLM(config), tokens(batch, seq)

    return fake(make)


BOTH: tuple[Precision | None, ...] = (None, "amp_bf16")
MODELS = {
    "Llama-8B, 128 × 8192": Model(llama(LLAMA_8B, 128, 8192)),
    "Llama-8B, 256 × 4096": Model(llama(LLAMA_8B, 256, 4096)),
    "Llama-8B, 256 × 8192": Model(llama(LLAMA_8B, 256, 8192)),
    "Llama-8B, 64 × 8192": Model(llama(LLAMA_8B, 64, 8192)),
    "Llama-1B, 64 × 4096": Model(llama(LLAMA_1B, 64, 4096)),
    "Llama-1B, 512 × 2048": Model(llama(LLAMA_1B, 512, 2048)),
    "Llama-0.5B, 32 × 2048": Model(llama((1024, 16, 4096, 16), 32, 2048), BOTH),
    "Llama-2B, 8 × 16384": Model(llama((2560, 20, 6912, 20), 8, 16384, 4)),
    "GPT-2, 64 × 1024": Model(gpt2(64, 1024), BOTH),
    "GPT-2 medium, 192 × 1024": Model(gpt2(192, 1024, 1024, 24, 16)),
    "GPT-2 XL, 256 × 1024": Model(gpt2_xl),
    "BERT-large, 256 × 512": Model(bert_large),
    "T5-large, 128 × 512": Model(t5(128, 512)),
    "ViT-H, 512 images": Model(vit(512)),
    "ViT-H, 4096 images": Model(vit(4096)),
    "Mixtral 8x7B, 64 × 4096": Model(mixtral()),
    "Qwen3-MoE 30B, 64 × 4096": Model(qwen3_moe),
    "DeepSeek-like, 64 × 4096": Model(deepseek(64, 4096)),
}  # fmt: skip
CASES = (
    Case("Llama-8B, 128 × 8192", ("1 dgx-h100", "4 dgx-a100-40")),
    Case("Llama-8B, 256 × 4096", ("1 dgx-h100", "2 dgx-a100", "8 a10-box")),
    Case("Llama-8B, 256 × 8192", ("4 dgx-h100", "8 dgx-h100", "64 dgx-h100")),
    Case("Llama-8B, 64 × 8192", ("4 dgx-h100", "1 dgx-h200")),
    Case("Llama-1B, 64 × 4096", ("1 dgx-h100", "2 dgx-a100-40", "4 a10-box", "1 l40s-box", "8+4")),
    Case("Llama-1B, 512 × 2048", ("1 dgx-a100-40", "2 rtx-4090-box", "2+2")),
    Case("Llama-0.5B, 32 × 2048", ("1 a10-box", "1 t4-box", "2 a10-box")),
    Case("Llama-2B, 8 × 16384", ("1 dgx-h100", "2 dgx-a100-40")),
    Case("GPT-2, 64 × 1024", ("1 a10-box", "1 dgx-a100")),
    Case("GPT-2 medium, 192 × 1024", ("2 a10-box", "1 rtx-4090-box", "8+4")),
    Case("GPT-2 XL, 256 × 1024", ("1 dgx-a100", "4 a10-box", "1 dgx-h100")),
    Case("BERT-large, 256 × 512", ("1 a10-box", "2 dgx-a100-40")),
    Case("T5-large, 128 × 512", ("1 a10-box", "1 dgx-a100-40")),
    Case("ViT-H, 512 images", ("1 a10-box", "1 dgx-a100-40")),
    Case("ViT-H, 4096 images", ("2 dgx-a100-40", "4 dgx-h100")),
    Case("Mixtral 8x7B, 64 × 4096", ("4 dgx-h100",)),
    Case("Qwen3-MoE 30B, 64 × 4096", ("2 dgx-h100",)),
    Case("DeepSeek-like, 64 × 4096", ("1 dgx-h100", "2 dgx-a100-40")),
)


def cluster(name: str) -> Cluster:
    """Machines of a preset, as "2 dgx-h100"; or so many A100s beside so many H100s, as "8+4"."""
    if "+" not in name:
        nodes, _, preset = name.partition(" ")
        return Cluster.preset(preset, int(nodes))
    slow, fast = map(int, name.split("+"))
    parts = [Cluster.preset("dgx-a100", slow // fast, fast), Cluster.preset("dgx-h100", 1, fast)]
    return Cluster.join(parts, Level("network", slow // fast + 1, 25e9, 1e-5))


@dataclass(frozen=True)
class Pinned:
    """A pin and the step of its plan; None: nothing fits, or nothing can be run so."""

    pin: Pin
    step_s: float | None


@dataclass(frozen=True)
class Result:
    """A case, the free plan's step (None: it does not fit) and way in words, seconds of planning, and its pins."""

    model: str
    cluster: str
    free_s: float | None
    way: str
    cpu_s: float
    pinned: Sequence[Pinned]

    @property
    def regrets(self) -> list[float]:
        """Return the regrets of the pins under which a plan fits."""
        own = self.free_s or inf
        return [own / pinned.step_s - 1 for pinned in self.pinned if pinned.step_s is not None]

    @property
    def worst(self) -> tuple[float, str]:
        """The largest regret, and its pin in words."""
        able = [(regret_of(self.free_s, p), words(p.pin)) for p in self.pinned if p.step_s is not None]
        return max(able, default=(0.0, ""))


def regret_of(free_s: float | None, pinned: Pinned) -> float:
    """Return by how much the free plan is slower, as a share."""
    return (free_s or inf) / pinned.step_s - 1 if pinned.step_s is not None else -1.0


def words(pin: Pin) -> str:
    """Say what is pinned, for people."""
    return ", ".join(f"{name} {_shown(value)}" for name, value in pin.items())


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return str(Mesh.of(**value))
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# ---- pins ----


class Drawer:
    """Draws pins that can be asked of a graph on a cluster."""

    def __init__(self, graph: Graph, on: Cluster, precisions: Sequence[Precision | None], random: Random) -> None:
        self.on, self.precisions, self.random = on, precisions, random
        self.counts, self.blocks = microbatch_counts(batch_size(graph)), len(blocks_of(graph))

    def pins(self, free: Plan, number: int) -> Iterator[Pin]:
        """Yield `number` different pins: every second one near the choice of the free plan, the others at random."""
        seen = list[Pin]()
        while len(seen) < number:
            pin = self.near(free) if len(seen) % 2 else self.drawn()
            if pin not in seen:
                seen.append(pin)
                yield pin

    def drawn(self) -> Pin:
        """One to three things."""
        random, pin = self.random, Pin()
        kinds = random.sample(["mesh", "microbatches", "recompute", "stages", "precision"], random.choice((1, 1, 2, 3)))
        if "stages" in kinds and self.stages:
            pin["stages"] = random.choice(self.stages)
            if random.random() < 0.5:
                pin["schedule"] = random.choice(SCHEDULES)
        if "mesh" in kinds:
            size = pin.get("stages", 1)
            pin |= self.mesh(self.on.num_devices // size if isinstance(size, int) else max(size))
        if "microbatches" in kinds:
            pin["microbatches"] = random.choice(self.counts)
        if "recompute" in kinds:
            pin["recompute"] = random.choice(RECOMPUTES)
        if ("precision" in kinds and len(self.precisions) > 1) or not pin:
            pin["precision"] = random.choice(self.precisions)
        return pin

    @property
    def stages(self) -> list[int | list[int]]:
        """Numbers of stages, and the devices of each of unlike parts."""
        equal: list[int | list[int]] = [n for n in degrees(self.on.num_devices) if n <= min(self.blocks, 16)]
        own = [part.num_devices for part in self.on.parts]
        return [*equal, *([own] * 3 if len(set(own)) > 1 else [])]

    def mesh(self, num_devices: int) -> Pin:
        """One of so many devices, half of the time of one axis, with or without roles."""
        if num_devices == 1:
            return {"mesh": {"x": 1}}
        own = list(meshes(num_devices))
        mesh = own[0] if self.random.random() < 0.5 else self.random.choice(own)
        pin = Pin(mesh=dict(zip(mesh.names, mesh.sizes, strict=True)))
        if self.random.random() < 0.7:
            pin["roles"] = [self.random.choice(ROLES) for _ in mesh.names]
        return pin

    def near(self, free: Plan) -> Pin:
        """Some of what the free plan chose, with one thing moved."""
        random, run = self.random, free.execution
        names = [name for name in free.mesh.names if name != TIME]
        mesh = {name: free.mesh.sizes[free.mesh.index(name)] for name in names}
        pin = Pin()
        if run.schedule.num_stages > 1:
            by_part = list(self.on.parts and [p.num_devices for p in self.on.parts])
            pin["stages"] = by_part if run.schedule.stage_sizes else run.schedule.num_stages
        if random.random() < 0.7:
            pin["mesh"] = mesh
        own = min(range(len(self.counts)), key=lambda i: abs(self.counts[i] - free.mesh.num_microbatches))
        move = random.choice(("roles", "fewer", "more", "again", "schedule" if "stages" in pin else "more"))
        if move == "roles":
            pin |= {"mesh": mesh, "roles": [random.choice(ROLES) for _ in names]}
        elif move == "again":
            pin["recompute"] = random.choice(RECOMPUTES)
        elif move == "schedule":
            pin["schedule"] = random.choice(SCHEDULES)
        if move in ("fewer", "more"):
            pin["microbatches"] = self.counts[max(0, min(len(self.counts) - 1, own + (1 if move == "more" else -1)))]
        elif random.random() < 0.5:
            pin["microbatches"] = self.counts[own]
        return pin


# ---- planning ----


class Bench:
    """Plans cases of one model, which is captured once for each precision."""

    def __init__(self, name: str, model: Model, captured: Callable[[Model, Precision | None], Graph]) -> None:
        self.name, self.model, self.certified = name, model, Certified()
        self.rules = self.certified.by_name()
        self.graphs = {precision: captured(model, precision) for precision in model.precisions}

    def result(self, on: str, own: Cluster, number: int, tell: Callable[[str], None] = lambda text: None) -> Result:
        """One case with so many pins."""
        start = time.process_time()
        free = self.plan(own, {})
        assert free is not None
        cpu_s = time.process_time() - start
        free_s, way = step_s(own, free), f"{free.mesh}, {free.execution.schedule.num_stages} stages"
        tell(f"{self.name}, {on}: {free_s or 0:.4f} s {way} ({cpu_s:.1f} s)")
        drawer = Drawer(next(iter(self.graphs.values())), own, self.model.precisions, Random(f"{self.name}, {on}"))
        pinned = list[Pinned]()
        for pin in drawer.pins(free, number):
            plan = self.plan(own, pin)
            pinned.append(Pinned(pin, None if plan is None else step_s(own, plan)))
            if (regret := regret_of(free_s, pinned[-1])) > MOST and plan is not None:
                tell(f"    {regret:.2%} {words(pin)}: {plan.prediction.step_s:.4f} s {plan.mesh}")
        return Result(self.name, on, free_s, way, round(cpu_s, 2), pinned)

    def plan(self, on: Cluster, pin: Pin) -> Plan | None:
        """The best plan of all precisions; None where the pin cannot be."""
        given = {name: value for name, value in pin.items() if name != "precision"}
        if "mesh" in given:
            given["mesh"] = Mesh.of(**given["mesh"])
        if isinstance(given.get("stages"), list):
            given["stages"] = tuple(given["stages"])
        found = list[Plan]()
        for precision in [pin["precision"]] if "precision" in pin else self.model.precisions:
            planner = Planner(on, self.certified, rules=self.rules, precision=precision)
            try:
                found.append(planner.plan(self.graphs[precision], self.name, **given))
            except PlanError:  # heads or a batch that do not divide, a role that leaves an operator nothing
                continue
        return min(found, key=lambda plan: (step_s(on, plan) is None, plan.prediction.step_s), default=None)


def step_s(on: Cluster, plan: Plan) -> float | None:
    """The step of a plan; None where it does not fit."""
    return plan.prediction.step_s if plan.prediction.memory.total_bytes <= plan.report.limit_bytes else None


def captured(model: Model, precision: Precision | None) -> Graph:
    """The graph of a model in a precision."""
    own, batch = model.build()
    return capture(own, batch, precision=precision).graph


# ---- free plans anew ----


class Anew(NamedTuple):
    """A free plan that was planned again: its step beside the free one that is kept, and the least of all kept ones."""

    case: str
    step_s: float
    before_s: float
    least_s: float
    cpu_s: float
    way: str

    @property
    def regret(self) -> float:
        """Return by how much it is slower than the fastest plan on record."""
        return self.step_s / self.least_s - 1 if self.least_s < inf else 0.0

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.step_s:.4f} s, was {self.before_s:.4f} s, regret {self.regret:+.2%}, planned in "
            f"{self.cpu_s:.1f} s ({self.way})"
        )


def anew(only: str = "", path: Path = KEPT) -> Iterator[Anew]:
    """Plan the kept cases that hold a text again, free, and print each beside what is kept."""
    known = kept(path)
    for model, clusters in CASES:
        todo = [on for on in clusters if (model, on) in known and only in f"{model}, {on}"]
        if not todo:
            continue
        bench = Bench(model, MODELS[model], captured)
        for on in todo:
            result, start = known[model, on], time.process_time()
            plan = bench.plan(cluster(on), {})
            step = None if plan is None else step_s(cluster(on), plan)
            steps = [result.free_s, *(pin.step_s for pin in result.pinned)]
            again = Anew(
                f"{model}, {on}", inf if step is None else step, result.free_s or inf,
                min((s for s in steps if s is not None), default=inf), time.process_time() - start,
                "" if plan is None else f"{plan.mesh}, {plan.execution.schedule.num_stages} stages",
            )  # fmt: skip
            print(again, flush=True)
            yield again


# ---- what is kept, and the page ----


def kept(path: Path = KEPT) -> dict[tuple[str, str], Result]:
    """The results by case."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = list(map(_parsed, map(json.loads, lines)))
    return {(result.model, result.cluster): result for result in found}


def _parsed(row: dict[str, Any]) -> Result:
    row["pinned"] = [Pinned(**pinned) for pinned in row["pinned"]]
    return Result(**row)


def add(result: Result, path: Path = KEPT) -> None:
    """One more line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")


INTRODUCTION = """\
{heading}

A plan that is left free should never be slower than one with something pinned. In {count} of {all} cases, with
{pins} random pins in all, {over} of these give a plan that is faster by more than {most:.1%}; the largest *regret* is
{worst:.2%}.

Written by `make regret` on {date} from `bench/data/regret.jsonl`. Pins are one to three of mesh, roles, microbatches,
recomputation, stages, schedule and precision; every second one is what the free plan chose, with one thing moved.

* *regret*: how much slower the free plan is than the fastest pinned one; below 0 it is faster than all of them.
* *able*: of how many pins a plan fits. *planning*: CPU time of the free plan.

| model | cluster | regret | pin | plan | step | able | planning |
|---|---|--:|---|---|--:|--:|--:|
"""


def section(results: Mapping[tuple[str, str], Result]) -> str:
    """The table as Markdown, the worst first."""
    regrets = [regret for result in results.values() for regret in result.regrets]
    head = INTRODUCTION.format(
        heading=REGRET, count=len(results), all=sum(len(case.clusters) for case in CASES), most=MOST,
        pins=sum(len(r.pinned) for r in results.values()),
        over=sum(regret > MOST for regret in regrets), worst=max(regrets, default=0.0), date=date.today().isoformat(),
    )  # fmt: skip
    return head + "".join(map(_row, sorted(results.values(), key=lambda r: r.worst, reverse=True)))


def _row(r: Result) -> str:
    regret, pin = r.worst
    step = "" if r.free_s is None else f"{r.free_s:.3f} s"
    cells = [r.model, r.cluster, f"{regret:+.2%}", pin, r.way, step, f"{len(r.regrets)} of {len(r.pinned)}",
             f"{r.cpu_s:.1f} s"]  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan what is not kept yet, and write the section; 1 where a regret is too large."""
    parser = argparse.ArgumentParser(prog="python -m bench.regret", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that hold it; prints only")
    parser.add_argument(
        "--free", action="store_true", help="plan only the free plans, beside what is kept; prints only"
    )
    parser.add_argument("--pins", type=int, default=20, metavar="N", help="of each case")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.free:
        return int(max((again.regret for again in anew(options.only)), default=0.0) > MOST)
    found = {} if options.only else kept()
    for model, clusters in CASES:
        todo = [on for on in clusters if (model, on) not in found and options.only in f"{model}, {on}"]
        if not todo:
            continue
        bench = Bench(model, MODELS[model], captured)
        for on in todo:
            found[model, on] = bench.result(
                on, cluster(on), options.pins, lambda text: print(text, file=sys.stderr, flush=True)
            )
            if not options.only:
                add(found[model, on])
    text = section(found)
    print(text)
    if not options.only:
        replace_section(REGRET, text)
    return int(any(regret > MOST for result in found.values() for regret in result.regrets))


if __name__ == "__main__":
    sys.exit(main())
