"""Mixed precision on two ranks: as far from fp64 as `torch.autocast` on one process is, under every kind of plan."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from examples.zoo import ZOO, GPTBlock
from shardwright.api import certified_choices
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import Prediction
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.lowering.launch import run_ranks
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.precision import check_device, tf32
from shardwright.lowering.private import unwrap
from shardwright.pcg.capture import capture, find_loss
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import fused_moves, source_of
from shardwright.pcg.step.execution import Precision
from shardwright.pcg.step.lifetimes import with_lifetimes
from shardwright.pcg.step.parameters import find_parameters
from shardwright.search.planner import Planner
from tests.each import each
from tests.lowering.runs import Batch, Case, Step, outcome, parallel_step, peak_on_rank, whole
from tests.search.graphs import cluster

NUM_RANKS = 2
ROLES = ("data", "zero", "tensor")


class Pictures(nn.Module):
    """Convolutions, batch normalization and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.norms[0](self.first(x)).relu()
        x = (x + self.norms[1](self.second(x))).relu().mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), labels)


class Regression(nn.Module):
    """One product."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.product = nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.product(x), y)


def example(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(1)
    if name == "pictures":
        return Pictures(), {"x": torch.randn(8, 4, 8, 8), "labels": torch.randint(0, 10, (8,))}
    model, batch = ZOO[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, GPTBlock):
            module.dropout = 0.0
    return model, batch


@cache
def case(name: str) -> Case:
    model, batch = example(name)
    return Case(model, batch, capture(model, batch, precision="amp_bf16"))


@cache
def solved(name: str, role: str) -> Graph:
    planner = Planner(cluster(NUM_RANKS), certified_choices())
    return planner.solve(case(name).captured.graph, Mesh(("x",), (NUM_RANKS,)), (role,), role).graph


def alone(name: str, *, exact: bool) -> Step:
    """The single process in fp64, or under autocast."""
    model, batch = copy.deepcopy(case(name).model), case(name).batch
    if exact:
        model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
        loss = find_loss(model(**batch))
    assert loss is not None
    loss.backward()
    return outcome(model, loss)


def error(step: Step, exact: Step) -> tuple[float, float]:
    """Of the loss, relative; and of all gradients as one vector, relative to its length."""
    pairs = [(step.gradients[name], g) for name, g in exact.gradients.items() if g is not None]
    off = sum(float(((0 if mine is None else mine.double()) - g).square().sum()) for mine, g in pairs)
    size = sum(float(g.square().sum()) for _, g in pairs)
    return abs(float(step.loss) / float(exact.loss) - 1), (off / size) ** 0.5


@pytest.mark.parametrize("name", ["gpt", "llama", "pictures"])
def test_rounds_no_more_than_autocast_does(name: str) -> None:
    exact = alone(name, exact=True)
    loss, gradients = error(alone(name, exact=False), exact)
    for role in ROLES:
        for step in case(name).on_ranks(solved(name, role), lambda p: parallel_step(p, case(name).batch)):
            found = error(step, exact)
            assert found[0] <= max(2 * loss, 2**-9), role
            assert found[1] <= 2 * gradients, role
            assert {g.dtype for g in step.gradients.values() if g is not None} == {torch.float32}


def test_a_loss_scaler_leaves_no_trace() -> None:
    """Scaled by a power of two, gradients are the same after `unscale_`, and an overflow on one rank skips all."""

    def steps(parallel: ParallelModule) -> tuple[Step, Step, bool]:
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
        plain = parallel_step(parallel, case("pictures").batch)
        optimizer.zero_grad()
        parallel.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaled = parallel_step(parallel, case("pictures").batch)
        parallel.scaler.unscale_(optimizer)
        after = outcome(parallel, scaled.loss)
        parallel.scaler.update()
        optimizer.zero_grad()
        parallel.forward_backward(**case("pictures").batch)
        before = [p.detach().clone() for p in parallel.parameters()]
        if dist.get_rank() == 0:
            unwrap(next(p.grad for p in parallel.parameters() if p.grad is not None)).fill_(float("inf"))
        parallel.scaler.step(optimizer)
        kept = all(torch.equal(whole(p), whole(b)) for p, b in zip(parallel.parameters(), before, strict=True))
        return plain, after, kept

    for plain, after, kept in case("pictures").on_ranks(solved("pictures", "zero"), steps):
        for name, gradient in plain.gradients.items():
            torch.testing.assert_close(after.gradients[name], gradient, rtol=2**-7, atol=1e-6)
        assert kept


@each("precision, device, problem", [
    ("fp8", "cuda", "it can be costed, but not run"),
    ("amp_fp16", "cpu", "training in float16 needs a GPU, and this rank is on cpu"),
    ("fp16", "cpu", "training in float16 needs a GPU"),
])  # fmt: skip
def test_devices_that_do_not_train_in_a_precision(precision: Precision, device: str, problem: str) -> None:
    with pytest.raises(PlanError, match=f"precision '{precision}': {problem}"):
        check_device(precision, torch.device(device))


@each("precision, device", [(None, "cpu"), ("amp_bf16", "cpu"), ("tf32", "cpu"), ("amp_fp16", "cuda")])
def test_devices_that_do(precision: Precision | None, device: str) -> None:
    check_device(precision, torch.device(device))


def test_tf32_is_on_inside_only() -> None:
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    with tf32(wanted=True):
        assert all(backend.allow_tf32 for backend in backends)
    with tf32(wanted=False):
        assert [backend.allow_tf32 for backend in backends] == before
    assert [backend.allow_tf32 for backend in backends] == before


def test_products_cost_what_their_dtype_costs() -> None:
    """On a GPU a step of a larger model is faster, sends fewer bytes and keeps fewer."""
    gpus = Cluster.preset("dgx-h100", 1)
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2)))
        batch = {"x": torch.empty(8192, 4096)}

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).square().mean()

    found: list[Prediction] = []
    for precision in (None, "amp_bf16"):
        planner = Planner(gpus, certified_choices(), precision=precision)
        graph = capture(Squares(), batch, precision=precision).graph
        found.append(planner.solve(graph, Mesh(("x",), (8,)), ("zero",), "").prediction)
    wide, mixed = found
    assert mixed.compute_s < wide.compute_s / 2
    gathers, sums = 3, 2  # the first weight is not needed again in backward
    share = (gathers / 2 + sums) / (gathers + sums)
    assert mixed.communication_bytes == pytest.approx(wide.communication_bytes * share, rel=0.01)
    assert mixed.memory.parameters_bytes == wide.memory.parameters_bytes
    assert mixed.memory.optimizer_bytes == wide.memory.optimizer_bytes


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_shards_are_cast_before_they_are_gathered(name: str) -> None:
    """What products alone read is gathered in 16 bits and scattered in fp32; what norms read too, in fp32."""
    graph = solved(name, "zero")
    parameters = find_parameters(graph).by_leaf.values()
    gathered = {p.leaf: p.used_dtype for p in parameters if p.slices is not None}
    by_products = {
        leaf.name for leaf in graph.leaves("parameter")
        if all(graph.by_name[user].op == "cast" for user in graph.users[leaf.name])
    }  # fmt: skip
    assert by_products
    assert gathered == {leaf: "bfloat16" if leaf in by_products else "float32" for leaf in gathered}
    assert all(p.summed_bytes == 2 * p.used_bytes for p in parameters if p.used_dtype == "bfloat16")
    assert not [n for n, _, _ in fused_moves(graph) if source_of(graph, n.name).op == "parameter"
                and n.name not in find_parameters(graph).names]  # fmt: skip


def test_whole_gradients_are_accumulated_in_the_dtype_of_the_parameters() -> None:
    """Over 64 microbatches, 16 bits would lose the last ones: shards that are scattered each time do not."""
    torch.manual_seed(1)
    batch = {"x": torch.randn(128, 16) + 1, "y": torch.randn(128, 16)}
    model = Regression()
    case = Case(model, batch, capture(model, batch, precision="amp_bf16"))
    planner = Planner(cluster(NUM_RANKS), certified_choices())
    graph = planner.solve(case.captured.graph, Mesh.of(mb=64, x=2), ("zero",), "test").graph
    leaves = [node.name for node in graph.leaves("parameter")]
    whole_sums, shards = (
        case.on_ranks(with_lifetimes(graph, dict.fromkeys(leaves, zero)), lambda run: parallel_step(run, batch))[0]
        for zero in ("zero-1", "zero-2")
    )
    for name, expected in shards.gradients.items():
        torch.testing.assert_close(whole_sums.gradients[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_whole_gradients_take_as_much_memory_as_predicted() -> None:
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 512), "y": torch.randn(8, 512)}
    model = Regression(512)
    case = Case(model, batch, capture(model, batch, precision="amp_bf16"))
    planner = Planner(cluster(NUM_RANKS), certified_choices())
    graph = planner.solve(case.captured.graph, Mesh.of(mb=4, x=2), ("zero",), "test").graph
    graph = with_lifetimes(graph, {node.name: "zero-1" for node in graph.leaves("parameter")})
    measured = run_ranks(lambda: peak_on_rank(case, graph), NUM_RANKS, 60)[0]
    assert simulate(program(graph, cluster(NUM_RANKS))).fullest.memory.total_bytes == pytest.approx(measured, rel=0.1)
