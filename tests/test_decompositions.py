"""Softmax, losses, norms and attention over a sharded dimension, on real ranks: what one process computes.

Every decomposition is applied to a small model in which nothing but the dimension that it is about can be divided, so
that the search, on links that cost nothing, shards it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.accuracy import measure, prepare
from bench.plans import CERTIFIED, fast_links
from examples.zoo import GPT
from shardwright.cost.clusters.cluster import Cluster, Level
from shardwright.cost.clusters.device import Device
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.check import check_plan
from shardwright.search.request.restrict import FREE, TENSOR
from shardwright.search.tree.planner import Planner
from shardwright.substitutions.apply import apply
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.match import places
from shardwright.substitutions.rules.catalogue import CATALOGUE, SEARCHED
from shardwright.substitutions.rules.decompositions import DECOMPOSITIONS, MAXIMUM
from tests.each import in_whole_grids, some
from tests.lowering.runs import Case, assert_trains_as_serial
from tests.models import grid

RULES: Mapping[str, Equation] = {rule.name: rule for rule in (*DECOMPOSITIONS, *MAXIMUM)}


class Through(nn.Module):
    """A function of parameters, in which every element of the result has a weight of its own in the loss."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.operands = nn.ParameterList(torch.randn(shape, dtype=torch.float64) for shape in shapes)

    def forward(self, weight: Tensor, **others: Tensor) -> Tensor:
        return (self.function(*self.operands, **others) * weight).sum()


@dataclass(frozen=True)
class Example:
    """A rule, a function that it rewrites, and the shapes of its operands and of its result."""

    rule: str
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]

    def case(self) -> Case:
        torch.manual_seed(3)
        return Case(Through(self.function, *self.shapes), {"weight": torch.randn(self.result, dtype=torch.float64)})


def _attention(causal: bool = False, scale: float | None = None) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        mask = masks[0] if masks else None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)

    return attend


X, Q, K, V = (3, 5, 16), (1, 3, 5, 7), (1, 3, 8, 7), (1, 3, 8, 9)
GROUPED = (1, 9, 5, 7)
EXAMPLES = [
    Example("maximum_in_blocks", lambda x: x.amax(-1, keepdim=True), (X,), (3, 5, 1)),
    Example("softmax_in_parts", lambda x: x.softmax(-1), (X,), X),
    Example("log_softmax_in_parts", lambda x: x.log_softmax(-1), (X,), X),
    Example("layer_norm_in_parts", lambda x: F.layer_norm(x, (16,)), (X,), X),
    Example("layer_norm_in_parts_weighted", lambda x, w: F.layer_norm(x, (16,), w), (X, (16,)), X),
    Example("layer_norm_in_parts_affine", lambda x, w, c: F.layer_norm(x, (16,), w, c), (X, (16,), (16,)), X),
    Example("rms_norm_in_parts", lambda x: F.rms_norm(x, (16,), eps=1e-6), (X,), X),
    Example("rms_norm_in_parts_weighted", lambda x, w: F.rms_norm(x, (16,), w, eps=1e-6), (X, (16,)), X),
    Example("attention_in_parts", _attention(scale=0.3), (Q, K, V), (1, 3, 5, 9)),
    Example("attention_in_parts_of_usual_scale", _attention(), (Q, K, V), (1, 3, 5, 9)),
    Example("masked_attention_in_parts", _attention(scale=0.3), (Q, K, V, (5, 8)), (1, 3, 5, 9)),
    Example("masked_attention_in_parts_of_usual_scale", _attention(), (Q, K, V, (5, 8)), (1, 3, 5, 9)),
    Example("causal_attention_in_parts", _attention(causal=True, scale=0.3), (Q, K, V), (1, 3, 5, 9)),
    Example("causal_attention_in_parts_of_usual_scale", _attention(causal=True), (Q, K, V), (1, 3, 5, 9)),
    Example("grouped_attention_in_parts", _attention(scale=0.3), (GROUPED, K, V), (1, 9, 5, 9)),
    Example("grouped_attention_in_parts_of_usual_scale", _attention(), (GROUPED, K, V), (1, 9, 5, 9)),
    Example("grouped_causal_attention_in_parts", _attention(causal=True, scale=0.3), (GROUPED, K, V), (1, 9, 5, 9)),
    Example("grouped_causal_attention_in_parts_of_usual_scale", _attention(causal=True), (GROUPED, K, V), (1, 9, 5, 9)),
]


def rewritten(graph: Graph, rule: str, degree: int) -> Graph:
    """The graph after the rule, at its one place."""
    (match,) = places(RULES[rule], graph, (degree,))
    return apply(RULES[rule], graph, match)


def sharded(graph: Graph, num_ranks: int) -> Graph:
    """The parallel graph that the search makes of a graph where links cost nothing."""
    planner = Planner(fast_links(num_ranks), CERTIFIED)
    return planner.solve(graph, Mesh.of(x=num_ranks), (FREE,), "sharded").graph


def splits(graph: Graph, op: str) -> list[str]:
    return [choice for node in graph.nodes if node.op == op for choice in node.split]


def test_every_decomposition_has_an_example() -> None:
    assert {e.rule for e in EXAMPLES} == set(RULES) - {"cross_entropy_in_parts"}


@pytest.mark.parametrize(
    ("example", "num_ranks"),
    [pytest.param(e, n, id=f"{e.rule}-{n}") for i, e in enumerate(some(EXAMPLES, 6)) for n in [4 if i % 4 == 0 else 2]],
)
def test_it_runs_over_a_sharded_dimension_as_one_process_does(example: Example, num_ranks: int) -> None:
    case = example.case()
    graph = sharded(rewritten(case.captured.graph, example.rule, num_ranks), num_ranks)
    partial = "sum" if example.rule != "maximum_in_blocks" else "amax"
    assert any(choice not in ("R", "C") for choice in splits(graph, partial)), graph
    assert any(layout.kind == "S" for n in graph.leaves("parameter") for layout in graph.types[n.name].layouts)
    assert_trains_as_serial(case, graph, 1e-12)


