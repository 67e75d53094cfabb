"""Precision by module: which forwards run in which region, and patterns that decide about nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.modules import in_own_precision
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from tests.each import each


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Part(nn.Module):
    """Takes and gives a nest; in it a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, pair: Pair, *, scale: Tensor) -> Pair:
        first = self.a(pair.first * scale)
        with torch.autocast("cuda", torch.bfloat16):
            return Pair(first, self.b(pair.second).sin())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.unread, self.tail = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.again = self.tail

    def forward(self, x: Tensor) -> Tensor:
        pair = Pair(self.tail(x), x)
        for part in self.parts:
            pair = part(pair, scale=pair.first.cos())
        return nn.functional.linear(pair.first, self.unread.weight).square().mean() + pair.second.mean()


BATCH = {"x": torch.randn(4, 8)}
AMP, WIDE = "bfloat16", "float32"


def captured(precision: Any) -> Graph:
    return capture(Model(), BATCH, precision=precision).graph


def products(graph: Graph) -> Iterator[str]:
    """The dtypes of tail, parts.0.a, .b, parts.1.a, .b, and of the product of the model's own forward."""
    return (graph.types[node.name].dtype for node in graph.nodes if node.op == "linear")


@each("precision, dtypes", [
    ({"tail": "fp32", "*": "amp_bf16"}, (WIDE, AMP, AMP, AMP, AMP, AMP)),
    ({"again": "fp32", "*": "amp_bf16"}, (WIDE, AMP, AMP, AMP, AMP, AMP)),  # the same module
    ({"tail": "fp32", "again": "amp_bf16", "*": "amp_bf16"}, (WIDE, AMP, AMP, AMP, AMP, AMP)),
    ({"parts": "fp32", "*": "amp_bf16"}, (AMP, WIDE, AMP, WIDE, AMP, AMP)),  # a list; regions inside are kept
    ({"parts.*.b": "fp32", "*": "amp_bf16"}, (AMP, AMP, WIDE, AMP, WIDE, AMP)),
    ({"parts.1": "amp_bf16", "parts": "fp32", "*": "amp_bf16"}, (AMP, WIDE, AMP, AMP, AMP, AMP)),
    ({"parts.*.a": "amp_bf16", "parts.0-1": "fp32", "*": "amp_bf16"}, (AMP, AMP, AMP, AMP, AMP, AMP)),
    ({"parts.0": "amp_bf16", "*": "fp32"}, (WIDE, AMP, AMP, WIDE, AMP, WIDE)),
    ({"parts.0": "amp_bf16"}, (WIDE, AMP, AMP, WIDE, AMP, WIDE)),
    ({"parts.*.b": "fp32"}, (WIDE, WIDE, WIDE, WIDE, WIDE, WIDE)),
    ({"?*": "fp32", "*": "amp_fp16"}, (WIDE, WIDE, AMP, WIDE, AMP, "float16")),
])  # fmt: skip
def test_the_first_pattern_that_fits_a_module_or_one_around_it_decides(
    precision: dict[str, Any], dtypes: tuple[str, ...]
) -> None:
    assert tuple(products(captured(precision))) == dtypes


def test_what_goes_into_float32_and_out_of_16_bits_is_widened() -> None:
    """In nests and by keyword; and operators say the module and line that they would say without a policy."""
    wide = captured({"parts": "fp32", "*": "amp_bf16"})
    assert [wide.types[n.name].dtype for n in wide.nodes if n.op in ("cos", "sin")] == [AMP, AMP, WIDE, AMP]
    assert [wide.types[n.name].dtype for n in wide.nodes if n.op == "mul" and n.source.module] == [WIDE, WIDE]
    low = captured({"parts.0": "amp_bf16", "*": "fp32"})
    assert [low.types[n.name].dtype for n in low.nodes if n.op == "cos"] == [WIDE, WIDE]
    plain = {str(node.source) for node in captured(None).nodes if not node.is_leaf}
    assert {str(node.source) for node in wide.nodes if node.op != "cast" and not node.is_leaf} <= plain


def test_models_are_left_as_they_were() -> None:
    model = Model()
    policy: dict[str, Any] = {"tail": "amp_bf16", "parts": "fp32"}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), in_own_precision(model, policy, "cpu"):
        model(BATCH["x"][:, :7])
    assert not torch.is_autocast_enabled("cpu")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@each("precision, problem", [
    ({"tial": "fp32", "*": "amp_bf16"}, "'tial' names no module of Model; give names or patterns, such as 'tail'"),
    ({"x.*": "fp32"}, "'x.*' names no module of Model; give names or patterns, such as 'parts', 'parts.0', 'pa"),
    ({"parts": "fp32", "parts.1": "amp_bf16"}, "every module that 'parts.1' names is named by an earlier pattern, or"),
    ({"unread": "fp32"}, "'unread' names 'unread' of Model, which no forward calls; name the module whose forward"),
])  # fmt: skip
def test_patterns_that_decide_about_nothing(precision: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError) as error:
        captured(precision)
    assert str(error.value).startswith(f"precision: {problem}")


@each("precision, dtype", [({"tail": "fp32"}, "bfloat16"), ({"tail": "fp32", "*": "amp_bf16"}, "float16")])
def test_models_in_other_dtypes(precision: dict[str, Any], dtype: str) -> None:
    with pytest.raises(PlanError, match=f"expected parameters in float32, got {dtype}"):
        capture(Model().to(getattr(torch, dtype)), BATCH, precision=precision)


def test_a_model_without_modules_inside() -> None:
    with pytest.raises(PlanError, match=r"names no module of Linear; .* such as none, it has no modules inside"):
        capture(nn.Linear(8, 8), {"input": BATCH["x"]}, precision={"head": "fp32"})
