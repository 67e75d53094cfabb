"""Applies an algebraic rule at a match: a new, validated graph."""

from __future__ import annotations

from dataclasses import replace

from shardwright.pcg.errors import RuleError
from shardwright.pcg.graph import Graph, Node, topological
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.match import Match, replacement


def apply(rule: Equation, graph: Graph, match: Match) -> Graph:
    """Return the graph with the matched roots replaced by the rule's right side.

    A result keeps its name where it is still computed, and a new node has the source of the node that it replaces.
    Raises `RuleError` where the match is of another graph.
    """
    missing = [name for name in (*match.nodes, *match.variables.values()) if name not in graph.by_name]
    if missing:
        raise RuleError(
            f"rule {rule.name!r}: the match names %{missing[0]}, which this graph does not have; match again"
        )
    new, results = replacement(graph, rule, match)
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    latest = max((position[name] for name in match.variables.values()), default=-1)
    ordered = sorted(match.roots, key=position.__getitem__)
    at = ordered[0] if latest < position[ordered[0]] else ordered[-1]
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name == at:
            nodes += new
        if node.name not in match.nodes:
            nodes.append(replace(node, inputs=tuple(results.get(i, i) for i in node.inputs)))
    outputs = tuple((key, results.get(name, name)) for key, name in graph.outputs)
    return Graph(topological(nodes), outputs, graph.mesh).without_dead_nodes().validate()