class Head(nn.Module):
    """A vocabulary's weights and a loss that ignores some targets."""

    def __init__(self, vocab: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(scale * torch.randn(vocab, 7, dtype=dtype))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(x @ self.weight.T, targets)


def head_case(vocab: int = 16, **options: Any) -> Case:
    model = Head(vocab, **options)
    x = torch.randn(9, 7, dtype=model.weight.dtype)
    return Case(model, {"x": x, "targets": torch.tensor([0, vocab - 1, -100, 3, 5, -100, vocab // 2, 1, 7])})


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_cross_entropy_over_a_sharded_vocabulary(num_ranks: int) -> None:
    case = head_case()
    graph = sharded(rewritten(case.captured.graph, "cross_entropy_in_parts", num_ranks), num_ranks)
    (weight,) = graph.leaves("parameter")
    assert str(graph.types[weight.name].layouts[0]) == "S(0)"
    assert splits(graph, "pick") == ["v"]
    assert not any(n.op == "combine" and graph.types[n.name].shape == (9, 16) for n in graph.nodes)
    assert_trains_as_serial(case, graph, 1e-12)


def test_large_logits_do_not_overflow() -> None:
    """Without the maximum, exp(1e4) is infinite."""
    case = head_case(scale=1e4, dtype=torch.float32)
    graph = sharded(rewritten(case.captured.graph, "cross_entropy_in_parts", 2), 2)
    assert splits(graph, "pick") == ["v"]
    assert_trains_as_serial(case, graph, 1e-6)


def test_a_class_may_be_ignored_whatever_its_logit() -> None:
    """Padding is a class of its own here, whose logit is minus infinity."""

    class Padded(Head):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            logits = x @ self.weight.T
            return F.cross_entropy(logits.masked_fill(torch.arange(16) == 3, float("-inf")), targets, ignore_index=3)

    batch = {**head_case().batch, "targets": torch.tensor([0, 15, 3, 3, 5, 3, 8, 1, 7])}
    case = Case(Padded(16), batch)
    graph = sharded(rewritten(case.captured.graph, "cross_entropy_in_parts", 2), 2)
    assert splits(graph, "pick") == ["v"]
    assert_trains_as_serial(case, graph, 1e-12)


def test_a_vocabulary_that_is_not_divisible_has_no_such_place() -> None:
    graph = head_case(vocab=18).captured.graph
    assert places(RULES["cross_entropy_in_parts"], graph, (4,)) == []
    assert len(places(RULES["cross_entropy_in_parts"], graph, (2, 4))) == 1


def test_label_smoothing_is_left_alone() -> None:
    class Smooth(Head):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(x @ self.weight.T, targets, label_smoothing=0.1)

    graph = Case(Smooth(16), head_case().batch).captured.graph
    assert places(RULES["cross_entropy_in_parts"], graph, (2,)) == []


SLOW_LINKS = Device("quick", 2**34, 1e12, {"fp32": 1e13}, 0.5, 0.0, "cpu")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_search_keeps_a_vocabulary_sharded_up_to_the_loss(num_ranks: int) -> None:
    """A GPT on a tensor-parallel axis of slow links: logits are not gathered, targets of -100 are ignored."""
    torch.manual_seed(0)
    ids, targets = torch.randint(1024, (2, 4, 12))
    targets[:, ::3] = -100
    case = Case(GPT(vocab=1024, max_seq=12, hidden=64, num_heads=4, num_layers=1), {"ids": ids, "targets": targets})
    cluster = Cluster("slow links", SLOW_LINKS, (Level("rank", num_ranks, 1e6, 0.0),), "gloo", "made up")
    mesh = Mesh.of(tp=num_ranks)
    without, plan = (
        Planner(cluster, CERTIFIED, rules=rules).plan(case.captured.graph, "gpt", mesh=mesh, roles=(TENSOR,))
        for rules in ({}, RULES)
    )
    assert plan.prediction.step_s < 0.7 * without.prediction.step_s
    assert [step for rewrite in plan.report.rewrites for step, _ in rewrite.steps] == ["cross_entropy_in_parts"]
    check_plan(plan, case.captured.graph, CERTIFIED, RULES)
    assert splits(plan.graph, "pick") == ["v"]
    assert_trains_as_serial(case, plan.graph, 1e-4)


@in_whole_grids
@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), grid([4, 2], each=1, names=("bert", "gpt2", "llama")))
def test_models_of_the_zoo_train_with_decompositions(name: str, num_ranks: int) -> None:
    prepared = prepare(name)
    gpus = replace(SLOW_LINKS, kind="cuda")  # gloo's reduce-scatter costs what its all-reduce does: no use for norms
    cluster = Cluster("slow links", gpus, (Level("rank", num_ranks, 1e6, 0.0),), "nccl", "made up")
    plan = Planner(cluster, CERTIFIED, rules={name: CATALOGUE[name] for name in SEARCHED}).plan(
        prepared.captured.graph, name, mesh=Mesh.of(tp=num_ranks), roles=(TENSOR,)
    )
    used = {step for rewrite in plan.report.rewrites for step, _ in rewrite.steps}
    assert used >= ({"cross_entropy_in_parts"} | ({"layer_norm_in_parts_affine"} if name == "bert" else set()))
    errors = measure(prepared, plan.graph)
    assert errors.within_tolerance, errors
