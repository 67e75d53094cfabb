"""The pairwise model of a graph on one mesh: variables, their own costs, and the costs between them.

    operator ──result──▶ [hub] ──resharding──▶ operator ...        parameter's storage ──▶ operator

One variable per operator and per stored parameter; a *hub* variable per tensor with several readers, so that a
resharding that they share is paid once. The sum of own costs and of edge costs is the plan's cost, with one exception:
where several readers want the same layout and it is not the hub's, the model pays for it once each, the plan once in
all. Nodes that no parameter reaches (masks, positions) are not variables: they are computed in whatever layout their
readers want.

Everything is interned by what it depends on, so equal blocks share their tables, and work done on one is done for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.moves import MoveCosts, TensorClass
from shardwright.cost.compute.compute import Compute
from shardwright.pcg.analysis import Written, constant_nodes, is_whole, saved_by, written
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layout, Layouts, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS
from shardwright.search.blocks import blocked_choices
from shardwright.search.domain import CertifiedSplits, Domain, node_domain, storage_domain
from shardwright.search.reshard import Closure, close, replicated, valid_states

Restrict = Callable[[Node, int, str], bool]
"""Whether a node may take a choice on an axis; used for baselines and forced layouts."""


T = TypeVar("T")


class Interner:
    """Keeps one object per key, so that equal things are identical."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The object made for an equal key before, or a new one."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def num_made(self, kind: str) -> int:
        """How many objects of this kind (the first part of their key) were made."""
        return sum(1 for key in self._made if isinstance(key, tuple) and key[0] == kind)


@dataclass(frozen=True)
class Order:
    """The order in which variables are eliminated, and the entries of the largest table on the way."""

    variables: tuple[int, ...]
    largest_table: int


@dataclass
class Variable:
    """One choice to make. `kind` is "node", "storage" or "hub"; `name` the node or tensor it belongs to."""

    kind: str
    name: str
    size: int
    domain: Domain | None = None
    closure: Closure | None = None


@dataclass
class Problem:
    """Variables with their domains; `edges[i, j]` is the cost table between two variables, i < j.

    `order` is the elimination order, once a solver has decided it.
    """

    graph: Graph
    mesh: Mesh
    variables: list[Variable] = field(default_factory=list)
    time_s: list[np.ndarray] = field(default_factory=list)
    kept_bytes: list[np.ndarray] = field(default_factory=list)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    closures: dict[str, Closure] = field(default_factory=dict)
    index: dict[tuple[str, str], int] = field(default_factory=dict)
    order: Order | None = None


