"""Precisions by module: what goes together, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.pcg.errors import ClusterError
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.precisions import base_of, canonical, every, of_modules, shown
from tests.each import each

POLICY: dict[str, Any] = {"head": "fp32", "*.norm": "fp32", "*": "amp_bf16"}


def test_a_mapping_is_kept_as_pairs_and_one_for_all_is_a_precision() -> None:
    assert canonical(POLICY, "") == tuple(POLICY.items()) == canonical(tuple(POLICY.items()), "")
    assert canonical({"*": "tf32"}, "") == "tf32"
    assert Execution(POLICY) == Execution.from_json(Execution(POLICY).to_json())
    assert Execution(POLICY).to_json() == {"precision": POLICY}
    assert hash(Execution(POLICY)) != hash(Execution({"*.norm": "fp32", "head": "fp32", "*": "amp_bf16"}))


@each("precision, base, others, text", [
    (None, None, set(), "the model's own"),
    ("bf16", "bf16", {"bf16"}, "bf16"),
    (POLICY, "amp_bf16", {"fp32", "amp_bf16"}, "amp_bf16, with head and *.norm in fp32"),
    ({"a": "fp32", "b": "amp_bf16"}, None, {"fp32", "amp_bf16"}, "the model's own, with a in fp32, with b in amp_bf16"),
])  # fmt: skip
def test_what_it_is(precision: Any, base: str | None, others: set[str], text: str) -> None:
    assert (base_of(precision), every(precision), shown(precision)) == (base, others, text)
    assert of_modules(canonical(precision, "")) == of_modules(precision)


def test_values_have_the_dtypes_of_their_graph_and_the_loss_is_scaled_as_the_base_is() -> None:
    run = Execution({"head": "fp32", "*": "amp_fp16"})
    assert (run.base, run.whole, run.is_scaled, run.rates) == ("amp_fp16", None, True, {})
    assert [run.compute_dtype(d) for d in ("float32", "float16")] == ["float32", "float16"]
    assert run.state_dtype("float32") == "float32"
    assert not Execution({"head": "fp32", "*": "amp_bf16"}).is_scaled
    assert (Execution("tf32").whole, Execution("tf32").base) == ("tf32", "tf32")


@each("precision, problem", [
    ({}, "precision: expected one of 'fp32', 'tf32', .*, or a mapping from modules to these, got {}"),
    (("fp32", "bf16"), r"precision: expected one of .* got \('fp32', 'bf16'\)"),
    (3, "precision: expected one of 'fp32', .* got 3"),
    ({" ": "fp32"}, "precision: expected a non-empty string, got ' '; it is a module's name, or a pattern of them"),
    ({"head": None}, r"precision\['head'\]: expected one of 'fp32', .* got None; choose one of them"),
    ({"head": "quarter"}, r"precision\['head'\]: expected one of 'fp32', .* got 'quarter'; choose one of them"),
    ({"*": "fp32", "head": "amp_bf16"}, r"precision\['\*'\]: it fits every module, .*; put it behind 'head'"),
    *(({"head": p, "*": "amp_bf16"}, rf"precision\['head'\]: .* in a model in amp_bf16, got '{p}'")
      for p in ("tf32", "fp16", "bf16", "fp8", "amp_fp16")),
    ({"head": "amp_fp16"}, "expected 'fp32' or 'amp_bf16' or 'bf16_params' in a model in its own dtypes, got 'amp_f"),
    ({"a": "amp_bf16", "*": "amp_fp16"}, "expected 'fp32' or 'amp_fp16' in a model in amp_fp16, got 'amp_bf16'; mod"),
    ({"a": "amp_bf16", "*": "bf16_params"}, "expected 'fp32' or 'bf16_params' in a model in bf16_params, got 'amp_"),
    ({"a": "bf16_params", "*": "fp16_params"}, "expected 'fp32' or 'fp16_params' in a model in fp16_params, got 'bf"),
    *(({"head": "fp32", "*": p}, rf"precision\['\*'\]: expected 'fp32' or 'amp_bf16' .* 'fp16_params', got '{p}'; mod")
      for p in ("tf32", "fp16", "bf16", "fp8")),
])  # fmt: skip
def test_what_does_not_go_together(precision: Any, problem: str) -> None:
    with pytest.raises(ClusterError, match=rf"^Execution\.{problem}" if problem.startswith("precision") else problem):
        Execution(precision)
