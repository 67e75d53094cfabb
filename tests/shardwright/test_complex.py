"""Complex weights by way of the API: plans, checkpoints, files, models without memory; what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardwright as sw
from shardwright.lowering.private import unwrap
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.store.files import read_part
from shardwright.lowering.store.opening import open_files
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError, CheckpointError, ForeignError, PlanError
from shardwright.pcg.foreign import calls
from tests.complexes import Batch, Turned, operator, rotating, turning
from tests.lowering.runs import whole

ZERO: dict[str, Any] = {"mesh": {"x": 2}, "roles": "zero"}
OTHERS: dict[str, dict[str, Any]] = {
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
    "stages": {"stages": 2, "microbatches": 2},
}


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 0.05, weight_decay=0.1)


def step(module: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    if hasattr(module, "forward_backward"):
        module.forward_backward(**batch)
    else:
        module(**batch).backward()
    optimizer.step()


def test_a_run_goes_on_under_other_plans(tmp_path: Path) -> None:
    model, batch = operator()
    alone = copy.deepcopy(model)
    optimizer = optimizer_of(alone)
    for _ in range(3):
        step(alone, optimizer, batch)

    def run() -> dict[str, dict[str, Tensor]]:
        first = sw.compile(copy.deepcopy(model), sw.Cluster.local(2), kwargs=batch, **ZERO)
        optimizer = optimizer_of(first)
        for _ in range(2):
            step(first, optimizer, batch)
        sw.save(tmp_path, first, optimizer, step=2)
        states = dict[str, dict[str, Tensor]]()
        for name, options in {"zero": ZERO, **OTHERS}.items():
            parallel = sw.compile(copy.deepcopy(model), sw.Cluster.local(2), kwargs=batch, **options)
            optimizer = optimizer_of(parallel)
            assert sw.load(tmp_path, parallel, optimizer) == 2
            step(parallel, optimizer, batch)
            states[name] = {key: whole(value).detach().clone() for key, value in parallel.state_dict().items()}
        return states

    one, other = run_ranks(run, 2)
    for name in one:
        found = {**one[name], **other[name]}
        for key, value in alone.state_dict().items():
            assert found[key].dtype == value.dtype
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-11, msg=f"{name}, {key}")


def test_weights_from_files_of_a_model_without_memory_and_back(tmp_path: Path) -> None:
    model, batch = rotating()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with sw.fake():
        hollow, _ = rotating()

    def run() -> dict[str, Tensor]:
        files = sw.WeightFiles(tmp_path / "model.pt")
        parallel = sw.compile(hollow, sw.Cluster.local(2), kwargs=batch, weights=files, **ZERO)
        step(parallel, optimizer_of(parallel), batch)
        with pytest.raises(sw.ShardwrightError, match="Muon: a parameter is of complex numbers"):
            sw.Muon([p for p in parallel.parameters() if p.dim() == 2], parallel=parallel)
        own, _ = rotating()
        own.load_state_dict(get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True)))
        return {key: value.detach().clone() for key, value in own.state_dict().items()}

    step(model, optimizer_of(model), batch)
    for state in run_ranks(run, 2):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-11, msg=key)


def narrow(model: nn.Module) -> nn.Module:
    """The same model with numbers of half the bytes."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().to(torch.cfloat if p.is_complex() else torch.float32)))
    return model


