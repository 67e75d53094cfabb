"""Graphs: values made of frozen nodes, and the one inference that gives every node its type.

A graph is a tuple of nodes in topological order; a node has one result and is referred to by name. Leaves carry their
type as attributes. In a *serial* graph the mesh is empty. In a *parallel* one every operator node says along which
factor each mesh axis splits it (`split`), the four parallel operators are nodes of their own, and `infer` checks that
each operand has exactly the layout that the split asks for.

Invariants, checked by `Graph.validate`:
* names are unique and defined before use; every operator is known;
* shapes fit the operator's factor string; layouts fit its split;
* results that are read from outside are `R` on every axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from shardwright.pcg.attrs import Attr, Attrs
from shardwright.pcg.bands import Bands
from shardwright.pcg.bounds import ALL, Band
from shardwright.pcg.choice import Exchange, Running, exchanges, num_senders, sends
from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.factors import Shape, Signature
from shardwright.pcg.inference import fits, infer
from shardwright.pcg.layout import S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.node import LEAVES, OPAQUE, RECEIVED, Node, Source, is_result, leaf, make_attrs
from shardwright.pcg.optable import ROWS, LocalShapes
from shardwright.pcg.parallel import SEND
from shardwright.pcg.types import TensorType

SERIAL = Mesh()


@dataclass(frozen=True)
class Graph:
    """An immutable graph. `outputs` maps "loss" and the names of mutated buffers to the nodes that give them.

    So it does with the names of the model's results where a program gives these (`pcg.results`).
    """

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    mesh: Mesh = SERIAL

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash of the nodes' names and splits alone, which hardly any two graphs share."""
        names, splits = [node.name for node in self.nodes], [node.split for node in self.nodes]
        return hash((tuple(names), tuple(splits), self.outputs, self.mesh))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}  # another process has its own

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """The type of every node's result, inferred once. Raises a `GraphError` at the first bad node."""
        types: dict[str, TensorType] = {}
        for node in self.nodes:
            types[node.name] = self._typed(node, types)
        return types

    def _typed(self, node: Node, types: Mapping[str, TensorType]) -> TensorType:
        """Return the type of a node's result, from the types of earlier nodes."""
        if node.name in types:
            raise GraphError(f"{node}: a node of this name exists already; names are unique")
        try:
            operands = [types[name] for name in node.inputs]
        except KeyError as missing:
            problem = f"operand %{missing.args[0]} is not defined before it; order nodes topologically"
            raise GraphError(f"{node}: {problem}") from None
        return infer(node, operands, self.mesh)

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """The nodes that read each node's result, in order, once per use."""
        users: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in node.inputs:
                users[name].append(node.name)
        return {name: tuple(names) for name, names in users.items()}

    @property
    def loss(self) -> str:
        """The node that gives the loss. Raises a `GraphError` if there is none."""
        self.check_loss()
        return dict(self.outputs)["loss"]

    @property
    def is_part(self) -> bool:
        """Return whether this is one of several pipeline stages: it receives values, or gives no loss."""
        return "loss" not in dict(self.outputs) or any(node.op == RECEIVED for node in self.nodes)

    def check_loss(self) -> None:
        """Raise a `GraphError` if no output is called "loss", or it is no operator's result."""
        outputs = dict(self.outputs)
        if "loss" not in outputs:
            raise GraphError(f"the graph has no output 'loss', only {sorted(outputs)}; a graph to plan gives a loss")
        if (node := self.by_name.get(outputs["loss"])) is None:
            raise GraphError(f"output 'loss' names %{outputs['loss']}, which no node defines")
        if node.is_leaf:
            raise GraphError(
                f"the loss is {node.op} {node.attr('target')!r} itself: there is nothing to run; compute it"
            )

    def leaves(self, op: str) -> Iterator[Node]:
        return (node for node in self.nodes if node.op == op)

    def signature(self, node: Node) -> Signature:
        """Return the node's resolved factor string, over the logical shapes."""
        return _signature(node.op, node.attrs, tuple(self.types[name].shape for name in node.inputs))

    def local_attrs(self, node: Node) -> Attrs:
        """Return the attributes with which a device computes its part of a node that has a row."""
        return ROWS[node.op].localize(dict(node.attrs), self.local_shapes(node))

    def local_shapes(self, node: Node) -> LocalShapes:
        """Return the shapes of a node's operands and result, and of a device's parts of them."""
        operands, result = [self.types[name] for name in node.inputs], self.types[node.name]
        return LocalShapes(
            tuple(t.shape for t in operands),
            result.shape,
            tuple(t.local_shape(self.mesh) for t in operands),
            result.local_shape(self.mesh),
            num_senders(node.split, self.mesh.sizes) if node.split else 1,
        )

    @cached_property
    def _bands(self) -> Bands:
        return Bands(self.by_name, self.types)

    def band(self, node: Node) -> Band:
        """Return how far before and after itself a query sees keys, if the node is attention; else it says nothing."""
        return self._bands.of(node) if node.row is not None and node.row.travels else ALL

    def exchanges(self, node: Node, dtype_of: Callable[[str], str] = str) -> tuple[Exchange, ...]:
        """Return what devices send each other while an operator runs, by axis in the order of forward.

        `dtype_of`: the dtype that a value of some dtype is computed in.
        """
        if node.row is None or not sends(node.split):
            return ()
        types = [self.types[name] for name in (*node.inputs, node.name)]
        dtypes, grads = [dtype_of(t.dtype) for t in types], [t.grad for t in types[:-1]]
        shapes, sizes = self.local_shapes(node), self.mesh.sizes
        signature, band = self.signature(node), self.band(node)
        return exchanges(Running(node.row, signature, node.split, sizes, shapes, dtypes, grads, band))

    def validate(self) -> Graph:
        """Check every invariant, and return the graph itself, so that passes can end with it."""
        types = self.types
        for key, name in self.outputs:
            if name not in types:
                raise GraphError(f"output {key!r} names %{name}, which no node defines")
            kinds = "RS" if is_result(key) else "R"
            wrong = [a for a, x in zip(self.mesh.names, types[name].layouts, strict=True) if x.kind not in kinds]
            if wrong:
                raise LayoutError(
                    f"output {key!r} (%{name}) is {types[name]}; results are R on every axis: reduce P, combine S, "
                    f"read C before it is replicated, on {wrong}"
                )
        return self

    def validated_beside(self, known: Graph) -> Graph:
        """Validate a graph that resembles a typed one, inferring only the types of nodes that differ."""
        return self.typed_beside(known).validate()

    def typed_beside(self, known: Graph) -> Graph:
        """Return the graph itself, with `types` inferred only where it differs from a typed one."""
        types: dict[str, TensorType] = {}
        before, known_types = known.by_name, known.types
        is_alike = self.mesh == known.mesh
        for node in self.nodes:
            name = node.name
            if is_alike and before.get(name) is node and name not in types:
                for operand in node.inputs:
                    if types.get(operand) is not known_types[operand]:
                        break
                else:
                    types[name] = known_types[name]
                    continue
            kind, earlier = self._typed(node, types), known_types.get(name)
            types[name] = earlier if earlier is not None and earlier == kind else kind
        self.__dict__["types"] = types  # where the cached property stores it
        return self

    @property
    def draws(self) -> list[tuple[str, int]]:
        """The draws of random numbers, in the order of the program: the operator, and the number of its draw."""
        return [(node.op, draw) for node in self.nodes if (draw := node.draw) is not None]

    def without_dead_nodes(self) -> Graph:
        """Return the graph without nodes that no output needs, also leaves; inputs stay, as the batch's contract."""
        live = {name for _, name in self.outputs}
        for node in reversed(self.nodes):
            if node.name in live:
                live.update(node.inputs)
        return replace(self, nodes=tuple(n for n in self.nodes if n.name in live or n.op == "input"))

    def erased(self) -> Graph:
        """Return the serial graph that this graph denotes, without parallel operators and layouts."""
        alias: dict[str, str] = {}
        nodes: list[Node] = []
        for node in self.nodes:
            if node.is_parallel or node.op == SEND:
                alias[node.name] = alias.get(node.inputs[0], node.inputs[0])
                continue
            attrs = node.attrs
            if node.is_leaf:
                attrs = tuple([(k, () if k == "layouts" else v) for k, v in attrs])
            inputs = tuple([alias.get(i, i) for i in node.inputs])
            nodes.append(Node(node.name, node.op, inputs, attrs, (), node.source))
        return Graph(tuple(nodes), tuple((k, alias.get(v, v)) for k, v in self.outputs))


@lru_cache(maxsize=16384)
def _signature(op: str, attrs: tuple[tuple[str, Attr], ...], shapes: tuple[Shape, ...]) -> Signature:
    return ROWS[op].signature(shapes, dict(attrs))


def topological(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes in an order that defines before use, the given one if it does.

    Raises `GraphError` on a cycle.
    """
    pending: dict[str, Node] = {}
    for node in nodes:
        if node.name in pending:
            raise GraphError(f"{node}: a node of this name exists already; names are unique")
        pending[node.name] = node
    done: dict[str, Node] = {}
    for start in list(pending):
        stack = [start]
        path: set[str] = set()
        while stack:
            name = stack[-1]
            if name in done:
                stack.pop()
                continue
            path.add(name)
            missing = [i for i in pending[name].inputs if i not in done and i in pending]
            if not missing:
                done[name] = pending[name]
                path.discard(name)
                stack.pop()
            elif missing[0] in path:
                raise GraphError(f"{pending[name]}: the graph has a cycle through %{missing[0]}")
            else:
                stack.append(missing[0])
    return tuple(done.values())


__all__ = ["LEAVES", "OPAQUE", "S", "Source", "fits", "infer", "leaf", "make_attrs"]
