"""Names for the places of operations in blocks of the model: the same in equal blocks, whatever the layouts.

mlp.act_fn:silu              the operator `silu` of the module `mlp.act_fn`, seen from the block
:add#2                       the second `add` of the block's own code
mlp.up:linear/combine        the change of layout of an operand of that operator
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.step.parameters import module_block
from shardwright.pcg.step.recompute import fits, is_exact


def places(graph: Graph, blocks: Mapping[str, str]) -> dict[str, str]:
    """Return the place of every node that is no leaf. `blocks`: the blocks of nodes outside of their module's block.

    Copies of one node, such as masks in several layouts, have one place.
    """
    place_of, counts, constants = dict[str, str](), Counter[tuple[str, str]](), constant_nodes(graph)
    numbers, homes = dict[tuple[str, str, str], int](), dict[str, str]()

    def numbered(node: Node, place: str) -> str:
        key = (homes[node.name], place, node.name.partition(".")[0])
        if key not in numbers:
            counts[key[:2]] += 1
            numbers[key] = counts[key[:2]]
        return f"{place}#{numbers[key]}" if numbers[key] > 1 else place

    def home(node: Node) -> str:
        return blocks.get(node.name, module_block(f"{node.source.module}."))

    nodes = [node for node in graph.nodes if not node.is_leaf]
    for node in nodes:
        if not node.is_parallel:
            op, homes[node.name] = f"constant_{node.op}" if node.name in constants else node.op, home(node)
            place_of[node.name] = numbered(node, f"{_seen_from(homes[node.name], node.source.module)}:{op}")
    for node in reversed(nodes):
        if node.is_parallel:
            reader = next(iter(graph.users[node.name]), "")
            homes[node.name] = homes[reader] if reader else home(node)
            first = place_of[reader] if reader else f"{_seen_from(homes[node.name], node.source.module)}:"
            place_of[node.name] = numbered(node, f"{first}/{node.op}")
    return place_of


@lru_cache(maxsize=1 << 16)
def is_at(place: str, pattern: str) -> bool:
    """Return whether a pattern fits a place, or a module that the place lies in."""
    return fits(place, pattern) or any(fits(module, pattern) for module in modules_of(place))


class Listed:
    """The places, modules and patterns of a list.

    Names without wildcards are looked up, as a list may have thousands.
    """

    def __init__(self, listed: Iterable[str]) -> None:
        each = list(listed)
        self._patterns = [name for name in each if not is_exact(name)]
        self._exact = frozenset(each).difference(self._patterns)

    def at(self, place: str) -> set[str]:
        """Return the entries that fit a place, as `is_at` does."""
        exact = {name for name in (place, *modules_of(place)) if name in self._exact}
        return exact.union(pattern for pattern in self._patterns if is_at(place, pattern))


def modules_of(place: str) -> Iterator[str]:
    """Yield the modules inside the block that a place lies in, seen from the block: `mlp`, `mlp.act_fn`."""
    parts = place.partition(":")[0].split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1) if parts[0])


def _seen_from(block: str, module: str) -> str:
    if module == block:
        return ""
    return module.removeprefix(f"{block}.") if block else module