def test_gradients_are_scaled() -> None:
    """Of two stages, one alone has complex weights, and torch's scaler searches them by themselves."""
    model, batch = turning(counts=False)
    narrow(model).get_submodule("turned").register_buffer("mean", torch.ones(4, dtype=torch.cfloat))
    batch = {key: value.float() for key, value in batch.items()}
    alone = copy.deepcopy(model)
    step(alone, optimizer_of(alone), batch)

    def run() -> dict[str, list[tuple[float, dict[str, Tensor]]]]:
        results = dict[str, list[tuple[float, dict[str, Tensor]]]]()
        for name in ("zero", "stages"):
            parallel = sw.compile(copy.deepcopy(model), sw.Cluster.local(2), kwargs=batch, **FOREIGN[name])
            optimizer, results[name] = optimizer_of(parallel), []
            parallel.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for overflows in (False, True):
                parallel.forward_backward(**batch)
                gradient = dict(parallel.named_parameters())["turned.weight"].grad if dist.get_rank() == 0 else None
                if overflows and gradient is not None:
                    torch.view_as_real(unwrap(gradient)).view(-1)[-1] = float("inf")
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                state = {key: whole(value).detach().clone() for key, value in parallel.state_dict().items()}
                results[name].append((scaler.get_scale(), state))
        return results

    one, other = run_ranks(run, 2, 60.0)
    for name in one:
        assert [scale for scale, _ in one[name]] == [scale for scale, _ in other[name]] == [1024.0, 512.0]
        for (_, first), (_, second) in zip(one[name], other[name], strict=True):  # the second step is left out
            for key, value in alone.state_dict().items():
                torch.testing.assert_close({**first, **second}[key], value, rtol=1e-5, atol=1e-6, msg=f"{name}, {key}")


