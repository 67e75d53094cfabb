"""Networks of experts: two `expert_linear` with the operators between and after them become a row that experts split.

A sum over experts can be partial, but a nonlinear function of it cannot: the function has to be inside the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.pcg.analysis import cut_with
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.rows.experts import ACTIVATIONS
from shardwright.pcg.types import promote


@dataclass(frozen=True)
class _Network:
    """The operands of `experts`, by name, except that `x` is [*tokens, 1, i]; and the activation of its first product.

    `summed`: the dtype of the sum, if weights and all are cast to a wider one before it.
    """

    x: str
    index: str
    weights: str
    up: str
    down: str
    activation: str
    summed: str = ""


def with_networks(graph: Graph) -> Graph:
    """Replace every weighted sum of the results of a token's experts by one `experts`."""
    finder, b, names = _Finder(graph), GraphBuilder(), dict[str, str]()
    for node in graph.nodes:
        b.at(node.name, node.source)
        network = finder.network(node)
        if network is None:
            names[node.name] = b.copied(node, [names[name] for name in node.inputs])
            continue
        *tokens, _, size = graph.types[network.x].shape
        x = b.op("reshape", names[network.x], shape=(*tokens, size))
        index, weights, *matrices = (names[name] for name in (network.index, network.weights, network.up, network.down))
        if network.summed:
            weights = b.op("cast", weights, dtype=network.summed)
        names[node.name] = b.op("experts", x, index, weights, *matrices, activation=network.activation)
    return b.graph([(key, names[name]) for key, name in graph.outputs])


class _Finder:
    """A search from a node through its operands, as long as they have no other reader."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.types = graph, graph.types

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.types[name].shape

    def _own(self, name: str, *ops: str) -> Node | None:
        """Return the node if it is one of these operators and has a single reader."""
        node = self.graph.by_name[name]
        return node if node.op in ops and len(set(self.graph.users[name])) == 1 else None

    def network(self, node: Node) -> _Network | None:
        """Return the network if this sum is Σ_k weights[…, k] · last[…, k, :], in mixed precision in a wider dtype."""
        if node.op != "sum" or node.attr("keepdim"):
            return None
        wider = self._own(node.inputs[0], "cast")
        scaled = self._own(wider.inputs[0] if wider is not None else node.inputs[0], "mul")
        if scaled is None:
            return None
        for product, column in (scaled.inputs, scaled.inputs[::-1]):
            last, weights = self._own(product, "expert_linear"), self.graph.by_name[column]
            if last is not None and weights.op == "reshape" and node.attr("dims") == (len(self._shape(product)) - 2,):
                joined = self._of(last, weights)
                if joined is not None and wider is not None:
                    joined = replace(joined, summed=self.types[wider.name].dtype)
                return (
                    joined if joined is not None and self._computes_in(joined) == self.types[node.name].dtype else None
                )
        return None

    def _of(self, last: Node, column: Node) -> _Network | None:
        """Return the network that ends in this product, with weights that stand in a column."""
        hidden, down, index = last.inputs
        first, activation = self._hidden(hidden)
        weights, entries = column.inputs[0], self._shape(index)
        if first is None or first.inputs[2] != index:
            return None
        x, up, _ = first.inputs
        shapes = (self._shape(weights), self._shape(column.name), self._shape(x)[:-1], self._shape(hidden)[:-1])
        if shapes != (entries, (*entries, 1), (*entries[:-1], 1), entries):
            return None
        return _Network(x, index, weights, up, down, activation)

    def _computes_in(self, network: _Network) -> str:
        own = (self.types[name].dtype for name in (network.x, network.weights, network.up, network.down))
        return promote(*own, network.summed) if network.summed else promote(*own)

    def _hidden(self, name: str) -> tuple[Node | None, str]:
        """Return the product that a hidden value is made of, and the activation, which may be a gate."""
        gated = self._own(name, "mul")
        if gated is None:
            activation = self._own(name, *_OPERATORS)
            first = activation and self._own(activation.inputs[0], "expert_linear")
            return first, _word(activation) if activation is not None else ""
        for active, value in (gated.inputs, gated.inputs[::-1]):
            activation = self._own(active, *_OPERATORS)
            first = activation and self._halved(activation.inputs[0], value)
            if activation is not None and first is not None:
                return first, _word(activation)
        return None, ""

    def _halved(self, gate: str, value: str) -> Node | None:
        """Return the `expert_linear` whose columns' first and second half these are."""
        halves = [self._own(name, "slice") for name in (gate, value)]
        if (
            halves[0] is None
            or list(cut_with(self.graph, halves[0])) != halves
            or self._shape(gate) != self._shape(value)
        ):
            return None
        whole = self.graph.by_name[halves[0].inputs[0]]
        of_columns = halves[0].attr("dim") == len(self._shape(whole.name)) - 1
        alone = len(set(self.graph.users[whole.name])) == 2
        return whole if whole.op == "expert_linear" and of_columns and alone else None


_OPERATORS = tuple(word.partition("_")[0] for word in ACTIVATIONS)


def _word(activation: Node) -> str:
    """Return the name of the activation in `experts`."""
    tanh = activation.op == "gelu" and activation.attr("approximate") == "tanh"
    return f"{activation.op}{'_tanh' * tanh}"
