"""Precision by module on two ranks, against one process whose modules' forwards are wrapped by hand."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.lifetimes import with_lifetimes
from shardwright.pcg.step.parameters import find_parameters
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.lowering.rounding import LAYOUTS, NUM_RANKS, error
from tests.lowering.runs import Case, Step, outcome, parallel_step
from tests.search.graphs import cluster


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 32), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)), labels)


class Policy(NamedTuple):
    """What is asked for; and what is done by hand: the modules that run in float32 and in bfloat16, and the rest."""

    asked: dict[str, Any]
    wide: tuple[str, ...]
    low: tuple[str, ...]
    base_is_low: bool


POLICIES = {
    "head and norms": Policy(
        {"head": "fp32", "*norm": "fp32", "*": "amp_bf16"}, ("head", "norm", "blocks.0.norm", "blocks.1.norm"), (), True
    ),
    "within a list": Policy(
        {"blocks.1.up": "amp_bf16", "blocks": "fp32", "*": "amp_bf16"}, ("blocks.0", "blocks.1"), ("blocks.1.up",), True
    ),
    "in fp32": Policy({"blocks.0-1.up": "amp_bf16", "*": "fp32"}, (), ("blocks.0.up", "blocks.1.up"), False),
    "the model's own": Policy({"blocks.1": "amp_bf16"}, (), ("blocks.1",), False),
}


CELLS = [("head and norms", "data"), *((name, "ZeRO-3") for name in POLICIES)]


def example() -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(1)
    return Net(), {"x": torch.randn(16, 16), "labels": torch.randint(0, 10, (16,))}


def by_hand(policy: Policy | None, *, double: bool = False) -> Step:
    """A step of one process; without a policy in float64 or, all of it, under autocast."""
    model, batch = example()
    if double:
        model, batch = model.double(), {**batch, "x": batch["x"].double()}
    for name in policy.wide if policy else ():
        wrap(model.get_submodule(name), wide=True)
    for name in policy.low if policy else ():
        wrap(model.get_submodule(name), wide=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=policy.base_is_low if policy else not double):
        loss = model(**batch)
    loss.backward()
    return outcome(model, loss)


def wrap(module: nn.Module, *, wide: bool) -> None:
    """Arguments of what runs in float32 are widened, and results of what runs in bfloat16 where nothing else does."""
    forward = module.forward

    def wrapped(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not wide):
            return forward(x.float() if wide else x).float()

    module.forward = wrapped


@cache
def case(name: str) -> Case:
    model, batch = example()
    return Case(model, batch, capture(model, batch, precision=POLICIES[name].asked))


@cache
def laid_out(name: str, layout: str) -> Graph:
    role, zero = LAYOUTS[layout]
    captured = case(name).captured
    planner = Planner(cluster(NUM_RANKS), certified_choices(), precision=captured.precision)
    graph = planner.solve(captured.graph, Mesh.of(x=NUM_RANKS), (role,), role).graph
    return with_lifetimes(graph, {leaf.name: zero for leaf in graph.leaves("parameter")})


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_modules_run_in_what_is_asked_of_them(name: str, layout: str) -> None:
    """Nearer to the process whose modules are wrapped that way than to any other; as far from float64 as that is."""
    exact, hand = by_hand(None, double=True), by_hand(POLICIES[name])
    others = [by_hand(policy) for other, policy in POLICIES.items() if other != name] + [by_hand(None)]
    for step in case(name).on_ranks(laid_out(name, layout), lambda run: parallel_step(run, case(name).batch)):
        torch.testing.assert_close(step.loss, hand.loss, rtol=1e-5, atol=0)
        off = error(step, hand).gradients
        assert off < min(error(step, other).gradients for other in others)
        assert error(step, exact).gradients <= 2 * error(hand, exact).gradients


@each("name, low", [
    ("head and norms", {"first", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}),
    ("within a list", {"first", "blocks.1.up", "head"}),
    ("in fp32", {"blocks.0.up", "blocks.1.up"}),
    ("the model's own", {"blocks.1.up", "blocks.1.down"}),
])  # fmt: skip
def test_weights_are_gathered_in_what_their_modules_compute_in(name: str, low: set[str]) -> None:
    graph = laid_out(name, "ZeRO-3")
    parameters = find_parameters(graph).by_leaf
    gathered = {str(graph.by_name[leaf].attr("target")): p.used_dtype for leaf, p in parameters.items() if p.slices}
    products = {name: dtype for name, dtype in gathered.items() if "norm" not in name and name.endswith("weight")}
    assert {leaf.removesuffix(".weight") for leaf, dtype in products.items() if dtype == "bfloat16"} == low
    assert set(products.values()) == {"float32", "bfloat16"}
    assert {dtype for leaf, dtype in gathered.items() if "norm" in leaf} == {"float32"}
