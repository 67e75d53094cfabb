"""Parameters in 16 bits over masters in float32: which modules cast what they are given, and what is captured."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.modules import in_own_precision
from shardwright.pcg.errors import CaptureError
from shardwright.pcg.graph import Graph
from tests.each import each
from tests.pcg.capture.test_depth import exported_whole, noted

D, LOW, WIDE = 8, "bfloat16", "float32"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

    def forward(self, x: Tensor, *, scale: tuple[Tensor, Tensor]) -> Tensor:
        return x * scale[0] + self.net(self.norm(x))


class Net(nn.Module):
    """A tied head, a buffer that widens, parameters of its own, a frozen norm, and a weight that forward reads."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.table, self.head, self.norm = nn.Embedding(16, D), nn.Linear(D, 16, bias=False), nn.LayerNorm(D)
        self.head.weight = self.table.weight
        self.norm.requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.scale, self.unread = nn.Parameter(torch.ones(D)), nn.Linear(D, D)
        self.register_buffer("places", torch.randn(4, D))

    def forward(self, ids: Tensor, more: dict[str, Tensor]) -> Tensor:
        x = nn.functional.linear(self.table(ids) + self.places, self.unread.weight.float())
        for block in self.blocks:
            x = block(x, scale=(self.scale, more["weight"]))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())


def batch() -> dict[str, Any]:
    more = {"weight": torch.ones(1), "count": torch.ones(1, dtype=torch.int)}
    return {"ids": torch.randint(16, (2, 4)), "more": more}


def captured(precision: Any = "bf16_params", num_blocks: int = 2) -> Graph:
    return capture(Net(num_blocks), batch(), precision=precision).graph


def casts(graph: Graph) -> dict[str, str]:
    """Of each parameter that is cast, the module that reads it first."""
    return {
        str(graph.by_name[node.inputs[0]].attr("target")): node.source.module
        for node in graph.nodes
        if node.op == "cast" and graph.by_name[node.inputs[0]].op == "parameter"
    }


def test_each_parameter_is_cast_once_where_it_is_read_first() -> None:
    """Masters stay as they are, buffers too."""
    graph = captured()
    leaves = {str(leaf.attr("target")): leaf.name for leaf in graph.leaves("parameter")}
    assert {graph.types[leaf].dtype for leaf in leaves.values()} == {WIDE}
    own = {name: name.rpartition(".")[0] for name in leaves}
    assert casts(graph) == {**own, "scale": "blocks.0", "unread.weight": ""}
    readers = [user for leaf in leaves.values() for user in graph.users[leaf]]
    assert len(readers) == len(leaves)
    assert [graph.types[leaf.name].dtype for leaf in graph.leaves("buffer")] == [WIDE]


@each("precision, low, first", [
    ("bf16_params", LOW, LOW),
    ("fp16_params", "float16", "float16"),
    ({"blocks.0.norm": "fp32", "*": "bf16_params"}, LOW, WIDE),
    ({"blocks.0": "fp32", "*": "bf16_params"}, LOW, WIDE),
    ({"blocks.1": "bf16_params", "*": "fp32"}, LOW, WIDE),
    ({"blocks.1": "bf16_params"}, LOW, WIDE),
    ({"blocks.1": "bf16_params", "blocks.0.norm": "amp_bf16"}, LOW, WIDE),
])  # fmt: skip
def test_norms_run_in_what_their_parameters_are_in(precision: Any, low: str, first: str) -> None:
    """Blocks cast the wide values that they are given, in nests and by keyword."""
    graph = captured(precision)
    norms = {n.source.module: graph.types[n.name].dtype for n in graph.nodes if n.op == "layer_norm"}
    assert (norms["blocks.0.norm"], norms["blocks.1.norm"]) == (first, low)
    products = {n.source.module: graph.types[n.name].dtype for n in graph.nodes if n.op == "linear"}
    in_block = [dtype for name, dtype in products.items() if name.startswith("blocks.1")]
    assert set(in_block) == {low}


