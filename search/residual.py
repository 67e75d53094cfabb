"""What lies between one part of a network and the next: sums that skip a part, and all up to the products beside them.

In a transformer that is the residual stream: what attention and the MLP are added to, with norms and dropouts;
lookups are not among them. Tensor parallelism leaves it whole on every device, unless its sequence (Megatron's
`sequence_parallel`) or its width is split too.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.order import postorder
from shardwright.pcg.step.regions import attentions
from shardwright.search.restrict import is_weight, weight_factors


def residual(graph: Graph) -> frozenset[str]:
    """The operators that lie between parts.

    A sum skips a part if one operand was made of the other by a product with a weight. From there on and back, all that
    is no such product, no lookup and no weight lies between.
    """
    number = {node.name: i for i, node in enumerate(graph.nodes)}
    weights = {node.name for node in graph.nodes if is_weight(graph, node.name)}
    products = {node.name for node in graph.nodes if weight_factors(graph, node, None)}
    inside = products.union(*(members for _, members in attentions(graph, weights)))
    apart = weights | constant_nodes(graph) | {node.name for node in graph.nodes if node.is_leaf}

    def between(names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in inside and name not in apart]

    def skipped(node: Node) -> list[str]:
        """The operand that skips a part, if this is such a sum."""
        if node.op != "add" or len(set(node.inputs)) < 2 or node.name in inside or not apart.isdisjoint(node.inputs):
            return []
        first, last = sorted(node.inputs, key=number.__getitem__)
        made_of = set(postorder([last], lambda n: since(n, number[first])))
        return [first] if first in made_of and not products.isdisjoint(made_of - {first}) else []

    def since(name: str, least: int) -> list[str]:
        return [i for i in graph.by_name[name].inputs if i not in apart and number[i] >= least]

    sums = {node.name: operands for node in graph.nodes if (operands := skipped(node))}
    readers = (user for operands in sums.values() for name in operands for user in graph.users[name])
    after = postorder([*sums, *between(readers)], lambda name: between(graph.users[name]))
    before = postorder(sums, lambda name: between(graph.by_name[name].inputs))
    return frozenset([*after, *before])
