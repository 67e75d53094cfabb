"""What a `ParallelModule` promises to its user: names, state, gradients, optimizers, clipping, errors."""

from __future__ import annotations

import copy
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwright.lowering.module import ParallelModule, lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.analysis import buffers_in_backward
from shardwright.pcg.errors import BatchError, DistributedError, PlanError, ShardwrightError
from shardwright.pcg.layout import Layouts, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from tests.each import some
from tests.lowering.runs import Case, assert_same_step, assert_trains_as_serial, hang, parallel_step, serial_step, whole
from tests.lowering.test_training import DATA, FUSED, GRID, MEGATRON, TWO, VOCAB_SPLIT, ZERO3, Convolutions, Net, both

TENSOR = MEGATRON | FUSED | VOCAB_SPLIT


@pytest.fixture(scope="module")
def net() -> Case:
    torch.manual_seed(0)
    return Case(Net().double(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad).clone() for name, p in module.named_parameters() if p.grad is not None}


def test_models_of_different_seeds_become_rank_0s(net: Case) -> None:
    graph = net.graph(TWO, TENSOR)

    def body() -> None:
        torch.manual_seed(dist.get_rank())
        model = Net().double()
        parallel = lower(graph, model, timeout_s=30)
        torch.manual_seed(0)
        expected = Net().double()
        for name, value in expected.state_dict().items():
            assert torch.equal(whole(parallel.state_dict()[name]), value), name
            assert torch.equal(model.state_dict()[name], value), name

    run_ranks(body, 2, 30)


def test_tensors_that_are_no_parameters_become_rank_0s_too() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(4, 4), torch.randn(4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) + self.shift).square().mean()

    def body() -> list[float]:
        torch.manual_seed(dist.get_rank())
        found = Case(Shifted(), {"x": torch.ones(8, 4)})
        parallel = found.lower(found.graph(TWO, {}))
        return [parallel.forward_backward(**found.batch).item(), Shifted.forward(found.model, **found.batch).item()]  # type: ignore[arg-type]

    (one, eager), (other, also_eager) = run_ranks(body, 2, 30)
    assert one == other == pytest.approx(eager, rel=1e-6)
    assert eager == pytest.approx(also_eager, rel=1e-6)


def test_names_shapes_and_ties_are_the_models(net: Case) -> None:
    def body(parallel: ParallelModule) -> dict[str, tuple[int, ...]]:
        state = parallel.state_dict()
        assert state["head.weight"] is not None
        assert parallel.get_parameter("head.weight") is parallel.get_parameter("tok.weight")
        assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in net.model.named_parameters()]
        assert list(state) == list(net.model.state_dict())
        assert all(isinstance(p, DTensor) for p in parallel.parameters())
        for name, value in net.model.state_dict().items():
            assert torch.equal(whole(state[name]), value), name
        return {name: tuple(p.to_local().shape) for name, p in parallel.named_parameters()}  # pyright: ignore[reportAttributeAccessIssue]

    shapes = net.on_ranks(net.graph(TWO, TENSOR), body)[1]
    assert shapes["tok.weight"] == (10, 16)
    assert shapes["qkv.weight"] == (24, 16)
    assert shapes["down.weight"] == (16, 12)


def test_dtensors_hold_the_same_slices_as_ours(net: Case) -> None:
    """`full_tensor`, DTensor's own gather, restores the parameter, so its placements mean what our layouts mean."""
    cells: list[Layouts] = [
        (S(0), S(0)), (S(0), S(0, 2)), (S(0, 2), S(0)), (S(0, 3), R), (R, S(1, 2)), (S(1), S(0, 6)), (S(0, 4), S(0, 2)),
    ]  # fmt: skip

    def body(parallel: ParallelModule) -> None:
        held = parallel.get_parameter("qkv.weight")
        assert torch.equal(whole(held), net.model.get_parameter("qkv.weight"))
        parallel.forward_backward(**net.batch)
        assert isinstance(held.grad, DTensor)
        assert held.grad.placements == held.placements  # pyright: ignore[reportAttributeAccessIssue]

    graphs = [net.graph(GRID, {"qkv.weight": layouts}, data_axes=(0, 1)) for layouts in cells]
    net.on_ranks_of([(graph, DEFAULT) for graph in graphs], body)


