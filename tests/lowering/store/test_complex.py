"""Weights and buffers of complex numbers: complex for users, pairs of real numbers in programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.checking import check_capture
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.store.storage import as_complex, lies_in_pairs
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.pcg.errors import CaptureError, DistributedError, GraphError, PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.inference import infer
from shardwright.pcg.layout import R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.node import leaf, make_attrs
from shardwright.pcg.step.execution import Execution
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.complexes import operator, rotating
from tests.each import each
from tests.lowering.runs import Case, assert_same_step, parallel_step, run_all, serial_step, whole

MODELS = {"operator": operator, "rotating": rotating}
ROLES = ("data", "tensor", "zero")
TWO = Mesh.of(x=2)


@cache
def case(name: str) -> Case:
    return Case(*MODELS[name]())


@cache
def graph(name: str, role: str, mesh: Mesh = TWO) -> Graph:
    planner = Planner(Cluster.local(2), certified_choices())
    return planner.solve(case(name).captured.graph, mesh, (role,), "test").graph


def sharded(name: str) -> Graph:
    """Complex weights in slices along their first dimension, by hand."""
    one = case(name)
    storage = {key: (S(0),) for key, p in one.model.named_parameters() if p.shape and p.shape[0] % 2 == 0}
    return one.graph(TWO, {**storage, **dict.fromkeys(one.batch, (S(0),))}, data_axes=(0,))


def test_the_eager_step_is_compared() -> None:
    for name in MODELS:
        assert check_capture(case(name).model, case(name).captured, (), case(name).batch).equal, name


def test_steps_are_those_of_one_process() -> None:
    graphs = {(n, role): graph(n, role) for n in MODELS for role in ROLES} | {
        (n, "sharded"): sharded(n) for n in MODELS
    }

    def step(name: str, own: Graph) -> Any:
        return parallel_step(case(name).lower(own), case(name).batch)

    results = run_all([(2, partial(step, name, own)) for (name, _), own in graphs.items()])
    for (name, role), steps in zip(graphs, results, strict=True):
        for found in steps:
            assert_same_step(found, serial_step(case(name)), 1e-11, f"{name}, {role}")
            assert {key for key, g in found.gradients.items() if g is not None and g.is_complex()}, (name, role)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}


def trained(module: nn.Module, batch: dict[str, Tensor], kind: str, *, clip: bool = True) -> dict[str, Tensor]:
    """The state after three steps, clipped."""
    optimizer = OPTIMIZERS[kind](module.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        if isinstance(module, ParallelModule):
            module.forward_backward(**batch)
            norm = module.clip_grad_norm_(0.1) if clip else None
        else:
            module(**batch).backward()
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1) if clip else None
        assert norm is None or norm.dtype == torch.float64
        optimizer.step()
    return {key: whole(value).detach().clone() for key, value in module.state_dict().items()}


@each("kind", OPTIMIZERS)
def test_optimizers_and_clipping(kind: str) -> None:
    name = "operator"
    expected = trained(copy.deepcopy(case(name).model), case(name).batch, kind)
    jobs = [(graph(name, "zero"), Execution()), (sharded(name), Execution())]
    for ranks in case(name).on_ranks_of(jobs, lambda parallel: trained(parallel, case(name).batch, kind)):
        for state in ranks:
            assert [*state] == [*expected]
            for key, value in expected.items():
                assert state[key].dtype == value.dtype
                torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-11)


def test_microbatches_and_recomputation() -> None:
    one = case("operator")
    planner = Planner(Cluster.local(2), certified_choices())
    runs = {
        "microbatches": (planner.solve(one.captured.graph, Mesh.of(mb=2, x=2), ("zero",), "test").graph, Execution()),
        "recomputation": (graph("operator", "zero"), Execution(recompute="full")),
    }
    for ranks in one.on_ranks_of([*runs.values()], lambda parallel: parallel_step(parallel, one.batch)):
        for step in ranks:
            assert_same_step(step, serial_step(one), 1e-11)


def test_ranks_begin_with_the_values_of_rank_0() -> None:
    model, batch = rotating()
    one = case("rotating")

    def state() -> dict[str, Tensor]:
        import torch.distributed as dist

        mine = copy.deepcopy(model)
        with torch.no_grad():
            for tensor in (*mine.parameters(), *mine.buffers()):
                tensor.add_(dist.get_rank() * 1j if tensor.is_complex() else dist.get_rank())
        parallel = Case(mine, batch, one.captured).lower(sharded("rotating"))
        return {key: whole(value).detach().clone() for key, value in parallel.state_dict().items()}

    for found in run_ranks(state, 2):
        for key, value in model.state_dict().items():
            assert torch.equal(found[key], value), key


def test_a_state_is_loaded_under_another_plan() -> None:
    one = case("operator")
    wanted = {key: torch.randn_like(value) for key, value in one.model.state_dict().items()}

    def loaded(parallel: ParallelModule) -> dict[str, Tensor]:
        parallel.load_state_dict(wanted)
        (weight,) = (p for key, p in parallel.named_parameters() if key == "convs.0.weight")
        assert isinstance(weight, DTensor)
        assert weight.dtype == torch.complex128
        with pytest.raises(PlanError, match=r"convs\.0\.weight: the state has shape .*4, 4, 3, 2.*, the model"):
            parallel.load_state_dict({**wanted, "convs.0.weight": torch.view_as_real(wanted["convs.0.weight"])})
        return {key: whole(value).detach().clone() for key, value in parallel.state_dict().items()}

    for ranks in one.on_ranks_of(
        [(graph("operator", "data"), Execution()), (sharded("operator"), Execution())], loaded
    ):
        for state in ranks:
            assert all(torch.equal(state[key], value) for key, value in wanted.items())


def test_a_dry_run() -> None:
    dry_run(sharded("operator"))


def test_numbers_that_do_not_lie_in_pairs_are_copied() -> None:
    flat = torch.arange(9.0)
    for pairs in (flat[1:9].view(4, 2), flat[:8].view(2, 4).T, flat[:6].view(3, 2)[:, :2]):
        assert as_complex(pairs).tolist() == [complex(*pair) for pair in pairs.tolist()]
    assert not lies_in_pairs(flat[1:9].view(4, 2))
    assert lies_in_pairs(flat[2:8].view(3, 2))


class Remembering(nn.Module):
    """Complex numbers that forward assigns, and a weight that is not trained."""

    last: Tensor

    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.cdouble))
        self.still = nn.Parameter(torch.randn(4, dtype=torch.cdouble), requires_grad=False)
        if in_buffer:
            self.register_buffer("last", torch.zeros(4, dtype=torch.cdouble))
        else:
            self.last = torch.zeros(4, dtype=torch.cdouble)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(x, x.roll(1, 0)) * self.turn + self.still + 0.5 * self.last
        self.last = y.detach().mean(0)
        return y.abs().mean()


def test_a_buffer_that_forward_assigns_is_complex_too() -> None:
    torch.manual_seed(0)
    model, batch = Remembering(in_buffer=True), {"x": torch.randn(8, 4).double()}
    one = Case(copy.deepcopy(model), batch)

    def losses(module: Any) -> list[Tensor]:
        return [module(**batch).detach() for _ in range(3)]

    own = one.graph(TWO, dict.fromkeys(batch, (S(0),)), data_axes=(0,))
    for found in one.on_ranks(own, losses):
        torch.testing.assert_close(found, losses(copy.deepcopy(model)), rtol=1e-12, atol=1e-12)
    with pytest.raises(CaptureError, match=r"forward changes 'last', .*keep what steps change in a buffer"):
        Case(Remembering(in_buffer=False), batch)


def test_a_leaf_of_pairs_has_a_type() -> None:
    numbers = leaf("w", "parameter", (4, 2), "float64", "w", pairs="complex128")
    assert numbers.is_complex
    mesh = Mesh.of(x=2)
    assert infer(numbers, [], mesh).shape == (4, 2)
    assert infer(replace(numbers, attrs=make_attrs(**{**dict(numbers.attrs), "layouts": ("S(0)",)})), [], mesh)
    for attrs, told in (
        ({"layouts": ("S(1)",)}, r"complex numbers \[4\] are stored as .*, which cuts real from imaginary parts"),
        ({"shape": (4, 3)}, r"a leaf of complex128 is held as pairs of float64, got float64\[4, 3\]"),
        ({"dtype": "float32"}, r"a leaf of complex128 is held as pairs of float64, got float32\[4, 2\]"),
        ({"pairs": "complex32"}, r"a leaf of complex32 is held as pairs"),
    ):
        wrong = replace(numbers, attrs=make_attrs(**{**dict(numbers.attrs), **attrs}))
        with pytest.raises(GraphError, match=told):
            infer(wrong, [], mesh)


def test_a_plan_of_real_numbers_is_of_another_model() -> None:
    one = case("operator")
    model, batch = operator()
    for conv in model.convs:  # pyright: ignore[reportGeneralTypeIssues]
        conv.weight = nn.Parameter(torch.view_as_real(conv.weight.detach()).clone())
    with pytest.raises(DistributedError, match=r"convs\.0\.weight: the plan has complex numbers, the model real ones"):
        Case(model, batch, one.captured).on_ranks(sharded("operator"), lambda _: None)


class Odd(nn.Module):
    """Complex numbers of which only the parts could be shared by two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(3, 501, dtype=torch.cdouble))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None, None] * self.turn).abs().square().mean()


def test_the_search_cuts_no_number() -> None:
    one = Case(Odd(), {"x": torch.randn(8).double()})
    planner = Planner(Cluster.local(2), certified_choices())
    for role in ROLES:
        solved = planner.solve(one.captured.graph, TWO, (role,), "test").graph
        (weight,) = solved.leaves("parameter")
        assert solved.types[weight.name].layouts == (R,), role
