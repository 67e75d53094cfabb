"""Moves of parameters that are sent encoded: a step comes as near to the exact one as its plan says."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bench.encodings import batches
from bench.gpt import Size, build
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.encodings import decode, encode
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.encodings import ENCODINGS, Encoding
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.buckets import LARGE_BYTES
from shardwright.pcg.step.execution import Execution, ReduceDtype
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.parameters import find_parameters
from shardwright.pcg.step.precisions import Precision
from tests.each import each, some
from tests.lowering.pipelines import evenly, in_stages, of_one_stage
from tests.lowering.runs import Case, Step, parallel_step, serial_step
from tests.lowering.test_reduce_dtype import planned
from tests.lowering.trial.test_dryrun import report

WIDTH, ROWS = 96, 16


class Net(nn.Module):
    """Small parameters that share buckets, and one that is summed alone; the gradients of layers are far apart."""

    def __init__(self, wide: int = LARGE_BYTES // 8 // WIDTH + 9) -> None:
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


def most(found_in: Case, parts: int) -> dict[str, float]:
    """The largest magnitude of a parameter's gradient by each part of the batch, added up."""
    found = dict.fromkeys((name for name, _ in found_in.model.named_parameters()), 0.0)
    for rows in found_in.batch["x"].chunk(parts):
        step = serial_step(Case(found_in.model, {"x": rows}))
        for name, gradient in step.gradients.items():
            found[name] += whole(gradient).abs().max().item()
    return found


LAYOUTS: list[tuple[str, Zero, Mesh]] = [
    ("data", "zero-3", Mesh.of(x=2)), ("data", "zero-3", Mesh.of(mb=2, x=4)),
    ("zero", "zero-3", Mesh.of(x=4)), ("zero", "zero-1", Mesh.of(mb=2, x=2)), ("zero", "zero-2", Mesh.of(mb=2, x=2)),
    ("zero", "kept", Mesh.of(mb=2, x=2)), ("zero", "zero-3", Mesh.of(dp=2, x=2)),
]  # fmt: skip


@each("role, zero, mesh", some([LAYOUTS[1], LAYOUTS[6], *LAYOUTS[3:6], LAYOUTS[0], LAYOUTS[2]], 2))
def test_gradients_are_within_the_bound_of_the_plan(role: str, zero: Zero, mesh: Mesh) -> None:
    """On all ranks the same, and not exact."""
    graph = planned(case(), role, mesh, zero)
    for name in ("int8", "int4"):
        run = Execution(encodings={"gradients": name})  # pyright: ignore[reportArgumentType]
        steps = case().on_ranks(graph, lambda p: parallel_step(p, case().batch), run)
        largest = most(case(), mesh.num_devices * mesh.num_microbatches)
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


@each("zero, mesh", some([(zero, mesh) for role, zero, mesh in LAYOUTS if role == "zero"], 1))
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


@each("role, zero, mesh", [("data", "zero-3", Mesh.of(x=4)), LAYOUTS[2], LAYOUTS[-1]])
def test_what_is_sent_is_predicted(role: str, zero: Zero, mesh: Mesh) -> None:
    """By a dry run: every collective with its bytes, and memory."""
    graph = planned(case(torch.float32), role, mesh, zero)
    run = Execution(encodings={"weights": "int8", "gradients": "int4"})  # pyright: ignore[reportArgumentType]
    found, own = report(graph, execution=run), report(graph)
    assert found.findings == [], str(found)
    kinds = {message.collective for message in found.run.messages if message.kind in ("weights", "gradients")}
    assert kinds == {"all_to_all", "all_gather"}
    assert found.plan.prediction.communication_bytes < 0.32 * own.plan.prediction.communication_bytes


class Chain(nn.Module):
    """Blocks for stages; the loss is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().sum() / ROWS


def test_stages_send_encoded() -> None:
    """Gradients of each stage are within the bound, whatever the order of its microbatches, in one part or in two."""
    torch.manual_seed(4)
    found = Case(Chain().double(), {"x": torch.randn(ROWS, 48, dtype=torch.float64)})
    expected, largest = serial_step(found), most(found, 8)
    sent: dict[str, Any] = {"encodings": {"gradients": "int8"}}
    data, zero = (of_one_stage(found, (role,), 4, "zero-3") for role in ("data", "zero"))
    plans = [(data, evenly(data, 2, "zero-bubble", **sent)), (zero, evenly(zero, 2, **sent))]
    for (graph, run), steps in zip(plans, in_stages(found, plans), strict=True):
        bounds = {p.leaf: p.summed_bound for p in find_parameters(graph, run).by_leaf.values()}
        for loss, gradients in steps:
            torch.testing.assert_close(loss, expected.loss)
            own = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            assert len(own) == len(gradients) == 8
            for leaf in graph.leaves("parameter"):
                if (name := str(leaf.attr("target"))) in own:
                    off = (own[name] - whole(expected.gradients[name])).abs().max().item()
                    assert 0 < off <= bounds[leaf.name] * largest[name], name


@each("precision, reduce_dtype", [("amp_bf16", None), (None, "bfloat16")])
def test_in_16_bits(precision: Precision | None, reduce_dtype: ReduceDtype | None) -> None:
    """Codes of weights in 16 bits, and gradients that are sums in 16 bits; both are near the step without encodings."""
    torch.manual_seed(5)
    model, batch = Chain(), {"x": torch.randn(ROWS, 48)}
    found = Case(model, batch, capture(model, batch, precision=precision))
    graph = planned(found, "zero", Mesh.of(x=2))
    runs = [
        Execution.of(reduce_dtype=reduce_dtype, encodings=own)
        for own in ({}, {"weights": "int8", "gradients": "int8"})
    ]  # fmt: skip
    exact_steps, steps = found.on_ranks_of([(graph, run) for run in runs], lambda p: parallel_step(p, batch))
    assert steps[0].loss != exact_steps[0].loss
    torch.testing.assert_close(steps[0].loss, exact_steps[0].loss, rtol=2e-2, atol=0)
    for name, gradient in steps[0].gradients.items():
        near = whole(exact_steps[0].gradients[name])
        assert 0 < (whole(gradient) - near).norm() < 0.1 * near.norm(), name
        assert whole(gradient).dtype == torch.float32


def test_training_stays_near() -> None:
    """Of a small GPT: its losses on new batches are those of exact moves, but for a small part of what it learns."""
    size = Size(batch=8, seq=16, vocab=32, hidden=64, heads=2, layers=1)
    data = batches(size, 30)
    found = Case(build(size), data[0])

    def losses(parallel: ParallelModule) -> list[float]:
        optimizer, told = torch.optim.AdamW(parallel.parameters(), lr=3e-3), list[float]()
        for batch in data:
            told.append(parallel.forward_backward(**batch).item())
            optimizer.step()
            optimizer.zero_grad()
        return told

    graph = planned(found, "zero", Mesh.of(x=2))
    runs = [
        Execution.of(encodings=own)
        for own in ({}, {"weights": "int8", "gradients": "int4"}, {"weights": "fp8", "gradients": "int8"})
    ]  # fmt: skip
    exact_losses, *others = (ranks[0] for ranks in found.on_ranks_of([(graph, run) for run in runs], losses))
    learned = exact_losses[0] - sum(exact_losses[-5:]) / 5
    assert learned > 0.5
    for own in others:
        assert own != exact_losses
        assert max(abs(a - b) for a, b in zip(own, exact_losses, strict=True)) < 0.1 * learned