def test_gradients_accumulate_and_are_cleared_as_in_torch(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        def step() -> dict[str, Tensor]:
            torch.manual_seed(1)
            parallel.forward_backward(**net.batch)
            return gradients(parallel)

        def same(found: dict[str, Tensor], factor: float) -> None:
            for name, value in once.items():
                torch.testing.assert_close(found[name], factor * value)

        once = step()
        held = {name: p.grad for name, p in parallel.named_parameters()}
        same(step(), 2)
        assert all(parallel.get_parameter(name).grad is grad for name, grad in held.items())
        same(step(), 3)
        parallel.zero_grad(set_to_none=False)
        same(step(), 1)
        parallel.zero_grad()
        assert not gradients(parallel)
        same(step(), 1)
        parallel.zero_grad()
        torch.manual_seed(1)
        loss = parallel(**net.batch)
        parallel.zero_grad()
        loss.backward()
        same(gradients(parallel), 1)
        torch.manual_seed(1)
        (2 * parallel(**net.batch)).backward()
        same(gradients(parallel), 3)

    graphs = [net.graph(TWO, storage, data_axes=(0,)) for storage in (DATA, DATA | ZERO3, TENSOR)]
    net.on_ranks_of([(graph, DEFAULT) for graph in graphs], body)


def test_two_forwards_and_one_backward(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        torch.manual_seed(1)
        for _ in range(2):
            parallel.forward_backward(**net.batch)
        expected = gradients(parallel)
        parallel.zero_grad()
        torch.manual_seed(1)
        (parallel(**net.batch) + parallel(**net.batch)).backward()
        torch.testing.assert_close(gradients(parallel), expected)
        parallel.zero_grad()
        torch.manual_seed(1)
        first, second = parallel(**net.batch), parallel(**net.batch)
        second.backward()
        first.backward()
        torch.testing.assert_close(gradients(parallel), expected)

    graphs = [net.graph(GRID, both(storage, DATA), data_axes=(0, 1)) for storage in (DATA, DATA | ZERO3)]
    net.on_ranks_of([(graph, DEFAULT) for graph in graphs], body)


def test_evaluation_without_gradients_and_a_forward_without_backward(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        torch.manual_seed(1)
        expected = parallel.forward_backward(**net.batch)
        kept = gradients(parallel)
        parallel.zero_grad()
        torch.manual_seed(1)
        with torch.no_grad():
            assert torch.equal(parallel(**net.batch), expected)
        parallel(**net.batch)
        torch.manual_seed(1)
        parallel.forward_backward(**net.batch)
        torch.testing.assert_close(gradients(parallel), kept)

    net.on_ranks(net.graph(TWO, DATA | ZERO3, data_axes=(0,)), body)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "fused-adamw": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


def test_training_with_clipping_equals_the_single_process(net: Case) -> None:
    def train(make: Any, module: Any, step: Any, clip: Any) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        torch.manual_seed(2)
        optimizer, losses, norms = make(module.parameters()), [], []
        for _ in range(4):
            optimizer.zero_grad()
            losses.append(step())
            norms.append(whole(clip()))
            optimizer.step()
        return losses, norms, {name: whole(p).detach() for name, p in module.named_parameters()}

    def alone(make: Any) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        model = copy.deepcopy(net.model)

        def serial_step() -> Tensor:
            loss = model(**net.batch)
            loss.backward()
            return loss.detach()

        return train(make, model, serial_step, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))

    expected = {name: alone(make) for name, make in OPTIMIZERS.items()}

    def body(parallel: ParallelModule) -> None:
        def ours() -> Tensor:
            return parallel.clip_grad_norm_(0.5)

        def torchs() -> Tensor:
            return nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)

        start = {name: whole(p).clone() for name, p in parallel.named_parameters()}
        for (name, make), clip in product(OPTIMIZERS.items(), (ours, torchs)):
            parallel.load_state_dict(start | {"head.weight": start["tok.weight"]})
            parallel.zero_grad()
            found = train(make, parallel, lambda: parallel.forward_backward(**net.batch), clip)
            wrong = f"{name}, {clip.__name__}: "
            torch.testing.assert_close(
                found, expected[name], check_dtype=False, rtol=1e-6, atol=1e-7, msg=lambda m, wrong=wrong: wrong + m
            )

    net.on_ranks(net.graph(GRID, both(DATA | {"up.bias": (S(0),)}, TENSOR), data_axes=(0,)), body)


def test_clip_norms(net: Case) -> None:
    def clipped(parallel: ParallelModule, order: float) -> float:
        parallel.zero_grad()
        assert parallel.clip_grad_norm_(1.0) == 0
        torch.manual_seed(1)
        parallel.forward_backward(**net.batch)
        flat = torch.cat([g.flatten() for g in gradients(parallel).values()])
        norm = parallel.clip_grad_norm_(1e-3, order)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(flat, order), rtol=1e-12, atol=0)
        flat = torch.cat([g.flatten() for g in gradients(parallel).values()])
        for p in parallel.parameters():
            if p.grad is not None:
                p.grad.fill_(float("inf"))
        assert parallel.clip_grad_norm_(1.0, order).isposinf()  # also where several ranks hold copies
        return float(torch.linalg.vector_norm(flat, order))

    graph = net.graph(GRID, both(DATA, TENSOR), data_axes=(0,))
    norms = net.on_ranks(graph, lambda parallel: [clipped(parallel, order) for order in (1.0, 2.0, float("inf"))])
    assert norms == [pytest.approx([1e-3] * 3, rel=1e-2)] * 4


