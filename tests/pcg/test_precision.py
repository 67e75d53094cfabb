"""Mixed precision: what rows say is what `torch.autocast` does, and captured graphs say what they compute in."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from examples.zoo import ZOO
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.checks import FieldError
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.optable import ROWS
from shardwright.pcg.precision import HALVES, check_precision, low_dtype, operand_dtypes
from shardwright.pcg.step.precisions import PRECISIONS, Precision
from shardwright.pcg.types import TensorType
from tests.each import each, some
from tests.models import zoo
from tests.pcg.run_torch import apply
from tests.samples import SAMPLES, Sample

ONLY_ON_GPUS = {
    "erfinv", "exp", "expm1", "log", "log1p", "pow", "reciprocal", "rsqrt", "softplus", "sum", "softmax", "log_softmax",
    "layer_norm", "rms_norm",
}  # fmt: skip
"""What `torch.autocast` widens on GPUs, and on CPUs runs in the dtype that it comes in."""
NOT_IN_ITS_LISTS = {"expert_linear", "grouped_mm", "recurrent"}
"""Products that `torch.autocast` leaves alone, which in fp32 would be none of a GPU's fast ones."""


def operands(sample: Sample, dtype: torch.dtype) -> list[Tensor]:
    arrays = (torch.from_numpy(np.asarray(a)) for a in sample.arrays())
    return [x.to(dtype) if x.is_floating_point() else x for x in arrays]


def results(name: str) -> Iterator[tuple[str, str]]:
    """(by torch.autocast, by the row) for every sample with real operands, in fp32 and in bf16."""
    row = ROWS[name]
    for sample in SAMPLES[name]:
        for dtype in (torch.float32, torch.bfloat16):
            given = operands(sample, dtype)
            if not any(x.is_floating_point() for x in given):
                continue
            node = Node("y", name, tuple(f"t{i}" for i in range(len(given))), make_attrs(**sample.attrs))
            types = [TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in given]
            with torch.autocast("cpu", torch.bfloat16):
                try:
                    found = apply(node, given)
                except RuntimeError as error:
                    if not re.search("not implemented for|support tensors of type", str(error)):
                        raise
                    continue
            dtypes = operand_dtypes(row, types, "bfloat16")
            yield str(found.dtype).removeprefix("torch."), row.result_dtype(dtypes, dict(sample.attrs))


@each("name", sorted(ROWS))
def test_rows_run_in_what_autocast_runs_them_in(name: str) -> None:
    found = list(results(name))
    differing = {pair for pair in found if pair[0] != pair[1]}
    if name in ONLY_ON_GPUS:
        assert differing == {("bfloat16", "float32")}
    elif name in NOT_IN_ITS_LISTS:
        assert differing == {("float32", "bfloat16")}
    else:
        assert not differing


def dtype_of(graph: Graph, op: str) -> set[str]:
    return {graph.types[n.name].dtype for n in graph.nodes if n.op == op}


@pytest.mark.parametrize("name", zoo(*some(["gpt2", "llama", "t5", "mixtral", "resnext", "dlrm"], 2)))
def test_the_zoo_is_typed_in_two_dtypes(name: str) -> None:
    """Products in 16 bits; norms, softmax and the loss in fp32; parameters as they are, each cast at most once."""
    torch.manual_seed(0)
    graph = capture(*ZOO[name](), precision="amp_bf16").graph.validate()
    floats = {t.dtype for t in graph.types.values()} - {"int64", "int32", "bool"}
    assert floats == {"float32", "bfloat16"}
    wide = {op for op, row in ROWS.items() if row.autocast == "wide"}
    assert not {n.op for n in graph.nodes if n.op in wide and graph.types[n.name].dtype in HALVES}
    assert dtype_of(graph, "linear") <= {"bfloat16"}
    assert graph.types[dict(graph.outputs)["loss"]].dtype == "float32"
    for leaf in graph.leaves("parameter"):
        assert graph.types[leaf.name].dtype == "float32"
        assert sum(graph.by_name[user].op == "cast" for user in graph.users[leaf.name]) <= 1


