"""What a graph says without a cluster: what is constant, stored or kept for backward, and what repeats."""

from __future__ import annotations

import re

from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.optable import ROWS


def constant_nodes(graph: Graph) -> frozenset[str]:
    """Nodes that no parameter reaches, nor the tensor at the cut where a part of a graph begins."""
    reached: set[str] = set()
    for node in graph.nodes:
        if node.op == "parameter" or (node.is_leaf and node.attr("grad")) or any(i in reached for i in node.inputs):
            reached.add(node.name)
    return frozenset(n.name for n in graph.nodes if n.name not in reached)


def copies_data(graph: Graph, node: Node) -> bool:
    """Whether a view has to copy: a reshape of something that is not contiguous, moved or not in between."""
    if node.op != "reshape":
        return False
    source = graph.by_name[node.inputs[0]]
    while source.is_parallel:
        source = graph.by_name[source.inputs[0]]
    return source.op in ("permute", "expand", "slice")


def saved_by(node: Node) -> tuple[int | str, ...]:
    """What a differentiated operator keeps for backward, as `Row.saves`; one that is not known, everything it sees."""
    row = ROWS.get(node.op)
    return row.saves if row is not None else (*range(len(node.inputs)), "result")


def stored_nodes(graph: Graph) -> set[str]:
    """Parameters, and parameters on their way through parallel operators."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.op == "parameter" or (node.is_parallel and node.inputs[0] in found):
            found.add(node.name)
    return found


def is_whole(choice: str) -> bool:
    """Whether a split choice leaves the operator's work undivided: R, C, or partial operands."""
    return choice in ("R", "C") or (choice[0] == "P" and choice[1:].replace(",", "").isdigit())


_BLOCK = re.compile(r"^(.*?\.\d+)\.|^(.*)\.")


def block_of(qualified_name: str) -> str:
    """The repeated block of a parameter: its name up to the first number (`model.layers.3`), else its module."""
    match = _BLOCK.match(qualified_name)
    return (match[1] or match[2]) if match else ""
