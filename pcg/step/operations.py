"""What a step runs, in order: operators, and changes of layout of activations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step.parameters import Parameters, module_block


class Operation(NamedTuple):
    """One operator, or one change of layout of an activation.

    reads        activations, by name; `weights`: parameters, by leaf
    views        parameters whose memory it reads by way of views
    alias        the operand whose memory the result shares, or ""
    keeps        what backward needs of activations; `mask_bytes`: and of a mask
    gradients    the activations among `reads` that get one; none and no weights: there is no backward
    grad         whether its result gets one
    apart        whether the gradients of its weights are made apart from those of its activations
    attention    whether it is made again under selective recomputation
    early        whether it is a sum over ranks that is started before anything else runs
    module       where it lies in the model
    """

    name: str
    reads: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    alias: str = ""
    num_bytes: float = 0.0
    keeps: tuple[str, ...] = ()
    mask_bytes: float = 0.0
    gradients: tuple[str, ...] = ()
    grad: bool = False
    apart: bool = False
    attention: bool = False
    early: bool = False
    module: str = ""

    @property
    def block(self) -> str:
        """The repeated module that it lies in, or ""."""
        return module_block(f"{self.module}.")

    @property
    def is_differentiated(self) -> bool:
        return self.grad and bool(self.gradients or self.weights)


def plain_operations(
    graph: Graph, nodes: Sequence[Node], parameters: Parameters, early: Collection[str] = ()
) -> Iterator[Operation]:
    """What a program that keeps all values runs: `nodes`, with the parameters and gradients of each."""
    names, views = parameters.names, views_of_parameters(graph, parameters)
    for node in nodes:
        read = tuple(dict.fromkeys(names.get(i, i) for i in node.inputs))
        weights = tuple(i for i in read if i in parameters.by_leaf)
        through = tuple(dict.fromkeys(leaf for i in node.inputs for leaf in views.get(i, ())))
        grad = graph.types[node.name].grad
        reads = tuple(i for i in read if i not in weights)
        gradients = tuple(i for i in reads if grad and graph.types[i].grad)
        yield Operation(node.name, reads, weights, through, gradients=gradients, grad=grad, early=node.name in early)


def views_of_parameters(graph: Graph, parameters: Parameters) -> dict[str, tuple[str, ...]]:
    """Values that may lie in the memory of parameters, and in that of which."""
    names, found = parameters.names, dict[str, tuple[str, ...]]()
    for node in graph.nodes:
        row = ROWS.get(node.op)
        keeps_memory = node.is_parallel or (row is not None and (row.view or node.op in ("cast", "contiguous")))
        if node.name in names or node.is_leaf or not keeps_memory:
            continue
        leaves = dict.fromkeys(leaf for i in node.inputs for leaf in ((names[i],) if i in names else found.get(i, ())))
        if leaves:
            found[node.name] = tuple(leaves)
    return found
