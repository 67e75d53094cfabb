"""The matrix in `docs/matrix.md`: every model under every layout on real gloo ranks equals the single process.

Two ranks under the layouts that split, and four under ZeRO × tensor and the search's own, which are marked slow: every
model under some of these cases, every case with some of the models. `make matrix` runs it all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.accuracy import Errors, Step, compare, measure, prepare
from bench.matrix import Cell, page, run_cell
from bench.plans import CASES, TRAINING, Case, fast_links
from bench.replicated import describe
from examples.zoo import ZOO
from shardwright.pcg.mesh import Mesh
from shardwright.search.request.restrict import TENSOR, ZERO
from tests.each import each, some
from tests.models import grid

SPLITTING = [case for case in CASES if case.name != "searched"]
DATA_2, ZERO_2, TENSOR_2, SEARCHED_2 = (case for case in SPLITTING if case.num_ranks == 2)
ZERO_TENSOR_4, SEARCHED_4 = (c for c in SPLITTING if c.num_ranks == 4 and c.roles in (None, (ZERO, TENSOR)))
# in turn: a model has the first of these, or the others
TWO_RANKS, FOUR_RANKS = [DATA_2, TENSOR_2, ZERO_2, SEARCHED_2], [SEARCHED_4, ZERO_TENSOR_4]


def assert_equals_single_process(name: str, case: Case) -> None:
    prepared = prepare(name)
    plan = case.plan(prepared.captured.graph, name)
    errors = measure(prepared, plan.graph)
    assert errors.within_tolerance, errors


@pytest.mark.parametrize(("name", "case"), grid(TWO_RANKS, each=1, names=some(ZOO, 6)))
def test_two_ranks_equal_one(name: str, case: Case) -> None:
    assert_equals_single_process(name, case)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), grid(FOUR_RANKS, each=1, names=some(ZOO, 2)))
def test_four_ranks_equal_one(name: str, case: Case) -> None:
    assert_equals_single_process(name, case)


@each("name", ["gpt2", "llama"])
def test_what_a_model_computes_in_fp32_by_itself_is_compared_in_fp64(name: str) -> None:
    """The loss of transformers' models, and llama's norms."""
    prepared = prepare(name, kind="fp64")
    assert not [t for t in prepared.captured.graph.types.values() if t.dtype == "float32"]
    case = next(c for c in TRAINING if c.roles == (TENSOR,) and c.recompute == "none")
    cell = run_cell(prepared, case)
    assert cell.good, cell.failure or cell.errors


# ---- the judge itself ----


def step(**gradients: list[float]) -> Step:
    tensors = {name: torch.tensor(values) for name, values in gradients.items()}
    return Step(2.0, tensors, {"mean": torch.ones(2)}, torch.zeros(1, dtype=torch.uint8))


def test_a_gradient_is_compared_relative_to_its_own_norm() -> None:
    errors = compare(step(a=[3.0, 4.001], b=[100.0]), step(a=[3.0, 4.0], b=[100.0]))
    assert errors.gradient_name == "a"
    assert errors.gradient == pytest.approx(2e-4, rel=1e-3)
    assert not errors.within_tolerance


def test_a_gradient_that_is_only_rounding_is_compared_relative_to_the_whole() -> None:
    errors = compare(step(a=[1.0], zero=[3e-10]), step(a=[1.0], zero=[1e-10]))
    assert errors.gradient == pytest.approx(2e-5, rel=1e-3)
    assert errors.within_tolerance


@pytest.mark.parametrize("wrong", [step(a=[1.0]), step(a=[1.0], b=[float("nan")]), step(a=[1.0], b=[1.0], c=[0.0])])
def test_a_gradient_that_is_missing_extra_or_nan_is_never_within_tolerance(wrong: Step) -> None:
    errors = compare(wrong, step(a=[1.0], b=[1.0]))
    assert errors.gradient == float("inf")
    assert not errors.within_tolerance


def test_loss_buffers_and_random_state_count_too() -> None:
    good = step(a=[1.0])
    assert compare(good, good).within_tolerance
    for wrong in (
        replace(good, loss=2.0001),
        replace(good, loss=float("nan")),
        replace(good, buffers={"mean": torch.tensor([1.0, 1.001])}),
        replace(good, random_state=torch.ones(1, dtype=torch.uint8)),
    ):
        assert not compare(wrong, good).within_tolerance


def test_further_steps_count_by_their_losses_and_by_how_far_the_weights_have_come() -> None:
    """All weights have come 0.1 far: one that is 1e-3 off is a hundredth of that, whatever its own size."""
    weights = {"a": torch.tensor([100.0]), "b": torch.tensor([1.0])}
    good = replace(step(a=[1.0]), weights=weights, moved=0.1, losses=(4.0, 2.0))
    assert compare(good, good).drift == compare(good, good).losses == 0.0
    off = replace(good, weights={**weights, "a": torch.tensor([100.001])}, losses=(4.0, 2.02))
    errors = compare(off, good)
    assert errors.drift == pytest.approx(0.01, rel=0.02)
    assert errors.losses == pytest.approx(0.01)
    assert compare(replace(off, weights={"b": torch.ones(1)}), good).drift == float("inf")
    assert not errors.within_growth(Errors.worst([compare(good, good)]))
    assert errors.within_growth(replace(errors, drift=0.006, losses=0.006))
    assert not errors.within_growth(replace(errors, drift=0.004))


def test_rounding_is_compared_with_that_of_one_process() -> None:
    autocast = replace(compare(step(a=[1.0]), step(a=[1.0])), loss=1e-2, losses=2e-2, whole=3e-2, drift=4e-2)
    assert autocast.within_rounding(autocast)
    assert replace(autocast, loss=2e-2, losses=4e-2, whole=6e-2, drift=8e-2).within_rounding(autocast)
    for name, value in {"loss": 3e-2, "losses": 5e-2, "whole": 7e-2, "drift": 9e-2}.items():
        assert not replace(autocast, **{name: value}).within_rounding(autocast), name
    assert not replace(autocast, same_random_state=False).within_rounding(autocast)


def test_each_kind_of_numbers_has_its_tolerance() -> None:
    exact = compare(step(a=[1.0]), step(a=[1.0]))
    single, rounded = replace(exact, loss=1e-6, drift=1e-3), replace(exact, loss=1e-3, whole=1e-2)
    prepared = prepare("mlp")
    for kind, rounding, accepted in (
        ("fp64", None, [exact]),
        ("fp32", None, [exact, single]),
        ("fp32", exact, [exact]),
        ("fp32", replace(exact, drift=1e-3), [exact, single]),
        ("amp_bf16", exact, [exact]),
        ("amp_bf16", rounded, [exact, rounded]),
    ):
        judge = replace(prepared, kind=kind, rounding=rounding)
        assert [errors for errors in (exact, single, rounded) if judge.accepts(errors)] == accepted, kind


def test_what_stays_whole_is_said_with_its_reason() -> None:
    serial = prepare("gpt").captured.graph
    tensor = Case("tensor", 2, Mesh(("tp",), (2,)), ("tensor",)).plan(serial, "gpt").graph
    assert describe(serial, tensor, ("tensor",)) == "tp: 5 layer_norm, 8 add, 4 dropout (cheaper whole)"
    data = Case("data", 3, Mesh(("dp",), (3,)), ("data",)).plan(serial, "gpt").graph
    assert "(size 8 not divisible by 3)" in describe(serial, data, ("data",))


def test_fast_links_make_the_search_split() -> None:
    serial = prepare("mlp").captured.graph
    graph = Case("searched", 2, fast_links=True).plan(serial, "mlp").graph
    assert describe(serial, graph, None) == "none"
    assert fast_links(1).num_devices == 1


def test_the_page_shows_errors_and_failures() -> None:
    errors = compare(step(a=[1.0]), step(a=[1.0]))
    text = page(
        [Cell("mlp", CASES[0], errors, mesh="[dp=2]", replicated="none"), Cell("mlp", CASES[1], failure="E: x")]
    )
    assert (
        "1 of 2 cells are within tolerance, and the largest error of a gradient is 0.0e+00 (mlp; data, 2 ranks),"
        in text
    )
    assert "| plan | mlp |" in text
    assert "| data, 2 ranks | 0e+00 |\n| zero, 2 ranks | **failed** |" in text
    assert "* data, 2 ranks: none" in text
    assert "**zero, 2 ranks failed**: `E: x`" in text


def test_a_model_that_cannot_be_cut_is_told_the_operator() -> None:
    case = next(c for c in TRAINING if c.mesh is not None and c.mesh.num_microbatches == 2 and c.recompute == "none")
    cell = run_cell(prepare("resnext", kind="fp64"), case)
    assert cell.refused, cell.failure
    assert cell.good
    assert "batch cannot be cut into 2 microbatches exactly here" in cell.failure
    text = page([cell])
    assert f"| {case} | refused |" in text
    assert "1 of 1 cells are within tolerance.\n" in text
    assert "*refused*: the model cannot be cut" in text


def test_what_is_made_again_needs_blocks_and_attention() -> None:
    modes = {
        name: {str(c.recompute) for c in TRAINING if c.suits(prepare(name).captured.graph)}
        for name in ("mlp", "dlrm", "gpt")
    }
    assert modes["mlp"] == {"none"}
    assert modes["dlrm"] == {"none", "full"}
    assert modes["gpt"] == {str(c.recompute) for c in TRAINING}
