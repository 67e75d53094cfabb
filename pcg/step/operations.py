"""What a step runs, in order: operators, and changes of layout of activations."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from shardwright.pcg.graph import OPAQUE, Graph
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE, REPLICATE
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
    graph: Graph, parameters: Parameters, once: frozenset[str], elsewhere: Collection[str]
) -> list[Operation]:
    """What a program that keeps all values runs: all operators but those that are run `once`, or `elsewhere`.

    Sums that the batch alone determines come first, with all that they need.
    """
    names, views = parameters.names, views_of_parameters(graph, parameters)
    sums, before = early_sums(graph, once)
    found: list[Operation] = []
    for node in graph.nodes:
        if node.is_leaf or node.name in once or node.name in names or node.name in elsewhere:
            continue
        read = dict.fromkeys(names.get(name, name) for name in node.inputs)
        reads = tuple(name for name in read if name not in parameters.by_leaf)
        grad = graph.types[node.name].grad
        found.append(
            Operation(
                name=node.name,
                reads=reads,
                weights=tuple(name for name in read if name in parameters.by_leaf),
                views=tuple(dict.fromkeys(leaf for name in node.inputs for leaf in views.get(name, ()))),
                gradients=tuple(name for name in reads if grad and graph.types[name].grad),
                grad=grad,
                early=node.name in sums,
            )
        )
    return sorted(found, key=lambda operation: not (operation.early or operation.name in before))


def views_of_parameters(graph: Graph, parameters: Parameters) -> dict[str, tuple[str, ...]]:
    """Values that may lie in the memory of parameters, and in that of which."""
    names, found = parameters.names, dict[str, tuple[str, ...]]()
    for node in graph.nodes:
        row = ROWS.get(node.op)
        keeps_memory = node.op in (PARTITION, REPLICATE) or (
            row is not None and (row.view or node.op in ("cast", "contiguous"))
        )
        if node.name in names or node.is_leaf or not keeps_memory:
            continue
        leaves = dict.fromkeys(leaf for i in node.inputs for leaf in ((names[i],) if i in names else found.get(i, ())))
        if leaves:
            found[node.name] = tuple(leaves)
    return found


def early_sums(graph: Graph, constant: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Reductions of single values that the batch alone determines, and everything that has to come before them."""
    from_batch: set[str] = set(constant)
    sums: list[str] = []
    for node in graph.nodes:
        if node.op == "input":
            from_batch.add(node.name)
        elif node.is_leaf or node.op in (OPAQUE, COMBINE) or not all(i in from_batch for i in node.inputs):
            continue
        elif node.op == REDUCE:
            small = graph.types[node.name].num_elements == 1
            if small and node.name not in constant:
                sums.append(node.name)
        elif node.op == PARTITION or (node.op in ROWS and not ROWS[node.op].random):
            from_batch.add(node.name)
    return sums, _ancestors(graph, sums)


def _ancestors(graph: Graph, names: Iterable[str]) -> frozenset[str]:
    found: set[str] = set()
    pending = list(names)
    while pending:
        for name in graph.by_name[pending.pop()].inputs:
            if name not in found:
                found.add(name)
                pending.append(name)
    return frozenset(found)
