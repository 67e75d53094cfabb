"""The construction of a graph's pairwise model: the choices of operators and tensors, and the tables between them.

Everything is interned by what it depends on, so equal blocks share their tables, and work done on one is done for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.moves import MoveCosts, TensorClass
from shardwright.cost.compute.compute import compute_on
from shardwright.pcg.analysis import Written, saved_by, written
from shardwright.pcg.choice import WHOLE, Choice, Choices
from shardwright.pcg.encodings import CARRIED, Encoding
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layout, Layouts, P, R, S, in_chunks
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import source_of
from shardwright.pcg.results import handed_on
from shardwright.pcg.row import BESIDE
from shardwright.pcg.step.buckets import BLOCK_BYTES
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.schedules import most_in_flight
from shardwright.pcg.types import ITEM_BYTES, TensorType
from shardwright.search.choices.blocks import blocked_choices
from shardwright.search.choices.domain import CertifiedSplits, Domain, Options, node_options, storage_domain
from shardwright.search.choices.interning import Interned, Interner
from shardwright.search.choices.problem import Costs, NoLayoutsError, Problem, Restrict, RunFacts
from shardwright.search.choices.reshard import Closure, close, replicated, valid_states
from shardwright.search.exact.folding import Folded
from shardwright.search.request.limited import Limited
from shardwright.search.request.limits import Splits, Stored, limited_moves

PerAxis = tuple[tuple[Layout, ...], ...]


class Moved(NamedTuple):
    """The further facts that decide the price of a tensor's moves: the other fields of `TensorClass`."""

    stored: bool
    view: bool
    again: bool
    summed: str
    zero: Zero
    twice: bool
    late: bool
    together: float
    gathered_as: Encoding | None = None
    summed_as: Encoding | None = None


class TensorUse(NamedTuple):
    """A variable that reads a tensor: its choices, the operand's position, and how often the reader occurs."""

    variable: int
    domain: Domain
    position: int
    times: int = 1


