"""Where operations stand in their block: the same names in equal blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.places import Listed, is_at, places
from tests.each import each
from tests.pcg.step.test_regions import Attention, captured, in_slices, model_of


def test_equal_blocks_have_equal_places_and_no_two_operations_share_one() -> None:
    graph = model_of(Attention)
    operations = Operations(graph).listed
    where = places(graph, {o.name: o.block for o in operations})
    blocks = [[where[o.name] for o in operations if o.block == f"layers.{n}"] for n in range(3)]
    assert blocks[0] == blocks[1] == blocks[2]
    assert len(set(blocks[0])) == len(blocks[0])
    assert {"q:linear", "out:linear", ":matmul", ":matmul#2", ":add"} <= set(blocks[0])


def test_a_change_of_layout_is_named_by_its_reader() -> None:
    """In every block the same, though the first reads the model's input and the others what the one before gives."""
    graph = in_slices()
    operations = Operations(graph).listed
    where = places(graph, {o.name: o.block for o in operations})
    moves = [[where[o.name] for o in operations if o.block == f"layers.{n}" and graph.by_name[o.name].is_parallel]
             for n in range(3)]  # fmt: skip
    assert moves[1] == moves[2] != []
    assert any(place.startswith("up:linear/") for place in moves[1])


class Around(nn.Module):
    """Part of a block is the model's own code, and so is what comes after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((nn.Linear(16, 16), nn.Linear(16, 16))) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.layers:  # type: ignore[misc]
            x = second(torch.tanh(first(x) + x))
        return torch.tanh(x).mean()


def test_code_around_modules_is_counted_in_its_block() -> None:
    """In every block the same; so a folded model, which has one block for all, calls all operations by these places."""
    graph = captured(Around())
    operations = Operations(graph).listed
    where = places(graph, {o.name: o.block for o in operations})
    blocks = [[where[o.name] for o in operations if o.block == f"layers.{n}"] for n in range(3)]
    assert blocks[0] == blocks[1] == blocks[2] == ["0:linear", "0:add", ":add", ":tanh", "1:linear", "1:add"]
    assert next(where[o.name] for o in operations if not o.block) == ":tanh"


@each(
    ("place", "pattern", "expected"),
    [
        ("mlp.act:silu", "mlp", True),
        ("mlp.act:silu", "mlp.act", True),
        ("mlp.act:silu", "mlp.*", True),
        ("mlp.act:silu", "mlp.act:silu", True),
        ("mlp.act:silu", "mlp.act:mul", False),
        ("mlp.act:silu", "ml", False),
        (":add", ":add", True),
        (":add", "", False),
    ],
)
def test_patterns_fit_places_and_the_modules_around_them(place: str, pattern: str, expected: bool) -> None:
    assert is_at(place, pattern) == expected


def test_a_list_finds_what_its_patterns_fit() -> None:
    """Names that are looked up and patterns that are matched, those of ranges and of wildcards as names among them."""
    own = [
        "mlp.act:silu",
        "mlp.act",
        "layers.3.up:linear",
        "layers.[*].up:linear",
        ":add#2",
        ":add",
        "a-b:mul",
        "x1-2:mul",
    ]
    patterns = [*own, "mlp", "mlp.*", "layers.0-5", "layers.0-2.up", "*:add", ":add?2", "[a]-b", "ml", "", "x1[-]2:mul"]
    listed = Listed(patterns)
    for place in (*own, "mlp.up:linear/combine", "layers.7.up:linear", "layers.*.up:linear"):
        assert listed.at(place) == {pattern for pattern in patterns if is_at(place, pattern)}, place
