"""Names of the timeline's tasks and values for people: the block, and the place in it."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from shardwright.pcg.graph import Graph
from shardwright.pcg.step.parameters import module_block
from shardwright.pcg.step.places import places
from shardwright.pcg.types import ITEM_BYTES


class Result(NamedTuple):
    """A device's part of a value."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class Names:
    """Names of one graph; equal blocks have the same labels. `blocks`: all of them, and "" for none."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._blocks: dict[str, str] = {}
        self._labels = {name: place.removeprefix(":") for name, place in places(graph, {}).items()}
        for node in reversed(graph.nodes):  # a change of layout belongs to its reader
            where = str(node.attr("target")) if node.is_leaf else f"{node.source.module}."
            readers = graph.users[node.name] if node.is_parallel else ()
            self._blocks[node.name] = self._blocks[readers[0]] if readers else module_block(where)
            if node.is_leaf:
                self._labels[node.name] = where.removeprefix(f"{self._blocks[node.name]}.")
        self.blocks = list(dict.fromkeys(["", *(self._blocks[node.name] for node in graph.nodes)]))
        self._known = frozenset(self.blocks[1:])

    def moment(self, text: str) -> str:
        """Return a moment with names for people.

        `backward of microbatch 1 of 4: linear_560 weights` → `…: mlp.down_proj:linear weights of layers.79`.
        """
        when, colon, what = text.partition(": ")
        block, label = self.of(what)
        return when + colon + label + (f" of {block}" if block else "")

    def whole(self, text: str) -> str:
        """Return the full name: `linear_560 backward` → `model.layers.79.mlp.down_proj:linear backward`."""
        block, label = self.of(text)
        return f"{block}.{label}" if block and not label.startswith(":") else block + label

    def result(self, text: str) -> Result | None:
        """Return a device's part of the result of the operator that a task is named after; of several, the last."""
        names = [word for word in text.split(" ") if word in self._labels]
        if not names:
            return None
        kind = self._graph.types[names[-1]]
        local = kind.local_shape(self._graph.mesh)
        return Result(local, kind.dtype, prod(local) * ITEM_BYTES[kind.dtype])

    def of(self, text: str) -> tuple[str, str]:
        """Return block and label: `linear_560 backward` → `model.layers.79`, `mlp.down_proj:linear backward`."""
        block, words = "", list[str]()
        for word in text.split(" "):
            if word in self._labels:
                block = self._blocks[word]
                words.append(self._labels[word])
            elif word in self._known:
                block = word
                words.append("weights")
            else:
                words.append(word)
        return block, " ".join(words)
