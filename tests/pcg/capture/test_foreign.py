"""Foreign parts in a capture: found where capture fails, recorded, refused by name."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.fake import fake
from shardwright.pcg.capture.unseen import Site, UnseenError
from shardwright.pcg.errors import CaptureError, PlanError
from shardwright.pcg.foreign import Call, calls
from shardwright.pcg.offers import parse_choices
from shardwright.pcg.rows.declared import ROW_BY_ROW
from shardwright.verifier.choices import Certified
from tests.each import each
from tests.foreign import ROWS, WIDTH, Deep, Gated, Nearest, Net, make


def found(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> tuple[Call, ...]:
    return calls(capture(model, batch, **options).graph)


def test_why_has_the_line_and_the_operator() -> None:
    model, batch = make("fourier")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError):
        capture(model, batch)
    (call,) = found(model, batch, find=True)
    assert call.why.startswith("foreign.py:")
    assert "aten.tanh.default: it has no row for complex numbers" in call.why
    assert call.seconds > 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_part_by_hand_and_what_it_is_made_of() -> None:
    model, batch = make("quantizer")
    (call,) = found(model, batch, foreign={"part": "whole"})
    assert (call.why, call.state, call.written, call.draws) == ("", (("book",), ("taken",)), ("taken",), False)
    assert [result.grad for result in call.results] == [True, False]
    (drawing,) = found(*make("boolean index"), foreign={"part": "whole"})
    assert drawing.draws


def test_every_call_of_a_part_is_recorded() -> None:
    model, batch = Deep(), {"x": torch.randn(ROWS, WIDTH)}
    model.h[1].part = model.h[0].part
    one, two = found(model, batch, foreign={"h.0.part": "whole"})
    assert (one.name, one.number, two.number) == ("h.0.part", 0, 1)


def test_a_proxy_of_a_module_is_that_module() -> None:
    """`torch.export` shows modules as proxies, which share their attributes, if one of them has two names."""

    class Unseen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            proxy = object.__new__(Unseen)
            object.__setattr__(proxy, "__dict__", vars(self))
            raise UnseenError("it draws", "draw outside", Site(proxy, "here.py:1"))

    with pytest.raises(CaptureError, match=r"in module '1' \(here.py:1\): .*it draws"):
        capture(nn.Sequential(nn.Linear(WIDTH, WIDTH), Unseen()), {"input": torch.randn(ROWS, WIDTH)})


def test_the_calls_of_a_plan_are_known() -> None:
    model, batch = make("fourier")
    (call,) = known = found(model, batch, foreign={"part": "whole"})
    again = found(model, {"x": 2 * batch["x"]}, known=known)
    assert again == (call,)


def test_where_no_part_helps_the_first_error_stays() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() if x.sum() > 0 else x.mean()

    with pytest.raises(CaptureError, match="in module 'Root'"):
        capture(Root(), {"x": torch.ones(2)}, find=True)


class Counting(nn.Module):
    """Counts by a method beside its forward, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def count(self) -> None:
        if self.get_buffer("calls") > 2:
            self.get_buffer("calls").zero_()
        self.get_buffer("calls").add_(1)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Counted(nn.Module):
    """Has such a part."""

    def __init__(self) -> None:
        super().__init__()
        self.counting, self.linear = Counting(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.counting.count()
        return self.linear(x)


def test_a_module_whose_forward_is_not_called_is_no_part() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Counted()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x).square().mean()

    (call,) = found(Root(), {"x": torch.randn(ROWS, WIDTH)}, find=True)
    assert (call.name, call.written) == ("part", ("counting.calls",))