LAYOUTS = {
    "tensor": (TWO, TENSOR),
    "nested": (GRID, both({"up.weight": (S(0, 2),), "down.weight": (S(0),)}, MEGATRON | VOCAB_SPLIT)),
    "blocked": (GRID, both({"qkv.weight": (S(0, 4),), "down.weight": (S(1, 2),)}, {"qkv.weight": (S(0, 2),)})),
    "zero3": (Mesh.of(dp=4), ZERO3),
}


@pytest.mark.parametrize(
    "names", some([("tensor", "zero3"), ("zero3", "blocked"), ("blocked", "nested"), ("nested", "tensor")], 1)
)
def test_checkpoints_move_between_layouts(net: Case, tmp_path: Path, names: tuple[str, str]) -> None:
    """A single process's state is loaded, trained on, saved with its optimizer, and loaded under another layout."""
    torch.manual_seed(5)
    other = Net().double().state_dict()
    expected = copy.deepcopy(net.model)
    expected.load_state_dict(other)
    optimizer = torch.optim.AdamW(expected.parameters(), fused=True)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(1)
        module(**net.batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(parallel: ParallelModule) -> None:
        parallel.load_state_dict(other)
        for name, value in parallel.state_dict().items():
            assert torch.equal(whole(value), other[name]), name
        optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)
        step(parallel, optimizer)
        state = get_optimizer_state_dict(parallel, optimizer)
        save_checkpoint({"model": parallel.state_dict(), "optimizer": state}, checkpoint_id=tmp_path)

    def load(parallel: ParallelModule) -> None:
        optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)
        step(parallel, optimizer)  # whatever it has made of them, the checkpoint replaces it
        state = {"model": parallel.state_dict(), "optimizer": get_optimizer_state_dict(parallel, optimizer)}
        load_checkpoint(state, checkpoint_id=tmp_path)
        parallel.load_state_dict(state["model"])
        set_optimizer_state_dict(parallel, optimizer, state["optimizer"])
        step(parallel, optimizer)
        for name, value in parallel.state_dict().items():
            torch.testing.assert_close(whole(value), after[name], msg=name)

    for _ in range(2):
        step(expected, optimizer)
    after = expected.state_dict()
    (mesh, storage), (other_mesh, other_storage) = (LAYOUTS[name] for name in names)
    net.on_ranks(net.graph(mesh, storage), save)
    net.on_ranks(net.graph(other_mesh, other_storage), load)


