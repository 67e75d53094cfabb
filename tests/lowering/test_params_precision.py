"""Parameters in 16 bits over masters in float32, on two ranks: bit by bit what FSDP2 computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwright.api import plan
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.aten import dtype_name
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution, ReduceDtype
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.parameters import find_parameters
from shardwright.pcg.step.precisions import Precision, PrecisionByModule
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.each import each, some
from tests.lowering.rounding import cells
from tests.lowering.runs import Case, whole
from tests.lowering.trial.test_dryrun import report
from tests.pcg.capture.test_casting import Net
from tests.search.graphs import cluster

NORMS: PrecisionByModule = (("blocks.*.norm", "fp32"), ("*", "bf16_params"))
NUM_STEPS, SCALE = 3, 2.0**14


class Trained(NamedTuple):
    """Of each step, the mean of the ranks' losses; gradients and parameters after the last one, whole."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]

    def off(self, other: Trained) -> set[str]:
        """The names of what differs in any bit."""
        pairs = [(self.gradients, other.gradients), (self.parameters, other.parameters)]
        return {name for own, others in pairs for name in {**own, **others} if not _same(own[name], others[name])}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and one.dtype == other.dtype and one.equal(other))


def example() -> tuple[Net, Any]:
    """A model and a batch, the same every time."""
    torch.manual_seed(1)
    return Net(), {"ids": torch.randint(16, (8, 4)), "more": {"weight": torch.rand(1)}}


@cache
def case(precision: Precision | PrecisionByModule = "bf16_params") -> Case:
    model, batch = example()
    return Case(model, batch, capture(model, batch, precision=precision))


def laid_out(found: Case, role: str = "zero", zero: Zero = "zero-3", microbatches: int = 1) -> Graph:
    mesh = Mesh.of(x=2) if microbatches == 1 else Mesh.of(mb=microbatches, x=2)
    planner = Planner(cluster(2), certified_choices(), precision=found.captured.precision)
    graph = planner.solve(found.captured.graph, mesh, (role,), role).graph
    return with_lifetimes(graph, {leaf.name: zero for leaf in graph.leaves("parameter")})


def trained(model: nn.Module, step: Callable[[], float], scaler: torch.amp.GradScaler) -> Trained:
    """A few steps of AdamW; `step` scales the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = list[float](), dict[str, Tensor | None]()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(step())
        scaler.unscale_(optimizer)
        gradients = {name: None if p.grad is None else whole(p.grad).clone() for name, p in model.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
    return Trained(losses, gradients, {name: whole(p.detach()).clone() for name, p in model.named_parameters()})


def scaler_for(low: torch.dtype) -> torch.amp.GradScaler:
    """Gradients below 6e-5 round coarsely in float16, and FSDP2's are twice ours until ranks take their mean."""
    return torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=low == torch.float16)


def ours(parallel: ParallelModule, batch: Any, low: torch.dtype) -> Trained:
    parallel.scaler = scaler = scaler_for(low)
    found = trained(parallel, lambda: float(parallel.forward_backward(**batch)), scaler)
    assert {value.dtype for value in parallel.state_dict().values()} == {torch.float32}
    return found


def fsdp(reduce_dtype: torch.dtype, param_dtype: torch.dtype, *, wide_norms: bool) -> Trained:
    """`fully_shard` of every block and of the model; of norms in float32, and what lies beside them."""
    warnings.simplefilter("ignore")  # that what a wrapped module gives is a view, which is not written to here
    (model, batch), mesh, scaler = example(), init_device_mesh("cpu", (2,)), scaler_for(param_dtype)
    low = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    wide = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduce_dtype)
    rank = dist.get_rank()
    for block in model.get_submodule("blocks").children():
        for module in block.modules() if wide_norms else ():
            if isinstance(module, (nn.LayerNorm, nn.Linear)):
                fully_shard(module, mesh=mesh, mp_policy=wide if isinstance(module, nn.LayerNorm) else low)
        fully_shard(block, mesh=mesh, mp_policy=low)
    fully_shard(model, mesh=mesh, mp_policy=low)

    def step() -> float:
        loss = model(batch["ids"].chunk(2)[rank], batch["more"])
        scaler.scale(loss).backward()
        mean = loss.detach() / 2
        dist.all_reduce(mean)
        return float(mean)

    return trained(model, step, scaler)


PRECISIONS: list[tuple[Precision | PrecisionByModule, torch.dtype, list[ReduceDtype | None]]] = [
    ("bf16_params", torch.bfloat16, [None, "bfloat16"]),
    (NORMS, torch.bfloat16, [None, "bfloat16"]),
    ("fp16_params", torch.float16, [None]),
]
"""With what parameters are used in, and what gradients are sent in (None: float32)."""


@pytest.mark.parametrize(("precision", "low", "sent"), some(PRECISIONS, 1))
def test_training_is_that_of_fsdp2_bit_by_bit(
    precision: Precision | PrecisionByModule, low: torch.dtype, sent: list[ReduceDtype | None]
) -> None:
    """Losses, gradients and updated masters; what gradients are sent in makes a difference."""
    found, wide_norms = case(precision), precision == NORMS
    graph = laid_out(found)
    used = {p.used_dtype for p in find_parameters(graph).by_leaf.values() if p.slices}
    assert used == {dtype_name(low), *(("float32",) if wide_norms else ())}
    runs = list[Trained]()
    for name in sent:
        for mine in found.on_ranks(graph, lambda p: ours(p, found.batch, low), Execution(reduce_dtype=name)):
            runs.append(mine)
        for theirs in run_ranks(partial(fsdp, getattr(torch, name or "float32"), low, wide_norms=wide_norms), 2, 60):
            assert runs[-1].losses == theirs.losses
            assert runs[-1].off(theirs) == set()
    if len(sent) > 1:
        assert runs[0].off(runs[-1]) > {"scale", "blocks.0.net.0.weight"}


def test_rounds_no_more_than_one_process_does() -> None:
    """Data parallel and tensor parallel, in one and two microbatches, with all made again."""
    found = list(cells("gpt", ("data", "tensor"), [("full", None)], "bf16_params"))
    assert len(found) == 4
    assert all(cell.good for cell in found), [cell for cell in found if not cell.good]


@each("role, zero", [("data", "zero-3"), *(("zero", zero) for zero in ZEROS), ("tensor", "zero-3")])
def test_what_is_sent_and_kept_is_predicted(role: str, zero: Zero) -> None:
    """By a dry run, which compares dtypes, bytes and memory; 16 bits are gathered where there are slices."""
    found = case()
    graph = laid_out(found, role, zero, microbatches=2)
    assert report(graph).findings == []
    parameters = list(find_parameters(graph).by_leaf.values())
    assert {p.dtype for p in parameters} == {"float32"}
    assert all(p.gradient_bytes == 4 * p.num_elements for p in parameters)
    if role == "zero":
        assert {p.used_dtype for p in parameters} == {"bfloat16"}
        assert all(p.whole_bytes == 2 * p.used_bytes for p in parameters)


def test_capture_is_compared_with_a_step_of_the_same_precision() -> None:
    """Under autocast beside, the product that the model widens would run in 16 bits."""
    found = case()
    check = plan(
        found.model, Cluster.local(2), kwargs=found.batch, precision="bf16_params", check_capture="first",
        mesh={"x": 2}, roles=["zero"],
    ).capture_check  # fmt: skip
    assert str(check).startswith("equal to an eager step: losses to 0.0e+00, gradients to 0.0e+00")
