"""Moves and products in pieces: what a step gives is what one process does, and one piece travels beside another.

One small model has a pair of every kind of move, along every factor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from shardwright.lowering.ranks.movement import Axis, Started
from shardwright.lowering.runtime import pieces
from shardwright.lowering.runtime.collectives import reduce, replicate
from shardwright.lowering.text.emit import emit
from shardwright.lowering.text.outside import find_outside
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step import buckets
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.pairs import FIRST, LAST, Pair
from shardwright.pcg.types import TensorType
from tests.each import RANDOM_CASES, at_random
from tests.lowering.parallelize import Choose
from tests.lowering.runs import Case, Step, assert_same_step, parallel_step, run_all, serial_step

HIDDEN, INNER = 16, 32
SPLITS: dict[str, tuple[int | None, dict[str, int | str]]] = {
    "whole between": (None, {"gate": "o", "up": "o", "down": "i", "first": "i", "second": "o", "third": "i"}),
    "sequence between": (1, {"gate": "o", "up": "o", "down": "i", "first": "R", "second": "R", "third": 1}),
    "batch between": (0, {"gate": "o", "up": "o", "down": "i", "first": "i", "second": "o", "third": "R"}),
}
"""The dimension in which what lies between products is split, and how each product is: by it, or by a factor."""


class Net(nn.Module):
    """A gated MLP, whose two first products read one value, and three more products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER, bias=False)
        self.down, self.first, self.second, self.third = (
            nn.Linear(n, HIDDEN, bias=False) for n in (INNER, HIDDEN, HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.norm.weight.dtype)
        n = self.norm(x)
        y = x + self.down(silu(self.gate(n)) * self.up(n))
        return (self.third(torch.tanh(self.second(self.first(y)))) + y).square().mean()


@cache
def case(dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(0)
    return Case(Net().to(dtype), {"x": torch.randn(8, 8, HIDDEN)})


def choosing(between: int | None, products: dict[str, int | str], num_data: int) -> Choose:
    """The split of each node on the last axis as `SPLITS` says; the `num_data` axes before it split the batch."""

    def choose(node: Node, axis: int, operands: list[TensorType]) -> str:
        if not operands or not operands[0].shape:
            return "R"
        wide = operands[0].shape[-1] == INNER and node.op != "linear"
        dim = 0 if axis < num_data else products[node.source.module] if node.op == "linear" else 2 if wide else between
        if not isinstance(dim, int):
            return dim or "R"
        signature = ROWS[node.op].signature([t.shape for t in operands], dict(node.attrs))
        ((factor,), *_) = signature.operands[0][dim : dim + 1]
        return signature.factors[factor].name

    return choose


def graph_of(name: str, mesh: Mesh, dtype: torch.dtype = torch.float64) -> Graph:
    """Along an axis `z` before the last one, weights are stored in slices (ZeRO-3)."""
    between, products = SPLITS[name]
    along = {"o": S(0), "i": S(1)}
    whole = (R,) * (len(mesh) - 1)
    stored = {f"{x}.weight": (*whole, along[str(how)]) for x, how in products.items() if str(how) in along}
    if "z" in mesh.names:
        stored |= {name: (S(1 - tp.dim), tp) for name, (_, tp) in stored.items()}
    return case(dtype).graph(mesh, stored | {"gate.bias": (*whole, S(0))}, choosing(between, products, len(mesh) - 1))


def pairs_of(graph: Graph, execution: Execution) -> list[Pair]:
    return find_outside(graph, execution).operations.pairs


TP = Mesh.of(tp=2)
Run = tuple[torch.dtype, str, Mesh, Execution]
RUNS: list[Run] = [
    *((torch.float64, name, mesh, Execution(pieces=2)) for name in SPLITS for mesh in (TP, Mesh.of(z=2, tp=2))),
    (torch.float64, "batch between", Mesh.of(mb=2, tp=2), Execution(pieces=2)),
    (torch.float64, "whole between", TP, Execution(pieces=8)),
    (torch.float64, "sequence between", TP, Execution(pieces=2, recompute={"": ["gate"]})),
    (
        torch.float64,
        "sequence between",
        TP,
        Execution(pieces=2, recompute={"": ["norm", "gate", "up", ":silu", ":mul"]}),
    ),
    (torch.float32, "sequence between", TP, Execution(pieces=4)),
    (torch.bfloat16, "sequence between", TP, Execution(pieces=4)),
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def test_a_step_in_pieces_is_that_of_one_process() -> None:
    """Of gathered weights, each is a block by itself."""
    found = assert_as_one_process(RUNS)
    assert {pair.function for pairs in found for pair in pairs} == {*FIRST, *LAST}
    assert [len(pairs) for pairs in found] == [4, 4, 3, 3, 4, 4, 4, 4, 2, 3, 3, 3]


def assert_as_one_process(runs: Sequence[Run]) -> list[list[Pair]]:
    """Return the pairs of each run."""
    with mock.patch.object(buckets, "BLOCK_BYTES", 1):
        plans = [(dtype, graph_of(name, mesh, dtype), run) for dtype, name, mesh, run in runs]

        def body(dtype: torch.dtype, graph: Graph, run: Execution) -> Step:
            return parallel_step(case(dtype).lower(graph, run), case(dtype).batch)

        jobs = [(graph.mesh.num_devices, partial(body, dtype, graph, run)) for dtype, graph, run in plans]
        steps = run_all(jobs)
        found = [pairs_of(graph, run) for _, graph, run in plans]
    for (dtype, name, mesh, run), own in zip(runs, steps, strict=True):
        for step in own:
            told = f"{name}, {mesh}, {dtype}, {run.pieces}, {run.recompute}"
            assert_same_step(step, serial_step(case(dtype)), TOLERANCES[dtype], told)
    return found


MESHES = [TP, Mesh.of(tp=4), Mesh.of(z=2, tp=2), Mesh.of(mb=2, tp=2), Mesh.of(mb=4, tp=2)]
PLACES = ["norm", "gate", "up", "down", "first", "second", "third", ":silu", ":mul", ":tanh", ":add"]


@at_random
@pytest.mark.slow
def test_random_steps_in_pieces_are_those_of_one_process() -> None:
    rng, runs = random.Random(7), list[Run]()
    while len(runs) < RANDOM_CASES:
        again: Any = rng.choice(["none", {"": rng.sample(PLACES, rng.randint(1, 6))}])
        run = Execution(pieces=rng.choice([2, 2, 4, 8]), recompute=again)
        runs.append((rng.choice(list(TOLERANCES)), rng.choice(list(SPLITS)), rng.choice(MESHES), run))
    found = assert_as_one_process(runs)
    assert sum(map(bool, found)) > 0.7 * len(runs)


def test_what_pieces_do_not_divide_runs_whole() -> None:
    """Three pieces divide no dimension of 8; and one rank has nobody to send to."""
    graph = graph_of("sequence between", TP)
    assert pairs_of(graph, Execution(pieces=3)) == pairs_of(graph_of("batch between", Mesh.of(tp=1)), RUNS[0][-1]) == []
    whole, three, two = (emit(graph, find_outside(graph, Execution(pieces=n))) for n in (1, 3, 2))
    assert three == whole != two
    down = "lambda piece: F.linear(piece, down_weight), mul, (1, 2), 2, reduce_scatter, tp, (1, 1)"
    assert f"product_then_move({down})" in two


def test_what_others_read_is_no_pair() -> None:
    """A summand that the caller gets as well, and a gathered value."""
    graph, run = graph_of("sequence between", TP), Execution(pieces=2)
    pairs = pairs_of(graph, run)
    for own in pairs:
        seen = own.read if own.move_first else own.start
        outputs = (*graph.outputs, ("seen", seen))
        assert pairs_of(replace(graph, outputs=outputs), run) == [pair for pair in pairs if pair != own], own.function


class Similar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.scale)
        return torch.tanh(linear(x, x)).square().sum()


def test_a_product_with_itself_is_no_pair() -> None:
    """Of a value that is gathered, and of one that is split along what is summed."""
    own = Case(Similar(), {"x": torch.randn(8, 8)})
    for function, how in (
        ("combine", {"linear": "R", "mul": "_0", "tanh": "_0"}),
        ("reduce", {"linear": "i", "mul": "_1", "tanh": "_1"}),
    ):
        graph = own.graph(TP, {}, lambda node, *_, how=how: how.get(node.name, "R"))
        assert f"= {function}(" in emit(graph, find_outside(graph, Execution()))
        assert not pairs_of(graph, Execution(pieces=2)), function


def logged(events: list[str], what: str) -> pieces.Start:
    """A move that does nothing but say when it starts and when it is waited for."""
    numbers = iter(range(99))

    def start(x: Tensor, axis: Axis, dim: int, blocks: int) -> Started:
        number = next(numbers)
        events.append(f"{what} {number}")
        return lambda: events.append(f"wait {number}") or x

    return start


def order_of(move: Callable[..., Tensor]) -> tuple[list[str], list[str]]:
    """What happens in forward, and in backward, if the move is logged and its product too."""
    events = list[str]()
    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def product(piece: Tensor) -> Tensor:
        events.append("compute")
        found = linear(piece, weight)
        found.register_hook(lambda _: events.append("compute"))
        return found

    started = {move: (logged(events, "send"), logged(events, "send"))}
    axis = mock.Mock()
    with mock.patch.object(pieces, "_STARTED", started):
        if move is replicate:
            (y,) = pieces.move_then_products(move, x, axis, (0, 1), 2, lambda p: (product(p),), (0, 1))
        else:
            y = pieces.product_then_move(product, x, (0, 1), 2, move, axis, (0, 1))
        forward = events.copy()
        events.clear()
        y.sum().backward()
    torch.testing.assert_close(y, linear(x, weight))
    torch.testing.assert_close(weight.grad, x.sum(0).expand(4, 4))
    return forward, events


def test_a_piece_travels_while_another_is_computed() -> None:
    gathered = ["send 0", "wait 0", "send 1", "compute", "wait 1", "compute"]
    scattered = ["compute", "send 0", "compute", "wait 0", "send 1", "wait 1"]
    assert order_of(replicate) == (gathered, scattered)
    assert order_of(reduce) == (scattered, gathered)
