"""Compare the plans of two builds: the plans of a grid, and the CPU seconds that each takes after capture.

    python -m bench.builds --write before.jsonl          in one checkout
    python -m bench.builds --against before.jsonl        in the other: prints each case beside what was written

With `--plain`, plans send no keys around a ring and nothing in pieces: written first, it shows what these save.

The cases are those of `bench.grid`, every second one with stages where they may pay; meshes of three axes; and deep
models. Equal plans have equal graphs and run equally. A plan that is slower by more than 0.1 % is an error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import exp, inf, log
from pathlib import Path
from typing import Any

import torch

from bench import grid_cases
from bench.grid_cases import H100, LLAMA_8B, LLAMA_70B, llama
from bench.search import Example, llama_8b, llama_405b
from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.choice import Choice
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.ring import Ring
from shardwright.pcg.step.precisions import Precision
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.pcg.types import TensorType
from shardwright.reports.facts import fits
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified

SLOWER = 1e-3
"""The share by which a step may be longer: plans of folded and whole graphs differ by as much."""


@dataclass(frozen=True)
class Case:
    """A model by name, the machines that it is planned for, and words for the planner."""

    model: str
    build: Callable[[], Example]
    preset: str
    nodes: int
    precision: Precision | None = None
    words: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = ", ".join(f"{name} {value}" for name, value in self.words.items() if value is not None)
        return f"{self.model}, {self.nodes} × {self.preset}" + (f", {words}" if words else ", stages may pay")


@dataclass(frozen=True)
class Planned:
    """A case's plan: its step (inf: nothing fits), how it is run, a digest of all of it, and the seconds it took."""

    case: str
    step_s: float
    way: str
    digest: str
    cpu_s: float


def cases() -> Iterator[Case]:
    """Yield all cases, those of a model in a row."""
    for own in grid_cases.CASES:
        for number, (preset, nodes) in enumerate(own.clusters):
            stages = None if number % 2 else 1
            yield Case(own.name, own.build, preset, nodes, own.precision, {"stages": stages})
    for name, sizes, axes in (("Llama-8B", LLAMA_8B, (4, 2, 8)), ("Llama-70B", LLAMA_70B, (8, 8, 4))):
        num_nodes = axes[0] * axes[1] * axes[2] // 8
        yield Case(name, llama(*sizes), H100, num_nodes, None, {"mesh": Mesh(("x", "y", "z"), axes)})
    for layers in (12, 96):
        yield Case(f"Llama-8B with {layers} layers", partial(llama_8b, layers), H100, 8)
    yield Case("Llama-405B", llama_405b, H100, 2048, None, {"stages": 1})


class WithoutRings(Certified):
    """The certified choices of nodes without rings."""

    def __call__(self, node: Node, operands: Sequence[TensorType], blocked: Sequence[Choice] = ()) -> frozenset[Choice]:
        return frozenset(x for x in super().__call__(node, operands, blocked) if not isinstance(x, Ring))


def captured(case: Case, folder: Path | None) -> Graph:
    """Return the captured graph of a case, which stays in the folder as text."""
    path = folder and folder / f"{case.model.replace(' ', '_')}.txt"
    if path is not None and path.exists():
        return parse_graph(path.read_text(encoding="utf-8")).validate()
    graph = capture(*case.build(), precision=case.precision).graph
    if path is not None:
        path.write_text(print_graph(graph), encoding="utf-8")
    return graph


def planned(case: Case, graph: Graph, *, plain: bool = False) -> Planned:
    """Plan a case with nothing known; if `plain`, without rings and pieces."""
    start, certified = time.process_time(), WithoutRings() if plain else Certified()
    planner = Planner(
        Cluster.preset(case.preset, nodes=case.nodes), certified, rules=certified.by_name(), precision=case.precision
    )
    plan = planner.plan(graph, case.model, **case.words, **({"pieces": 1} if plain else {}))
    cpu_s = time.process_time() - start
    run = plan.execution
    rings = sum(any(isinstance(choice, Ring) for choice in node.split) for node in plan.graph.nodes)
    way = f"{plan.mesh}, {run.schedule.num_stages} stages ({run.schedule.name}), {run.pieces} pieces, {rings} rings"
    return Planned(str(case), plan.prediction.step_s if fits(plan) else inf, way, _digest(plan), round(cpu_s, 2))


def _digest(plan: Plan) -> str:
    run_as = json.dumps(plan.execution.to_json(), sort_keys=True)  # without what a build does not know
    return hashlib.sha256((print_graph(plan.graph) + run_as).encode()).hexdigest()[:16]


def all_planned(only: str, folder: Path | None, *, plain: bool = False) -> Iterator[Planned]:
    """Yield the plans of the cases that hold a text."""
    known: tuple[str, Graph] | None = None
    for case in cases():
        if only not in str(case):
            continue
        if known is None or known[0] != case.model:
            known = case.model, captured(case, folder)
        yield planned(case, known[1], plain=plain)


def compared(new: Planned, old: Planned) -> str:
    """Return a case's line."""
    same = "same plan" if new.digest == old.digest else f"{new.step_s / old.step_s - 1:+.3%} ({new.way}; was {old.way})"
    return f"{new.case}: {same}; {old.cpu_s:.1f} → {new.cpu_s:.1f} s ({new.cpu_s / old.cpu_s:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan all cases, and write or compare them; 1 where a plan is slower."""
    parser = argparse.ArgumentParser(prog="python -m bench.builds", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--write", type=Path, help="a file for the results, a line each")
    parser.add_argument("--against", type=Path, help="such a file of another build")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases that hold this text")
    parser.add_argument("--plain", action="store_true", help="plan without rings and pieces")
    parser.add_argument("--graphs", type=Path, help="a folder in which captured graphs stay")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = options.against.read_text(encoding="utf-8").splitlines() if options.against else []
    before = {own.case: own for own in (Planned(**json.loads(line)) for line in lines)}
    ratios, slower = list[float](), list[str]()
    for new in all_planned(options.only, options.graphs, plain=options.plain):
        if options.write:
            with options.write.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(new)) + "\n")
        if (old := before.get(new.case)) is None:
            print(f"{new.case}: {new.step_s:.4f} s, {new.way}, planned in {new.cpu_s:.1f} s", flush=True)
            continue
        print(compared(new, old), flush=True)
        ratios.append(new.cpu_s / old.cpu_s)
        slower += [new.case] if new.step_s > (1 + SLOWER) * old.step_s else []
    if ratios:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"{len(ratios)} cases: CPU time {mean:.2f} of before (geometric mean); slower plans: {slower or 'none'}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