def test_load_state_dict_errors(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        state = dict(net.model.state_dict())
        with pytest.raises(ShardwrightError, match="drop assign"):
            parallel.load_state_dict(state, assign=True)
        with pytest.raises(PlanError, match=r"up.bias: the state has shape \[7\], the model \[24\]"):
            parallel.load_state_dict(state | {"up.bias": torch.zeros(7)})
        state["extra"] = state.pop("up.bias")
        with pytest.raises(ShardwrightError, match=r"missing keys \['up.bias'\], unexpected keys \['extra'\]"):
            parallel.load_state_dict(state)
        assert parallel.load_state_dict(state, strict=False).missing_keys == ["up.bias"]

    net.on_ranks(net.graph(TWO, TENSOR), body)


def test_buffers_are_written_back_and_frozen_parameters_stay() -> None:
    torch.manual_seed(0)
    model = Convolutions()
    model.first.weight.requires_grad_(False)
    case = Case(model, {"images": torch.randn(8, 3, 9, 9), "labels": torch.randint(5, (8,))})
    reference = copy.deepcopy(model)
    for _ in range(3):
        reference(**case.batch)

    def body(parallel: ParallelModule) -> None:
        for _ in range(3):
            parallel.forward_backward(**case.batch)
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(parallel.get_buffer(name), buffer)
        assert parallel.get_parameter("first.weight").grad is None
        assert not parallel.get_parameter("first.weight").requires_grad

    case.on_ranks(case.graph(TWO, {"images": (S(0),)}, data_axes=(0,)), body)


class Averaging(nn.Module):
    """Blocks that scale by an average, and only then update it."""

    class Block(nn.Module):
        average: Tensor
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("average", torch.rand(4))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x * self.weight) * self.average.clone()
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.count.add_(1)
            return y * self.weight

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([self.Block(), self.Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.pow(2).sum()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backward_reads_buffers_as_forward_did(recompute: Any) -> None:
    """They are written between the two: what backward keeps or makes again is of the values before."""
    torch.manual_seed(0)
    case = Case(Averaging().double(), {"x": torch.randn(8, 4, dtype=torch.float64)})
    graph = case.graph(TWO, {"x": (S(0),)})
    assert buffers_in_backward(graph) == {"h.0.average", "h.1.average"}
    execution = Execution(recompute=recompute)
    for step in case.on_ranks(graph, lambda parallel: parallel_step(parallel, case.batch), execution):
        assert_same_step(step, serial_step(case), 1e-11)


def test_a_rank_may_pass_its_own_shard(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        assert parallel.input_layouts == {"ids": (S(0),), "labels": (S(0),)}
        torch.manual_seed(1)
        expected = parallel(**net.batch)
        torch.manual_seed(1)
        part = {key: value.chunk(2)[dist.get_rank()] for key, value in net.batch.items()}
        assert torch.equal(parallel(**part), expected)

    net.on_ranks(net.graph(TWO, DATA, data_axes=(0,)), body)


def test_one_tensor_under_two_names_is_two_inputs(net: Case) -> None:
    """Labels are often the ids themselves when a model is captured, and something else later."""
    ids = net.batch["ids"]
    case = Case(net.model, {"ids": ids, "labels": ids})
    assert_trains_as_serial(Case(net.model, dict(net.batch)), case.graph(TWO, {}))


def test_batch_errors(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        ids, labels = net.batch["ids"], net.batch["labels"]
        for batch, message in (
            ({"ids": ids}, r"'labels' is missing; pass exactly the tensors \['ids', 'labels'\]"),
            (
                {"ids": ids, "labels": labels, "mask": ids},
                "'mask' was not in the batch that the model was captured with",
            ),
            ({"ids": ids, "labels": labels.int()}, r"'labels' has dtype torch.int32, expected torch.int64; cast it"),
            ({"ids": ids, "labels": 3}, r"'labels' is a int, expected a plain tensor int64\[8, 12\]$"),
            ({"ids": distribute_tensor(ids, parallel.ranks.device_mesh), "labels": labels}, "'ids' is a DTensor, exp"),
            (
                {"ids": ids[:6], "labels": labels},
                r"\[6, 12\], expected the global shape \[8, 12\], or this rank's shard \[4, 12\] \(dp: S\(0\)\)",
            ),
        ):
            with pytest.raises(BatchError, match=message):
                parallel.forward_backward(**batch)

    net.on_ranks(net.graph(TWO, DATA, data_axes=(0,)), body)


def test_what_cannot_be_done_to_a_lowered_module(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        assert parallel.train() is parallel
        with pytest.raises(ShardwrightError, match=r"captured in train mode.*call model.eval\(\) and compile again"):
            parallel.eval()
        with pytest.raises(ShardwrightError, match="before compiling it"):
            parallel.float()

    net.on_ranks(net.graph(TWO, {}), body)


def test_a_plan_of_another_model_is_refused(net: Case) -> None:
    def body(model: nn.Module) -> None:
        lower(net.graph(Mesh.of(dp=1), {}), model, timeout_s=30)

    with pytest.raises(DistributedError, match=r"the plan has a parameter or buffer 'tok\.weight' that the model"):
        run_ranks(lambda: body(Convolutions()), 1, 30)
    other = Net()
    other.up = nn.Linear(16, 28)
    with pytest.raises(DistributedError, match=r"up.weight: the plan has shape \[24, 16\], the model \[28, 16\]"):
        run_ranks(lambda: body(other), 1, 30)


@pytest.mark.parametrize("make", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_a_model_without_data_cannot_be_trained(net: Case, make: Any) -> None:
    with make():
        hollow = Net()
    graph = net.graph(Mesh.of(dp=1), {})
    with pytest.raises(DistributedError, match=r"tok\.weight: the model has no data.*build it with real tensors"):
        run_ranks(lambda: lower(graph, hollow, timeout_s=30), 1, 30)


@pytest.mark.parametrize("storage", [DATA, TENSOR], ids=["data", "tensor"])
def test_when_a_rank_dies_the_others_end_with_an_error(net: Case, storage: dict[str, Layouts]) -> None:
    def body(parallel: ParallelModule) -> None:
        parallel.forward_backward(**net.batch)
        if dist.get_rank() == 1:
            os._exit(1)
        for _ in range(1000):
            parallel.forward_backward(**net.batch)

    start = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        net.on_ranks(net.graph(TWO, storage, data_axes=(0,)), body, grace_s=20)
    assert "rank 1 of 2 failed:\nthe process died" in str(caught.value)
    assert "; rank 1 does not answer: killed, stopped or gone; start all ranks anew" in str(caught.value)
    assert time.monotonic() - start < 25


def test_when_a_rank_hangs_the_others_time_out(net: Case, tmp_path: Path) -> None:
    graph, done = net.graph(TWO, TENSOR), tmp_path / "done"

    def body() -> float:
        parallel = lower(graph, net.model, timeout_s=1.0)
        parallel.forward_backward(**net.batch)
        if dist.get_rank() == 1:
            hang(done, 4)
            return 0.0
        start = time.monotonic()
        with pytest.raises(DistributedError, match=r"(?s)rank 0 of 2: a coll.*; rank 1 is at \S+runs.py.*; start"):
            parallel.forward_backward(**net.batch)
        done.touch()
        return time.monotonic() - start

    assert run_ranks(body, 2, 30)[0] < 3
