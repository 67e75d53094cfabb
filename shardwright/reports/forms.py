"""Closed forms of a plan's cost: seconds and bytes in nodes, batch and hidden size, from the cost model's own terms.

Arithmetic and bytes of a kernel are polynomials in the sizes of its operands. They are found exactly, from the cost
model's own functions at as many sizes as they have coefficients (degree 1 in the batch and in each node's part of it,
2 in the hidden size). A kernel takes its time in the plan, times the growth of its arithmetic, or of its bytes where
these decide; a collective stays on the line of its curve that it lies on in the plan. So a form holds while the layout
is the same, the same side decides, and kernels reach the same rate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from shardwright.cost.compute.operators import num_drawn
from shardwright.cost.compute.work import Local, Passes, Work, passes
from shardwright.pcg.analysis import written
from shardwright.pcg.choice import WHOLE, Choice, degrees, num_senders, step_along
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import OPAQUE, Node
from shardwright.pcg.ring import Ring
from shardwright.pcg.types import TensorType
from shardwright.reports.facts import PlanFacts
from shardwright.search.request.restrict import batch_factors
from shardwright.search.request.spaces import batch_size

if TYPE_CHECKING:
    from sympy import Expr

Powers = tuple[int, int, int]
"""Exponents of the batch, of the hidden size, and of one over the nodes."""
ONE: Powers = (0, 0, 0)
Form = Mapping[Powers, float]
"""A polynomial in the ratios of batch, hidden size and nodes to the plan's; at the plan, its terms simply add up."""
_POINTS = tuple(product((1, 2), (1, 2, 3), (1, 2)))
_Dims = tuple[tuple[int, int], ...]


def interpolated(values: Mapping[Powers, float]) -> Form:
    """Return the polynomial with these values at `_POINTS`."""
    form = dict(values)
    for b, n in product((1, 2), (1, 2)):
        one, two, three = (form[b, h, n] for h in (1, 2, 3))
        square = (one - 2 * two + three) / 2
        line = two - one - 3 * square
        form[b, 1, n], form[b, 2, n], form[b, 3, n] = one - line - square, line, square
    for h, n in product((1, 2, 3), (1, 2)):
        form[1, h, n], form[2, h, n] = 2 * form[1, h, n] - form[2, h, n], form[2, h, n] - form[1, h, n]
    for b, h in product((1, 2), (1, 2, 3)):
        form[b, h, 1], form[b, h, 2] = 2 * form[b, h, 1] - form[b, h, 2], form[b, h, 2] - form[b, h, 1]
    largest = max(map(abs, form.values()), default=0.0)
    return {(b - 1, h - 1, n - 1): c for (b, h, n), c in form.items() if abs(c) > 1e-9 * largest}


