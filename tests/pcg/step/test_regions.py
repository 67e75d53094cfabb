"""What is made again together: attention however it is written, blocks by pattern, gathered activations."""

from __future__ import annotations

import time
import weakref
from functools import cache
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.actions import actions
from shardwright.pcg.step.asked import _Asked, still_there
from shardwright.pcg.step.chunk import whole_chunk
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operation import Operation
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.places import places
from shardwright.pcg.step.recompute import RECOMPUTE
from shardwright.pcg.step.regions import Draws, _by_block
from shardwright.pcg.types import TensorType
from tests.each import each
from tests.lowering.parallelize import parallelize
from tests.search.graphs import blocks


def test_blocks_are_put_side_by_side_in_time_that_grows_with_their_number() -> None:
    """Of ten thousand blocks, the first is torn: one operation of it comes last."""
    numbers = [*range(10_000), 0]
    listed = [Operation(f"o{i}", block=f"block.{number}") for i, number in enumerate(numbers)]
    start = time.process_time()
    found = _by_block(listed, Draws(Graph((), ())))
    assert time.process_time() - start < 1
    assert sorted(o.name for o in found) == sorted(o.name for o in listed)
    assert abs(found.index(listed[0]) - found.index(listed[-1])) == 1


class Attention(nn.Module):
    """Written out, with a mask, a scale and a cast; keys and values are repeated, as where heads share them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(2, 8, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t[:, :, None].expand(2, 2, 2, 8, 4).reshape(2, 4, 8, 4) for t in (k, v))
        scores = q @ k.transpose(2, 3) * 0.5
        scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e9)
        p = F.dropout(scores.softmax(-1), 0.1)
        return x + self.out((p @ v).transpose(1, 2).reshape(2, 8, 16))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Attention, num_blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x).tanh()


def captured(model: nn.Module) -> Graph:
    return capture(model, {"x": torch.randn(2, 8, 16)}).graph


@cache
def model_of(block: type[nn.Module] = Attention) -> Graph:
    return captured(Model(block))


def regions(graph: Graph, recompute: Any) -> list[tuple[str, list[str]]]:
    """The operators of every region, in order."""
    listed = Operations(graph, Execution(recompute=recompute)).listed
    runs = groupby(listed, key=lambda o: o.region)
    return [(again.name, [graph.by_name[o.name].op for o in own]) for again, own in runs if again is not None]


def test_attention_that_is_written_out_is_made_again() -> None:
    """From the repeated keys and the first product to the last, side by side, though values are made in between."""
    found = regions(model_of(), "selective")
    assert len(found) == 3
    for _, ops in found:
        products = [place for place, op in enumerate(ops) if op == "matmul"]
        assert len(products) == 2
        assert {"softmax", "dropout", "where"} <= set(ops[products[0] : products[1]])
        assert ops.count("expand") == 2
        assert "linear" not in ops


def test_backward_runs_attention_again_up_to_its_last_product() -> None:
    chunk = whole_chunk(Operations(model_of(), Execution(recompute="selective")))
    ops = [chunk.occurrences[n].operation.name for n in actions(chunk).of("again")]
    graph = model_of()
    assert sum(graph.by_name[name].op == "matmul" for name in ops) == 3  # of six


def test_blocks_by_pattern() -> None:
    """The first pattern that fits decides; what none names is kept."""
    graph = model_of()
    found = regions(graph, {"layers.1": "none", "layers.0": "full", "layers.*": "selective"})
    assert found[0][0] == "layers.0"
    assert len(found) == 2
    assert [name for name, _ in regions(graph, {"layers.[02]": "full"})] == ["layers.0", "layers.2"]
    assert regions(graph, "none") == []


@each(
    ("block", "recompute", "message"),
    [
        (Attention, {"layer.*": "full"}, "recompute: 'layer.*': 'full': no repeated block of the model is so named"),
        (Attention, {"*": "full", "layers.1": "selective"}, "recompute: 'layers.1': 'selective': no repeated block"),
        (Plain, "selective", "recompute: '*': 'selective': there is no attention (a softmax between two products"),
        (Plain, {"layers.1": "selective"}, "recompute: 'layers.1': 'selective': there is no attention"),
    ],
)
def test_what_is_not_there_cannot_be_made_again(block: type[nn.Module], recompute: Any, message: str) -> None:
    with pytest.raises(PlanError) as error:
        regions(model_of(block), recompute)
    assert str(error.value).startswith(message)


def again(recompute: Any) -> dict[str, list[str]]:
    """What is made again of each block, by the operators' modules and kinds."""
    graph = model_of(Mlp)
    found = dict[str, list[str]]()
    for o in Operations(graph, Execution(recompute=recompute)).listed:
        if o.region is not None:
            module = o.module.removeprefix(f"{o.block}.") if o.module != o.block else ""
            found.setdefault(o.block, []).append(f"{module}:{graph.by_name[o.name].op}")
    return found


def test_places_of_a_block_are_made_again_alone() -> None:
    own = ["norm:layer_norm", ":gelu"]
    assert again({"layers.0-1": ["norm", ":gelu"]}) == {"layers.0": own, "layers.1": own}
    found = regions(model_of(Mlp), {"layers.1": ["norm", "up", ":gelu"]})
    assert [ops for _, ops in found] == [["layer_norm", "linear", "add", "gelu"]]  # one after the other: one region


def test_what_is_kept_between_two_parts_them() -> None:
    """They could not run side by side: one reads what the other leads to."""
    found = regions(model_of(Mlp), {"layers.1": ["norm", ":gelu"]})
    assert [ops for _, ops in found] == [["layer_norm"], ["gelu"]]


