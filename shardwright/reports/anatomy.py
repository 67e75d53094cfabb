"""What a plan consists of, in the words that people use: what each axis does, how weights are stored, what moves.

Everything here is derived from the parallel graph and the cost model, so it describes any plan, however it was found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.cost.predict import NodeCosts, node_costs
from shardwright.pcg.analysis import constant_nodes, is_whole
from shardwright.pcg.factors import Signature
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.layout import Layout, S
from shardwright.pcg.moves import Move, fused_moves
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import COMBINE
from shardwright.search.plan import Plan

Use = str
"""Along what an operator is split: one of `USES`."""
USES = ("batch", "sequence", "features", "whole")
Storage = str
"""How a parameter is kept: "whole", "sharded" as it is used, or "gathered" for each use."""


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What one mesh axis does: how many operators it splits along what, and their share of the compute time."""

    name: str
    size: int
    num_operators: Mapping[Use, int]
    share_of_compute: Mapping[Use, float]
    num_weights: Mapping[Storage, int]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Moves of one kind along one axis. `what` is "weight", "activation" or "constant"."""

    what: str
    axis: str
    before: str
    after: str
    count: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Unsplit:
    """Operators that run whole along an axis, all for the same reason; `example` says where one of them is."""

    axis: str
    op: str
    reason: str
    count: int
    compute_s: float
    example: str


class Anatomy:
    """The parts of one plan, each worked out once."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph, self.mesh = plan, plan.graph, plan.mesh

    @cached_property
    def costs(self) -> Mapping[str, NodeCosts]:
        return node_costs(self.graph, self.plan.cluster)

    @cached_property
    def constants(self) -> frozenset[str]:
        """Nodes that no parameter reaches: positions, masks, labels."""
        return constant_nodes(self.graph)

    @cached_property
    def operators(self) -> tuple[Node, ...]:
        """What the plan is about: operators that a parameter reaches, without single numbers."""
        return tuple(
            n for n in self.graph.nodes
            if not (n.is_leaf or n.is_parallel or n.name in self.constants) and self._is_large(n)
        )  # fmt: skip

    def _is_large(self, node: Node) -> bool:
        return any(self.graph.types[name].num_elements > 1 for name in (node.name, *node.inputs))

    # ---- uses ----

    @cached_property
    def uses(self) -> Mapping[str, tuple[Use, ...]]:
        """Along what each operator is split, by mesh axis."""
        serial = self.graph.erased()
        batch, sequence = _carried(serial, 0, integers_only=False), _carried(serial, 1, integers_only=True)

        def use(node: Node, choice: str) -> Use:
            if is_whole(choice):
                return "whole"
            if choice == batch.get(node.name):
                return "batch"
            return "sequence" if choice == sequence.get(node.name) else "features"

        whole = ("R",) * len(self.mesh)
        return {n.name: tuple(use(n, choice) for choice in n.split or whole) for n in self.operators}

    @cached_property
    def axes(self) -> tuple[AxisUse, ...]:
        total_s = sum(self.costs[n.name].compute_s for n in self.operators) or 1.0
        found: list[AxisUse] = []
        for axis, (name, size) in enumerate(zip(self.mesh.names, self.mesh.sizes, strict=True)):
            count: dict[Use, int] = dict.fromkeys(USES, 0)
            seconds: dict[Use, float] = dict.fromkeys(USES, 0.0)
            for node in self.operators:
                use = self.uses[node.name][axis]
                count[use] += 1
                seconds[use] += self.costs[node.name].compute_s
            stored: dict[Storage, int] = {"whole": 0, "sharded": 0, "gathered": 0}
            for storage in self.storage.values():
                stored[storage[axis]] += 1
            found.append(AxisUse(name, size, count, {u: s / total_s for u, s in seconds.items()}, stored))
        return tuple(found)

    # ---- weights ----

    @cached_property
    def storage(self) -> Mapping[str, tuple[Storage, ...]]:
        """How each parameter is kept along each axis: whole, sharded as it is used, or gathered for each use (ZeRO)."""
        return {n.name: self._storage(n) for n in self.graph.leaves("parameter")}

    def _storage(self, parameter: Node) -> tuple[Storage, ...]:
        gathered = {str(n.attr("axis")) for n in self._steps(parameter.name) if n.op == COMBINE}
        layouts = self.graph.types[parameter.name].layouts
        return tuple(
            "whole" if not x.is_shard else "gathered" if axis in gathered else "sharded"
            for axis, x in zip(self.mesh.names, layouts, strict=True)
        )

    def _steps(self, name: str) -> Iterator[Node]:
        """The parallel operators between a value and the operators that read it."""
        for user in self.graph.users[name]:
            node = self.graph.by_name[user]
            if node.is_parallel:
                yield node
                yield from self._steps(user)

    # ---- moves ----

    @cached_property
    def moves(self) -> tuple[tuple[Node, Node, Move], ...]:
        """(the node that the value comes from, the last step of the move, the move)."""
        return tuple((self._origin(start), node, move) for node, start, move in fused_moves(self.graph))

    def _origin(self, name: str) -> Node:
        node = self.graph.by_name[name]
        while node.is_parallel:
            node = self.graph.by_name[node.inputs[0]]
        return node

    def kind_of(self, node: Node) -> str:
        """What a value is: "weight", "activation", or "constant" where no parameter reaches it."""
        if node.op == "parameter":
            return "weight"
        return "constant" if node.name in self.constants else "activation"

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """All moves by kind, the longest first."""
        groups: dict[tuple[str, str, str, str], list[NodeCosts]] = defaultdict(list)
        for origin, last, move in self.moves:
            key = (self.kind_of(origin), self.mesh.names[move.axis], move.before.kind, move.after.kind)
            groups[key].append(self.costs[last.name])
        found = [
            Traffic(*key, len(g), sum(c.communication_bytes for c in g), sum(c.communication_s for c in g))
            for key, g in groups.items()
        ]
        return tuple(sorted(found, key=lambda t: (-t.seconds, -t.sent_bytes)))

    # ---- what is not split ----

    @cached_property
    def unsplit(self) -> tuple[Unsplit, ...]:
        """Operators that do not share their work along an axis, by reason, the most expensive first."""
        groups: dict[tuple[str, str, str], list[Node]] = defaultdict(list)
        for node in self.operators:
            for axis, use in enumerate(self.uses[node.name]):
                if use == "whole" and self.mesh.sizes[axis] > 1:
                    name = str(node.attr("target")) if node.op == OPAQUE else node.op
                    groups[self.mesh.names[axis], name, self._why_whole(node, axis)].append(node)
        found = [
            Unsplit(*key, len(nodes), sum(self.costs[n.name].compute_s for n in nodes), str(nodes[0].source))
            for key, nodes in groups.items()
        ]
        return tuple(sorted(found, key=lambda u: -u.compute_s))

    def _why_whole(self, node: Node, axis: int) -> str:
        if node.op == OPAQUE:
            return "it has no row in the op table, so nothing is known about splitting it"
        size = self.mesh.sizes[axis]
        factors = [f for f in self.graph.signature(node).factors if f.size > 1]
        free = [f for f in factors if f.role != "fixed"]
        if not free:
            return "every dimension is needed whole"
        if not any(f.size % size == 0 for f in free):
            sizes = ", ".join(str(f.size) for f in sorted(free, key=lambda f: f.size))
            return f"no splittable size ({sizes}) is divisible by {size}"
        if ROWS[node.op].view:
            return "it moves no data"
        return "moving its operands would cost more than splitting it saves"


def _carried(graph: Graph, dim: int, *, integers_only: bool) -> Mapping[str, str]:
    """For every operator that carries dimension `dim` of the inputs, the factor that holds it."""
    inputs = [(n.name, graph.types[n.name]) for n in graph.leaves("input")]
    where: dict[str, Layout] = {
        name: S(dim) for name, kind in inputs
        if len(kind.shape) > dim and (kind.dtype.startswith("int") or not integers_only)
    }  # fmt: skip
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.is_leaf or node.op == OPAQUE or not any(i in where for i in node.inputs):
            continue
        signature = graph.signature(node)
        index = _carrier(signature, [where.get(i) for i in node.inputs])
        if index is not None:
            found[node.name] = signature.factors[index].name
            result = signature.split_layouts(index)[1]
            if result.is_shard:
                where[node.name] = result
    return found


def _carrier(signature: Signature, carried: Sequence[Layout | None]) -> int | None:
    """The factor whose shard of an operand is the carried one."""
    for index, factor in enumerate(signature.factors):
        operands, _ = signature.split_layouts(index)
        if factor.role != "fixed" and any(x == c for x, c in zip(operands, carried, strict=True)):
            return index
    return None
