"""Rings that a role asks for: which attention can be in one, and why another cannot.

Where an axis has the role "ring", every attention of the sequence is in a ring along it, or the request is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import gcd

from shardwright.pcg.choice import Choice
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.ring import Ring
from shardwright.pcg.step.regions import attentions


def rings(graph: Graph, context: Mapping[str, Choice]) -> Mapping[str, list[tuple[Choice, int]]]:
    """Return the operators of the sequence past which operands can travel, with these choices and their sizes.

    `context`: by operator, the choice that splits the sequence. A size is what an axis has to divide.
    """
    by_name = dict[str, list[tuple[Choice, int]]]()
    for name, choice in context.items():
        node = graph.by_name[name]
        if node.row is not None and node.row.travels:
            signature = graph.signature(node)
            sizes = {f.name: f.size for f in signature.factors}
            offered = (ring for ring in Ring.offered(node.row, signature) if ring.outward == choice)
            by_name[name] = [(ring, gcd(*(sizes[factor] for factor in ring.factors))) for ring in offered]
    return by_name


def num_rings(graph: Graph) -> int:
    """Return the number of operators that can be in a ring."""
    travelling = ((n.row, graph.signature(n)) for n in graph.nodes if n.row is not None and n.row.travels)
    return sum(any(Ring.offered(row, signature)) for row, signature in travelling)


def check_rings(
    graph: Graph, context: Mapping[str, Choice], stored: Collection[str], axes: Sequence[tuple[str, int]]
) -> None:
    """Raise a `PlanError` for attention of the sequence that cannot be in a ring along these axes, of more than one.

    `stored`: the nodes whose value is a parameter.
    """
    if len(axes) > 1:
        names = " and ".join(name for name, _ in axes)
        raise PlanError(f"role 'ring' of axes {names}: keys travel around one ring; give the role to one larger axis")
    known = rings(graph, context)
    for name, members in attentions(graph, stored):
        if members.isdisjoint(context):
            continue
        node, sizes = graph.by_name[name], [size for _, size in known.get(name, ())]
        for axis, degree in axes:
            if any(size % degree == 0 for size in sizes):
                continue
            why = _length(max(sizes), axis, degree) if sizes else _form(graph, node, members)
            raise PlanError(f"role 'ring' of axis {axis!r}: attention at {node.source} {why}")


def _length(size: int, axis: str, degree: int) -> str:
    """`size`: the length of the sequence, or what the lengths of queries and keys have in common."""
    return (
        f"has a sequence of {size}, which {axis}={degree} does not divide; pad batches to a length that it divides "
        "(sw.bucket), or choose another size"
    )


def _form(graph: Graph, node: Node, members: Collection[str]) -> str:
    others = "choose the role 'context' or 'ulysses'"
    if node.row is not None and node.row.travels:
        return f"does not have its queries along the sequence; {others}"
    if any(graph.by_name[name].is_random for name in members):
        return f"drops probabilities, so it is no single operator; train without this dropout, or {others}"
    return (
        "is written out as products and a softmax; call F.scaled_dot_product_attention (in transformers "
        f'attn_implementation="sdpa"), or {others}'
    )
