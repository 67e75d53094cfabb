"""Mixtures of experts on gloo ranks in double precision, unevenly routed: every split of their rows, as one process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from examples.zoo import ZOO
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime import kernels
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import fused_moves, source_of
from shardwright.pcg.step.execution import DEFAULT
from shardwright.pcg.step.parameters import find_parameters
from shardwright.pcg.step.time import check_time
from shardwright.pcg.types import TensorType
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.experts import SIZE, USED, mixture
from tests.lowering.parallelize import follow
from tests.lowering.runs import Case, Step, assert_same_step, parallel_step, serial_step

ROWS = ("experts", "expert_linear")
ERROR = 1e-10
TOKENS = "_0"


def forced(case: Case, split: Sequence[str], batch: Sequence[str] = (TOKENS,)) -> Graph:
    """The rows of experts split in this way along each axis of two, the batch along those of the splits `batch`."""
    serial, mesh = case.captured.graph, Mesh.of(**dict.fromkeys("xyz"[: len(split)], 2))
    others = follow(serial, mesh)

    def choose(node: Node, axis: int, operands: list[TensorType]) -> str:
        return split[axis] if node.op in ROWS else others(node, axis, operands)

    return case.graph(mesh, {"x": tuple(S(0) if choice in batch else R for choice in split)}, choose)


def planned(case: Case, roles: Sequence[str], many: int = 1) -> Graph:
    mesh = Mesh.of(**({"mb": many} if many > 1 else {}), **dict.fromkeys("xyz"[: len(roles)], 2))
    planner = Planner(Cluster.local(mesh.num_devices), certified_choices())
    return planner.solve(case.captured.graph, mesh, roles, "test").graph


class Routing(NamedTuple):
    """What a rank was asked for: the experts of its tokens, and how many rows its own experts took."""

    chosen: Tensor
    num_rows: int


@contextmanager
def routed() -> Generator[list[Routing]]:
    found, real = list[Routing](), kernels.by_expert

    def spy(index: Tensor, num_experts: int, offset: int | None) -> tuple[Tensor, Tensor]:
        order, ends = real(index, num_experts, offset)
        found.append(Routing(index, len(order)))
        return order, ends

    kernels.by_expert = spy
    try:
        yield found
    finally:
        kernels.by_expert = real


def on_ranks(case: Case, graphs: Sequence[Graph]) -> list[list[tuple[Step, list[Routing]]]]:
    """By rank, one step of each graph and how it was routed."""

    def step(graph: Graph) -> tuple[Step, list[Routing]]:
        with routed() as found:
            return parallel_step(case.lower(graph), case.batch), found

    return run_ranks(lambda: [step(graph) for graph in graphs], graphs[0].mesh.num_devices, 60)


def chosen(case: Case) -> Tensor:
    """The experts that the model itself chooses for every token, [tokens, k]."""
    with torch.no_grad():
        index = case.model.route(case.model.before(case.batch["x"]).reshape(-1, SIZE))[1]  # pyright: ignore[reportCallIssue]
    return index.reshape(len(index), -1)


def assert_trains(case: Case, graphs: Sequence[Graph]) -> None:
    expected = serial_step(case)
    for steps in on_ranks(case, graphs):
        for step, _ in steps:
            assert_same_step(step, expected, ERROR)


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("sorted", "_0 e f k o"),
        ("not gated", "e f"),
        ("biased", "_0 _1 e i o"),
        ("first", "_0 e"),
        ("added", "_0 e"),
        ("masked", "_0"),
        ("looped", "_0"),
    ],
)
def test_every_split_on_two_ranks(name: str, splits: str) -> None:
    case = Case(*mixture(name))
    assert_trains(case, [forced(case, (split,)) for split in splits.split()])


def test_experts_are_split_along_the_axis_that_splits_everything_else_by_tokens() -> None:
    """Tokens are gathered for the experts, and each rank keeps its tokens of the sum."""
    case = Case(*mixture("sorted"))
    graph = forced(case, ("e",), batch=("e",))
    assert {node.op for node in graph.nodes if node.is_parallel} >= {"combine", "reduce", "partition"}
    assert_trains(case, [graph])


def test_two_splits_on_four_ranks() -> None:
    case = Case(*mixture("sorted"))
    assert_trains(case, [forced(case, split) for split in (("_0", "e"), ("_0", "f"), ("e", "f"), ("e", "e"))])


def test_tokens_go_where_one_process_sends_them_and_none_is_dropped() -> None:
    """Bit for bit the same experts; every row is some rank's, and one expert has most of them."""
    case = Case(*mixture("sorted"))
    expected = chosen(case)
    load = torch.bincount(expected.reshape(-1), minlength=8)
    assert load.max() > 3 * load.float().mean()
    assert load.min() == 0
    by_tokens, by_expert = zip(*on_ranks(case, [forced(case, (TOKENS,)), forced(case, ("e",))]), strict=True)
    indices = [found[0].chosen for _, found in by_tokens]
    assert torch.equal(torch.cat(indices), expected)
    assert [found[0].num_rows for _, found in by_tokens] == [index.numel() for index in indices]
    assert all(torch.equal(found[0].chosen, expected) for _, found in by_expert)
    assert [found[0].num_rows for _, found in by_expert] == [int(load[:4].sum()), int(load[4:].sum())]
    assert len(expected) * USED == load.sum()


def test_plans_with_microbatches_zero_and_split_weights() -> None:
    case = Case(*mixture("sorted"))
    several = [planned(case, (role,), many) for role in ("data", "zero") for many in (1, 2)]
    several += [planned(case, ("tensor",))]
    assert [next(graph.leaves("experts")).split[-1] for graph in several] == [TOKENS] * 4 + ["e"]
    assert_trains(case, several)
    assert_trains(case, [planned(case, roles, 2) for roles in (("data", "tensor"), ("zero", "tensor"))])


@pytest.mark.parametrize("roles", [("zero",), ("zero", "tensor")])
def test_weights_that_are_read_transposed_are_cast_and_then_gathered(roles: tuple[str, ...]) -> None:
    """In 16 bits, with their block and as it stays: what is gathered of a view of one would be an activation."""
    serial = capture(*ZOO["mixtral"](), precision="amp_bf16").graph
    mesh = Mesh.of(mb=2, **dict.fromkeys("xy"[: len(roles)], 2))
    graph = Planner(Cluster.local(mesh.num_devices), certified_choices()).solve(serial, mesh, roles, "test").graph
    weights = [p for p in find_parameters(graph).by_leaf.values() if "mlp_experts" in p.leaf]
    assert [(p.slices is not None and p.slices.axis, p.used_dtype) for p in weights] == [("x", "bfloat16")] * 4
    assert not {source_of(graph, start).op for _, start, _ in fused_moves(graph)} & {"permute"}


def test_a_balancing_loss_is_exact_and_alone_keeps_the_batch_from_being_cut() -> None:
    """It is a product of means over the batch. In float32, for which transformers has grouped products on CPUs."""
    torch.manual_seed(0)
    model, batch = ZOO["mixtral"]()
    model.config.output_router_logits = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    case = Case(model, batch)
    expected = serial_step(case)
    for ((step, _),) in on_ranks(case, [planned(case, ("data",))]):
        assert_same_step(step, expected, 1e-5)
    with pytest.raises(PlanError, match=r"add at model \(modeling_mixtral\.py:\d+\): .* products of means"):
        check_time(planned(case, ("data",), 2), DEFAULT)
    model.config.output_router_logits = False  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    without = Case(model, batch)
    check_time(planned(without, ("data",), 2), DEFAULT)
