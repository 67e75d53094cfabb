"""The results of a program that gives what the model returns, and not only its loss.

They are outputs of the graph called `.result.0`, `.result.1`, … in the order of their leaves. A device has some rows of
each, if they can be shared out, and else the whole. So nothing gathers logits.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layout, Layouts, R, S
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.node import is_result


def gives_results(graph: Graph) -> bool:
    """Return whether a graph gives the model's results, and no loss."""
    return any(is_result(key) for key, _ in graph.outputs)


def by_rows(shape: tuple[int, ...], mesh: Mesh) -> Layouts:
    """Return the layout in which as many axes of devices as can share the rows."""
    layouts, rows = list[Layout](), shape[0] if shape else 1
    for name, size in zip(mesh.names, mesh.sizes, strict=True):
        shares = name != TIME and size > 1 and rows % size == 0
        rows //= size if shares else 1
        layouts.append(S(0) if shares else R)
    return tuple(layouts)


def handed_on(graph: Graph, mesh: Mesh) -> Mapping[str, Layouts]:
    """Return the layouts in which a serial graph's results leave, by node; whatever else leaves is whole."""
    whole = {name for key, name in graph.outputs if not is_result(key)}
    results = {name for key, name in graph.outputs if is_result(key)} - whole
    return {name: by_rows(graph.types[name].shape, mesh) for name in results}