class ProblemBuilder:
    """Builds problems for one cluster; tables are shared among all graphs and restrictions of one mesh."""

    def __init__(self, cluster: Cluster, mesh: Mesh, certified: CertifiedSplits) -> None:
        self.mesh, self.certified = mesh, certified
        self.costs = MoveCosts(cluster, mesh.sizes)
        self.compute = Compute(cluster.device)
        self.interner = Interner()

    def build(
        self,
        graph: Graph,
        restrict: Restrict | None = None,
        boundary: Mapping[str, Layouts] | None = None,
        blocked: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Problem:
        """The problem of a serial graph. What cannot be split stays whole.

        For a part of a graph, `boundary` gives the layouts in which it reads its inputs and hands on its result.
        `blocked` is what `blocked_choices` says of the graph, where that is known already.
        """
        if blocked is None:
            blocked = blocked_choices(graph, constant_nodes(graph))
        return _Build(self, graph, restrict, boundary or {}, blocked).run()


class _Build:
    def __init__(
        self,
        builder: ProblemBuilder,
        graph: Graph,
        restrict: Restrict | None,
        boundary: Mapping[str, Layouts],
        blocked: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.b, self.graph, self.restrict, self.boundary, self.blocked = builder, graph, restrict, boundary, blocked
        self.sizes = builder.mesh.sizes
        self.types = graph.types
        self.kinds = {n: builder.interner.get(("type", kind), lambda kind=kind: kind) for n, kind in self.types.items()}
        self.constants = constant_nodes(graph)
        self.problem = Problem(graph, builder.mesh)
        self.charged: set[str] = set()
        self.roots: dict[str, str] = {}

    def run(self) -> Problem:
        readers: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for node in self.graph.nodes:
            if node.name in self.constants or node.is_leaf:
                self.roots[node.name] = node.name
                continue
            variable = self._add("node", node.name, self._domain(node))
            for position, name in enumerate(node.inputs):
                if name not in self.constants:
                    readers[name].append((variable, position))
        outputs = dict.fromkeys(name for _, name in self.graph.outputs)
        for name in outputs:
            if name not in self.constants:
                readers.setdefault(name, [])
        for node in self.graph.leaves("parameter"):
            if node.name in readers:
                self._add("storage", node.name, self._storage(node, readers[node.name]))
        for node in self.graph.leaves("input"):
            if node.name in readers:
                self._add("storage", node.name, self._held(node))
        for name, uses in readers.items():
            self._connect(name, uses, name in outputs)
        return self.problem

    def _add(self, kind: str, name: str, domain: Domain | None, closure: Closure | None = None, size: int = 0) -> int:
        p = self.problem
        p.index[kind, name] = len(p.variables)
        p.variables.append(Variable(kind, name, len(domain) if domain else size, domain, closure))
        zeros = self.b.interner.get(("zeros", size), lambda: np.zeros(size))
        p.time_s.append(domain.time_s if domain else zeros)
        p.kept_bytes.append(domain.kept_bytes if domain else zeros)
        return len(p.variables) - 1

    def _domain(self, node: Node) -> Domain:
        operands = [self.types[i] for i in node.inputs]
        row = ROWS.get(node.op)
        how = written(self.graph, node)
        view = row is not None and row.view and how != "copy"
        self.roots[node.name] = self.roots[node.inputs[0]] if view else node.name
        saved = saved_by(node, [t.grad for t in operands]) if self.types[node.name].grad else ()
        kept = tuple(self._charges(node, saved))
        allowed = self._allowed(node, operands)
        key = ("domain", *self._kind(node), kept, how, allowed)
        return self.b.interner.get(key, lambda: self._make_domain(node, operands, allowed, kept, how))

    def _make_domain(
        self,
        node: Node,
        operands: Sequence[Any],
        allowed: tuple[frozenset[str], ...],
        kept: tuple[int | str, ...],
        how: Written,
    ) -> Domain:
        everything = frozenset({"R"}).union(*allowed)
        domain = node_domain(node, operands, self.types[node.name], self.sizes, everything, self.b.compute, kept, how)
        return _restricted(domain, allowed)

    def _allowed(self, node: Node, operands: Sequence[Any]) -> tuple[frozenset[str], ...]:
        """Per axis, the certified choices that the restriction leaves."""
        if node.op not in ROWS:
            return (frozenset({"R"}),) * len(self.sizes)
        blocked, constant = self.blocked.get(node.name, ()), tuple(i in self.constants for i in node.inputs)
        certified = self.b.interner.get(
            ("certified", *self._kind(node), blocked, constant), lambda: self._certified(node, operands, blocked)
        )
        if self.restrict is None:
            return (certified,) * len(self.sizes)
        left = (frozenset(c for c in certified if self.restrict(node, a, c)) for a in range(len(self.sizes)))
        return tuple(choices or certified & {"R"} for choices in left)

    def _certified(self, node: Node, operands: Sequence[Any], blocked: tuple[str, ...]) -> frozenset[str]:
        found = self.b.certified(node, operands, blocked)
        return frozenset(c for c in found if not self._sums_constants(node, c))

    def _kind(self, node: Node) -> tuple[Hashable, ...]:
        """Names an operator and its operands' types; equal for equal nodes of repeated blocks."""
        attrs = tuple(a for a in node.attrs if a[0] != "seed")
        return (node.op, attrs, *(id(self.kinds[i]) for i in node.inputs))

    def _sums_constants(self, node: Node, choice: str) -> bool:
        """Whether a choice asks for partial sums of what no parameter reaches: nothing makes them."""
        partial = map(int, choice[1:].split(",")) if is_whole(choice) and choice[0] == "P" else ()
        return any(node.inputs[i] in self.constants for i in partial)

    def _charges(self, node: Node, saves: Sequence[int | str]) -> list[int | str]:
        """What this node is the first to keep for backward: views share storage with what they look at."""
        charged: list[int | str] = []
        for item in saves:
            name = (
                self.roots.get(node.inputs[item], "")
                if isinstance(item, int)
                else f"{node.name}{'.mask' * (item == 'mask')}"
            )
            leaf = name in self.graph.by_name and self.graph.by_name[name].is_leaf
            if name and name not in self.charged and not leaf and name not in self.constants:
                self.charged.add(name)
                charged.append(item)
        return charged

    def _storage(self, node: Node, uses: Sequence[tuple[int, int]]) -> Domain:
        readers = [(self.problem.variables[v].domain, position) for v, position in uses]
        per_axis = self.b.interner.get(
            ("used", *((id(d), position) for d, position in readers)), lambda: self._used(readers)
        )
        allowed = tuple(
            frozenset(
                str(x)
                for x in _storable(self.types[node.name].shape, per_axis[a], s)
                if self.restrict is None or self.restrict(node, a, str(x))
            )
            for a, s in enumerate(self.sizes)
        )
        kind = self.types[node.name]
        key = ("storage", kind, per_axis, allowed)

        return self.b.interner.get(
            key, lambda: _restricted(storage_domain(kind, per_axis, self.sizes, self.b.compute), allowed)
        )

    def _used(self, readers: Sequence[tuple[Domain | None, int]]) -> tuple[tuple[Layout, ...], ...]:
        """Per axis, the layouts in which readers want a tensor."""
        wanted = [needs[position] for domain, position in readers if domain for needs in domain.operands]
        return tuple(tuple(sorted({layouts[axis] for layouts in wanted})) for axis in range(len(self.sizes)))

    def _connect(self, name: str, uses: Sequence[tuple[int, int]], is_output: bool) -> None:
        """Edges from a tensor's producer to its readers, through a hub where there are several."""
        node = self.graph.by_name[name]
        producer = self.problem.index["storage" if node.is_leaf else "node", name]
        closure = self._closure(name, producer, uses)
        self.problem.closures[name] = closure
        made = self.problem.variables[producer].domain
        assert made is not None
        source, rows = producer, self._rows(closure, made)
        if len(uses) + is_output > 1:
            source = self._add("hub", name, None, closure, len(closure.states))
            every = self.b.interner.get(("every", len(closure.states)), lambda: tuple(range(len(closure.states))))
            self._edge(producer, source, closure, rows, every)
            rows = every
        for variable, position in uses:
            domain = self.problem.variables[variable].domain
            assert domain is not None
            columns = self._rows(closure, domain, position)
            self._edge(source, variable, closure, rows, columns)
        if is_output:
            column = closure.index[self._handed_on(name)]
            extra = self.b.interner.get(
                ("out", id(closure), id(rows), column), lambda: closure.cost[list(rows), column]
            )
            total = self.problem.time_s[source]
            self.problem.time_s[source] = self.b.interner.get(("plus", id(total), id(extra)), lambda: total + extra)

    def _held(self, node: Node) -> Domain:
        """The one choice of a tensor that comes from outside in given layouts."""
        layouts = self.boundary[node.name]
        zero = np.zeros(1)
        return self.b.interner.get(
            ("held", layouts), lambda: Domain((tuple(map(str, layouts)),), ((),), (layouts,), zero, zero)
        )

    def _handed_on(self, name: str) -> Layouts:
        return self.boundary.get(name, replicated(len(self.sizes)))

    def _rows(self, closure: Closure, domain: Domain, position: int | None = None) -> tuple[int, ...]:
        """Which state of the closure each choice of a domain has the tensor in: as its result, or as that operand."""

        def rows() -> tuple[int, ...]:
            layouts = domain.result if position is None else [needs[position] for needs in domain.operands]
            return tuple(closure.index[x] for x in layouts)

        return self.b.interner.get(("rows", id(closure), id(domain), position), rows)

    def _edge(self, i: int, j: int, closure: Closure, rows: tuple[int, ...], columns: tuple[int, ...]) -> None:
        table = self.b.interner.get(
            ("edge", id(closure), id(rows), id(columns)),
            lambda: np.ascontiguousarray(closure.cost[np.ix_(rows, columns)]),
        )
        if i > j:
            table = self.b.interner.get(("flip", id(table)), lambda: np.ascontiguousarray(table.T))
            i, j = j, i
        known = self.problem.edges.get((i, j))
        if known is not None:
            table = self.b.interner.get(("plus", id(known), id(table)), lambda: known + table)
        self.problem.edges[i, j] = table

    def _closure(self, name: str, producer: int, uses: Sequence[tuple[int, int]]) -> Closure:
        kind = self.types[name]
        made = self.problem.variables[producer].domain
        assert made is not None
        readers = [(self.problem.variables[v].domain, position) for v, position in uses]
        key = ("layouts", id(made), self._handed_on(name), *((id(d), position) for d, position in readers))
        per_axis = self.b.interner.get(key, lambda: self._layouts(made, readers, self._handed_on(name)))
        root = self.graph.by_name[self.roots[name]]
        stored, view = root.name == name and root.op == "parameter", root.name != name and root.op == "parameter"
        return self.b.interner.get(
            ("closure", id(self.kinds[name]), stored, view, id(per_axis)),
            lambda: self._closed(TensorClass(kind.shape, kind.dtype, kind.grad, stored, view), per_axis),
        )

    def _closed(self, tensor: TensorClass, per_axis: tuple[tuple[Layout, ...], ...]) -> Closure:
        return self.b.interner.get(
            ("closed", tensor, per_axis),
            lambda: close(tensor, valid_states(tensor.shape, per_axis, self.sizes), self.b.costs),
        )

    def _layouts(
        self, made: Domain, readers: Sequence[tuple[Domain | None, int]], handed_on: Layouts
    ) -> tuple[tuple[Layout, ...], ...]:
        """Per axis, the layouts in which a tensor is made or wanted."""
        layouts: list[set[Layout]] = [{R, x} for x in handed_on]
        wanted = [tuple(needs[position] for needs in domain.operands) for domain, position in readers if domain]
        for state in (state for group in (made.result, *wanted) for state in group):
            for axis, layout in enumerate(state):
                layouts[axis].add(layout)
        return tuple(tuple(sorted(x)) for x in layouts)


def _storable(shape: tuple[int, ...], used: Sequence[Layout], size: int) -> list[Layout]:
    return [R, *(x for x in used if x.is_shard), *(S(d) for d, extent in enumerate(shape) if extent % size == 0)]


def _restricted(domain: Domain, allowed: Sequence[frozenset[str]]) -> Domain:
    """The choices that every axis allows. Where they do not divide the sizes together, the last axes stay whole."""
    for num_axes in range(len(allowed), -1, -1):
        axes = [*allowed[:num_axes], *([frozenset({"R"})] * (len(allowed) - num_axes))]
        keep = [i for i, split in enumerate(domain.splits) if all(c in a for c, a in zip(split, axes, strict=True))]
        if keep:
            return domain if len(keep) == len(domain) else _subset(domain, keep)
    raise AssertionError("an operator can always run whole, and a parameter be stored whole")


def _subset(domain: Domain, keep: Sequence[int]) -> Domain:
    return Domain(
        tuple(domain.splits[i] for i in keep),
        tuple(domain.operands[i] for i in keep),
        tuple(domain.result[i] for i in keep),
        domain.time_s[list(keep)],
        domain.kept_bytes[list(keep)],
    )
