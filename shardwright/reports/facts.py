"""The facts of a plan, each computed once: the use of each axis, the storage of weights, moves, costs.

Everything is derived from the parallel graph and the cost model, so it describes any plan, however it was found.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.cost.predict import Details, NodeCosts, details
from shardwright.cost.prediction import Prediction
from shardwright.cost.timeline.memory import MemoryVerdict, safe_bytes, verdict
from shardwright.cost.timeline.program import Programs, StepProgram
from shardwright.cost.timeline.timeline import Timeline
from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.choice import WHOLE, Choice, Exchange
from shardwright.pcg.foreign import Call, is_foreign
from shardwright.pcg.graph import OPAQUE, Node
from shardwright.pcg.mesh import TIME
from shardwright.pcg.moves import Move, fused_moves, source_of
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step.lifetimes import Zero, lifetime_of
from shardwright.pcg.step.parameters import Parameter, find_parameters
from shardwright.pcg.step.recompute import OFFLOAD
from shardwright.pcg.step.time import estimated
from shardwright.pcg.types import is_float
from shardwright.reports.again import Recomputation
from shardwright.reports.away import OnHost, on_host
from shardwright.reports.lifetimes import Gathered, gathered_weights
from shardwright.reports.named import Names
from shardwright.reports.units import size
from shardwright.search.plan import Alternative, Plan
from shardwright.search.request.restrict import FREE, TENSOR, batch_factors

SplitAlong = str
"""The kind of dimension that one mesh axis splits in an operator: one of `SPLITS`."""
SPLITS = ("batch", "sequence", "experts", "features", "whole")
StoredAs = str
"""The storage of a parameter along one mesh axis: whole, sharded as it is used, or gathered for each use (ZeRO)."""
STORED = ("whole", "sharded", "gathered")
"""The ways to store a parameter along one mesh axis, see `StoredAs`."""


@dataclass(frozen=True, slots=True)
class AxisFacts:
    """The use of one mesh axis: how many operators it splits along which dimension, and their share of compute time.

    `num_weights`, `share_of_weights`: by storage, the number of weights and their share of all elements.
    `num_gathered`: the number of gathered weights by lifetime. `is_time`: the axis has microbatches, no devices.
    """

    name: str
    size: int
    num_operators: Mapping[SplitAlong, int]
    share_of_compute: Mapping[SplitAlong, float]
    num_weights: Mapping[StoredAs, int]
    share_of_weights: Mapping[StoredAs, float]
    num_gathered: Mapping[Zero, int]
    is_time: bool


@dataclass(frozen=True, slots=True)
class Traffic:
    """The moves of one kind along one axis in a step, all together.

    `what`: "weight", "activation", "constant" or that of an `Exchange`.
    `num_forward`, `num_backward`: how often each of the `count` values, and its gradient, moves in a step.
    """

    what: str
    axis: str
    before: str
    after: str
    num_forward: int
    num_backward: int
    count: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Unsplit:
    """Operators that run whole along an axis, all for the same reason; `example` is the place of one of them."""

    axis: str
    op: str
    reason: str
    count: int
    compute_s: float
    example: str


def memory_verdict(plan: Plan, other: Alternative | None = None) -> MemoryVerdict:
    """Return whether the plan, or an alternative, fits the plan's devices.

    "fits": within the memory limit of the search, and outside the last tenth of the memory.
    """
    prediction = plan.prediction if other is None else other.prediction
    word = verdict(prediction.memory.total_bytes, prediction.device_bytes)
    within = prediction.memory.total_bytes <= plan.report.limit_bytes if other is None else other.fits
    return word if within or word != "fits" else "does not fit"


def fits(plan: Plan) -> bool:
    """Return whether the plan is said to fit."""
    return memory_verdict(plan) == "fits"


def usable_bytes(plan: Plan, other: Alternative | None = None) -> int:
    """Return the bytes of a device that the plan, or an alternative, may use and still be said to fit."""
    return min(plan.report.limit_bytes, safe_bytes((other or plan).prediction.device_bytes))


def memory_remark(plan: Plan, other: Alternative | None = None) -> str:
    """Return a remark on the plan's or an alternative's memory, `does not fit, 43.6 GB too much`, or ""."""
    word, used = memory_verdict(plan, other), (other or plan).prediction.memory.total_bytes
    return "" if word == "fits" else f"{word}, {size(used - usable_bytes(plan, other))} too much"


def ranked_alternatives(plan: Plan) -> list[Alternative]:
    """Return the plan's alternatives, the fastest first."""
    return sorted(plan.alternatives, key=lambda a: a.prediction.step_s)


def step_parts(p: Prediction) -> dict[str, float]:
    """Return the parts of the busiest device's step, in seconds that add up to it.

    "slowdown and overheads": the slowdown of compute by communication beside it, changes of layout on the compute
    stream, and the start and the end of a step.
    """
    parts = {"compute": p.compute_s, "optimizer": p.optimizer_s, "exposed communication": p.exposed_s}
    rest_s = p.step_s - sum(parts.values()) - p.bubble_s
    return {**parts, "slowdown and overheads": rest_s, "bubble": p.bubble_s}


