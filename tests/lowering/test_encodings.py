"""Moves of parameters that are sent encoded: a step comes as near to the exact one as its plan says."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.encodings import decode, encode
from shardwright.pcg.encodings import ENCODINGS, Encoding
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.buckets import LARGE_BYTES
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.parameters import find_parameters
from tests.each import each, some
from tests.lowering.runs import Case, Step, parallel_step, serial_step
from tests.lowering.test_reduce_dtype import planned
from tests.lowering.trial.test_dryrun import report

WIDTH, ROWS = 96, 16


class Net(nn.Module):
    """Small parameters that share buckets, and one that is summed alone; the gradients of layers are far apart."""

    def __init__(self, wide: int = LARGE_BYTES // 8 // WIDTH + 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide = nn.Linear(WIDTH, wide + -wide % 4)

    def forward(self, x: Tensor) -> Tensor:
        for scale, layer in zip((1.0, 1e-3, 30.0), self.layers, strict=True):
            x = x + scale * layer(x).tanh()
        return self.wide(x).square().sum() / ROWS


@cache
def case(dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(2)
    return Case(Net().to(dtype), {"x": torch.randn(ROWS, WIDTH, dtype=dtype)})


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


@cache
def exact(dtype: torch.dtype = torch.float64) -> Step:
    return serial_step(case(dtype))


@cache
def most(parts: int) -> dict[str, float]:
    """The largest magnitude of a parameter's gradient by each part of the batch, added up."""
    found = dict.fromkeys((name for name, _ in case().model.named_parameters()), 0.0)
    for rows in case().batch["x"].chunk(parts):
        step = serial_step(Case(case().model, {"x": rows}))
        for name, gradient in step.gradients.items():
            found[name] += whole(gradient).abs().max().item()
    return found


LAYOUTS: list[tuple[str, Zero, Mesh]] = [
    ("data", "zero-3", Mesh.of(x=2)), ("data", "zero-3", Mesh.of(mb=2, x=4)),
    ("zero", "zero-3", Mesh.of(x=4)), ("zero", "zero-1", Mesh.of(mb=2, x=2)), ("zero", "zero-2", Mesh.of(mb=2, x=2)),
    ("zero", "kept", Mesh.of(mb=2, x=2)), ("zero", "zero-3", Mesh.of(dp=2, x=2)),
]  # fmt: skip


@each("role, zero, mesh", some([LAYOUTS[1], LAYOUTS[6], *LAYOUTS[3:6], LAYOUTS[0], LAYOUTS[2]], 3))
def test_gradients_are_within_the_bound_of_the_plan(role: str, zero: Zero, mesh: Mesh) -> None:
    """On all ranks the same, and not exact."""
    graph = planned(case(), role, mesh, zero)
    for name in ("int8", "int4"):
        run = Execution(encodings={"gradients": name})  # pyright: ignore[reportArgumentType]
        steps = case().on_ranks(graph, lambda p: parallel_step(p, case().batch), run)
        largest = most(mesh.num_devices * mesh.num_microbatches)
        for leaf, p in find_parameters(graph, run).by_leaf.items():
            target = str(graph.by_name[leaf].attr("target"))
            found, expected = whole(steps[0].gradients[target]), whole(exact().gradients[target])
            off = (found - expected).abs().max().item()
            assert 0.01 * p.summed_bound * largest[target] < off <= p.summed_bound * largest[target], (name, target)
            assert all(torch.equal(found, whole(step.gradients[target])) for step in steps)
        assert all(step.loss == exact().loss for step in steps)


def sent(values: Tensor, encoding: Encoding) -> Tensor:
    found = torch.empty_like(values)
    decode(encode(values, encoding), encoding, found)
    return found


def with_weights_as_sent(graph: Graph, encoding: Encoding) -> Case:
    """The model with the weights that readers see: the slices of each, encoded by itself."""
    own = Case(case().model, case().batch, case().captured)
    model = Net().double()
    for (name, weight), (_, stored) in zip(model.named_parameters(), own.model.named_parameters(), strict=True):
        leaf = next(n.name for n in graph.leaves("parameter") if n.attr("target") == name)
        slices = find_parameters(graph).by_leaf[leaf].slices
        assert slices is not None
        size = graph.mesh.sizes[graph.mesh.index(slices.axis)]
        parts = stored.detach().chunk(size, slices.dim)
        read = [sent(part.reshape(1, -1), encoding).view(part.shape) for part in parts]
        weight.data = torch.cat(read, slices.dim)
    return Case(model, case().batch)


@each("zero, mesh", some([(zero, mesh) for role, zero, mesh in LAYOUTS if role == "zero"], 2))
def test_a_step_is_that_of_the_weights_as_they_arrive(zero: Zero, mesh: Mesh) -> None:
    """Forward and backward read the same ones, however often they are gathered; what is stored stays as it is."""
    graph = planned(case(), "zero", mesh, zero)
    for name in ("int8", "fp8"):
        expected = serial_step(with_weights_as_sent(graph, ENCODINGS[name]))
        run = Execution(encodings={"weights": name})  # pyright: ignore[reportArgumentType]
        for step in case().on_ranks(graph, lambda p: parallel_step(p, case().batch), run):
            torch.testing.assert_close(step.loss, expected.loss)
            torch.testing.assert_close(step.gradients, expected.gradients)
        assert abs(expected.loss - exact().loss) > 1e-9 * exact().loss


def test_a_nan_is_in_one_step_alone() -> None:
    """It shows in every gradient that has it, and leaves nothing behind in the memory of buckets."""

    def finite(parallel: ParallelModule) -> list[list[bool]]:
        batch = case().batch["x"]
        wrong = batch.clone()
        wrong[3, 5] = float("nan")
        found = list[list[bool]]()
        for given in (wrong, batch):
            step = parallel_step(parallel, {"x": given})
            found.append([bool(torch.isfinite(whole(gradient)).all()) for gradient in step.gradients.values()])
            parallel.zero_grad(set_to_none=True)
        return found

    graph = planned(case(), "data", Mesh.of(x=2))
    run = Execution(encodings={"gradients": "int8"})  # pyright: ignore[reportArgumentType]
    for bad, good in case().on_ranks(graph, finite, run):
        assert not any(bad)
        assert all(good)


@each("role, zero, mesh", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[-1]])
def test_what_is_sent_is_predicted(role: str, zero: Zero, mesh: Mesh) -> None:
    """By a dry run: every collective with its bytes, and memory."""
    graph = planned(case(torch.float32), role, mesh, zero)
    run = Execution(encodings={"weights": "int8", "gradients": "int4"})  # pyright: ignore[reportArgumentType]
    found, own = report(graph, execution=run), report(graph)
    assert found.findings == [], str(found)
    kinds = {message.collective for message in found.run.messages if message.kind in ("weights", "gradients")}
    assert kinds == {"all_to_all", "all_gather"}
    assert found.plan.prediction.communication_bytes < 0.32 * own.plan.prediction.communication_bytes