class Regions(nn.Module):
    """Regions as people write them: for a GPU, disabled within another, without gradients, `.float()` at the end."""

    def __init__(self, device: str = "cuda", low: torch.dtype | None = torch.bfloat16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
        self.device, self.low = device, low

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.autocast(self.device, self.low):
            x = self.layers[1](x)
            with torch.autocast(self.device, enabled=False):
                x = self.layers[2](x.float())
            with torch.no_grad():
                frozen = self.layers[3](x)
            x = self.layers[4](x).softmax(-1) + frozen
        return x.float().square().mean()


@each("device, low", [("cuda", torch.bfloat16), ("cpu", torch.bfloat16), ("cuda", None)])
def test_regions_of_autocast_in_a_model_are_kept(device: str, low: torch.dtype | None) -> None:
    graph = capture(Regions(device, low), {"x": torch.randn(4, 8)}).graph
    half = "float16" if low is None else "bfloat16"
    linears = [n for n in graph.nodes if n.op == "linear"]
    assert [graph.types[n.name].dtype for n in linears] == ["float32", half, "float32", half, half]
    assert [graph.types[n.name].grad for n in linears] == [True, True, True, False, True]
    assert dtype_of(graph, "softmax") == {"float32"}
    assert [n.source.module for n in linears if graph.types[n.name].grad] == [f"layers.{i}" for i in (0, 1, 2, 4)]


def test_a_disabled_region_stays_wide_under_a_precision() -> None:
    graph = capture(Regions(), {"x": torch.randn(4, 8)}, precision="amp_bf16").graph
    linears = [graph.types[n.name].dtype for n in graph.nodes if n.op == "linear"]
    assert linears == ["bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16"]


class Mean(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).mean()


class Logits(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.head, self.wide = nn.Linear(8, 32), wide

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        return torch.tanh(logits.float() if self.wide else logits).mean()


def test_what_a_model_widens_is_wide() -> None:
    """So fp32 logits cost what they cost."""
    graphs = [capture(Logits(wide), {"x": torch.randn(4, 8)}, precision="amp_bf16").graph for wide in (True, False)]
    assert [dtype_of(graph, "tanh") for graph in graphs] == [{"float32"}, {"bfloat16"}]


def test_batch_normalization_gives_what_it_gets_and_its_statistics_are_wide() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    graph = capture(Mean(model), {"x": torch.randn(2, 3, 4, 4)}, precision="amp_bf16").graph
    assert dtype_of(graph, "relu") == {"bfloat16"}
    assert dtype_of(graph, "sum") == {"float32"}


def test_doubles_stay_doubles() -> None:
    model = nn.Linear(8, 8).double()

    graph = capture(Mean(model), {"x": torch.randn(4, 8).double()}, precision="amp_bf16").graph
    assert {t.dtype for t in graph.types.values()} == {"float64"}


def test_precisions_with_casts() -> None:
    assert {p: low_dtype(p) for p in PRECISIONS if low_dtype(p)} == {
        "amp_bf16": "bfloat16", "bf16_params": "bfloat16", "amp_fp16": "float16", "fp16_params": "float16",
        "fp8": "bfloat16",
    }  # fmt: skip
    assert [p for p in PRECISIONS if low_dtype(p, "parameters")] == ["bf16_params", "fp16_params"]
    assert [p for p in PRECISIONS if low_dtype(p, "autocast")] == ["amp_bf16", "amp_fp16", "fp8"]


@each("precision, dtype", [(p, "float32") for p in ("bf16", "fp16")] + [(p, "bfloat16") for p in ("amp_bf16", "fp32")])
def test_a_model_in_another_dtype_is_refused(precision: Precision, dtype: str) -> None:
    with pytest.raises(PlanError, match=f"precision '{precision}': expected parameters in .*, got {dtype}; "):
        check_precision(precision, {dtype, "int64"})


def test_parameters_that_are_not_trained_may_be_in_16_bits_where_parameters_are_cast() -> None:
    assert check_precision("bf16_params", {"float32", "float64"}, {"bfloat16", "float16"}) == "bf16_params"
    refused: list[tuple[Precision, set[str], set[str]]] = [
        ("bf16_params", {"bfloat16"}, set()), ("amp_bf16", {"float32"}, {"bfloat16"}),
    ]  # fmt: skip
    for precision, trained, frozen in refused:
        with pytest.raises(PlanError, match=f"precision '{precision}': expected parameters in float32, got bfloat16; "):
            check_precision(precision, trained, frozen)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(FieldError, match="precision: expected"):
        check_precision("quarter", {"float32"})  # pyright: ignore[reportArgumentType]
