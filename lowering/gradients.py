"""Which gradients are summed after the backward instead of inside it.

`replicate` on a parameter is no operator of the program: every use of the leaf lies behind it, so the sum over the axis
may wait until the leaf's whole gradient is there. There it can be done in place, in buckets, and beside the rest of the
backward (`reducer.py`). What this finds are those `replicate` nodes, as aliases of their leaf.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.pcg.graph import Graph
from shardwright.pcg.parallel import REPLICATE


@dataclass(frozen=True)
class Summed:
    """A parameter leaf whose gradient is summed over `axes` (names, in mesh order) when the backward has made it.

    `first_use` is the position of its first reader: gradients become complete in the reverse order.
    """

    leaf: str
    axes: tuple[str, ...]
    first_use: int


def find_summed(graph: Graph) -> tuple[list[Summed], dict[str, str]]:
    """Every parameter that gets a gradient, in the order in which gradients are complete; aliases of `replicate`s."""
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    results = {name for _, name in graph.outputs}
    aliases: dict[str, str] = {}
    found: list[Summed] = []
    for leaf in graph.leaves("parameter"):
        if not graph.types[leaf.name].grad:
            continue
        name, axes, outer = leaf.name, list[str](), list[str]()
        while readers := _all_replicate(graph, name) if name not in results else []:
            aliases.update(dict.fromkeys(readers, leaf.name))
            axes.append(str(graph.by_name[readers[0]].attr("axis")))
            outer.append(name)
            if len(readers) > 1:
                break
            name = readers[0]
        uses = [position[user] for n in (*outer, name) for user in graph.users[n] if user not in aliases]
        uses += [position[user] for a, base in aliases.items() if base == leaf.name for user in graph.users[a]]
        sizes = dict(zip(graph.mesh.names, graph.mesh.sizes, strict=True))
        summed = tuple(a for a in graph.mesh.names if a in axes and sizes[a] > 1)
        found.append(Summed(leaf.name, summed, min(uses, default=len(position))))
    return sorted(found, key=lambda s: -s.first_use), aliases


def _all_replicate(graph: Graph, name: str) -> list[str]:
    """The readers of a value if all of them replicate it along one and the same axis."""
    readers = [graph.by_name[user] for user in graph.users[name]]
    if not readers or any(r.op != REPLICATE or r.attr("axis") != readers[0].attr("axis") for r in readers):
        return []
    return list(dict.fromkeys(r.name for r in readers))
