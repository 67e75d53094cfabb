"""How far mixed precision is from exact numbers under every kind of plan, beside the same precision on one process.

Exact are a single process's loss l and gradients g in float64 (of models of experts, in float32). With ‖·‖ over all
gradients as one vector, the error of a step is e(step) = ‖g(step) - g‖ / ‖g‖, and u = 2^-8 is the most that bfloat16
rounds one value by, relative to it. Where `one` is one process, under `torch.autocast` or with parameters in bfloat16,
a plan is held to

    |l(plan) - l| <= 2 max(|l(one) - l|, u |l|)
    e(plan)       <= 2 e(one), where gradients are sent in float32
    e(plan)^2     <= (2 e(one))^2 + (2 u)^2, where they are sent in bfloat16

A plan rounds what one process rounds, at the same places; that its ranks round other summands makes another error of
the same size. Where a product's sum is split over two ranks, three roundings stand in the place of one, whose errors
are independent: √3 < 2. Where gradients are sent in bfloat16, ranks' summands are rounded once and their sum once.

`python -m tests.lowering.rounding [amp_bf16 | bf16_params] [MODEL ...]` prints a table of docs/precision.md, and exits
with 1 where a plan is further off.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from examples.zoo import ZOO
from shardwright.pcg.capture.capture import capture, find_loss
from shardwright.pcg.capture.modules import in_own_precision
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution, ReduceDtype
from shardwright.pcg.step.lifetimes import Zero, with_lifetimes
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.precisions import PRECISIONS, Precision
from shardwright.pcg.step.recompute import Recompute
from shardwright.pcg.step.time import check_time
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.lowering.runs import Batch, Case, Step, outcome, parallel_step
from tests.search.graphs import cluster

NUM_RANKS = 2
AMP: Precision = "amp_bf16"
U = 2.0**-8
NO_DOUBLE = {"mixtral", "qwen3_moe"}
"""Models whose grouped products of experts torch has not in float64."""
LAYOUTS: dict[str, tuple[str, Zero]] = {
    "data": ("data", "zero-3"), "ZeRO-1": ("zero", "zero-1"), "ZeRO-3": ("zero", "zero-3"),
    "tensor": ("tensor", "zero-3"),
}  # fmt: skip


class Pictures(nn.Module):
    """Convolutions, batch normalization and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.norms[0](self.first(x)).relu()
        x = (x + self.norms[1](self.second(x))).relu().mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), labels)


def example(name: str) -> tuple[nn.Module, Batch]:
    """A model without its dropout, which draws otherwise in float64, and a batch."""
    torch.manual_seed(1)
    if name == "pictures":
        return Pictures(), {"x": torch.randn(8, 4, 8, 8), "labels": torch.randint(0, 10, (8,))}
    model, batch = ZOO[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key in [key for key, x in vars(module).items() if "dropout" in key and isinstance(x, float)]:
            setattr(module, key, 0.0)
    return model, batch


@cache
def case(name: str, precision: Precision = AMP) -> Case:
    model, batch = example(name)
    return Case(model, batch, capture(model, batch, precision=precision))


@cache
def solved(name: str, role: str, num_microbatches: int = 1, precision: Precision = AMP) -> Graph:
    mesh = Mesh.of(x=NUM_RANKS) if num_microbatches == 1 else Mesh.of(mb=num_microbatches, x=NUM_RANKS)
    planner, graph = Planner(cluster(NUM_RANKS), certified_choices()), case(name, precision).captured.graph
    return planner.solve(graph, mesh, (role,), role).graph


def laid_out(name: str, layout: str, num_microbatches: int, precision: Precision) -> Graph:
    role, zero = LAYOUTS[layout]
    graph = solved(name, role, num_microbatches, precision)
    return with_lifetimes(graph, {leaf.name: zero for leaf in graph.leaves("parameter")})


def alone(name: str, precision: Precision | None) -> Step:
    """The single process in a precision; without one in fp64, or in fp32 where that does not run."""
    model, batch = example(name)
    if precision is None and name not in NO_DOUBLE:
        model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    with in_own_precision(model, precision, "cpu"):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == AMP):
            loss = find_loss(model(**batch))
        assert loss is not None
        loss.backward()
    return outcome(model, loss)