def serial_parts(p: Prediction) -> dict[str, float]:
    """Return the seconds of each part if nothing overlapped; they add up to `serial_s`."""
    return {"compute": p.compute_s, "communication": p.communication_s, "optimizer": p.optimizer_s}


def shown_operator(node: Node) -> str:
    """Return what an operator is called in reports."""
    if is_foreign(node):
        return Call.of(node).name
    return str(node.attr("target")) if node.op == OPAQUE else node.op


class PlanFacts:
    """The facts of one plan.

    `programs`: those of its graph, run in this plan's way and in others; a search has costed them already.
    """

    def __init__(self, plan: Plan, programs: Programs | None = None) -> None:
        self.plan, self.graph, self.mesh = plan, plan.graph, plan.mesh
        self.programs = programs or Programs(plan.graph, plan.cluster)

    @cached_property
    def _details(self) -> Details:
        return details(self.programs, self.plan.execution)

    @property
    def prediction(self) -> Prediction:
        """The prediction made of the plan now."""
        return self._details.prediction

    @property
    def costs(self) -> Mapping[str, NodeCosts]:
        """The costs of each node."""
        return self._details.costs

    @property
    def program(self) -> StepProgram:
        """The program of each stage's step."""
        return self._details.program

    @property
    def timeline(self) -> Timeline:
        """The simulated program."""
        return self._details.timeline

    @cached_property
    def names(self) -> Names:
        """The names of tasks and values."""
        return Names(self.graph)

    @cached_property
    def constants(self) -> frozenset[str]:
        """Nodes that no parameter reaches: positions, masks, labels."""
        return constant_nodes(self.graph)

    def kind_of(self, node: Node) -> str:
        """Return the kind of a value: "weight", "activation", or "constant" where no parameter reaches it."""
        if node.op == "parameter":
            return "weight"
        return "constant" if node.name in self.constants else "activation"

    @cached_property
    def operators(self) -> tuple[Node, ...]:
        """The operators that a parameter reaches, without those on single numbers."""
        return tuple(
            n for n in self.graph.nodes
            if not (n.is_leaf or n.is_parallel or n.name in self.constants) and self._is_large(n)
        )  # fmt: skip

    def _is_large(self, node: Node) -> bool:
        return any(self.graph.types[name].num_elements > 1 for name in (node.name, *node.inputs))

    @cached_property
    def dtypes(self) -> Mapping[str, int]:
        """The number of operators with real results by dtype, the most frequent first."""
        counts = Counter(self.graph.types[n.name].dtype for n in self.operators if n.op != "cast")
        return {dtype: count for dtype, count in counts.most_common() if is_float(dtype)}

    @cached_property
    def recomputation(self) -> Recomputation:
        """The plan's recomputation."""
        return Recomputation(self.plan, self.costs, self.programs)

    @cached_property
    def on_host(self) -> tuple[OnHost, ...]:
        """The values that wait for backward on the host."""
        return on_host(self.programs.steps(self.plan.execution)) if self.plan.execution.asks(OFFLOAD) else ()

    @cached_property
    def estimated(self) -> tuple[str, ...]:
        """The operators with sums over the batch in each microbatch by itself, with their places."""
        nodes = estimated(self.graph, self.plan.execution)
        return tuple(dict.fromkeys(f"{node.op} at {node.source}" for node in nodes))

    # ---- axes ----

    @cached_property
    def axes(self) -> tuple[AxisFacts, ...]:
        total_s = sum(self.costs[n.name].compute_s for n in self.operators) or 1.0
        elements = [self.graph.types[name].num_elements for name in self.storage]
        all_elements = sum(elements) or 1

        def facts(axis: int) -> AxisFacts:
            split = [(self.uses[n.name][axis], self.costs[n.name].compute_s) for n in self.operators]
            stored = [stored_as[axis] for stored_as in self.storage.values()]
            return AxisFacts(
                self.mesh.names[axis],
                self.mesh.sizes[axis],
                {use: sum(u == use for u, _ in split) for use in SPLITS},
                {use: sum(s for u, s in split if u == use) / total_s for use in SPLITS},
                {kind: stored.count(kind) for kind in STORED},
                {kind: sum(n for n, k in zip(elements, stored, strict=True) if k == kind) / all_elements
                 for kind in STORED},
                dict(Counter(g.zero for g in self.gathered for _ in range(g.count) if g.axis == self.mesh.names[axis])),
                self.mesh.names[axis] == TIME,
            )  # fmt: skip

        return tuple(map(facts, range(len(self.mesh))))

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters by leaf, with the way in which each reaches its readers."""
        return find_parameters(self.graph, self.plan.execution).by_leaf

    @cached_property
    def lifetimes(self) -> Mapping[str, Zero]:
        """The lifetimes of gathered parameters, by leaf."""
        return {leaf: lifetime_of(p.slices) for leaf, p in self.parameters.items() if p.slices is not None}

    @cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """The gathered weights by lifetime and axes, in the order of the model."""
        return gathered_weights(self.graph, self.parameters)

    @cached_property
    def uses(self) -> Mapping[str, tuple[SplitAlong, ...]]:
        """The kind of dimension that each mesh axis splits in each operator."""
        serial = self.graph.erased()
        batch, sequence = batch_factors(serial), batch_factors(serial, 1, integers_only=True)

        def use(node: Node, choice: Choice) -> SplitAlong:
            if not choice.factors:
                return "whole"
            if node.row is not None and node.row.sends and choice.inner == node.row.offset:
                return "experts"
            if choice.outward == batch.get(node.name):
                return "batch"
            return "sequence" if _splits_alike(choice.outward, sequence.get(node.name)) else "features"

        whole = (WHOLE,) * len(self.mesh)
        return {n.name: tuple(use(n, choice) for choice in n.split or whole) for n in self.operators}

    @cached_property
    def storage(self) -> Mapping[str, tuple[StoredAs, ...]]:
        """The storage of each parameter along each axis."""
        gathered = {(origin.name, move.axis) for origin, move, _ in self.moves if move.before.is_shard}

        def ways(parameter: Node) -> tuple[StoredAs, ...]:
            return tuple(
                "whole" if not x.is_shard else "gathered" if (parameter.name, axis) in gathered else "sharded"
                for axis, x in enumerate(self.graph.types[parameter.name].layouts)
            )

        return {n.name: ways(n) for n in self.graph.leaves("parameter")}

    # ---- moves ----

    @cached_property
    def moves(self) -> tuple[tuple[Node, Move, NodeCosts], ...]:
        """The moves, each as (the node that the value comes from, the move, its cost)."""
        return tuple((source_of(self.graph, start), move, self.costs[last.name])
                     for last, start, move in fused_moves(self.graph))  # fmt: skip

    @cached_property
    def exchanges(self) -> tuple[tuple[Node, str, Exchange], ...]:
        """The operators with exchanges, as (operator, its axes, the exchange along the first axis)."""
        pairs = ((node, self.graph.exchanges(node)) for node in self.graph.nodes)
        return tuple((n, " and ".join(self.mesh.names[x.axis] for x in sent), sent[0]) for n, sent in pairs if sent)

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """The traffic of a step by kind, the longest first."""
        groups: dict[tuple[str, str, str, str, int, int], list[NodeCosts]] = defaultdict(list)
        for origin, move, cost in self.moves:
            where = (self.kind_of(origin), self.mesh.names[move.axis], move.before.kind, move.after.kind)
            groups[*where, *cost.counts].append(cost)
        for node, axes, exchange in self.exchanges:
            cost = self.costs[node.name]
            groups[exchange.what, axes, "S", "S", *cost.counts].append(cost)
        rows = [
            Traffic(*key, len(g), sum(c.communication_bytes for c in g), sum(c.communication_s for c in g))
            for key, g in groups.items()
        ]
        return tuple(sorted(rows, key=lambda t: (-t.seconds, -t.sent_bytes)))

    # ---- operators that are not split ----

    @cached_property
    def unsplit(self) -> tuple[Unsplit, ...]:
        """The operators that do not share their work along an axis, by reason, the most expensive first."""
        groups: dict[tuple[str, str, str], list[Node]] = defaultdict(list)
        for node in self.operators:
            for axis, use in enumerate(self.uses[node.name]):
                if use == "whole" and self.mesh.sizes[axis] > 1:
                    name = shown_operator(node)
                    groups[self.mesh.names[axis], name, self._why_whole(node, axis)].append(node)
        rows = [
            Unsplit(*key, len(nodes), sum(self.costs[n.name].compute_s for n in nodes), str(nodes[0].source))
            for key, nodes in groups.items()
        ]
        return tuple(sorted(rows, key=lambda u: -u.compute_s))

    def _why_whole(self, node: Node, axis: int) -> str:
        if is_foreign(node):
            return "it is foreign: it runs as it is, and nobody says that it is row by row"
        if node.op == OPAQUE:
            return "it has no row in the op table, so nothing is known about splitting it"
        if self.mesh.names[axis] == TIME:
            return "it gives the same in each microbatch"
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
        devices = [name for name in self.mesh.names if name != TIME]
        role = dict(zip(devices, self.plan.asked.roles or (), strict=False)).get(self.mesh.names[axis], FREE)
        if role not in (TENSOR, FREE):
            return f"it has nothing that role {role!r} splits and {size} divides"
        return "moving its operands would cost more than splitting it saves"


def _splits_alike(choice: Choice, other: Choice | None) -> bool:
    """Return whether a choice splits as another one, perhaps in more blocks, as where a ring is balanced."""
    return other is not None and choice.factors == other.factors and choice.blocks % other.blocks == 0