class Formulas:
    """The forms of one plan: `compute_s`, `communication_s` and `optimizer_s` add up to `Prediction.serial_s`.

    Raises:
        PlanError: the plan has pipeline stages, or a ring along the axis of nodes, which has a kernel for each device.
    """

    def __init__(self, facts: PlanFacts) -> None:
        if facts.plan.execution.schedule.num_stages > 1:
            raise PlanError("closed forms are of plans without pipeline stages; `timeline` shows those")
        self.facts, self.graph = facts, facts.graph
        self.steps = facts.programs.steps(facts.plan.execution)
        levels, mesh = facts.plan.cluster.levels, self.graph.mesh
        self.num_nodes = levels[-1].size
        split = (axis for axis, count in enumerate(mesh.device_sizes) if count > 1)
        self.axis = next(split, None)
        if self.axis is not None and any(isinstance(choice, Ring) for choice in self._along(self.axis)):
            problem = f"closed forms grow with nodes, and a ring along {mesh.names[self.axis]} runs a kernel per device"
            raise PlanError(f"{problem}; `explain --what-if` plans for other numbers")
        self.batch = batch_size(self.graph)
        tables = [n.inputs[0] for n in self.graph.nodes if n.op == "embedding"]
        self.rows = {self.graph.types[name].shape[0] for name in tables}
        widths = Counter(d for leaf in self.graph.leaves("parameter") for d in self._shape(leaf) if d not in self.rows)
        self.hidden = widths.most_common(1)[0][0] if widths else 1

    def _along(self, axis: int) -> Iterator[Choice]:
        return (node.split[axis] for node in self.graph.nodes if node.split)

    def _shape(self, node: Node) -> tuple[int, ...]:
        return self.graph.types[node.name].shape

    # ---- growth of sizes ----

    @cached_property
    def growing(self) -> list[int]:
        """The sizes of parameters that grow with the hidden size: all but the rows of tables, and single numbers."""
        sizes = {d for leaf in self.graph.leaves("parameter") for d in self._shape(leaf)}
        return sorted(sizes - self.rows - {1})

    @cached_property
    def _batched(self) -> Mapping[str, str]:
        return batch_factors(self.graph.erased())

    @cached_property
    def dims(self) -> dict[str, _Dims]:
        """The exponents of the batch and of the hidden size in each dimension of each node."""
        dims_by_name = dict[str, _Dims]()
        for node in self.graph.nodes:
            if node.op in ("parameter", "buffer"):
                grown = node.op == "parameter"
                dims_by_name[node.name] = tuple((0, int(grown and d in self.growing)) for d in self._shape(node))
            elif node.is_leaf:
                dims_by_name[node.name] = tuple(
                    (int(d == 0 and node.op == "input"), 0) for d, _ in enumerate(self._shape(node))
                )
            elif node.is_parallel:
                dims_by_name[node.name] = dims_by_name[node.inputs[0]]
            else:
                dims_by_name[node.name] = self._result(node, dims_by_name)
        return dims_by_name

    def _result(self, node: Node, known: Mapping[str, _Dims]) -> _Dims:
        shape = self._shape(node)
        if node.op == OPAQUE:
            return ((0, 0),) * len(shape)
        of, result = self._factors(node, known), self.graph.signature(node).result
        seen = {f for dims in self.graph.signature(node).operands for dim in dims for f in dim}
        alike = next((known[i] for i in node.inputs if len(known[i]) == len(shape)), ((0, 0),) * len(shape))
        return tuple(
            _times(of[f] for f in dim) if seen.issuperset(dim) else alike[d] if shape[d] > 1 else (0, 0)
            for d, dim in enumerate(result)
        )

    def _factors(self, node: Node, dims_by_name: Mapping[str, _Dims]) -> list[tuple[int, int]]:
        """Return the same exponents for an operator's factors; in a dimension of several, the first one grows."""
        signature = self.graph.signature(node)
        powers = [(0, 0)] * len(signature.factors)
        for name, dims in zip(node.inputs, signature.operands, strict=False):
            for powers_of_dim, dim in zip(dims_by_name[name], dims, strict=True):
                real = [f for f in dim if signature.factors[f].size > 1]
                if real and powers_of_dim != (0, 0) and _times(powers[f] for f in dim) == (0, 0):
                    powers[real[0]] = powers_of_dim
        return powers

    # ---- kernels ----

    def _grown(self, name: str, at: Powers) -> tuple[int, ...]:
        """Return a device's part of a value in a graph grown by `at`; `at[2]` nodes' parts together."""
        kind, mesh = self.graph.types[name], self.graph.mesh
        local = kind.local_shape(mesh)
        split = None if self.axis is None else kind.layouts[self.axis]
        on_axis = split.dim if split is not None and split.is_shard else None
        return tuple(
            n * at[0] ** i * at[1] ** j * (at[2] if d == on_axis else 1)
            for d, (n, (i, j)) in enumerate(zip(local, self.dims[name], strict=True))
        )

    def _passes(self, node: Node, at: Powers) -> Passes:
        types, sizes = self.graph.types, self.graph.mesh.sizes
        split = node.split or (WHOLE,) * len(sizes)
        signature = None if node.op == OPAQUE else self.graph.signature(node)
        extents = tuple[int, ...]()
        if signature is not None:
            divided, grown = degrees(split, sizes), () if self.axis is None else split[self.axis].factors
            powers = self._factors(node, self.dims)
            extents = tuple(
                f.size // divided.get(f.name, 1) * at[0] ** i * at[1] ** j * (at[2] if f.name in grown else 1)
                for f, (i, j) in zip(signature.factors, powers, strict=True)
            )
        operands = [types[name] for name in node.inputs]
        local = tuple(
            TensorType(self._grown(name, at), t.dtype, (), t.grad)
            for name, t in zip(node.inputs, operands, strict=True)
        )
        kind, row = types[node.name], node.row
        mine = TensorType(self._grown(node.name, at), kind.dtype, (), kind.grad)
        i, j = _times(self.dims[node.name])
        whole = TensorType((kind.num_elements * at[0] ** i * at[1] ** j,), kind.dtype)
        random = row is not None and row.random
        drawn = num_drawn(self.steps.compute.device.kind, whole, mine.shape) if random else 0
        senders: float = num_senders(split, sizes)
        if self.axis is not None and split[self.axis].sends:
            senders /= at[2]  # fewer devices have the parts of all
        attrs, step = dict(node.attrs), step_along(split, sizes, row.offset if row is not None else None)
        part = Local(row, attrs, signature, extents, local, mine, drawn, written(self.graph, node), senders, step)
        return passes(part)

    def _node(self, node: Node) -> Form:
        """Return the seconds of an operator's passes in a step."""
        here = self._passes(node, (1, 1, 1))
        there = {at: self._passes(node, at) for at in _POINTS}
        compute, times = self.steps.compute, self.graph.mesh.num_microbatches
        paces = compute.device.paces.get(node.op, (1.0, 1.0))
        total = defaultdict[Powers, float](float)
        total_s = self.facts.costs[node.name].compute_s
        for side, dispatch_s in enumerate(compute.dispatch_s(node.op, here)):
            works = (here.forward, here.backward)[side]
            forms = [
                self._work(work, {at: (p.forward, p.backward)[side][number] for at, p in there.items()})
                for number, work in enumerate(works)
            ]
            own_s = paces[side] * sum(sum(form.values()) for form in forms)
            if works and (compute.device.kind != "cuda" or own_s < dispatch_s):
                total[ONE] += dispatch_s
            if works and (compute.device.kind != "cuda" or own_s >= dispatch_s):
                for form in forms:
                    for powers, value in form.items():
                        total[powers] += paces[side] * value
        own_s = sum(total.values())
        often = total_s / own_s if own_s > 0 else times  # microbatches, and recomputation
        return {powers: often * value for powers, value in total.items()}

    def _work(self, work: Work, there: Mapping[Powers, Work]) -> Form:
        """Return the seconds of a kernel; beside its launch, they grow as its arithmetic or its bytes."""
        if work.kind == "view":
            return {}
        compute, fixed_s = self.steps.compute, self.steps.compute.device.kernel_s
        arithmetic_s, bytes_s = compute.bounds(work)
        own_s = max(0.0, compute.work_s(work) - fixed_s)
        by_bytes = abs(own_s - bytes_s) < 1e-9 * bytes_s or not arithmetic_s
        form = interpolated({at: w.num_bytes if by_bytes else w.flops for at, w in there.items()})
        whole = sum(form.values())
        if whole <= 0:
            return {ONE: compute.work_s(work)}
        return _added({p: own_s * value / whole for p, value in form.items()}, {ONE: compute.work_s(work) - own_s})

    # ---- sums ----

    @cached_property
    def compute_s(self) -> Form:
        form = defaultdict[Powers, float](float)
        known = dict[object, Form]()
        for node in self.graph.nodes:
            if node.is_leaf or node.is_parallel or not (cost_s := self.facts.costs[node.name].compute_s):
                continue
            types = self.graph.types
            dims = tuple(self.dims[name] for name in (*node.inputs, node.name))
            kinds = tuple(types[name] for name in (*node.inputs, node.name))
            key = (node.op, node.attrs, node.split, kinds, dims, cost_s, written(self.graph, node))
            if key not in known:
                known[key] = self._node(node)
            for powers, value in known[key].items():
                form[powers] += value
        return form

    @cached_property
    def optimizer_s(self) -> Form:
        form = defaultdict[Powers, float](float)
        overhead_s = self.steps.compute.device.update_overhead_s
        for leaf in self.graph.leaves("parameter"):
            cost_s = self.facts.costs[leaf.name].compute_s
            if cost_s:
                form[ONE] += overhead_s
                form[self._powers(leaf.name)] += cost_s - overhead_s
        return form

    def _powers(self, name: str, *, whole: bool = False) -> Powers:
        """Return the exponents of a device's part of a value; `whole`: as if the axis of nodes did not split it."""
        i, j = _times(self.dims[name])
        split = self.axis is not None and self.graph.types[name].layouts[self.axis].is_shard
        return i, j, int(split and not whole)

    @cached_property
    def moved(self) -> list[tuple[str, Powers, Form, float]]:
        """The collectives, or pairs of them: the axis, the exponents of its bytes, its seconds, and its bytes."""
        rows = list[tuple[str, Powers, Form, float]]()
        mesh, costs = self.graph.mesh, self.steps.move_costs
        for name, (start, move) in self.steps.fused.items():
            cost = self.facts.costs[name]
            if not cost.communication_s:
                continue
            powers = self._powers(start, whole=move.axis == self.axis)
            num_bytes = self.graph.types[start].local_bytes(mesh) * (
                mesh.sizes[move.axis] if move.before.is_shard else 1
            )
            slope_s = 0.0
            for collective, times in zip(cost.collectives, cost.counts, strict=True):
                if collective and num_bytes:
                    here, more = (costs.collective_s(collective, move.axis, x * num_bytes) for x in (1, 1 + 2**-16))
                    slope_s += times * (more - here) * 2**16
            slope_s = min(slope_s, cost.communication_s)
            form = _added({powers: slope_s}, {ONE: cost.communication_s - slope_s})
            rows.append((mesh.names[move.axis], powers, form, cost.communication_bytes))
        for node, _, _ in self.facts.exchanges:
            cost = self.facts.costs[node.name]
            powers = self._powers(node.name)
            rows.append(("", powers, {powers: cost.communication_s}, cost.communication_bytes))
        return rows

    @cached_property
    def communication_s(self) -> Form:
        return _added(*(form for _, _, form, _ in self.moved))

    @cached_property
    def sent_bytes(self) -> Form:
        return _added(*({powers: num_bytes} for _, powers, _, num_bytes in self.moved))

    @cached_property
    def stored_bytes(self) -> Form:
        """The bytes of a device's parameters and optimizer states, divided in proportion to parameters."""
        shares, memory = defaultdict[Powers, float](float), self.facts.prediction.memory
        for leaf in self.graph.leaves("parameter"):
            shares[self._powers(leaf.name)] += self.graph.types[leaf.name].local_bytes(self.graph.mesh)
        total = sum(shares.values()) or 1.0
        stored_bytes = memory.parameters_bytes + memory.optimizer_bytes
        return {powers: stored_bytes * share / total for powers, share in shares.items()}

    @property
    def all(self) -> dict[str, Form]:
        """The forms by name; seconds end in `_s`, bytes of a device in `_bytes`."""
        names = ("compute_s", "optimizer_s", "communication_s", "sent_bytes", "stored_bytes")
        return {name: getattr(self, name) for name in names}

    def at(
        self, form: Form, nodes: float | None = None, batch: float | None = None, hidden: float | None = None
    ) -> float:
        """Return the value of a form; by default at the plan's own sizes."""
        b, h = (batch or self.batch) / self.batch, (hidden or self.hidden) / self.hidden
        u = self.num_nodes / (nodes or self.num_nodes)
        return sum(value * b**i * h**j * u**k for (i, j, k), value in form.items())

    def expression(self, form: Form) -> Expr:
        """Return a form as a sympy expression in n, b and h, with four digits."""
        from sympy import Float, Integer, Symbol

        n, b, h = (Symbol(name, positive=True) for name in "nbh")
        total: Expr = Integer(0)
        for (i, j, k), value in sorted(form.items(), reverse=True):
            coefficient = value / self.batch**i / self.hidden**j * self.num_nodes**k
            total += Float(coefficient, 4) * b**i * h**j / n**k
        return total


def _times(powers: Any) -> tuple[int, int]:  # noqa: ANN401 - any iterable of pairs
    pairs = list(powers)
    return sum(i for i, _ in pairs), sum(j for _, j in pairs)


def _added(*forms: Form) -> Form:
    total = defaultdict[Powers, float](float)
    for form in forms:
        for powers, value in form.items():
            total[powers] += value
    return {powers: value for powers, value in total.items() if value}
