"""The operations of a step, in order: operators, and changes of layout of activations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Self

from shardwright.pcg.analysis import (
    Written,
    computed_in_one,
    computed_once,
    drawn_everywhere,
    saved_by,
    summed_in_place,
    written,
)
from shardwright.pcg.attrs import integer
from shardwright.pcg.choice import Exchange, sends
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.layout import R, local_blocks
from shardwright.pcg.mesh import TIME
from shardwright.pcg.moves import SLICE, Move, fused_moves, source_of
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE, REPLICATE
from shardwright.pcg.row import BESIDE
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.late import sums_of_loss
from shardwright.pcg.step.operation import Operation
from shardwright.pcg.step.pairs import Pair, find_pairs, side_by_side
from shardwright.pcg.step.parameters import Parameters, find_parameters, module_block, narrow_dtypes
from shardwright.pcg.step.recompute import OFFLOAD
from shardwright.pcg.step.regions import Arrangement
from shardwright.pcg.step.schedules import phases
from shardwright.pcg.step.verbs import Verb
from shardwright.pcg.types import ITEM_BYTES, TensorType


class Operations:
    """The operations and parameters of a typed parallel graph under an execution.

    A move of two parallel operators is one operation. Sums that the batch alone determines come first, with the nodes
    that they need: `early`. `once`: the nodes that are computed before the first step.

    Raises:
        PlanError: the precision does not fit a graph that was captured in 16 bits, or the execution names blocks or
        places to recompute or offload that are not there, or offload where backward runs in two parts.
    """

    def __init__(self, graph: Graph, execution: Execution = DEFAULT, elsewhere: Collection[str] = ()) -> None:
        """List the operations. `elsewhere`: the names of nodes that get no operation because others do their work."""
        self.graph, self.execution = graph, execution
        narrow = narrow_dtypes(graph)
        self._is_narrow = bool(narrow)
        _check_precision(execution, narrow)
        parameters = find_parameters(graph, execution)
        self.parameters, self.aliases, self.leaf_of = parameters.by_leaf, parameters.aliases, parameters.names
        self.once = computed_once(graph)
        self.fused = {node.name: (start, move) for node, start, move in fused_moves(graph)}
        self.moves = self.fused | slices_of_time(graph)
        self._views = views_of_parameters(graph, parameters)
        self._alias: dict[str, str] = {}
        self._written: dict[str, Written] = {}
        self._bytes: dict[TensorType, float] = {}
        sums, before = early_sums(graph, self.once)
        self._sums, self.early = frozenset(sums), before.union(sums)
        self.loss_sums = sums_of_loss(graph)
        operations = [
            operation
            for node in graph.nodes
            if not (node.is_leaf or node.name in self.once or node.name in self.leaf_of or node.name in elsewhere)
            if (operation := self._move(node) if node.is_parallel else self._operator(node)) is not None
        ]
        self._first = [o._replace(block="") for o in operations if o.name in self.early]
        rest = [o for o in operations if o.name not in self.early]
        gathers = {name for name, (_, move) in self.moves.items() if move.collectives()[0] == "all_gather"}
        self._rest = Arrangement(graph, rest, gathers, self.leaf_of)
        self.listed = self._listed()

    def _listed(self) -> list[Operation]:
        """List the operations, those of pairs side by side; nothing runs in pieces where backward has two parts."""
        is_one = "weights" not in phases(self.execution.schedule.name)
        if self.execution.asks(OFFLOAD) and not is_one:
            raise PlanError(
                f"offload: with schedule {self.execution.schedule.name!r} backward runs in two parts, and the second "
                "needs the values longer; choose another schedule, or leave offload out"
            )
        listed = _apart(self._first + self._rest.run(self.execution))
        self.pairs = find_pairs(self.graph, self.fused, listed, self.execution.pieces if is_one else 1)
        return side_by_side(_whole(listed, self.pairs), self.pairs)

    def run_as(self, execution: Execution) -> Self:
        """Return the operations of an execution that differs in recomputation, offload or pieces.

        Raise a `PlanError` as `run` of regions does.
        """
        variant = copy(self)
        variant.execution = execution
        variant.listed = variant._listed()
        return variant

    @cached_property
    def num_bytes(self) -> dict[str, float]:
        """The size of every activation, by the name of its operation."""
        return {operation.name: operation.num_bytes for operation in self.listed}

    @cached_property
    def in_one(self) -> frozenset[str]:
        """The nodes that are computed in one stage."""
        return computed_in_one(self.graph)

    @cached_property
    def drawn(self) -> frozenset[str]:
        """The draws that every stage makes."""
        return drawn_everywhere(self.graph)

    def bytes_of(self, name: str) -> float:
        """Return the size of one device's part of a value, in the dtype that the execution keeps it in."""
        kind = self.graph.types[name]
        if (size := self._bytes.get(kind)) is None:
            num_bytes, dtype = kind.local_bytes(self.graph.mesh), self.dtype(kind.dtype)
            size = self._bytes[kind] = num_bytes / ITEM_BYTES[kind.dtype] * ITEM_BYTES[dtype]
        return size

    def dtype(self, dtype: str) -> str:
        """Return the dtype in which a value is computed and kept. A graph captured in 16 bits has it already."""
        return dtype if self._is_narrow else self.execution.compute_dtype(dtype)

    def exchanges(self, node: Node) -> tuple[Exchange, ...]:
        """Return what devices send each other while an operator runs, in the dtypes that the execution keeps."""
        return self.graph.exchanges(node, self.dtype)

    def written(self, node: Node) -> Written:
        """Return how a node is written in code, by the function of this name; the result is stored."""
        if (written_node := self._written.get(node.name)) is None:
            written_node = self._written[node.name] = written(self.graph, node)
        return written_node

    def is_weight(self, name: str) -> bool:
        """Return whether readers see a parameter under this name."""
        return self._name(name) in self.parameters

    def _name(self, name: str) -> str:
        """Return a parameter's leaf. The first half of a fused move is read as the start of the whole move."""
        name = self._alias.get(name, name)
        return self.leaf_of.get(name, name)

    def _operation(
        self, node: Node, operands: Sequence[str], names: Sequence[str], *, alias: str = "",
        sums_in_place: bool = False, is_free: bool = False, keeps: tuple[str, ...] = (), saved: tuple[str, ...] = (),
        mask_bytes: float = 0.0, split_backward: bool = False, verb: Verb = "run",
    ) -> Operation:  # fmt: skip
        """Return an operation with the fields that moves and operators share.

        `names`: the operands as readers see them.
        """
        types, parameters, module = self.graph.types, self.parameters, node.source.module
        grad = types[node.name].grad
        reads = [name for name in names if name not in parameters]
        views = [leaf for name in operands for leaf in self._views.get(name, ())] if self._views else []
        return Operation(
            node.name,
            tuple(reads),
            tuple([name for name in names if name in parameters]) if len(reads) < len(names) else (),
            tuple(dict.fromkeys(views)) if views else (),
            saved,
            alias,
            sums_in_place,
            0.0 if is_free else self.bytes_of(node.name),
            keeps,
            mask_bytes,
            tuple([name for name in dict.fromkeys(reads) if types[name].grad]) if grad else (),
            grad,
            split_backward,
            verb,
            module,
            module_block(f"{module}."),
        )

    def _move(self, node: Node) -> Operation | None:
        if node.name not in self.moves:
            self._alias[node.name] = self._name(node.inputs[0])
            return None
        start, move = self.moves[node.name]
        name = self._name(start)
        if self._lies_in_batch(node, start, move):
            return self._operation(node, (start,), (name,), alias=name, is_free=True)
        forward = move.kind.forward
        inplace = forward == "" or (forward == "all_reduce" and summed_in_place(self.graph, start))
        alias = name if inplace and start not in self.leaf_of else ""
        sums: bool = bool(alias) and forward != ""
        verb: Verb = "start" if node.name in self._sums else "total" if node.name in self.loss_sums else "run"
        return self._operation(node, (start,), (name,), alias=alias, sums_in_place=sums, verb=verb)

    def _lies_in_batch(self, node: Node, start: str, move: Move) -> bool:
        """Return whether a move is a view of an input: a slice along the first dimension, in one piece."""
        if move.kind.forward != SLICE or source_of(self.graph, start).op != "input":
            return False
        layouts, sizes = self.graph.types[node.name].layouts, self.graph.mesh.sizes
        return layouts[move.axis].dim == 0 and local_blocks(layouts, move.axis, sizes) == 1

    def _operator(self, node: Node) -> Operation:
        types, row, names = self.graph.types, node.row, [self._name(i) for i in node.inputs]
        kind, parameters, views = types[node.name], self.parameters, self._views
        moves_nothing = row is not None and row.view and self.written(node) != "copy" and bool(names)
        of_weight = moves_nothing and names[0] in parameters
        grads = [types[i].grad for i in node.inputs]
        saved = saved_by(node, grads) if kind.grad else ()
        read = [i for i in saved if isinstance(i, int)]
        operands = [names[i] for i in read]
        leaves = [
            leaf for i, name in zip(read, operands, strict=True) for leaf in (name, *views.get(node.inputs[i], ()))
        ]
        is_product = kind.grad and row is not None and row.contraction and row.passes == 1
        operation = self._operation(
            node,
            node.inputs,
            names,
            alias=names[0] if moves_nothing and not of_weight else "",
            is_free=of_weight,
            keeps=tuple([k for k in operands if k not in parameters]) + ((node.name,) if "result" in saved else ()),
            saved=tuple(dict.fromkeys([leaf for leaf in leaves if leaf in parameters])) if leaves else (),
            mask_bytes=self._mask_bytes(node, saved),
            split_backward=is_product and any(grad and n in parameters for n, grad in zip(names, grads, strict=True)),
        )
        return (
            operation._replace(seed=integer(dict(node.attrs), "seed")) if row is not None and row.random else operation
        )

    def _mask_bytes(self, node: Node, saved: Sequence[int | str]) -> float:
        """Return the size of the masks and other values that backward needs beside activations.

        Dropout keeps its mask. Attention casts a mask of bools to numbers, and keeps these, but casts it by parts where
        keys travel. The rows of operators give the size of what else they keep.
        """
        types, mesh = self.graph.types, self.graph.mesh
        kind, extra = types[node.name], [item for item in saved if item in BESIDE]
        if not kind.grad or not extra or node.row is None:
            return 0.0
        dtype, shapes = self.dtype(types[next(iter(node.inputs))].dtype), self.graph.local_shapes(node)
        num_bytes = sum(node.row.beside_bytes(item, shapes, dtype) for item in extra)
        if node.op == "sdpa" and not sends(node.split):
            masks = (types[name] for name in node.inputs[3:])
            num_bytes += (
                sum(m.local_bytes(mesh) for m in masks if m.dtype == "bool") * ITEM_BYTES[self.dtype(kind.dtype)]
            )
        return num_bytes


