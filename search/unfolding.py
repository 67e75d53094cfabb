"""Layouts of all blocks from those of the few that stand for them: what a folded problem chose, for the whole graph.

Every copy of a block has the choices of the one that stands for it, so nothing is solved again: the whole graph has
more names than the folded one, not more variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.graph import Graph
from shardwright.search.folding import Folded
from shardwright.search.problem import Problem

_KINDS = ("node", "storage", "hub")


def unfolded(problem: Problem, folded: Folded, graph: Graph) -> Problem | None:
    """The problem of a whole graph, for `materialize`: all its names lead to variables of that of the `folded` one.

    So every solution of the one is a solution of the other. Names of the folded graph may be others than those that the
    problem has; None where more is different, or where the first of equal blocks alone has operators that no parameter
    reaches.
    """
    if (alike := _alike(folded.graph, problem.graph)) is None:
        return None
    own = {node.name: node.name for node in graph.nodes} | dict(_stands_for(folded))
    own = {name: alike[of] for name, of in own.items() if of in alike}
    handed_on = {name: alike[of] for name, of in _handed_on(folded)}
    known = problem.index
    index = {(kind, name): known[kind, of] for name, of in own.items() for kind in _KINDS if (kind, of) in known}
    index |= {("hub", name): known["hub", of] for name, of in handed_on.items() if ("hub", of) in known}
    domains = {name: problem.domains[of] for name, of in own.items() if of in problem.domains}
    constants = constant_nodes(graph)
    if any(not (node.is_leaf or node.name in constants or node.name in domains) for node in graph.nodes):
        return None
    closures = {name: problem.closures[of] for name, of in own.items() if of in problem.closures}
    return replace(problem, graph=graph, index=index, domains=domains, closures=closures)


def _alike(graph: Graph, other: Graph) -> Mapping[str, str] | None:
    """By each name in a graph, the name in another one that computes the same; None where it does not."""
    if graph is other:
        return {node.name: node.name for node in graph.nodes}
    found, ahead = dict[str, str](), [(a, b) for (_, a), (_, b) in zip(graph.outputs, other.outputs, strict=True)]
    while ahead:
        a, b = ahead.pop()
        if a in found:
            if found[a] != b:
                return None
            continue
        one, two = graph.by_name[a], other.by_name[b]
        if (one.op, one.attrs, len(one.inputs)) != (two.op, two.attrs, len(two.inputs)):
            return None
        found[a] = b
        ahead += zip(one.inputs, two.inputs, strict=True)
    return found if len(set(found.values())) == len(found) else None


def _stands_for(folded: Folded) -> Iterator[tuple[str, str]]:
    """The nodes of all copies of blocks, each with the one that stands for it."""
    for block, copies in folded.copies.items():
        for names in copies:
            yield from ((name, of) for of, name in names.items() if folded.home.get(of) == block)


def _handed_on(folded: Folded) -> Iterator[tuple[str, str]]:
    """What a copy gives to the next one, each with what the first copy reads in its place: it is laid out as that.

    But for what its own copy reads too.
    """
    users, home = folded.graph.users, folded.home
    for repeated in folded.repeated:
        for before, after in repeated.carried:
            if not any(home.get(user) == repeated.block for user in users[after]):
                yield from ((names[before], before) for names in folded.copies[repeated.block][1:])