class ProblemBuilder:
    """A builder of problems for one cluster; all graphs and restrictions of one mesh share its tables."""

    def __init__(
        self, cluster: Cluster, mesh: Mesh, certified: CertifiedSplits,
        *, by_microbatch: bool = False, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.mesh, self.certified = mesh, certified
        self.costs = MoveCosts(cluster, mesh, by_microbatch=by_microbatch)
        self.compute = compute_on(cluster.device)
        self.interner = Interner(check)

    def build(
        self,
        graph: Graph | Folded,
        restrict: Restrict | None = None,
        boundary: Mapping[str, Layouts] | None = None,
        blocked: Mapping[str, Choices] | None = None,
        way: RunFacts | None = None,
        limited: Limited | None = None,
    ) -> Problem:
        """Return the problem of a serial graph. An operator that cannot be split stays whole.

        For a part of a graph, `boundary` gives the layouts in which it reads its inputs and hands on its result.
        `blocked` is the result of `blocked_choices`, where it is known already. Raises `NoLayoutsError` where `limited`
        leaves nothing to choose.
        """
        folded = graph if isinstance(graph, Folded) else Folded(graph)
        if blocked is None:
            blocked = blocked_choices(folded.graph, folded.constants)
        return _Build(self, folded, restrict, boundary or {}, blocked, way or RunFacts(), limited).run()

    def certified_of(self, node: Node, graph: Graph, blocked: Mapping[str, Choices]) -> frozenset[Choice]:
        """Return the certified choices of a node of a serial graph."""
        return self.certified(node, [graph.types[i] for i in node.inputs], blocked.get(node.name, ()))

    def fastest_s(self, node: Node, graph: Graph, how: Written) -> float:
        """Return the seconds of an operator of a serial graph in its fastest layouts; `how`: how it is written."""
        operands, result = [graph.types[i] for i in node.inputs], graph.types[node.name]
        band = graph.band(node)
        key = "fastest", node.op, tuple(a for a in node.attrs if a[0] != "seed"), tuple(operands), how, band

        def least() -> float:
            own = (self.certified(node, operands) | {WHOLE},) * len(self.mesh)
            options = node_options(node, operands, result, self.mesh, own, self.costs, self.compute, how, band)
            return float((options.forward_s + options.backward_s).min())

        return self.interner.get(key, least)

    def close(self, kind: TensorType, moved: Moved, per_axis: PerAxis) -> Closure:
        """Return the closure of a tensor of this type that may have these layouts along each axis."""
        tensor = TensorClass(kind.shape, kind.dtype, kind.grad, *moved)
        return close(tensor, valid_states(kind.shape, per_axis, self.mesh.sizes), self.costs, self.interner.check)


class _Build:
    def __init__(
        self,
        builder: ProblemBuilder,
        folded: Folded,
        restrict: Restrict | None,
        boundary: Mapping[str, Layouts],
        blocked: Mapping[str, Choices],
        way: RunFacts,
        limited: Limited | None,
    ) -> None:
        self.b, self.restrict, self.blocked = builder, restrict, blocked
        self.boundary = {**handed_on(folded.graph, builder.mesh), **boundary}
        self.folded, self.way, self.graph, self.limited = folded, way, folded.graph, limited
        graph = folded.graph
        self.sizes = builder.mesh.sizes
        self.types = graph.types
        self.interner = builder.interner
        self.kinds = {name: self.interner.of(kind) for name, kind in self.types.items()}
        self.constants, self.again = folded.constants, folded.read_again
        self.problem = Problem(graph, builder.mesh)
        self.carried = {tie.before for tie in folded.ties}  # several chains of blocks may begin with these
        self.read_instead = defaultdict[str, list[str]](list)
        for tie in folded.ties:
            self.read_instead[tie.after].append(tie.before)
        self.results = dict.fromkeys(name for _, name in graph.outputs)
        self.closures: dict[str, Interned[Closure]] = {}
        self.charged: set[str] = set()
        self.roots: dict[str, str] = {}
        self.together = _most_bytes(graph) if self.way.relaxed else 0.0
        self.state_share, self.value_share = shares(self.way.run, builder.mesh)

    def run(self) -> Problem:
        readers: dict[str, list[TensorUse]] = defaultdict(list)
        for node in self.graph.nodes:
            if node.name in self.constants or node.is_leaf:
                self.roots[node.name] = node.name
                continue
            domain = self._domain(node)
            variable = self._choose("node", node.name, domain)
            for position, name in enumerate(node.inputs):
                if name not in self.constants:
                    readers[name].append(TensorUse(variable, domain, position, self.folded.times(node.name)))
        outputs = self.results
        for name in outputs:
            if name not in self.constants:
                readers.setdefault(name, [])
        for node in (*self.graph.leaves("parameter"), *self.graph.leaves("input")):
            if node.name in readers:
                held = self._storage(node, readers[node.name]) if node.op == "parameter" else self._held(node)
                self._choose("storage", node.name, held)
        for name, uses in readers.items():
            further = (use for other in self.read_instead.get(name, ()) for use in readers.get(other, ()))
            self._connect(name, uses, name in outputs, list(further))
        for tie in self.folded.ties:
            self._tie(*tie)
        return self.problem

    def _choose(self, kind: str, name: str, domain: Domain) -> int:
        """Add a variable with this domain, and return its number."""
        self.problem.domains[name] = domain
        times, share = self.folded.times(name), self.state_share if kind == "storage" else self.value_share
        time_s, kept_bytes = self.interner.call(_TIME_S, domain), self.interner.call(_KEPT_BYTES, domain)
        time_s, kept_bytes = self._many(time_s, times), self._many(kept_bytes, times * share)
        if self.way.relaxed and self.graph.by_name[name].op == "cast" and self._is_stored(name):
            time_s = self.interner.call(np.zeros_like, time_s)  # the cast of slices is part of gathering
        return self._variable(kind, name, domain.result, time_s, kept_bytes)

    def _many(self, costs: Costs, times: float) -> Costs:
        return costs if times == 1 else self.interner.call(np.multiply, costs, times)

    def _variable(self, kind: str, name: str, states: tuple[Layouts, ...], time_s: Costs, kept_bytes: Costs) -> int:
        p = self.problem
        number = p.index[kind, name] = len(p.states)
        p.states.append(states)
        p.time_s.append(time_s)
        p.kept_bytes.append(kept_bytes)
        return number

    def _domain(self, node: Node) -> Domain:
        operands = [self.types[i] for i in node.inputs]
        row, how = node.row, written(self.graph, node)
        view = row is not None and row.view and how != "copy"
        self.roots[node.name] = self.roots[node.inputs[0]] if view else node.name
        saved = saved_by(node, [t.grad for t in operands]) if self.types[node.name].grad else ()
        if node.name in self.way.again.regions:
            saved = (*saved, *(i for i in range(len(node.inputs)) if i not in saved))
        kept = tuple(self._charges(node, saved)) or (("result",) if source_of(self.graph, node.name).is_leaf else ())
        kind = self._kind(node)
        allowed, twice = self._allowed(node, operands, kind), node.name in self.way.again.twice
        left = self.limited.operator(node) if self.limited is not None else None
        key = ("domain", kind, kept, how, allowed, twice, left)

        def restricted() -> Domain:
            options = self.interner.get(("options", kind, how, allowed), lambda: self._options(node, allowed, how))
            return _restricted(options.domain(kept, twice=twice), allowed, left, node)

        return self.interner.get(key, restricted)

    def _options(self, node: Node, allowed: tuple[frozenset[Choice], ...], how: Written) -> Options:
        everything = tuple(own | {WHOLE} for own in allowed)
        operands, result = [self.types[i] for i in node.inputs], self.types[node.name]
        costs, compute, band = self.b.costs, self.b.compute, self.graph.band(node)
        return node_options(node, operands, result, self.b.mesh, everything, costs, compute, how, band)

    def _allowed(self, node: Node, operands: Sequence[TensorType], kind: Hashable) -> tuple[frozenset[Choice], ...]:
        """Return, per axis, the certified choices that the restriction leaves."""
        if node.row is None:
            return (frozenset({WHOLE}),) * len(self.sizes)
        blocked, constant = self.blocked.get(node.name, ()), tuple(i in self.constants for i in node.inputs)
        certified = self.interner.get(
            ("certified", kind, blocked, constant), lambda: self._certified(node, operands, blocked)
        )
        if self.restrict is None:
            return (certified,) * len(self.sizes)
        left = (frozenset(c for c in certified if self.restrict(node, a, c)) for a in range(len(self.sizes)))
        return tuple(choices or certified & {WHOLE} for choices in left)

    def _certified(self, node: Node, operands: Sequence[TensorType], blocked: Choices) -> frozenset[Choice]:
        found = self.b.certified(node, operands, blocked)
        if WHOLE not in found:
            raise PlanError(
                f"%{node.name} = {node.op} of {len(node.inputs)} operands at {node.source}: it has no certificate, "
                "not even to run whole; use operators of fewer operands and dimensions"
            )
        return frozenset(c for c in found if not self._sums_constants(node, c))

    def _kind(self, node: Node) -> Hashable:
        """Return a key of an operator and its operands; it is equal for equal nodes of repeated blocks."""
        attrs = tuple(a for a in node.attrs if a[0] != "seed")
        return (node.op, attrs, self.graph.band(node), *(self.kinds[i] for i in node.inputs))

    def _sums_constants(self, node: Node, choice: Choice) -> bool:
        """Return whether a choice asks for partial sums of a value that no parameter reaches: nothing makes these."""
        return any(node.inputs[i] in self.constants for i in choice.partial)

    def _charges(self, node: Node, saves: Sequence[int | str]) -> list[int | str]:
        """Return the values that this node is the first to keep for backward; views share their operand's storage.

        A region that is recomputed keeps the values that it reads, and only those of its own that others need.
        """
        charged: list[int | str] = []
        for item in saves:
            beside = item in BESIDE
            own = f"{node.name}.{item}" if beside else node.name
            name = self.roots.get(node.inputs[item], "") if isinstance(item, int) else own
            maker = node.name if beside else name
            fate = self.way.again.fate(maker, node.name)
            stays = bool(name) and name not in self.constants and fate is Fate.KEPT
            if stays and name not in self.charged and not self._is_stored(name):
                self.charged.add(name)
                charged.append(item)
        return charged

    def _is_stored(self, name: str) -> bool:
        """Return whether a value is a leaf or the cast of one. A cast pays for its own result, as it is laid out."""
        found = name in self.graph.by_name and source_of(self.graph, name)
        return bool(found) and found.is_leaf

    def _storage(self, node: Node, uses: Sequence[TensorUse]) -> Domain:
        kind, optimizer = self.types[node.name], self.way.run.assumed.optimizer
        per_axis = self.interner.get(
            ("used", *(use[1:3] for use in uses)), lambda: self.interner.of(_by_axis(_wanted(uses), len(self.sizes)))
        )
        left, used = self.limited.storage(node) if self.limited is not None else None, per_axis.value
        if left is not None and left.only is not None:  # whether or not anything uses it so
            used = [[*own, layout] for own, layout in zip(used, left.only, strict=True)]
        allowed = tuple(
            frozenset(
                x for x in _storable(kind.shape, used[a], size) if self.restrict is None or self.restrict(node, a, x)
            )
            for a, size in enumerate(self.sizes)
        )

        def domain() -> Domain:
            every = storage_domain(kind, used, self.sizes, self.b.compute, optimizer)
            return _as_seen(every, kind.shape, node, self.sizes)

        return self.interner.get(
            ("storage", self.kinds[node.name], per_axis, allowed, left, node.unpadded, node.is_complex, optimizer),
            lambda: _restricted(domain(), allowed, left, node),
        )

    def _connect(self, name: str, uses: Sequence[TensorUse], is_output: bool, next_uses: Sequence[TensorUse]) -> None:
        """Add edges from a tensor's producer to its readers, through a hub where there are several.

        `next_uses`: those in whose place it is read by other occurrences of blocks.
        """
        node = self.graph.by_name[name]
        beside = source_of(self.graph, self.roots[name]).op == "parameter"
        producer = self.problem.index["storage" if node.is_leaf else "node", name]
        closure = self.closures[name] = self._closure(name, [*uses, *next_uses])
        self.problem.closures[name] = closure.value
        source, rows, times = producer, self._rows(closure, self.problem.domains[name]), self.folded.times(name)
        share = self._share(name, uses, is_output)
        if len(uses) + is_output > 1 or name in self.carried or name in self.read_instead:
            states = closure.value.states
            free, every = (self.interner.call(make, len(states)) for make in (np.zeros, np.arange))
            source = self._variable("hub", name, states, free, free)
            self._edge(producer, source, self._between(closure, rows, every), times, beside=beside)
            rows = every
        for use in uses:
            table = self._between(closure, rows, self._rows(closure, use.domain, use.position))
            self._edge(source, use.variable, table, share * use.times, beside=beside)
        if is_output:
            column = closure.value.index[self._handed_on(name)]
            extra = self._many(self.interner.call(_last_step, closure, rows, column), share)
            self.problem.time_s[source] = self.interner.call(np.add, self.problem.time_s[source], extra)

    def _share(self, name: str, uses: Sequence[TensorUse], is_output: bool) -> float:
        """Return the share of the way from the hub that counts for each reader: 1, or less in a relaxed problem.

        The ways from a producer to its readers form a tree, if they share what they can. With the hub at the first
        fork, all readers but one share at most a part of a way. In a relaxed problem no reader pays for more than its
        own part.
        """
        times = 1 if name in self.carried else self.folded.times(name)
        readers = is_output + sum(1 if name in self.carried else -(-use.times // times) for use in uses)
        return 1 / max(1, readers - 1) if self.way.relaxed else 1

    def _tie(self, before: str, after: str, times: int) -> None:
        """Add the costs of giving a block's result the layouts in which the first occurrence reads its input."""
        if times == 0 or before in self.constants or after in self.constants:
            return
        i, j = (self.problem.index["hub", name] for name in (before, after))
        states = self.interner.of(self.problem.states[i])
        self._edge(i, j, self.interner.call(_back_to, self.closures[after], states), times)

    def _held(self, node: Node) -> Domain:
        """Return the one choice of a tensor that comes from outside in given layouts."""
        layouts = self.boundary[node.name]
        zero = np.zeros(1)
        return self.interner.get(("held", layouts), lambda: Domain(((),), ((),), (layouts,), zero, zero))

    def _handed_on(self, name: str) -> Layouts:
        return self.boundary.get(name, replicated(len(self.sizes)))

    def _rows(self, closure: Interned[Closure], domain: Domain, position: int | None = None) -> Interned[np.ndarray]:
        return self.interner.call(_states, closure, domain, position)

    def _between(self, closure: Interned[Closure], rows: Interned[np.ndarray], columns: Interned[np.ndarray]) -> Costs:
        return self.interner.call(_between, closure, rows, columns)

    def _edge(self, i: int, j: int, table: Costs, times: float, *, beside: bool = False) -> None:
        """Add a table of costs between two variables that is paid so many times; `beside`: of `Problem.overlapped`."""
        table = self._many(table, times)
        if i > j:
            table = self.interner.call(_flipped, table)
            i, j = j, i
        if beside:
            self.problem.overlapped.add((i, j))
        known = self.problem.edges.get((i, j))
        self.problem.edges[i, j] = table if known is None else self.interner.call(np.add, known, table)

    def _closure(self, name: str, uses: Sequence[TensorUse]) -> Interned[Closure]:
        made, handed_on, whole = self.problem.domains[name], self._handed_on(name), replicated(len(self.sizes))
        if self.b.costs.loop.time is not None and name not in self.results:
            handed_on = whole = _but_for(self.b.costs.loop.time, whole, made.result[0])
        per_axis = self.interner.get(
            ("layouts", made, handed_on, *(use[1:3] for use in uses)),
            lambda: self.interner.of(_by_axis([*made.result, *_wanted(uses), handed_on, whole], len(whole))),
        )
        source = source_of(self.graph, self.roots[name])
        of_parameter, is_view = source.op == "parameter", self.roots[name] != name
        stored, view = of_parameter and not is_view, of_parameter and is_view
        summed = self.way.run.reduced_dtype(self.types[source.name].dtype) if of_parameter else ""
        late = self.b.costs.loop.time is not None and any(state[self.b.costs.loop.time] == P for state in made.result)
        again = source.name in self.again
        zero = self.way.zero if stored or again else "zero-3"  # what is not gathered moves alike in all lifetimes
        twice, together = name in self.way.again.twice, self.together if of_parameter else 0.0
        dtype = self.types[name].dtype
        encodings = [self.way.run.encoding(what, dtype) if of_parameter else None for what in CARRIED]
        moved = Moved(stored, view, again, summed, zero, twice, late, together, *encodings)
        kind, moves = self.kinds[name], None
        key = (ProblemBuilder.close, kind, moved, per_axis)  # a method of the builder's would hold what holds it
        closure = self.interner.get(key, lambda: Interned(self.b.close(kind.value, moved, per_axis.value)))
        if self.limited is not None:
            moves = self.limited.moves(name)
        return closure if moves is None else self.interner.call(limited_moves, closure, moves)


_TIME_S, _KEPT_BYTES = attrgetter("time_s"), attrgetter("kept_bytes")


def shares(run: Execution, mesh: Mesh) -> tuple[float, float]:
    """Return the shares of a model's bytes in its first stage: of parameters, and of one microbatch's values.

    The first stage keeps the values of as many microbatches as its schedule has in flight there.
    """
    if run.schedule.num_stages == 1:
        return 1.0, 1.0
    share = run.schedule.share_of_largest
    in_flight = most_in_flight(run.schedule, mesh.num_microbatches, 0)
    return share, in_flight * share / run.schedule.chunks_per_stage


def _most_bytes(graph: Graph) -> float:
    """Return the most bytes of a message that gathers or scatters parameters: a block, in 32 bits at least."""
    kinds = (graph.types[leaf.name] for leaf in graph.leaves("parameter"))
    return 2.0 * BLOCK_BYTES + max((kind.num_elements * max(4, ITEM_BYTES[kind.dtype]) for kind in kinds), default=0)


def _wanted(uses: Sequence[TensorUse]) -> list[Layouts]:
    """Return the layouts in which readers want a tensor."""
    return [needs[use.position] for use in uses for needs in use.domain.operands]


def _but_for(axis: int, state: Layouts, other: Layouts) -> Layouts:
    """Return a state with another state's layout on one axis."""
    return (*state[:axis], other[axis], *state[axis + 1 :])


def _by_axis(states: Sequence[Layouts], num_axes: int) -> PerAxis:
    """Return, per axis, the layouts that occur in these states."""
    return tuple(tuple(sorted({state[axis] for state in states})) for axis in range(num_axes))


def _states(closure: Closure, domain: Domain, position: int | None) -> np.ndarray:
    """Return, per choice of a domain, the state of its result, or of its operand at `position`, in the closure."""
    layouts = domain.result if position is None else [needs[position] for needs in domain.operands]
    return np.array([closure.index[x] for x in layouts], dtype=np.intp)


def _between(closure: Closure, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(closure.cost[np.ix_(rows, columns)])


def _back_to(closure: Closure, states: tuple[Layouts, ...]) -> np.ndarray:
    """Return costs from each state of the closure to each of `states`, one row each; inf for those it lacks."""
    known = [closure.index.get(state, -1) for state in states]
    columns = closure.cost[:, known].T
    return np.where(np.array(known)[:, None] < 0, np.inf, columns)


def _flipped(table: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(table.T)


def _last_step(closure: Closure, rows: np.ndarray, column: int) -> np.ndarray:
    """Return the cost of each row for handing a result on in its last state."""
    return closure.cost[rows, column]


def _storable(shape: tuple[int, ...], used: Sequence[Layout], size: int) -> list[Layout]:
    return [R, *(x for x in used if x.is_shard), *(S(d) for d, extent in enumerate(shape) if extent % size == 0)]


def _as_seen(domain: Domain, shape: tuple[int, ...], node: Node, sizes: tuple[int, ...]) -> Domain:
    """Return the ways of storing a parameter in which its padding is where `DTensor` has none, and no number is cut."""
    if shape == node.unpadded and not node.is_complex:
        return domain
    parts = len(shape) - 1 if node.is_complex else None
    states = [
        number
        for number, state in enumerate(domain.result)
        if in_chunks(shape, node.unpadded, state, sizes) and not any(x.is_shard and x.dim == parts for x in state)
    ]
    return _subset(domain, states)


def _restricted(
    domain: Domain, allowed: Sequence[frozenset[Choice | Layout]], left: Splits | Stored | None, node: Node
) -> Domain:
    """Return the choices that every axis allows and that are `left` of these (None: all).

    Where the axes' choices do not divide the sizes together, the last axes stay whole. A parameter that is stored
    already stays as it is, whatever the axes are for.
    """
    if isinstance(left, Stored) and left.only is not None:
        return _subset(domain, _left(domain, range(len(domain.result)), left, node))
    by_axis: Sequence[Sequence[Choice | Layout]] = domain.result if node.is_leaf else domain.splits
    whole = frozenset([R if node.is_leaf else WHOLE])
    for num_axes in range(len(allowed), -1, -1):
        axes = [*allowed[:num_axes], *([whole] * (len(allowed) - num_axes))]
        keep = [i for i, split in enumerate(by_axis) if all(c in a for c, a in zip(split, axes, strict=True))]
        if keep:
            return _subset(domain, keep if left is None else _left(domain, keep, left, node))
    raise AssertionError("an operator can always run whole, and a parameter be stored whole")


def _left(domain: Domain, numbers: Sequence[int], left: Splits | Stored, node: Node) -> Sequence[int]:
    found = left.left(domain, numbers)
    if not found:
        what = str(node.attr("target")) if node.is_leaf else str(node)
        raise NoLayoutsError(f"the pins and roles of axes leave no layout for {what}")
    return found


def _subset(domain: Domain, keep: Sequence[int]) -> Domain:
    if len(keep) == len(domain):
        return domain
    return Domain(
        tuple(domain.splits[i] for i in keep),
        tuple(domain.operands[i] for i in keep),
        tuple(domain.result[i] for i in keep),
        domain.time_s[list(keep)],
        domain.kept_bytes[list(keep)],
    )