def _apart(listed: Sequence[Operation]) -> list[Operation]:
    """Keep a sum over ranks from overwriting its operand if the two are not made again together."""
    made = {o.name: o for o in listed}
    return [
        o._replace(alias="") if o.sums_in_place and o.alias in made and made[o.alias].region != o.region else o
        for o in listed
    ]


def _whole(listed: Sequence[Operation], pairs: Sequence[Pair]) -> list[Operation]:
    """Let what there is in pieces alone wait on the device."""
    in_pieces = {name for pair in pairs for name in pair.operations} - {name for pair in pairs for name in pair.made}
    return [o._replace(stored=Fate.KEPT) if o.name in in_pieces else o for o in listed]


def _check_precision(execution: Execution, narrow: set[str]) -> None:
    wanted = execution.compute_dtype("float32")
    if narrow and execution.whole and wanted not in narrow:
        got, good = " and ".join(sorted(narrow)), " or ".join(sorted({wanted, "float32"}))
        problem = f"expected parameters in {good}, got {got}; leave the precision out, or plan the model in float32"
        raise PlanError(f"precision {execution.whole!r}: {problem}")


def slices_of_time(graph: Graph) -> dict[str, tuple[str, Move]]:
    """Return the start and the move of every slice that a microbatch takes, by the slice's node."""
    if TIME not in graph.mesh.names:
        return {}
    axis, types = graph.mesh.index(TIME), graph.types
    slices = (node for node in graph.nodes if node.op == PARTITION and node.attr("axis") == TIME)
    return {n.name: (n.inputs[0], Move(axis, R, types[n.name].layouts[axis])) for n in slices}


