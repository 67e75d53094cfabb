"""The net under capture: what a captured graph loses is told, what it keeps raises no alarm, and all is put back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from bench.accuracy import prepare
from shardwright import checking
from shardwright.api import compile, plan
from shardwright.checking import check_capture, same_but_for_sizes
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.random.exact import seed_exactly
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.options import check_when
from shardwright.pcg.capture import capture as capturing
from shardwright.pcg.capture.capture import Captured, capture
from shardwright.pcg.errors import CaptureError, ShardwrightError
from shardwright.pcg.node import Node
from shardwright.reports.plan import PlanReport
from shardwright.search.plan import CaptureCheck, Plan
from tests.each import each
from tests.models import zoo

CLUSTER = Cluster.local(2)
CALLS = [0]
"""A global that a forward changes."""


class Reverse(Function):
    """The gradient reversed, as domain adversarial training does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -grad


class Model(nn.Module):
    """Two layers, a batch norm and a dropout; `fault` is what forward does beside, and no export sees."""

    mean: Tensor
    kept: Kept | None

    def __init__(self, fault: Callable[[Model, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.out = nn.Linear(6, 12), nn.Linear(12, 3)
        self.norm, self.drop = nn.BatchNorm1d(12), nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(12))
        self.memory: Tensor | None = None
        self.count, self.seen, self.kept = 0, list[int](), None
        self.fault = fault

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.up(x)))
        if self.fault is not None:
            h = self.fault(self, h)
        return F.cross_entropy(self.out(self.drop(h)), y)


BATCH = {"x": torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), "y": torch.arange(16) % 3}


@cache
def known() -> tuple[Model, Captured]:
    """A model without a fault, and its graph."""
    model = Model()
    return model, capture(model, BATCH)


@pytest.fixture
def model() -> Iterator[Model]:
    """The model of `known`, to take to a fault."""
    known()[0].fault = None
    yield known()[0]
    known()[0].fault = None


@pytest.fixture
def captured() -> Captured:
    return known()[1]


def told(model: nn.Module, captured: Captured) -> str:
    with pytest.raises(CaptureError) as error:
        check_capture(model, captured, (), BATCH)
    return str(error.value)


# ---- faults ----


