"""Elements named by strides, and writes in place: a share of `bench.writes`, which `make writes` judges whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from bench.writes import SCATTERS, VIEWS, Form, Forms, batch, forms, judge, trains
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.strided import STRIDED
from shardwright.pcg.errors import CaptureError
from tests.each import each

SHARE = [form for form in forms()[7::463] if form.view not in ("unfold", "unbind")]
STRIDES = [Form("strides", write, seen=True, early=True) for write in ("add_", "fill_diagonal_")]
SCATTERED = [Form("t", write, seen=True, early=False) for write in SCATTERS if write != "as_strided_scatter"]


def test_writes_have_the_gradients_of_eager_training() -> None:
    chosen = [form for form in (*SHARE, *STRIDES, *SCATTERED) if trains(form)]
    assert len(chosen) > 15
    assert not {str(form): what for form, what in judge(chosen) if what}


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    right = Form("rows", "mul_", seen=True, early=False)
    monkeypatch.setitem(VIEWS, "rows", lambda h: h[1:4] if isinstance(h, FakeTensor) else h[2:5])
    assert [what[:7] for _, what in judge([right])] == ["off by "]


def test_writes_into_windows_are_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"add_ writes into windows of a tensor \(Tensor.unfold\). Capture would clear"
    ):
        capture(Forms([Form("unfold", "add_", seen=True, early=False)]), batch())


def test_the_gradient_that_torch_has_wrong_is_refused() -> None:
    form = Form("whole", "as_strided_scatter", seen=True, early=False)
    with pytest.raises(
        CaptureError, match=r"as_strided_scatter, whose gradient torch computes wrongly .*Use slice_scatter"
    ):
        capture(Forms([form]), batch())
    capture(Forms([lambda layer, x: (layer(x) * x.as_strided_scatter(x[:2], (2, 6), (6, 1))).sum()]), batch())


def test_windows_may_be_read() -> None:
    def form(layer: nn.Linear, x: Tensor) -> Tensor:
        h = layer(x) * 1
        windows = h.unfold(0, 2, 3).clone()
        return (windows.mul_(2).sin() * h.relu_().unfold(1, 6, 1)[::2].sum()).sum()

    captured = capture(Forms([form]), batch())
    assert captured.graph.outputs[0][0] == "loss"


LAYOUTS = [torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(2, 3, 4).permute(1, 2, 0)]


def test_elements_by_strides_are_those_of_memory() -> None:
    for x in LAYOUTS:
        for size, stride, offset in (((2, 3), (4, 1), 1), ((3, 3), (2, 3), None), ((), (), 5), ((0, 2), (1, 1), 0)):
            expected = x.as_strided(size, stride, offset)
            assert torch.equal(STRIDED[torch.ops.aten.as_strided.default](x, size, stride, offset), expected)
    x = LAYOUTS[1]
    y, of = torch.zeros(2, 3), ((2, 3), (4, 1), 1)
    wanted = x.clone()
    wanted.as_strided(*of).copy_(y)
    assert torch.equal(STRIDED[torch.ops.aten.as_strided_scatter.default](x, y, *of), wanted)


PARTS: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (
        lambda h: h.expand(2, 6, 6).as_strided((3,), (2,)),
        r"shape \[2, 6, 6\] and strides \[0, 6, 1\], which does not fill",
    ),
    (
        lambda h: h[1:].as_strided((3,), (2,), 0),
        "names the elements -6 to -2 of a tensor of 30, others than its own; use",
    ),
]


@each("read, message", PARTS)
def test_strides_that_reach_beyond_a_tensor_are_refused(read: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Forms([lambda layer, x: read(layer(x)).sum()]), batch())