def views_of_parameters(graph: Graph, parameters: Parameters) -> dict[str, tuple[str, ...]]:
    """Return the values that may lie in the memory of parameters, with these. A cast's result has its own."""
    names, leaves_by_view = parameters.names, dict[str, tuple[str, ...]]()
    stored = {name: leaf for name, leaf in names.items() if leaf in parameters.by_leaf}
    for node in graph.nodes:
        if stored.keys().isdisjoint(node.inputs) and leaves_by_view.keys().isdisjoint(node.inputs):
            continue
        row = node.row
        keeps_memory = node.op in (PARTITION, REPLICATE) or (row is not None and row.aliases)
        if node.name in names or not keeps_memory:
            continue
        if any(graph.types[i].dtype != graph.types[node.name].dtype for i in node.inputs):  # rounded, by a cast
            continue
        memory = ((stored[i],) if i in stored else leaves_by_view.get(i, ()) for i in node.inputs)
        leaves = dict.fromkeys(leaf for leaves in memory for leaf in leaves)
        if leaves:
            leaves_by_view[node.name] = tuple(leaves)
    return leaves_by_view


def early_sums(graph: Graph, constant: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Return the reductions of single values that the batch alone determines, and all nodes that must precede them."""
    from_batch: set[str] = set(constant)
    sums: list[str] = []
    for node in graph.nodes:
        if not from_batch.issuperset(node.inputs):
            continue
        if node.op == "input":
            from_batch.add(node.name)
        elif node.is_leaf or node.op in (OPAQUE, COMBINE):
            continue
        elif node.op == REDUCE:
            small = graph.types[node.name].num_elements == 1
            if small and node.name not in constant:
                sums.append(node.name)
        elif node.op == PARTITION or (node.row is not None and not node.is_random):
            from_batch.add(node.name)
    return sums, _ancestors(graph, sums)


def _ancestors(graph: Graph, names: Iterable[str]) -> frozenset[str]:
    ancestors: set[str] = set()
    pending = list(names)
    while pending:
        for name in graph.by_name[pending.pop()].inputs:
            if name not in ancestors:
                ancestors.add(name)
                pending.append(name)
    return frozenset(ancestors)