def _assigned(m: Model, h: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * h.mean(0).detach()
    return h


def _hooked(m: Model, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: 2 * grad)
    return h


def _written(m: Model, h: Tensor) -> Tensor:
    h = h.clone()
    with torch.no_grad():
        h[:, :4] = 0
    return h


def _remembered(m: Model, h: Tensor) -> Tensor:
    past = torch.zeros_like(h) if m.memory is None else m.memory
    m.memory = h.detach()
    return h + past


def _counted(m: Model, h: Tensor) -> Tensor:
    CALLS[0] += 1
    return h if CALLS[0] % 2 else h + 1


def _drawn(m: Model, h: Tensor) -> Tensor:
    torch.rand(3)
    return h


def _drawn_by_python(m: Model, h: Tensor) -> Tensor:
    random.random()
    return h


def _moved(m: Model, h: Tensor) -> Tensor:
    m.up.bias.data += 1
    return h


def _registered(m: Model, h: Tensor) -> Tensor:
    m.register_buffer("total", h.detach().sum())
    return h


FAULTS: list[tuple[Callable[[Model, Tensor], Tensor], str]] = [
    (lambda m, h: Reverse.apply(h), r"gradient of 'up.weight': has the other sign"),
    (lambda m, h: h.detach(), r"gradient of 'up.weight': there is none eagerly, and one of norm"),
    (_hooked, r"gradient of 'norm.weight': is 0.5 times the eager one"),
    (_written, r"the loss: .* eagerly, .* by the graph"),
    (_assigned, r"buffer 'mean': stays as it was by the graph, and does not eagerly"),
    (_remembered, r"the loss of a second forward: "),
    (_counted, r"the loss of a second forward: "),
    (_drawn, r"torch's generator: the graph leaves it in another state; it draws only what"),
    (_drawn_by_python, r"Python's random: the graph leaves it in another state; it draws only what"),
    (_moved, r"parameter 'up.bias': forward itself changes it"),
    (_registered, r"buffer 'total': forward makes it, the graph does not"),
    (lambda m, h: h * 1.001, r"the loss: "),
    (lambda m, h: h.half().to(h.dtype), r"gradient of 'norm.bias': is off by"),
]


@each("fault, message", FAULTS, ids=[message for _, message in FAULTS])
def test_what_the_graph_lost_is_told(
    model: Model, captured: Captured, fault: Callable[[Model, Tensor], Tensor], message: str
) -> None:
    """The model takes to it once its graph is captured, so that no guard of capture is in the way."""
    model.fault = fault
    CALLS[0] = 0
    text = told(model, captured)
    assert re.search(message, text), text
    assert "check_capture='never' trains the captured graph as it is, which is another model" in text


def _tampered(captured: Captured, change: Callable[[Node], Node | None]) -> Captured:
    nodes = [change(node) or node for node in captured.graph.nodes]
    return replace(captured, graph=replace(captured.graph, nodes=tuple(nodes)))


def _detached(node: Node) -> Node | None:
    return replace(node, op="detach", attrs=()) if node.op == "tanh" else None


def _stronger(node: Node) -> Node | None:
    attrs = tuple((key, 0.4 if key == "p" else value) for key, value in node.attrs)
    return replace(node, attrs=attrs) if node.op == "dropout" else None


def test_a_graph_that_is_tampered_with_is_told(model: Model, captured: Captured) -> None:
    """What is wrong with operators themselves."""
    assert "gradient of 'up.weight': is lost: its norm is" in told(model, _tampered(captured, _detached))
    assert "the loss: " in told(model, _tampered(captured, _stronger))
    outputs = tuple((key, name) for key, name in captured.graph.outputs if key != "norm.running_mean")
    kept = replace(captured, graph=replace(captured.graph, outputs=outputs))
    assert "buffer 'norm.running_mean': stays as it was by the graph" in told(model, kept)


def test_a_graph_that_fails_where_the_model_runs_is_told(
    model: Model, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:

    def failing(*_: object) -> None:
        raise RuntimeError("no such shape\nand more")

    monkeypatch.setattr(checking.SerialProgram, "step", failing)
    assert "Model runs on this batch, and the graph that was captured of it fails: no such shape; " in told(
        model, captured
    )


# ---- no alarm ----


@pytest.mark.parametrize("name", zoo())
def test_models_of_the_zoo_are_equal_to_their_graphs(name: str) -> None:
    found = prepare(name)
    check = check_capture(found.model, found.captured, (), found.batch)
    assert check.equal
    assert max(check.errors) < 1e-5


class Chaotic(nn.Module):
    """Batch norms on few rows, deep, in 16 bits: rounding alone moves their gradients by as much as they are."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(depth)]
        self.blocks, self.last, self.fault = nn.Sequential(*blocks), nn.BatchNorm1d(6), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(x)
        h = h.detach() if self.fault else h
        return (torch.tanh(self.last(h)) * torch.arange(6, dtype=x.dtype)).mean()


def test_a_chaotic_model_raises_no_alarm_and_lost_gradients_are_told() -> None:
    """As far as rounding lets them be seen, which the result says."""
    batch = {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).bfloat16()}
    for depth in (1, 8):
        model = Chaotic(depth).bfloat16()
        captured = capture(model, batch)
        check = check_capture(model, captured, (), batch)
        assert (check.equal, check.noise > 1) == (True, depth == 8)
        model.fault = True
        if depth == 1:
            with pytest.raises(CaptureError, match="there is none eagerly, and one of norm"):
                check_capture(model, captured, (), batch)


def signs(h: Tensor) -> Tensor:
    """Which one of two rows should have the higher score: the first."""
    return 1 - 2 * torch.ones(len(h), len(h), dtype=h.dtype).triu()


class Cancelling(nn.Module):
    """Its loss does not depend on the bias, whose gradient is what rounding leaves of a sum that cancels."""

    LOSSES: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        "differences of scores": lambda h: F.softplus((h.mean(1)[:, None] - h.mean(1)[None]) * signs(h)).mean(),
        "softmax": lambda h: F.cross_entropy(h.mean(1).expand(3, -1), torch.arange(3)),
        "deviations": lambda h: (h - h.mean(0)).pow(3).mean(),
    }

    def __init__(self, loss: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.loss, self.layer = self.LOSSES[loss], nn.Linear(16, 16, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x))


@each("loss", Cancelling.LOSSES)
@each("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_cancels_raises_no_alarm_and_others_do(loss: str, dtype: torch.dtype) -> None:
    model = Cancelling(loss, dtype)
    batches = [{"x": torch.randn(8, 16, dtype=dtype)} for _ in range(20)]
    captured = capture(model, batches[0])
    for batch in batches:
        with torch.no_grad():
            model.layer.weight.normal_(std=0.05)
        assert check_capture(model, captured, (), batch).equal
    model.loss = lambda h: 2 * h.mean() + (own := Cancelling.LOSSES[loss](h)) - own.detach()
    with pytest.raises(CaptureError, match=r"gradient of 'layer\.bias'"):
        check_capture(model, captured, (), batches[0])


class Branch(nn.Module):
    """Its branch counts for a millionth, as in networks whose layers begin with small scales."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.stem, self.branch, self.fault = nn.Linear(16, 16), nn.Linear(16, 16), True
        self.scale = nn.Parameter(torch.full((16,), 1e-6))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        y = self.branch(h.detach() if self.fault else h).tanh()
        return (h + self.scale * (y.detach() if self.fault else y)).pow(2).mean()


@each("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_lost_is_told_however_small_it_is(dtype: torch.dtype) -> None:
    """It moves by a small part of itself, as one that is only rounding does not."""
    torch.manual_seed(0)
    model, batch = Branch(dtype), {"x": torch.randn(8, 16, dtype=dtype)}
    captured = capture(model, batch)
    model.fault = False
    with pytest.raises(CaptureError, match=r"gradient of 'branch\.weight': is lost"):
        check_capture(model, captured, (), batch)


class Looking(nn.Module):
    """Rows of tables, whose gradients autograd may keep as rows."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(12, 4, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.table(ids).sum(1) * self.bags(ids)).square().mean()


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_lookups_are_compared_whole(sparse: bool) -> None:
    model, batch = Looking(sparse=sparse), {"ids": torch.tensor([[1, 1, 5], [0, 5, 11]])}
    check = check_capture(model, capture(model, batch), (), batch)
    assert (check.equal, max(check.errors) < 1e-6) == (True, True)


# ---- all is put back ----


class Kept:
    """What a model may keep beside tensors."""

    def __init__(self) -> None:
        self.value, self.by = 0, {"x": [0]}
        self.python, self.numpy, self.torch = random.Random(0), np.random.default_rng(0), torch.Generator()

    def states(self) -> list[object]:
        """Of all generators that there are."""
        kept = self.python.getstate(), str(self.numpy.bit_generator.state), self.torch.get_state().tolist()
        return [*kept, random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


def _restless(m: Model, h: Tensor) -> Tensor:
    """Touches whatever can be touched."""
    kept = m.kept
    assert kept is not None
    m.count, m.memory = m.count + 1, h.detach()
    m.seen.append(m.count)
    kept.value, kept.by["x"] = m.count, [m.count]
    CALLS[0] += 1
    m.mean.add_(1)
    m.register_buffer("fresh", torch.ones(2))
    m.up.bias.data = torch.ones(12)
    m.out.weight.requires_grad_(False)
    kept.python.random()
    kept.numpy.random()
    torch.rand(1, generator=kept.torch)
    random.random()
    np.random.random()
    torch.rand(1)
    m.train(mode=False)
    raise ValueError("and fails")


def test_whatever_a_step_touches_is_put_back(captured: Captured) -> None:
    model, kept, gradient = Model(_restless), Kept(), torch.ones(3)
    model.kept, model.out.bias.grad = kept, gradient
    names, tensors = list(vars(model)), {n: (t, t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
    states, CALLS[0] = kept.states(), 0
    check = check_capture(model, captured, (), BATCH)
    assert str(check) == "not checked: the model does not run on this batch: ValueError: and fails"
    assert list(vars(model)) == names
    assert (model.count, model.memory, model.seen, CALLS, model.training) == (0, None, [], [0], True)
    assert (kept.value, kept.by) == (0, {"x": [0]})
    found = model.state_dict(keep_vars=True)
    assert list(found) == list(tensors)
    for name, (tensor, values) in tensors.items():
        assert found[name] is tensor
        assert torch.equal(tensor, values)
    assert model.out.bias.grad is gradient
    assert all(p.requires_grad for p in model.parameters())
    assert kept.states() == states


def test_masks_of_seed_exactly_are_compared_and_counted_back(model: Model, captured: Captured) -> None:
    with seed_exactly(3) as exact:
        assert check_capture(model, captured, (), BATCH).equal
        assert exact.counter == 0
        model.fault = lambda m, h: F.dropout(h, 0.1)
        assert "seed_exactly: the graph leaves it in another state" in told(model, captured)


# ---- what is not compared, or in part ----


def test_a_large_step_is_compared_on_some_rows(
    model: Model, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_affordable", lambda *_: (0.45, "it is large"))
    check = check_capture(model, captured, (), BATCH)
    assert (check.equal, check.num_rows) == (True, 7)
    assert " on 7 rows of the batch: losses to " in str(check)

    def captured_before(*args: Any, **kwargs: Any) -> Captured:
        found = capture(*args, **kwargs)
        model.fault = lambda m, h: h * 1.001
        return found

    monkeypatch.setattr(checking, "capture", captured_before)
    assert "is not the eager one, on 7 rows of this batch" in told(model, captured)
    monkeypatch.undo()
    monkeypatch.setattr(checking, "MOST_FLOPS", {"cpu": 10.0})
    model.fault = None
    check = check_capture(model, captured, (), BATCH)
    assert str(check) == (
        "not checked: a step of the whole batch takes 7.7e+03 floating-point operations, and fewer of its 16 rows "
        "cannot be taken"
    )


class Positions(nn.Module):
    """Another graph for another number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if len(x) > 5:
            h = torch.relu(h)
        if len(x) == 4:
            raise ValueError("not four")
        return h.sum()


@each(
    "rows, message",
    [
        (3, "not checked: it is large, and 3 of its 8 rows make another graph"),
        (4, "not checked: it is large, and 4 of its 8 rows cannot be captured: .*not four"),
    ],
)
def test_rows_that_stand_for_no_batch_are_said(rows: int, message: str) -> None:
    model, batch = Positions(), {"x": torch.randn(8, 4)}
    captured = capture(model, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_affordable", lambda *_: (rows / 8, "it is large"))
        assert re.match(message, str(check_capture(model, captured, (), batch)))


def test_what_does_not_fit_is_not_compared(model: Model, captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "free_bytes", lambda device: 2 * 6000.0)
    assert str(check_capture(model, captured, (), BATCH)).startswith("equal to an eager step on ")
    monkeypatch.setattr(checking, "free_bytes", lambda device: 100.0)
    text = str(check_capture(model, captured, (), BATCH))
    assert text == "not checked: it takes 2.22 kB beside the model, more than half of what is free"


def test_a_loss_that_is_no_number_is_not_compared(model: Model, captured: Captured) -> None:
    check = check_capture(model, captured, (), BATCH | {"x": torch.full((16, 6), torch.nan)})
    assert str(check) == "not checked: the loss of this batch is nan"


def test_a_model_without_values_is_not_compared(captured: Captured) -> None:
    with torch._subclasses.FakeTensorMode():
        model = Model()
    assert str(check_capture(model, captured, (), BATCH)) == "not checked: the model has no values"


def test_statistics_of_each_microbatch_are_compared_on_one() -> None:
    model = Model()
    captured = capture(model, BATCH, num_microbatches=2, per_microbatch=["norm"])
    assert check_capture(model, captured, (), BATCH).num_rows == 8


def test_graphs_are_the_same_but_for_sizes(model: Model, captured: Captured) -> None:
    one, other = captured.graph, capture(model, {k: v[:4] for k, v in BATCH.items()}).graph
    assert one != other
    assert same_but_for_sizes(one, other)
    assert not same_but_for_sizes(one, replace(other, nodes=other.nodes[:-1]))
    changed = tuple(_detached(node) or node for node in other.nodes)
    assert not same_but_for_sizes(one, replace(other, nodes=changed))


def test_when_to_compare_is_first_or_never() -> None:
    with pytest.raises(ShardwrightError, match="check_capture='always': expected 'first' or 'never'"):
        check_when("always")


def test_a_result_is_kept_in_words_and_as_data() -> None:
    check = CaptureCheck(equal=True, num_rows=4, errors=(0.0, 2e-7, 1e-8), noise=0.12)
    assert CaptureCheck.from_json(check.to_json()) == check
    assert str(check) == (
        "equal to an eager step on 4 rows of the batch: losses to 0.0e+00, gradients to 2.0e-07, buffers to 1.0e-08; "
        "rounding alone moves gradients by 1.2e-01"
    )


# ---- where plans and compiled models have it ----


def _untruthful(captured: Captured) -> Callable[..., Captured]:
    """A capture that loses gradients."""
    return lambda *_, **__: _tampered(captured, _detached)


def _refused(model: Model, plan: Plan | None) -> tuple[str, str, str]:
    """What compile says where it compares, and what the module says where it does not."""
    try:
        compile(model, CLUSTER, kwargs=BATCH, mesh={"x": 2} if plan is None else None, plan=plan)
    except ShardwrightError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        return "", "", ""
    trained = compile(model, CLUSTER, kwargs=BATCH, mesh={"x": 2}, check_capture="never")
    return text.splitlines()[0], str(trained.capture_check), type(trained).__name__


def test_every_rank_is_told_what_rank_0_compares(
    model: Model, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a plan that was compared is not compared again."""
    compared = plan(model, CLUSTER, kwargs=BATCH, mesh={"x": 2}, check_capture="first")
    assert compared.capture_check is not None
    assert compared.capture_check.equal
    assert Plan.from_json(json.loads(compared.text())) == compared
    assert "captured graph  equal to an eager step: losses to " in str(PlanReport(compared))
    assert plan(model, CLUSTER, kwargs=BATCH, mesh={"x": 2}).capture_check is None
    monkeypatch.setattr(capturing, "capture", _untruthful(captured))
    first, second = run_ranks(_refused, 2, args=(model, None))
    line = "Model: a step of the captured graph is not the eager one, on this batch (rounding alone moves gradients by"
    assert first[0].startswith(f"CaptureError: {line}")
    assert second[0].startswith(f"DistributedError: rank 0 could not make the plan: CaptureError: {line}")
    assert first[1:] == second[1:] == ("None", "ParallelModule")
    monkeypatch.undo()
    monkeypatch.setattr(checking, "check_capture", lambda *_: pytest.fail("compared again"))
    assert run_ranks(_refused, 2, args=(model, compared)) == [("", "", "")] * 2