class Summing(nn.Module):
    """Complex buffers to which forward adds a sum over the batch, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 8)
        self.register_buffer("total", torch.randn(4, dtype=torch.cdouble))
        self.register_buffer("drift", torch.randn(4, dtype=torch.cdouble))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        z = torch.view_as_complex(y.unflatten(-1, (4, 2)))
        with torch.no_grad():
            self.get_buffer("total").add_(z.sum(0))
            self.get_buffer("drift").add_((z * (1 - 2j)).mean(0))
        return y.square().mean()


def test_sums_over_the_batch_are_added_to_complex_buffers_by_microbatches() -> None:
    torch.manual_seed(0)
    model, batch = Summing().double(), {"x": torch.randn(8, 4).double()}
    alone = copy.deepcopy(model)

    def run() -> dict[str, Tensor]:
        parallel = sw.compile(model, sw.Cluster.local(2), kwargs=batch, microbatches=2)
        optimizer = optimizer_of(parallel)
        for _ in range(2):
            step(parallel, optimizer, batch)
        return {key: whole(value).detach().clone() for key, value in parallel.state_dict().items()}

    optimizer = optimizer_of(alone)
    for _ in range(2):
        step(alone, optimizer, batch)
    for state in run_ranks(run, 2):
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-11, msg=key)


def test_exports(tmp_path: Path) -> None:
    model, batch = operator()
    single, reals = narrow(operator()[0]), {key: value.float() for key, value in batch.items()}

    def run() -> dict[str, Tensor]:
        parallel = sw.compile(model, sw.Cluster.local(2), kwargs=batch, **ZERO)
        with pytest.raises(CheckpointError, match=r"export: convs\.0\.weight is complex128, .*complex64 alone"):
            sw.export(parallel, tmp_path / "wide")
        parallel = sw.compile(single, sw.Cluster.local(2), kwargs=reals, **ZERO)
        step(parallel, optimizer_of(parallel), reals)
        sw.export(parallel, tmp_path / "narrow")
        made = sw.export(parallel, everywhere=True)
        assert made is not None
        return {key: value.detach() for key, value in made.state_dict().items()}

    states = run_ranks(run, 2)
    files = open_files(tmp_path / "narrow")
    for state in states:
        for key, value in state.items():
            assert torch.equal(read_part(files, key, ()), value), key


def test_a_batch_of_complex_numbers_is_refused() -> None:
    class Given(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z.abs().sum()

    with pytest.raises(CaptureError, match=r"input .z. is of complex numbers; pass torch\.view_as_real"):
        capture(Given(), {"z": torch.ones(2, dtype=torch.cfloat)})


FOREIGN: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"x": 2}, "roles": "data"},
    "zero": ZERO,
    "tensor": OTHERS["tensor"],
    "microbatches": {"microbatches": 2, "foreign": {"turned": "batch"}},
    "stages": {"stages": 2, "microbatches": 2, "foreign": {"turned": "batch"}},
    "recomputed": {"mesh": {"x": 2}, "roles": "data", "recompute": "full"},
}


@pytest.mark.parametrize("in_batch", [False, True])
def test_foreign_parts_see_complex_numbers(in_batch: bool) -> None:
    model, batch = turning(counts=not in_batch)
    alone = copy.deepcopy(model)
    optimizer = optimizer_of(alone)
    for _ in range(2):
        step(alone, optimizer, batch)

    def run() -> dict[str, dict[str, Tensor]]:
        states = dict[str, dict[str, Tensor]]()
        for name, options in FOREIGN.items():
            if ("foreign" in options) == in_batch:
                parallel = sw.compile(copy.deepcopy(model), sw.Cluster.local(2), kwargs=batch, **options)
                assert [call.name for call in calls(parallel.graph)] == ["turned"]
                optimizer = optimizer_of(parallel)
                for _ in range(2):
                    step(parallel, optimizer, batch)
                states[name] = {key: whole(value).detach().clone() for key, value in parallel.state_dict().items()}
        return states

    one, other = run_ranks(run, 2)
    assert len(one) > 1
    for name in one:
        state = {**one[name], **other[name]}
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-11, msg=f"{name}, {key}")


def test_a_foreign_part_that_becomes_complex_is_an_error() -> None:
    model, batch = turning(counts=False)

    def run() -> None:
        parallel = sw.compile(model, sw.Cluster.local(1), kwargs=batch)
        Turned.is_real = True
        with pytest.raises(
            ForeignError,
            match=r"turned is foreign and gives float64\[8, 4, 2\], float64\[8, 4\], .*gave complex128\[8, 4\]",
        ):
            step(parallel, optimizer_of(parallel), batch)

    run_ranks(run, 1)


class Odd(nn.Module):
    """A model that does with complex numbers what no program can."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scale = kind, nn.Parameter(torch.ones(4))
        if kind == "parameter":
            self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex32))
        if kind == "constant":
            self.turn = torch.ones(4, dtype=torch.complex32)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        if self.kind == "loss":
            return torch.fft.fft(x).sum()
        if self.kind == "dropout":
            return nn.functional.dropout(torch.fft.fft(x)).abs().sum()
        return (x * torch.view_as_real(self.turn).float().sum()).mean()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("parameter", r"parameter 'turn' is complex32; expected complex64 or complex128: widen it"),
        ("constant", r"constant 'turn' is complex32; expected complex64 or complex128: widen it"),
        ("loss", r"Odd returns a loss of complex numbers, which has no backward; return a real one"),
        ("dropout", r"torch drops no complex numbers, eagerly neither; multiply them by a mask"),
    ],
)
def test_what_is_refused_by_name(kind: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Odd(kind), {"x": torch.ones(2, 4)})


def test_a_pin_that_cuts_numbers_is_refused() -> None:
    model, batch = operator()
    with pytest.raises(PlanError, match=r"convs\.0\.weight"):
        sw.plan(model, sw.Cluster.local(2), kwargs=batch, pins=["convs.0.weight=S(3)"], **ZERO)


def test_padding_leaves_the_parts_of_numbers_alone() -> None:
    model, batch = operator()
    plan = sw.plan(model, sw.Cluster.local(3), kwargs=batch, mesh={"x": 3}, roles="tensor", pad=True)
    for leaf in plan.graph.leaves("parameter"):
        if leaf.is_complex:
            assert plan.graph.types[leaf.name].shape[-1] == 2


def test_a_plan_file_has_complex_leaves(tmp_path: Path) -> None:
    model, batch = operator()
    plan = sw.plan(model, sw.Cluster.local(2), kwargs=batch, **ZERO)
    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert [leaf.attrs for leaf in again.graph.leaves("parameter") if leaf.is_complex] == [
        leaf.attrs for leaf in plan.graph.leaves("parameter") if leaf.is_complex
    ]
    assert sum(leaf.is_complex for leaf in again.graph.leaves("parameter")) == 2