class Error(NamedTuple):
    """Of a loss, relative; and e of all gradients, as above."""

    loss: float
    gradients: float


def error(step: Step, exact: Step) -> Error:
    pairs = [(step.gradients[name], g) for name, g in exact.gradients.items() if g is not None]
    off = sum(float(((0 if mine is None else mine.double()) - g).square().sum()) for mine, g in pairs)
    size = sum(float(g.square().sum()) for _, g in pairs)
    return Error(abs(float(step.loss) / float(exact.loss) - 1), (off / size) ** 0.5)


def allowed(one: Error, reduce_dtype: ReduceDtype | None) -> Error:
    """The most that a plan may be off."""
    sent = 2 * U if reduce_dtype == "bfloat16" else 0.0
    return Error(2 * max(one.loss, U), ((2 * one.gradients) ** 2 + sent**2) ** 0.5)


# ---- the table ----


WAYS: Sequence[tuple[Recompute, ReduceDtype | None]] = [
    (recompute, reduce_dtype) for recompute in ("none", "full") for reduce_dtype in (None, "bfloat16")
]


class Cell(NamedTuple):
    """The worst rank under one plan; `one`: one process."""

    model: str
    layout: str
    num_microbatches: int
    recompute: Recompute
    reduce_dtype: ReduceDtype | None
    found: Error
    one: Error

    @property
    def good(self) -> bool:
        limit = allowed(self.one, self.reduce_dtype)
        return self.found.loss <= limit.loss and self.found.gradients <= limit.gradients


def cells(
    name: str,
    layouts: Sequence[str] = tuple(LAYOUTS),
    ways: Sequence[tuple[Recompute, ReduceDtype | None]] = WAYS,
    precision: Precision = AMP,
) -> Iterator[Cell]:
    """A model under every plan of these that it can be run with."""
    own, exact = case(name, precision), alone(name, None)
    one = error(alone(name, precision), exact)
    for layout, count, (recompute, reduce_dtype) in product(layouts, (1, 2), ways):
        run = Execution(recompute=recompute, reduce_dtype=reduce_dtype)
        try:
            graph = laid_out(name, layout, count, precision)
            check_time(graph, run)
            Operations(graph, run)
        except PlanError:  # it cannot be cut into microbatches, or has no blocks that could be made again
            continue
        steps = own.on_ranks(graph, lambda p: error(parallel_step(p, own.batch), exact), run)
        worst = Error(max(step.loss for step in steps), max(step.gradients for step in steps))
        yield Cell(name, layout, count, recompute, reduce_dtype, worst, one)


def row(found: Sequence[Cell]) -> str:
    """A model's line of the table: per layout, the least and the largest e(plan) / e(one) of its plans."""

    def ratios(layout: str, reduce_dtype: ReduceDtype | None) -> str:
        own = [c for c in found if (c.layout, c.reduce_dtype) == (layout, reduce_dtype)]
        every = [c.found.gradients / c.one.gradients for c in own]
        return f"{min(every):.2f}–{max(every):.2f}" if every else "–"

    columns = [f"{ratios(layout, None)}; {ratios(layout, 'bfloat16')}" for layout in LAYOUTS]
    good = "all" if all(c.good for c in found) else f"{sum(c.good for c in found)}"
    return " | ".join((f"| {found[0].model}", f"{found[0].one.gradients:.1e}", *columns, f"{good} of {len(found)} |"))


def main(names: Sequence[str]) -> int:
    """Print the table; 1 where a plan is further off than it may be."""
    precision: Precision = "bf16_params" if names[:1] == ["bf16_params"] else AMP
    names = names[1:] if names and names[0] in PRECISIONS else names
    print(" | ".join(("| model", "e(one)", *LAYOUTS, "within |")))
    print("|---" * (3 + len(LAYOUTS)) + "|")
    good = True
    for name in names or ("pictures", *ZOO):
        found = list(cells(name, precision=precision))
        good = good and all(cell.good for cell in found)
        print(row(found), flush=True)
        for cell in (c for c in found if not c.good):
            print(cell)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
