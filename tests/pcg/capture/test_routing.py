"""Mixtures of experts are lifted to rows that say what they compute for each token, and compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench.accuracy import prepare
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import run_serial
from tests.each import each, in_whole_grids
from tests.experts import EXPERTS, SIZE, Sorted, deepseek, ends_of, grouped_mm, mixture
from tests.models import zoo

LIFTED = ("experts", "expert_linear", "grouped_mm", "sort_indices", "histc", "index", "opaque")


def counted(graph: Graph) -> dict[str, int]:
    """How many of the operators that routing is made of, and that it is lifted to, are in a graph."""
    found = {op: sum(1 for _ in graph.leaves(op)) for op in LIFTED}
    return {op: number for op, number in found.items() if number}


def assert_computes(model: nn.Module, batch: dict[str, Tensor], graph: Graph) -> None:
    """The graph's loss is the model's."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    leaves = {n.name: tensors[str(n.attr("target"))].detach().numpy() for n in graph.nodes if n.is_leaf}
    with torch.no_grad():
        np.testing.assert_allclose(run_serial(graph, leaves)[graph.loss], model(**batch), rtol=1e-13)


@each(
    ("name", "expected"),
    [
        ("sorted", {"experts": 1}),
        ("not gated", {"experts": 1}),
        ("added", {"experts": 1}),
        ("biased", {"expert_linear": 2, "index": 2}),  # of the biases of each row's expert
        ("first", {"expert_linear": 2}),
        ("masked", {}),
        ("looped", {}),
    ],
)
def test_no_order_is_left(name: str, expected: dict[str, int]) -> None:
    model, batch = mixture(name)
    graph = capture(model, batch).graph
    assert counted(graph) == expected
    assert_computes(model, batch, graph)


@in_whole_grids
@pytest.mark.parametrize("name", [*zoo("mixtral", "qwen3_moe"), "deepseek"])
def test_models_of_transformers(name: str) -> None:
    if name == "deepseek":
        torch.manual_seed(0)
        model, batch = deepseek()
        graph = capture(model, batch).graph
    else:
        known = prepare(name)
        model, batch, graph = known.model, known.batch, known.captured.graph
    for captured in (graph, capture(model, batch, precision="amp_bf16").graph):  # where a sum is made in float32
        found = counted(captured)
        assert found == {"experts": 1 if name == "deepseek" else 2}
    (node, *_) = graph.leaves("experts")
    assert node.source.module.endswith("mlp.experts")
    up, down = (graph.types[name].shape for name in node.inputs[3:])
    assert up[2] == 2 * down[1]


class Given(nn.Module):
    """Rows of `x` in an order of the experts that the batch gives, in groups of the experts `counted`."""

    def __init__(self, descending: bool = False, squared: bool = False) -> None:
        super().__init__()
        self.descending, self.squared = descending, squared
        self.up = nn.Parameter(torch.randn(EXPERTS, SIZE, SIZE).double())

    def forward(self, x: Tensor, scores: Tensor, counted: Tensor | None = None) -> Tensor:
        index = scores.argmax(-1) if scores.dim() > 1 else scores
        order = index.argsort(descending=self.descending, stable=True)
        ends = ends_of(index if counted is None else counted.argmax(-1))
        y = grouped_mm(x[order], self.up, ends)
        y = y.cumsum(0) if self.squared else y
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return y[back].square().sum()


def given(**more: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(20, SIZE).double(), "scores": torch.randn(20, EXPERTS).double(), **more}


def test_what_no_equation_is_about_stays() -> None:
    """Experts that may be negative, which a histogram leaves out; groups of other experts; falling orders."""
    cases = [
        (Given(), given(scores=torch.randint(-1, EXPERTS, (20,)))),
        (Given(), given(counted=torch.randn(20, EXPERTS))),
        (Given(descending=True), given()),
    ]
    for model, batch in cases:
        graph = capture(model, batch).graph
        assert counted(graph) == {"grouped_mm": 1, "sort_indices": 1, "histc": 1, "index": 2}
        assert_computes(model, batch, graph)


def test_who_reads_rows_in_order_gets_them_in_order() -> None:
    """A running sum over the sorted rows is another for each order; the product before it is not."""
    model, batch = Given(squared=True), given()
    graph = capture(model, batch).graph
    assert counted(graph) == {"expert_linear": 1, "sort_indices": 1, "index": 2}
    assert_computes(model, batch, graph)


class Normed(Sorted):
    """What experts say is normed before it is weighed: no sum of products."""

    def active(self, h: Tensor) -> Tensor:
        return super().active(h) if self.training else super().active(h).softmax(-1)


def test_a_network_is_one_row_only_where_it_is_that_network() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 12, SIZE).double()}
    for model, expected in ((Normed(), {"experts": 1}), (Normed().eval(), {"expert_linear": 2})):
        graph = capture(model.double(), batch).graph
        assert counted(graph) == expected
        assert_computes(model, batch, graph)