def test_a_module_in_float32_gives_float32_and_others_cast_what_they_read() -> None:
    graph = captured({"blocks.*.norm": "fp32", "head": "fp32", "*": "bf16_params"})
    dtypes = {n.source.module: graph.types[n.name].dtype for n in graph.nodes if n.op in ("layer_norm", "linear")}
    assert dtypes == {
        "": WIDE, "head": WIDE, "norm": LOW, **{f"blocks.{i}.norm": WIDE for i in range(2)},
        **{f"blocks.{i}.net.{j}": LOW for i in range(2) for j in (0, 2)},
    }  # fmt: skip
    found = Counter(node.inputs[0] for node in graph.nodes if node.op == "cast")
    assert found["table_weight"] == 1  # the head's is read as it is
    assert len(graph.users["table_weight"]) == 2


def shape_of(graph: Graph) -> list[object]:
    """The graph without its names."""
    places = {node.name: place for place, node in enumerate(graph.nodes)}
    return [(n.op, n.attrs, [places[i] for i in n.inputs], str(n.source)) for n in graph.nodes]


def test_deep_models_are_captured_from_few_layers() -> None:
    """All parameters are cast before the forward, of layers that are left out too."""
    found = list[bool]()
    with noted(found):
        few = captured(num_blocks=9)
    with exported_whole():
        assert shape_of(few) == shape_of(captured(num_blocks=9))
    assert found == [True]


class Frozen(nn.Module):
    """As adapters over a base in 16 bits; beside it a parameter in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(D, D).to(torch.bfloat16), nn.Linear(D, D)
        self.base.requires_grad_(requires_grad=False)
        self.last = nn.Linear(D, D).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.base(x) + self.adapter(x)).square().mean()


def test_parameters_of_other_dtypes() -> None:
    """One that is in 16 bits stays as it is; wider ones are cast."""
    graph = capture(Frozen(), {"x": torch.randn(2, D)}, precision="bf16_params").graph
    assert {str(leaf.attr("target")): graph.types[leaf.name].dtype for leaf in graph.leaves("parameter")} == {
        "base.weight": LOW, "base.bias": LOW, "adapter.weight": WIDE, "adapter.bias": WIDE,
        "last.weight": "float64", "last.bias": "float64",
    }  # fmt: skip
    assert set(casts(graph)) == {"adapter.weight", "adapter.bias", "last.weight", "last.bias"}
    assert {graph.types[node.name].dtype for node in graph.nodes if node.op == "linear"} == {LOW}


def test_models_are_left_as_they_were() -> None:
    """Even where forward fails; what backward runs again finds parameters as forward did."""
    model = Net()
    own = dict(model.named_parameters(remove_duplicate=False))
    for wrong in ({**batch(), "more": {}}, batch()):
        with in_own_precision(model, "bf16_params", "cpu"):
            if wrong["more"]:
                assert model(**wrong).dtype == torch.float32
            else:
                with pytest.raises(KeyError):
                    model(**wrong)
            assert dict(model.named_parameters(remove_duplicate=False)) == own
    with in_own_precision(model, "bf16_params", "cpu", in_backward=True):
        model(**batch())
        assert model.scale.dtype == torch.bfloat16
    assert all(p is own[name] for name, p in model.named_parameters(remove_duplicate=False))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_backward_runs_again_reads_the_same() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x, use_reentrant=False).float().square().mean()

    whole = Checkpointed()
    with in_own_precision(whole, "bf16_params", "cpu", in_backward=True):
        loss = whole(torch.randn(2, D))
        gradients = torch.autograd.grad(loss, list(whole.parameters()))
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}


class Normalized(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).train(training)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).float().square().mean()


@each("training", [True, False])
def test_batch_normalization_is_refused_as_torch_does_and_runs_in_float32(training: bool) -> None:
    model, x = Normalized(training), torch.randn(2, 3, 4, 4)
    with in_own_precision(model, "bf16_params", "cpu"), pytest.raises(RuntimeError, match="expected scalar type"):
        model(x)
    with pytest.raises(CaptureError) as error:
        capture(model, {"x": x}, precision="bf16_params")
    assert str(error.value).startswith("norm (test_casting.py:")
    assert str(error.value).endswith(
        "torch takes no weights in bfloat16 beside running statistics in float32; run the module in float32, as "
        "precision={'norm': 'fp32', '*': 'bf16_params'}"
    )
    graph = capture(model, {"x": x}, precision={"norm": "fp32", "*": "bf16_params"}).graph
    assert {graph.types[node.name].dtype for node in graph.nodes if node.op == "conv2d"} == {LOW}
