"""Programs of other shapes that are kept: a later run begins them without a capture, never those of another model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import kept
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import trace_of
from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.precisions import PrecisionMode
from tests.each import each
from tests.shardwright.test_programs import Call, batch_of, model_of, trained

CALLS = [Call(8, 6), Call(8, 10), Call(7, 6), Call(8, 6, False)]


def test_a_later_run_begins_other_shapes_without_a_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = trained(model_of(norm=False), CALLS).losses

    def run() -> tuple[list[float], int]:
        told, model = list[str](), model_of(norm=False)
        parallel = sw.compile(
            model, sw.Cluster.local(2), kwargs=batch_of(8, 6), mesh={"x": 2}, roles="zero", progress=told.append,
            timeout_s=60,
        )  # fmt: skip
        told.clear()
        losses = trained(parallel, CALLS).losses
        return losses, sum(text.startswith("capturing") for text in told)

    def body() -> list[tuple[list[float], int]]:
        found = [run(), run()]
        torch.distributed.barrier()
        for path in (tmp_path / "shardwright" / "programs").glob("*.json") if torch.distributed.get_rank() == 0 else ():
            path.write_text(path.read_text()[:-9])  # cut
        torch.distributed.barrier()
        return [*found, run()]

    first, _ = run_ranks(body, 2, 200)
    assert [captures for _, captures in first] == [3, 0, 3]
    for losses, _ in first:
        assert losses == pytest.approx(expected, rel=1e-10)


def test_a_later_run_of_a_plan_begins_without_a_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = sw.plan(Small(), sw.Cluster.local(1), kwargs={"x": X})
    assert plan.capture_check is None

    def run(model: nn.Module, batch: dict[str, object] | None = None, **options: Any) -> tuple[int, bool]:
        """The number of captures, and whether the graph is known to be the model."""
        told = list[str]()
        given = {"x": X} if batch is None else batch
        try:
            parallel = sw.compile(model, kwargs=given, plan=plan, progress=told.append, timeout_s=30, **options)
        except PlanError:
            return sum(text.startswith("capturing") for text in told), False
        parallel.forward_backward(**given)
        check = parallel.capture_check
        return sum(text.startswith("capturing") for text in told), check is not None and check.equal

    def body() -> None:
        assert run(Small(), check_capture="never") == (1, False)
        assert run(Small()) == (0, True)  # compared with the graph that is kept
        assert run(Small()) == (0, True)
        assert run(Small(), check_capture="never") == (0, True)
        assert run(Small(), strict=True) == (1, True)  # which parts are refused is not kept
        for other in (Small(torch.tanh), Small(p=0.25), Small(frozen=True)):
            assert run(other) == (1, False)
        assert run(Small(), {"x": X, "scale": 2.0}) == (1, False)
        (path,) = (tmp_path / "shardwright" / "programs").iterdir()
        path.write_text(path.read_text().replace("relu", "tanh"))
        assert run(Small()) == (1, True)  # what is kept is proven again
        assert run(Small()) == (0, True)

    run_ranks(body, 1, 120)


def test_what_is_kept_is_checked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = sw.plan(model_of(norm=False), sw.Cluster.local(2), kwargs=batch_of(8, 6), mesh={"x": 2}, roles="zero")
    other = sw.plan(model_of(norm=False), sw.Cluster.local(2), kwargs=batch_of(8, 6), mesh={"x": 2}, roles="data")
    assert kept.find("k", plan) is None
    kept.keep("k", kept.StoredPlan(plan, plan.graph.erased()), other)
    found = kept.find("k", plan)
    assert found is not None
    assert found.plan.graph == plan.graph
    assert kept.find("k", other) is None  # parameters are stored in another way
    (path,) = (tmp_path / "shardwright" / "programs").iterdir()
    told = json.loads(path.read_text())
    for damaged in ([], {}, {**told, "captured": ["x"]}, {**told, "plan": {"format": "shardwright-plan"}}):
        path.write_text(json.dumps(damaged))
        assert kept.find("k", plan) is None


class Small(nn.Module):
    """A linear and a dropout, of which a change is a model that computes something else."""

    def __init__(self, last: Callable[[Tensor], Tensor] = torch.relu, p: float = 0.5, frozen: bool = False) -> None:
        super().__init__()
        self.linear, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(p), last
        self.linear.requires_grad_(not frozen)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.last(self.drop(self.linear(x))).sum()


class Counting(Small):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.seen = x.sum().detach()
        return super().forward(x, scale) + self.seen


class Renamed(Small):
    __qualname__ = "Small"

    def forward(self, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(y)


class Beside(Small):
    __qualname__ = "Small"

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, scale), x


class Unread(Small):
    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, scale)


class Sign(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def hooked() -> Small:
    model = Small()
    model.linear.weight.register_hook(lambda gradient: 2 * gradient)
    return model


def digest_of(model: nn.Module, batch: dict[str, Any], precision: PrecisionMode | None = None) -> str | None:
    trace = trace_of(model, batch, precision)
    return trace and trace.digest()


X, LARGE = torch.ones(3, 4), torch.randn(5000)


def test_what_computes_something_else_has_another_digest() -> None:
    traces = [
        digest_of(Small(), {"x": X}), digest_of(Small().eval(), {"x": X}), digest_of(Small(), {"x": torch.ones(5, 4)}),
        digest_of(Small(), {"x": X, "scale": 2.0}), digest_of(Small(p=0.25), {"x": X}),
        digest_of(Small(frozen=True), {"x": X}),
        digest_of(Small(torch.tanh), {"x": X}), digest_of(Small(lambda x: x.detach() * x), {"x": X}),
        digest_of(Small(lambda x: x * x.detach()), {"x": X}),
        digest_of(Small(lambda x: x * torch.tensor(2.0)), {"x": X}),
        digest_of(Small(lambda x: x * torch.tensor(3.0)), {"x": X}), digest_of(Small(), {"x": X}, "amp_bf16"),
        *(digest_of(Unread(), {"x": X, "mask": mask}) for mask in (X[0], X[0, :3], X[0] > 0)),
        digest_of(Small(nn.ReLU()), {"x": X}), digest_of(Renamed(), {"y": X}), digest_of(Beside(), {"x": X}),
    ]  # fmt: skip
    assert None not in traces
    assert len(set(traces)) == len(traces)
    assert digest_of(Small(), {"x": X}) == traces[0]


class Pair(nn.Linear):
    """Returns two values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = super().forward(x)
        return y, y.tanh()


