"""Random numbers are drawn in the order of the single process, whatever of a program lies side by side."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.graph import OPAQUE, Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.operations import Operations
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.lowering.runs import Case, Step, assert_same_step, parallel_step, serial_step
from tests.lowering.test_recompute import some_places

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "rand": lambda x: x * torch.rand(8, 8, dtype=x.dtype),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "bernoulli_": lambda x: x * x.new_empty(8, 1).bernoulli_(0.4).div(0.4),
    "in place": lambda x: F.dropout(x.t() * 1.5, 0.3, inplace=True).t(),
    "none": lambda x: x,
}


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + DRAWS[self.kind](torch.tanh(self.linear(x)))


class Label(nn.Module):
    """A table of labels, some of which are dropped, as diffusion transformers embed them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)

    def forward(self, y: Tensor) -> Tensor:
        return self.table(torch.where(torch.rand(y.shape[0]) < 0.3, 4, y))


class Program(nn.Module):
    """Blocks and modules of their own that run in any order, some of them several times, inside each other too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng, kinds = random.Random(seed), list(DRAWS)
        self.label, self.shared = Label(), Layer(rng.choice(kinds))
        self.blocks = nn.ModuleList(
            nn.ModuleList([Layer(rng.choice(kinds)), Layer(rng.choice(kinds))]) for _ in range(3)
        )
        self.order = [rng.choice("0012L") for _ in range(6)] + ["0", "L", "1", "0"]
        self.inside = [rng.choice(["label", "shared", "nothing"]) for _ in self.order]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for where, inside in zip(self.order, self.inside, strict=True):
            if where == "L":
                x = x + self.label(y)
                continue
            first, second = self.blocks[int(where)]  # pyright: ignore[reportGeneralTypeIssues]
            x = first(x)
            if inside != "nothing":
                x = x + self.label(y) if inside == "label" else self.shared(x)
            x = F.layer_norm(second(x), (8,))
        return x.pow(2).mean() + x.mean()


class Twice(nn.Module):
    """What draws and gives several results is called twice with the same operands, and the two are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (a, (h, _)), (b, (_, c)) = self.lstm(x[None]), self.lstm(x[None])
        return (a - b).pow(2).mean() + (h * c).mean() + y.sum()


def planned(case: Case, mesh: Mesh, role: str) -> Graph:
    planner = Planner(Cluster.local(mesh.num_devices), certified_choices())
    return planner.solve(case.captured.graph, mesh, (role,), "draws").graph


def test_draws_have_the_order_of_the_single_process() -> None:
    todo = list[tuple[str, Case, Graph, Execution]]()
    for seed in (3, 5, 8):
        torch.manual_seed(seed)
        model = Program(seed) if seed < 8 else Twice()
        case = Case(model.double(), {"x": torch.randn(8, 8).double(), "y": torch.randint(4, (8,))})
        for role in {3: ("data", "tensor"), 5: ("zero",), 8: ("data",)}[seed]:
            graph = planned(case, Mesh.of(x=2), role)
            runs = {"none": Execution(), "some": some_places(graph, random.Random(seed), inside=False)}
            runs |= {"full": Execution(recompute="full")} if seed < 8 else {}
            todo += [(f"{seed} {role} {name}", case, graph, execution) for name, execution in runs.items()]
    expected = {id(case): serial_step(case) for _, case, _, _ in todo}

    def body() -> list[Step]:
        return [parallel_step(case.lower(graph, run), case.batch) for _, case, graph, run in todo]

    for steps in run_ranks(body, 2, 120):
        for (name, case, *_), step in zip(todo, steps, strict=True):
            assert_same_step(step, expected[id(case)], 1e-10, name)


def test_microbatches_draw_in_the_same_order() -> None:
    torch.manual_seed(0)
    model = Program(1)
    for layer in model.modules():  # on the batch, what has no row cannot be cut
        if isinstance(layer, Layer):
            layer.kind = "dropout"
    case = Case(model.double(), {"x": torch.randn(8, 8).double(), "y": torch.randint(4, (8,))})
    graph, expected = planned(case, Mesh.of(mb=2, x=1), "data"), serial_step(case)
    for step in case.on_ranks(graph, lambda parallel: parallel_step(parallel, case.batch)):
        assert_same_step(step, expected, 1e-10)


class Deep(nn.Module):
    """Of layers that are not all exported."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y, (_, c) = layer(x)
            x = x + y * c[0][:, None] + torch.rand_like(x)
        return x.pow(2).mean()


def test_draws_of_layers_that_are_not_exported_are_numbered_on() -> None:
    """By call: its results have one number."""
    torch.manual_seed(0)
    case = Case(Deep().double(), {"x": torch.randn(4, 3, 8).double()})
    assert case.captured.graph.draws == [(OPAQUE, n + k) for n in range(0, 18, 2) for k in (0, 0, 1)]
    graph = planned(case, Mesh.of(x=1), "data")
    (step,) = case.on_ranks(graph, lambda parallel: parallel_step(parallel, case.batch))
    assert_same_step(step, serial_step(case), 1e-10)


def test_a_call_that_draws_is_made_again_as_a_whole() -> None:
    torch.manual_seed(0)
    case = Case(Twice().double(), {"x": torch.randn(8, 8).double(), "y": torch.randint(4, (8,))})
    graph = planned(case, Mesh.of(x=1), "data")
    for seed in range(20):
        listed = Operations(graph, some_places(graph, random.Random(seed), inside=False)).listed
        draw = {node.name: node.draw for node in graph.nodes}
        regions = {(draw[o.name], o.region) for o in listed if draw[o.name] is not None}
        assert len(regions) == 2, regions


class Unread(nn.Module):
    """Draws that nothing reads: before all others, between, of what the model computes, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        F.dropout(self.two(x), 0.5)
        torch.bernoulli(x.sigmoid())
        torch.rand(2)
        y = F.dropout(self.one(x), 0.5)
        torch.bernoulli(torch.sigmoid(y.detach())).relu()
        torch.randn_like(y)
        z = F.dropout(y.relu() * torch.rand(8, dtype=x.dtype), 0.5)
        self.two(F.dropout(z, 0.25))
        torch.randint(5, (2, 2))
        F.scaled_dot_product_attention(z[None], z[None], z[None])
        return z.pow(2).mean()


class OnlyUnread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        F.dropout(y, 0.5)
        return y.pow(2).mean()


def test_draws_that_nothing_reads_are_made() -> None:
    """Also by number: a single process counts them."""
    torch.manual_seed(0)
    cases = [Case(model.double(), {"x": torch.randn(4, 8).double()}) for model in (Unread(), OnlyUnread())]
    graphs, expected = [planned(case, Mesh.of(x=2), "data") for case in cases], list(map(serial_step, cases))
    torch.manual_seed(0)
    with sw.seed_exactly(3):
        exact = cases[0].model(**cases[0].batch).item()

    def body() -> tuple[list[Step], float]:
        modules = [case.lower(graph) for case, graph in zip(cases, graphs, strict=True)]
        steps = [parallel_step(module, case.batch) for module, case in zip(modules, cases, strict=True)]
        torch.manual_seed(0)
        with sw.seed_exactly(3), torch.no_grad():
            return steps, modules[0](**cases[0].batch).item()

    for steps, own in run_ranks(body, 2, 60):
        for step, wanted in zip(steps, expected, strict=True):
            assert_same_step(step, wanted, 1e-10)
        assert own == pytest.approx(exact, rel=1e-10)
