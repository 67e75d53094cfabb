"""Random plans on real ranks: layouts, microbatches, lifetimes and what is made again as no search would choose them.

A pair is a model and a plan of it, all drawn from the pair's number: every node may use a random subset of its
certified choices, so that unusual splits, moves and storage meet; every parameter has a lifetime of its own, every
block of the model its own way to be made again. In fp64, with dropout on, the program has to give the loss, gradients
and weights after three steps of AdamW that one process gives, within 1e-9.

    python -m bench.random_plans 0 300
    python -m bench.random_plans 17 18 --models gpt
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.accuracy import Errors, Prepared, measure, prepare
from bench.plans import CERTIFIED, RandomSubset, fast_links
from examples.zoo import ZOO
from shardwright.pcg.choice import Choice
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.parameters import module_block
from shardwright.pcg.step.recompute import RECOMPUTES, Recompute
from shardwright.pcg.step.time import check_time
from shardwright.search.request.restrict import DATA, FREE, TENSOR, ZERO
from shardwright.search.tree.planner import Planner

MODELS = ("mlp", "gpt", "gpt2", "llama", "bert", "vit", "t5", "dlrm")
MESHES = (
    Mesh.of(mb=2, x=2), Mesh.of(mb=4, x=2), Mesh.of(mb=2, x=2, y=2), Mesh.of(mb=2, x=4), Mesh.of(x=2),
    Mesh.of(x=2, y=2),
)  # fmt: skip
OFTEN = (6, 3, 1, 1, 1, 1)
"""How often each mesh is drawn, relative to the others."""
ROLES = (FREE, FREE, ZERO, ZERO, DATA, TENSOR)
SHARES = (0.2, 0.4, 0.7, 1.0)
TRAINED = (1.0, 1.0, 1.0, 0.5)
BACKEND = "aot_eager"
COMPILED = 0.08
NUM_STEPS = 3
PLAN_S = 20
RUN_S, COMPILE_S = 120.0, 600.0


def cuts(serial: Graph, num_microbatches: int) -> dict[str, Choice]:
    """Return the choice that cuts each operator into microbatches, if a step has several."""
    if num_microbatches == 1:
        return {}
    mesh = Mesh((TIME, "x"), (num_microbatches, 1))
    graph = Planner(fast_links(1), CERTIFIED).solve(serial, mesh, (DATA,), "").graph
    return {node.name: node.split[0] for node in graph.nodes if node.split}


def _mode(serial: Graph, block: str, drawn: Recompute) -> Recompute:
    """Return the recomputation that was drawn for a block, or "full" where it has no attention."""
    try:
        made_again(serial, Execution(recompute={block: drawn}))
    except PlanError:
        return "full"
    return drawn


class TooLongError(ShardwrightError):
    """A plan that was not found in time: subsets by chance leave no two blocks equal."""


@contextmanager
def within(seconds: int) -> Generator[None]:
    """Raise `TooLongError` in the main thread after so long on a processor."""

    def stop(*_: object) -> None:
        raise TooLongError(f"no plan within {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass(frozen=True)
class Pair:
    """A model and how its plan is drawn."""

    number: int
    model: str
    mesh: Mesh
    roles: tuple[str, ...]
    share: float
    trained: float
    backend: str

    @classmethod
    def drawn(cls, number: int, models: Sequence[str] = MODELS) -> Pair:
        """The pair of a number."""
        draw = random.Random(number)
        (mesh,) = draw.choices(MESHES, OFTEN)
        roles = tuple(draw.choice(ROLES) for name in mesh.names if name != TIME)
        share, trained = draw.choice(SHARES), draw.choice(TRAINED)
        backend = BACKEND if draw.random() < COMPILED else ""
        return cls(number, draw.choice(models), mesh, roles, share, trained, backend)

    def __str__(self) -> str:
        frozen = "" if self.trained == 1.0 else ", some frozen"
        compiled = self.backend and f", {self.backend}"
        return f"{self.number}: {self.model}, {self.mesh} {'×'.join(self.roles)}, share {self.share}{frozen}{compiled}"

    @property
    def prepared(self) -> Prepared:
        return prepare(self.model, kind="fp64", trained=self.trained, num_steps=NUM_STEPS)

    def plan(self) -> tuple[Graph, Execution]:
        """The best plan of what was drawn. Raises `PlanError` where the model cannot be run in microbatches."""
        draw, serial = random.Random(-1 - self.number), self.prepared.captured.graph
        blocks = sorted({module_block(str(leaf.attr("target"))) for leaf in serial.leaves("parameter")} - {""})
        execution = Execution(recompute={block: _mode(serial, block, draw.choice(RECOMPUTES)) for block in blocks})
        allowed = RandomSubset(self.number, self.share, cuts(serial, self.mesh.num_microbatches))
        planner = Planner(fast_links(self.mesh.num_devices), allowed)
        graph = planner.solve(serial, self.mesh, self.roles, "random", execution=execution).graph
        check_time(graph)
        lifetimes: dict[str, Zero] = {leaf.name: draw.choice(ZEROS) for leaf in graph.leaves("parameter")}
        return with_lifetimes(graph, lifetimes), execution

    def run(self) -> Errors:
        """Plan, run and compare."""
        prepared = self.prepared
        with within(PLAN_S):
            graph, execution = self.plan()
        timeout_s = COMPILE_S if self.backend else RUN_S
        return measure(prepared, graph, timeout_s, execution, self.backend)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pairs of a range of numbers; 1 where any differs from one process."""
    parser = argparse.ArgumentParser(prog="python -m bench.random_plans", description=__doc__)
    parser.add_argument("first", type=int, help="number of the first pair")
    parser.add_argument("last", type=int, help="number behind the last pair")
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=MODELS)
    options = parser.parse_args(arguments)
    counts = Counter[str]()
    for number in range(options.first, options.last):
        start, pair = time.perf_counter(), Pair.drawn(number, options.models)
        outcome, text = _judged(pair)
        counts[outcome] += 1
        print(f"{outcome:8} {time.perf_counter() - start:5.1f} s  {pair}  {text}", flush=True)
    print(", ".join(f"{many} {outcome}" for outcome, many in counts.items()))
    return 1 if counts.keys() - {"equal", "refused", "slow"} else 0


def _judged(pair: Pair) -> tuple[str, str]:
    try:
        errors = pair.run()
    except PlanError as error:
        return "refused", str(error)
    except TooLongError as error:
        return "slow", str(error)
    except ShardwrightError as error:
        return "FAILED", re.split(r"\n+rank \d+ of", str(error))[0].strip()
    return ("equal", f"{errors.gradient:.0e}") if errors.within_double else ("DIFFERS", str(errors))


if __name__ == "__main__":
    sys.exit(main())
