"""Small models under hand-made layouts: loss, gradients, buffers and generator state are the single process's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from examples.zoo import GPT
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import GraphError, PlanError, ShardwrightError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layouts, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.types import TensorType
from tests.each import in_whole_grids
from tests.lowering.runs import (
    Case,
    Step,
    assert_all_train_as_serial,
    assert_same_step,
    assert_trains_as_serial,
    load_backends,
    parallel_step,
    serial_step,
)

BATCH, VOCAB, HIDDEN, FFN, SEQ = 8, 20, 16, 24, 12
Cell = tuple[Mesh, dict[str, Layouts], tuple[int, ...]]
"""A mesh, how leaves are stored on it, and the axes along which the batch is cut."""


class Net(nn.Module):
    """Embedding, a residual MLP with norm and dropout, a tied head, and a fused projection that is split again."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.up = nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.tok(ids))
        a, b, c = self.qkv(self.norm(x)).split(HIDDEN, dim=-1)
        x = x + self.drop(a * torch.sigmoid(b) + c)
        x = x + self.drop(self.down(F.gelu(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Convolutions(nn.Module):
    """Convolutions with bias and groups, batch norm with running statistics, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, stride=2, groups=4)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(images)))
        return F.cross_entropy(self.head(self.second(x).mean((2, 3))), labels)


@pytest.fixture(scope="module")
def net() -> Case:
    torch.manual_seed(0)
    ids, labels = torch.randint(VOCAB, (BATCH, SEQ)), torch.randint(VOCAB, (BATCH, SEQ))
    labels[0, :5] = -100  # ranks with different numbers of targets
    return Case(Net().double(), {"ids": ids, "labels": labels})


@pytest.fixture(scope="module")
def convolutions() -> Case:
    torch.manual_seed(0)
    batch = {"images": torch.randn(BATCH, 3, 9, 9).double(), "labels": torch.randint(5, (BATCH,))}
    return Case(Convolutions().double(), batch)


ONE, TWO, GRID = Mesh.of(only=1), Mesh.of(dp=2), Mesh.of(dp=2, tp=2)
DATA: dict[str, Layouts] = {"ids": (S(0),), "labels": (S(0),)}
ZERO3 = {
    name: (S(0),)
    for name in ("tok.weight", "norm.weight", "norm.bias", "qkv.weight", "qkv.bias", "up.weight", "down.weight")
}
MEGATRON = {"up.weight": (S(0),), "up.bias": (S(0),), "down.weight": (S(1),)}
FUSED = {"qkv.weight": (S(0, 3),), "qkv.bias": (S(0, 3),)}
VOCAB_SPLIT = {"tok.weight": (S(0),)}
HIDDEN_SPLIT = {"tok.weight": (S(1),)}


def both(outer: dict[str, Layouts], inner: dict[str, Layouts]) -> dict[str, Layouts]:
    return {name: (*outer.get(name, (R,)), *inner.get(name, (R,))) for name in outer | inner}


def assert_train_as_serial(case: Case, cells: dict[str, Cell], tolerance: float = 1e-11) -> None:
    graphs = {name: case.graph(mesh, storage, data_axes=axes) for name, (mesh, storage, axes) in cells.items()}
    assert_all_train_as_serial(case, graphs, tolerance)


def test_one_axis(net: Case) -> None:
    cells: dict[str, Cell] = {
        "one rank": (ONE, {}, ()),
        "replicated": (TWO, {}, ()),
        "data": (TWO, DATA, (0,)),
        "zero3": (TWO, DATA | ZERO3, (0,)),
        "megatron": (TWO, MEGATRON, ()),
        "blocked": (TWO, FUSED, ()),
        "vocabulary": (TWO, VOCAB_SPLIT, ()),
        "hidden": (TWO, HIDDEN_SPLIT, ()),
        "all split": (TWO, MEGATRON | FUSED | VOCAB_SPLIT, ()),
        "sequence": (TWO, {"ids": (S(1),), "labels": (S(1),)}, (0,)),
        "zero3 on 4": (Mesh.of(dp=4), DATA | ZERO3, (0,)),
    }
    assert_train_as_serial(net, cells)


def test_two_axes(net: Case) -> None:
    inside = both(DATA | {"up.weight": (S(0, 2),), "tok.weight": (S(0, 2),)}, MEGATRON | VOCAB_SPLIT)
    across = both(DATA | {"up.weight": (S(1),), "down.weight": (S(0),)}, MEGATRON)
    two_dimensions = both(DATA | {"up.weight": (S(0),)}, DATA | {"up.weight": (S(1),)})
    cells: dict[str, Cell] = {
        "data and nothing": (GRID, both(DATA, {}), (0,)),
        "data and tensor": (GRID, both(DATA, MEGATRON | FUSED), (0,)),
        "data and vocabulary": (GRID, both(DATA, VOCAB_SPLIT | MEGATRON), (0,)),
        "data twice": (GRID, both(DATA, DATA), (0,)),
        "zero3 inside tensor": (GRID, inside, (0,)),
        "zero3 across tensor": (GRID, across, (0,)),
        "hybrid": (GRID, both(DATA | ZERO3, DATA), (0, 1)),
        "hybrid inside": (GRID, both(DATA, DATA | ZERO3), (0, 1)),
        "zero3 on both": (GRID, both(DATA | ZERO3, DATA | ZERO3), (0, 1)),
        "two dimensions": (GRID, two_dimensions, (0, 1)),
    }
    assert_train_as_serial(net, cells)


def test_sequence_parallel_sums_become_reduce_scatters(net: Case) -> None:
    """Megatron's sequence parallelism: norm and dropout on slices of the sequence, the MLP on slices of its width."""

    def choose(node: Node, axis: int, operands: list[TensorType]) -> str:
        module = node.source.module
        if module in ("up", "down") and node.op == "linear":
            return "o" if module == "up" else "i"
        if node.op in ("gelu", "add") and operands[0].shape[-1] == FFN:
            return "_2"
        if operands and operands[0].shape == (BATCH, SEQ, HIDDEN) and node.op in ("dropout", "add", "mul", "sigmoid"):
            return "_1"
        return "R"

    graph = net.graph(TWO, MEGATRON, choose)
    source = net_source(net, graph)
    assert "reduce_scatter(" in source
    assert "gather_copy(" in source
    assert_trains_as_serial(net, graph)


def net_source(case: Case, graph: Graph) -> str:
    return case.on_ranks(graph, lambda parallel: parallel.source)[0]


def test_convolutions(convolutions: Case) -> None:
    cells: dict[str, Cell] = {
        "data": (TWO, {"images": (S(0),), "labels": (S(0),)}, (0,)),
        "channels": (TWO, {"first.weight": (S(0),), "first.bias": (S(0),), "second.weight": (S(0),)}, ()),
        "sharded buffers": (TWO, {"norm.running_mean": (S(0),), "norm.running_var": (S(0),)}, ()),
    }
    assert_train_as_serial(convolutions, cells, 1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
def test_programs_compile_without_graph_breaks(net: Case) -> None:
    expected = serial_step(net)
    layouts = {"data": net.graph(TWO, DATA, data_axes=(0,)), "tensor": net.graph(TWO, MEGATRON | VOCAB_SPLIT)}
    load_backends()

    def body() -> dict[str, Step]:
        steps = dict[str, Step]()
        for name, graph in layouts.items():
            parallel = net.lower(graph)
            parallel.compile(backend="aot_eager", fullgraph=True)
            steps[name] = parallel_step(parallel, net.batch)
        return steps

    for steps in run_ranks(body, 2, 120):
        for name, step in steps.items():
            assert_same_step(step, expected, 1e-11, name)


@in_whole_grids
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # so too
def test_programs_that_gather_blocks_compile() -> None:
    """All layers by the same graphs, twice as many for numbers of draws that differ; dropout on."""
    torch.manual_seed(0)
    ids = torch.randint(64, (2, 8, 16))
    found = Case(GPT(64, 64, 64, 4, 4).double(), {"ids": ids[0], "targets": ids[1]})
    expected = serial_step(found)
    storage = {name: (S(0),) for name, _ in found.model.named_parameters()} | {"ids": (S(0),), "targets": (S(0),)}
    graph = found.graph(TWO, storage, data_axes=(0,))
    load_backends()

    def body() -> list[int]:
        numbers = list[int]()
        for recompute in ("none", "selective"):
            compiled, parallel = list[object](), found.lower(graph, Execution(recompute=recompute))
            with pytest.raises(ShardwrightError, match="leave fullgraph out"):
                parallel.compile(fullgraph=True)

            def backend(module: GraphModule, operands: list[Tensor]) -> Callable[..., Any]:
                compiled.append(module)  # noqa: B023
                return module.forward

            parallel.compile(backend=backend)
            for _ in range(2):
                assert_same_step(parallel_step(parallel, found.batch), expected, 1e-11)
                parallel.zero_grad()
            numbers.append(len(compiled))
        return numbers

    assert run_ranks(body, 2, 120) == [[2, 6]] * 2


class Untrained(nn.Module):
    """A loss that no trained parameter reaches, or that is a leaf of the graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.w = kind, nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        found = {"input": x, "constant": torch.tensor(2.0), "detached": self.w.detach() * x, "parameter": self.w}
        return found[self.kind]


def test_a_loss_without_backward_is_told_and_one_that_nothing_computes_is_refused() -> None:
    batch = {"x": torch.tensor(5.0)}
    expected = {"detached": 15.0}
    cases = {kind: Case(Untrained(kind), batch) for kind in expected}

    def steps() -> list[tuple[float, str]]:
        found = []
        for case in cases.values():
            parallel = case.lower(replace(case.captured.graph, mesh=Mesh()))
            try:
                told = str(parallel.forward_backward(**batch).item())
            except PlanError as error:
                told = str(error)
            found.append((parallel(**batch).item(), told))
        return found

    for (kind, value), (loss, told) in zip(expected.items(), run_ranks(steps, 1)[0], strict=True):
        assert loss == value
        assert "depends on no parameter that is trained" in told
        with pytest.raises(PlanError, match="the loss, depends on no parameter that is trained, so that a step has"):
            dry_run(cases[kind].captured.graph)
    for kind in ("input", "constant", "parameter"):
        with pytest.raises(GraphError, match=f"the loss is {kind} '.*' itself: there is nothing to run; compute it"):
            capture(Untrained(kind), batch).graph.check_loss()