def test_a_module_in_a_block_decides_before_the_block() -> None:
    assert again({"layers.*.up": "full", "layers.*": "none"})["layers.2"] == ["up:linear", "up:add"]
    kept = again({"layers.*.up": "none", "layers.1": "full"})
    assert kept == {"layers.1": ["norm:layer_norm", ":gelu", "down:linear", "down:add"]}  # what leaves it is kept


def test_what_lies_in_no_block_is_made_again_by_its_places() -> None:
    assert again({"": [":mul"]}) == {"": [":mul"]}


@each(
    ("recompute", "message"),
    [
        ({"layers.*": ["mpl"]}, "recompute: 'layers.*': 'mpl': no operation of such a block is there; expected"),
        ({"layer.*": ["norm"]}, "recompute: 'layer.*': 'norm': no operation of such a block is there; expected"),
        ({"": "full"}, "recompute: '': 'full': what lies in no block is not made again as a whole; give a list"),
        ({"layers.*.ups": "full"}, "recompute: 'layers.*.ups': 'full': no repeated block of the model is so named"),
    ],
)
def test_places_that_are_not_there_are_named(recompute: Any, message: str) -> None:
    with pytest.raises(PlanError) as error:
        again(recompute)
    assert str(error.value).startswith(message)


def test_places_that_a_rewrite_took_away_are_forgotten() -> None:
    """Of each pattern: that another block still has such a place does not help. And no later pattern takes over."""
    graph = model_of(Mlp)
    listed = Operations(graph).listed
    moved = [o._replace(block="layers.9") if o.module == "layers.2.norm" else o for o in listed]
    own = ["norm", "qkv:linear", "up:linear/combine"]
    asked: dict[str, Any] = {"layers.2": ["norm"], "layers.[01]": own, "layers.*": "full"}
    assert still_there(graph, moved, Execution(recompute=asked)).recompute == (
        ("layers.2", "none"), ("layers.[01]", ("norm", "up:linear/combine")), ("layers.*", "full"),
    )  # fmt: skip
    assert still_there(graph, moved, full := Execution(recompute="full")) is full
    away: Any = {"layers.2": ["norm"], "layers.*": "full"}
    assert still_there(graph, moved, Execution(offload=away)).offload == (("layers.2", "none"), ("layers.*", "full"))


def test_what_was_asked_is_forgotten_by_the_time_it_is_answered() -> None:
    """The collector of cycles is paused in a search, which asks hundreds of times."""
    graph = blocks()
    listed = Operations(graph).listed
    run = Execution(recompute={"layers.*": ["mlp:linear"]})
    asked = _Asked(graph, listed, run, places(graph, {o.name: o.block for o in listed}), RECOMPUTE)
    assert {wish.fate for wish in asked.wishes.values()} == {Fate.KEPT, Fate.AGAIN}
    gone = weakref.ref(asked)
    del asked
    assert gone() is None


def test_many_patterns_take_no_more_than_seconds() -> None:
    """A plan file may have them: each is compiled once, and asked once for each module, not for each operation."""
    many = {f"other.*.{n}": "none" for n in range(6000)}
    start = time.process_time()
    assert len(again({**many, "layers.*": ["norm"]})) == 3
    assert time.process_time() - start < 10


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def in_slices() -> Graph:
    """Megatron's sequence parallelism: slices of the sequence but for the two products, which want all of it."""
    serial = model_of(Mlp)

    def choose(node: Node, axis: int, operands: list[TensorType]) -> str:
        if node.op == "linear":
            return "o" if serial.types[node.name].shape[-1] == 32 else "i"
        if operands and operands[0].shape[-1:] == (32,) and node.op in ("gelu", "add"):
            return "_2"
        if node.op in ("layer_norm", "add"):
            return "_1" if node.op == "add" else serial.signature(node).factors[1].name
        return "R"

    split = {"up.weight": (S(0),), "up.bias": (S(0),), "down.weight": (S(1),)}
    return parallelize(
        serial, Mesh.of(tp=2), choose, {f"layers.{i}.{k}": v for i in range(3) for k, v in split.items()}
    )


@each("recompute", ["selective", {"layers.*": "selective"}])
def test_what_was_gathered_is_gathered_again(recompute: Any) -> None:
    """Only slices are kept of what the first product of every block reads."""
    graph = in_slices()
    plain, again = (whole_chunk(Operations(graph, Execution(recompute=r))) for r in ("none", recompute))
    made = [again.occurrences[n].operation.name for n in actions(again).of("again")]
    assert len(made) == 3 + (recompute == "selective")  # and what the loss reads, which is in no block
    whole = 2 * 8 * 16 * 4
    kept = [sum(m.num_bytes for m in chunk.allocations if m.fate.is_stored) for chunk in (plain, again)]
    assert kept[0] - kept[1] >= 3 * whole / 2


def test_a_gather_belongs_to_the_block_that_reads_it() -> None:
    """What full recomputation keeps between blocks is not gathered."""
    chunk = whole_chunk(Operations(in_slices(), Execution(recompute="full")))
    kept = sorted({m.num_bytes for m in chunk.allocations if m.fate.is_stored and m.num_bytes})
    assert kept == [2 * 8 * 16 * 4 / 2]


class Whole(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def test_a_model_without_blocks_says_so() -> None:
    for recompute, message in (("full", "expected one of: none, the model has none"), ("selective", "no attention")):
        with pytest.raises(PlanError, match=message):
            regions(captured(Whole()), recompute)
