"""Mixed precision on two ranks: as far from fp64 as `torch.autocast` on one process is, under every kind of plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.prediction import Prediction
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.private import unwrap
from shardwright.lowering.runtime.precision import check_device, check_products, set_products
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import fused_moves, source_of
from shardwright.pcg.step.execution import ReduceDtype
from shardwright.pcg.step.lifetimes import with_lifetimes
from shardwright.pcg.step.parameters import find_parameters
from shardwright.pcg.step.precisions import Precision
from shardwright.pcg.step.recompute import Recompute
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.each import each, some
from tests.lowering.rounding import NUM_RANKS, Cell, Error, case, cells, solved
from tests.lowering.runs import Case, Step, entry_of, outcome, parallel_step, whole
from tests.search.graphs import cluster

BACKENDS: Any = torch.backends


class Regression(nn.Module):
    """One product."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.product(x), y)


FEW: dict[str, tuple[Recompute, ReduceDtype | None]] = {
    "gpt": ("full", "bfloat16"), "llama": ("none", None), "pictures": ("none", "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", some(FEW, 1))
def test_rounds_no_more_than_autocast_does(name: str) -> None:
    """A few cells of the table in docs/precision.md."""
    found = list(cells(name, ("data", "ZeRO-3", "tensor"), [FEW[name]]))
    assert len(found) >= 3
    assert all(cell.good for cell in found), [cell for cell in found if not cell.good]


def test_an_error_that_no_rounding_explains() -> None:
    """Of one part in fifty in a gradient, or in the loss."""
    cell = Cell("", "data", 1, "none", "bfloat16", Error(1e-5, 0.015), Error(1e-5, 0.0075))
    assert cell.good
    assert not cell._replace(reduce_dtype=None, found=Error(1e-5, 0.0151)).good
    assert not cell._replace(found=Error(1e-5, 0.02)).good
    assert not cell._replace(found=Error(0.01, 0.0075)).good


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
        assert {g.dtype for g in plain.gradients.values() if g is not None} == {torch.float32}
        for name, gradient in plain.gradients.items():
            torch.testing.assert_close(after.gradients[name], gradient, rtol=2**-7, atol=1e-6)
        assert kept


@each("precision, device, problem", [
    ("fp8", "cuda", "it can be planned and costed, but not run"),
    ("amp_fp16", "cpu", "training in float16 needs a GPU, and this would run on cpu; plan with 'amp_bf16', which"),
    ("fp16", "cpu", "training in float16 needs a GPU"),
])  # fmt: skip
def test_devices_that_do_not_train_in_a_precision(precision: Precision, device: str, problem: str) -> None:
    with pytest.raises(PlanError, match=f"precision '{precision}': {problem}"):
        check_device(precision, device)


@each("precision, device", [(None, "cpu"), ("amp_bf16", "cpu"), ("tf32", "cpu"), ("amp_fp16", "cuda")])
def test_devices_that_do(precision: Precision | None, device: str) -> None:
    check_device(precision, device)


@pytest.fixture
def settings() -> Iterator[dict[str, Any]]:
    """What products of float32 run in on GPUs, with what torch has set."""
    cudnn = BACKENDS.cudnn
    found = {"matmul": BACKENDS.cuda.matmul, "conv": cudnn.conv, "rnn": cudnn.rnn}
    yield found
    BACKENDS.fp32_precision = "none"
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True


def test_a_precision_sets_what_products_run_in_and_requires_it(settings: dict[str, Any]) -> None:
    for precision in ("tf32", "fp32", "tf32"):
        set_products(precision)
        assert {s.fp32_precision == "tf32" for s in settings.values()} == {precision == "tf32"}
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == (precision == "tf32")
        check_products(precision)
    set_products("amp_bf16")  # the user's own stay
    assert settings["matmul"].fp32_precision == "tf32"
    check_products("amp_bf16")
    problem = r"'fp32': compile set torch\.backends\.cuda\.matmul\.fp32_precision to 'ieee' for this.* now it is 'tf32'"
    with pytest.raises(PlanError, match=problem):
        check_products("fp32")
    for setting in settings.values():
        setting.fp32_precision = "tf32"
        set_products("tf32")
        setting.fp32_precision = "ieee"
        with pytest.raises(PlanError, match="now it is 'ieee'; set it back"):
            check_products("tf32")


def test_settings_that_users_make_the_newer_way_are_no_obstacle(settings: dict[str, Any]) -> None:
    """torch refuses to read the older settings where the newer ones say something else."""
    BACKENDS.fp32_precision = "tf32"
    settings["matmul"].fp32_precision = "tf32"
    for precision in ("fp32", "tf32"):
        set_products(precision)
        check_products(precision)


def test_every_step_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on CPUs have nothing to set; a program that has is stopped before it runs."""

    def steps(parallel: ParallelModule) -> list[str]:
        told = list[str]()
        monkeypatch.setattr(entry_of(parallel), "products", "tf32")
        for step in (parallel.forward_backward, parallel):
            with pytest.raises(PlanError) as error:
                step(**case("pictures").batch)
            told.append(str(error.value))
        return told

    for told in case("pictures").on_ranks(solved("pictures", "data"), steps):
        assert [text.startswith("precision 'tf32': compile set torch.backends") for text in told] == [True, True]


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


class Embedded(nn.Module):
    """Nothing that a mixed precision runs in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.table(ids)).square().mean()


def test_what_has_no_products_stays_in_float32() -> None:
    graph = capture(Embedded(), {"ids": torch.randint(64, (8, 4))}, precision="amp_bf16").graph
    planner = Planner(cluster(NUM_RANKS), certified_choices(), precision="amp_bf16")
    found = planner.solve(graph, Mesh.of(x=NUM_RANKS), ("zero",), "test")
    assert dry_run(found.graph, execution=found.execution).misshapen == ()


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