class Given(nn.Module):
    """A part that does as the function says."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.does, self.w = does, nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("queue", torch.zeros(2))

    def forward(self, x: Tensor, **others: Any) -> Any:
        return self.does(self, x, **others)


def _written(part: Given, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.w.mul_(2)
    return x * part.w


def _grown(part: Given, x: Tensor) -> Tensor:
    part.queue = torch.cat([part.get_buffer("queue"), x.detach()[0, :1]])
    return x


REFUSED: dict[str, tuple[Any, str]] = {
    "parameter": (_written, "changes its parameter 'w' in place"),
    "argument": (lambda part, x: x.mul_(2), "writes into a tensor that it is given"),
    "buffer": (_grown, "its buffer 'queue' changes its shape"),
    "eighths": (
        lambda part, x: x.to(torch.float8_e5m2),
        "returns a tensor of float8_e5m2; expected dense ones of .*complex64",
    ),
    "sparse": (lambda part, x: x.to_sparse(), r"returns a tensor of torch\.sparse_coo; expected dense ones"),
    "result": (lambda part, x: (x, x.shape), "returns a int; expected tensors"),
}


@each("name", REFUSED)
def test_what_a_part_may_not_do(name: str) -> None:
    does, told = REFUSED[name]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Given(does)

        def forward(self, x: Tensor) -> Tensor:
            y = self.part(x)
            return (y if isinstance(y, Tensor) else y[0]).sum()

    model = Outer()
    with pytest.raises(CaptureError, match=told):
        capture(model, {"x": torch.ones(2, WIDTH)}, foreign={"part": "whole"})
    assert torch.equal(model.part.w.detach(), torch.ones(WIDTH))


NOT_BY_ROW: dict[str, tuple[Any, str]] = {
    "mean": (lambda part, x: x - x.mean(0), "two halves of the batch do not give what the whole does"),
    "rows": (lambda part, x: x.sum(), "for 4 rows; expected a row of each result for each row"),
    "draws": (lambda part, x: x * torch.rand(()), "it draws random numbers"),
    "buffer": (lambda part, x: x + part.queue.add_(1).sum(), "it writes its buffer 'queue'"),
}


@each("name", NOT_BY_ROW)
def test_what_is_not_row_by_row(name: str) -> None:
    does, told = NOT_BY_ROW[name]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Given(does)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x).sum()

    with pytest.raises(CaptureError, match=f"part cannot run along the batch: .*{told}"):
        capture(Outer(), {"x": torch.randn(4, WIDTH)}, foreign={"part": "batch"})


def test_along_the_batch_only_the_batch_is_split() -> None:
    model, batch = make("lengths")
    graph = capture(model, batch, foreign={"part": "batch"}).graph
    (node,) = (node for node in graph.nodes if node.op == ROW_BY_ROW)
    assert node.attr("batched") == (0, 1)
    assert [f.name for f in graph.signature(node).factors if f.role != "fixed"] == ["b"]
    assert Certified()(node, [graph.types[name] for name in node.inputs]) == frozenset(parse_choices(["R", "b"]))


def test_an_object_is_no_argument() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Given(lambda part, x, by: x * by.random())

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x, by=random.Random(0)).sum()

    with pytest.raises(CaptureError, match="it is given a Random; expected tensors and plain values"):
        capture(Outer(), {"x": torch.ones(2)}, foreign={"part": "whole"})


def test_a_part_that_is_given_another_object_has_a_remedy() -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.cells(packed)[1].square().mean()

    batch = {"x": torch.ones(2, 3, WIDTH), "lengths": torch.tensor([3, 1])}
    with pytest.raises(CaptureError, match=r"in module 'cells'.*Or put the line, with all that it decides, into"):
        capture(Packing(), batch, find=True)


def test_a_name_of_nothing() -> None:
    model, batch = make("fourier")
    with pytest.raises(PlanError, match="'parts' names no module inside Net, no autograd"):
        capture(model, batch, foreign={"parts": "whole"})
    with pytest.raises(PlanError, match=r"'tests\.foreign\.Nearest' is not called by the forward of Net"):
        capture(model, batch, foreign={f"{Nearest.__module__}.{Nearest.__qualname__}": "whole"})


def test_a_model_without_values_has_no_types_to_show() -> None:
    with fake():
        model, batch = Net(Gated()), {"x": torch.randn(ROWS, WIDTH), "mask": torch.ones(ROWS) > 0}
    with pytest.raises(CaptureError, match=r"come from a run: .*; build it with real values"):
        capture(model, batch, foreign={"part": "whole"})
    with pytest.raises(CaptureError, match=r"in module 'part'.*its types come from a run with real values"):
        capture(model, batch, find=True)


def test_a_write_into_an_argument_with_a_gradient() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Given(lambda part, x: x.mul_(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x * self.part.w).sum()

    with pytest.raises(CaptureError, match="writes into a tensor that it is given"):
        capture(Outer(), {"x": torch.ones(2, WIDTH)}, foreign={"part": "whole"})