class InOrder(Small):
    """Eight layers, which run in some order; each reads one of the values of the one before."""

    def __init__(self, order: Sequence[int], which: int = 0) -> None:
        super().__init__()
        self.layers, self.order, self.which = nn.ModuleList(Pair(4, 4) for _ in range(8)), order, which

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for number in self.order:
            x = self.layers[number](x)[self.which if number < 7 else 0]
        return super().forward(x, scale)


def test_what_layers_read_is_of_the_digest() -> None:
    orders = [*range(8)], [*range(7, -1, -1)], [*range(8), 0], [*range(8), 7], [0, *range(8)], [0, *range(1, 7)]
    models = [InOrder([*range(8)], which=1), *map(InOrder, orders)]
    found = [digest_of(model, {"x": X}) for model in models]
    assert None not in found
    assert len(set(found)) == len(found)


class Before(nn.Module):
    """A function of the batch and a weight of two rows, before anything else."""

    def __init__(self, first: Callable[[Tensor, Tensor], Tensor], frozen: bool = False) -> None:
        super().__init__()
        self.first, self.weight = first, nn.Parameter(torch.ones(2, 4))
        if frozen:
            del self.weight
            self.register_buffer("weight", torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x, self.weight) * self.weight[0]).sum()


def halves(first: int) -> Callable[[Tensor, Tensor], Tensor]:
    def read(x: Tensor, _: Tensor) -> Tensor:
        parts = x[:2], x[1:]
        return parts[first].half() - 2 * parts[1 - first].half()

    return read


def cut(x: Tensor, weight: Tensor) -> Tensor:
    alone = (x * weight[0]).detach()
    return alone.requires_grad_().square()


def not_cut(x: Tensor, weight: Tensor) -> Tensor:
    whole = x * weight[0]
    whole.detach()
    return whole.square()


@each(
    "one, other",
    [
        (lambda x, _: x, lambda x, _: x.long().float()),
        (lambda x, _: x.half().float(), lambda x, _: x.bool().float()),
        (lambda x, w: x * w[0], lambda x, w: x * w.bfloat16().float()[0]),
        (halves(0), halves(1)),
        (lambda x, _: (x.half(), x.mul_(2))[0], lambda x, _: x.mul_(2).half()),
        (cut, not_cut),
    ],
)
def test_casts_and_cuts_of_gradients_are_of_the_digest(one: Any, other: Any) -> None:
    traces = [digest_of(Before(first), {"x": X}) for first in (one, other)]
    assert None not in traces
    assert traces[0] != traces[1]


def test_a_parameter_is_no_buffer() -> None:
    model = Before(lambda x, _: x)
    model.weight.requires_grad_(False)
    assert digest_of(model, {"x": X}) != digest_of(Before(lambda x, _: x, frozen=True), {"x": X})


@each(
    "model",
    [
        Small(lambda x: x * LARGE[:4]),
        Small(lambda x: x if x.sum() > 0 else -x),
        Counting(),
        hooked(),
        Small(Sign.apply),
        Small(lambda x: (x.register_hook(lambda gradient: 2 * gradient), x)[1]),
    ],
)
def test_what_is_not_known_has_no_digest(model: nn.Module) -> None:
    assert digest_of(model, {"x": X}) is None
