"""The choices that limits leave for one serial graph on one mesh, and why a parameter cannot be as it is pinned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.choice import Choice
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layout, R
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.order import postorder
from shardwright.pcg.padding.origins import MOST_PADDING
from shardwright.pcg.step.regions import attentions
from shardwright.search.choices.domain import Domain, axis_options
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.request.asked import RESIDUAL, LayoutPin
from shardwright.search.request.limits import BOUNDED, Limits, Moves, SplitBound, Splits, Stored
from shardwright.search.request.restrict import (
    CONTEXT,
    DATA,
    TENSOR,
    ZERO,
    batch_factors,
    is_weight,
    penalties,
    weight_factors,
)

Certified = Callable[[Node], frozenset[Choice]]


class Limited:
    """The choices that limits leave for one serial graph on one mesh."""

    def __init__(self, limits: Limits, graph: Graph, mesh: Mesh) -> None:
        self.limits, self.graph, self.mesh, self.sizes = limits, graph, mesh, mesh.device_sizes
        self.bounds = {bound.what: bound for bound in limits.bounds if bound.what in BOUNDED}
        self.batch, self.sequence = batch_factors(graph), batch_factors(graph, 1, integers_only=True)
        self.free = penalties(graph)
        self.between = residual(graph) if RESIDUAL in self.bounds else frozenset[str]()
        self.pinned = {
            leaf.name: pins for leaf in graph.leaves("parameter")
            if (pins := tuple(p for p in limits.layouts if p.names(str(leaf.attr("target")))))
        }  # fmt: skip
        self.stored, self.time = dict(limits.stored), [R] if TIME in mesh.names else []
        self.origin = {node.name: origin for node in graph.nodes if (origin := _origin(graph, node.name)) is not None}
        self.whole = self._read_whole()

    def operator(self, node: Node) -> Splits | None:
        """Return the limits of an operator's choices, or None where there are none."""
        bounds = () if node.name in self.origin or node.name in self.free else tuple(self._split_bounds(node))
        whole = tuple(self.whole.get(node.name, ()))
        return Splits(self.sizes, bounds, whole) if bounds or whole else None

    def storage(self, leaf: Node) -> Stored | None:
        """Return the limits of the ways to store a parameter, or None where there are none."""
        least = self.bounds[ZERO].low if ZERO in self.bounds else 1
        pins, state = self._on_axes(leaf.name), self.stored.get(str(leaf.attr("target")))
        only = None if state is None else (*self.time, *state)
        return Stored(self.sizes, pins, least, only) if pins or least > 1 or only is not None else None

    def moves(self, name: str) -> Moves | None:
        """Return the limits of a value's moves, or None where there are none."""
        origin = self.origin.get(name)
        if origin is None:
            return None
        most = self.bounds[ZERO].high if ZERO in self.bounds else None
        pins, exact = self._on_axes(origin), self.graph.types[name].shape == self.graph.types[origin].shape
        return Moves(self.sizes, pins, most, exact) if pins or most is not None else None

    def check(self, certified: Certified) -> None:
        """Raise a `NoLayoutsError` that says which operator cannot take a parameter as it is pinned."""
        for name, pins in self.pinned.items():
            sharded = [pin for pin in pins if pin.kept == "sharded"]
            for pin in sharded:
                problems = [self._refusal(name, pin, size, certified) for size in self._sizes_of(pin)]
                if problems and all(problems):
                    raise NoLayoutsError(problems[0])

    def check_met(self, domains: Mapping[str, Domain]) -> None:
        """Raise a `NoLayoutsError` where no operator, or parameter, can be split in as many ways as a bound wants."""
        for role, bound in self.bounds.items():
            if bound.low > 1 and not any(self._is_met(role, name, domain) for name, domain in domains.items()):
                raise NoLayoutsError(f"pin {bound.text!r}: on mesh {self.mesh} nothing can be split in so many ways")

    def _is_met(self, role: str, name: str, domain: Domain) -> bool:
        node, low = self.graph.by_name[name], self.bounds[role].low
        if role == ZERO:
            stored = self.storage(node) if node.op == "parameter" else None
            return stored is not None and any(stored.slices(state) >= low for state in domain.result)
        left = None if node.is_leaf else self.operator(node)
        stored = [b for b in left.bounds if b.low == low and b.wanted == self._wanted(role, node)] if left else []
        return any(b.is_met(split, self.sizes) for b in stored for split in domain.splits)

    def _split_bounds(self, node: Node) -> Iterator[SplitBound]:
        for role, bound in self.bounds.items():
            if role == ZERO or (role == RESIDUAL and node.name not in self.between):
                continue
            choices, others = self._choices(role, node)
            yield SplitBound(bound.low, bound.high, choices, others, self._wanted(role, node))

    def _choices(self, role: str, node: Node) -> tuple[frozenset[Choice], bool]:
        """Return the choices that split an operator for a role: these ones, or with True all but these."""
        batch, sequence = ({choice_of[node.name]} if node.name in choice_of else set[Choice]()
                           for choice_of in (self.batch, self.sequence))  # fmt: skip
        by_role = {DATA: batch, CONTEXT: sequence}
        if role == RESIDUAL:
            return frozenset(batch), True
        return (frozenset(by_role[role]), False) if role in by_role else (frozenset(batch | sequence), True)

    def _wanted(self, role: str, node: Node) -> frozenset[str]:
        """Return the choices that count where a role has a least degree: those that should split the operator."""
        if role == TENSOR:
            return frozenset(f for f, _ in weight_factors(self.graph, node, self.batch.get(node.name)))
        return self._choices(role, node)[0]

    def _on_axes(self, name: str) -> tuple[tuple[int, LayoutPin], ...]:
        """Return the pins of a parameter, each with the number of its axis, -1 for any."""
        return tuple((self.mesh.index(p.axis) if p.axis else -1, p) for p in self.pinned.get(name, ()))

    def _sizes_of(self, pin: LayoutPin) -> Sequence[int]:
        if pin.axis:
            return (self.sizes[self.mesh.index(pin.axis)],)
        return sorted({size for size in self.sizes if size > 1})

    def _read_whole(self) -> Mapping[str, set[tuple[int, int]]]:
        """Return, by operator, the operands and axes of which it may read no slice, as they are gathered for use."""
        read_whole = defaultdict[str, set[tuple[int, int]]](set)
        devices = [axis for axis, name in enumerate(self.mesh.names) if name != TIME]
        for node in self.graph.nodes:
            for position, name in enumerate(node.inputs) if node.name not in self.origin else ():
                for axis, pin in self._on_axes(self.origin.get(name, "")):
                    if pin.kept == "gathered":
                        read_whole[node.name] |= {(position, a) for a in ([axis] if axis >= 0 else devices)}
        return read_whole

    def _refusal(self, name: str, pin: LayoutPin, size: int, certified: Certified) -> str:
        """Return why a parameter cannot be stored and used as pinned among `size` devices, or ""."""
        kind, target = self.graph.types[name], self.graph.by_name[name].attr("target")
        shard, shape = pin.shard, " × ".join(map(str, kind.shape))
        if shard is not None and (shard.dim >= len(kind.shape) or kind.shape[shard.dim] % (size * shard.blocks)):
            padded = f"; pad={size} may let them" if _is_only_uneven(kind.shape, shard, size) else ""
            return f"pin {pin.text!r}: {target} is {shape}, of which {size} devices cannot have slices {shard}{padded}"
        for node, takes in self._readers(name, size, certified):
            if not any(map(pin.takes, takes)):
                good = ", ".join(map(str, sorted(takes))) or "no slices"
                return (
                    f"pin {pin.text!r}: {node.op} at {node.source} takes {target} ({shape}) over {size} devices as "
                    f"{good}, or whole; give one of these, or 'gathered' for slices that are put together for use"
                )
        return ""

    def _readers(self, name: str, size: int, certified: Certified) -> Iterator[tuple[Node, frozenset[Layout]]]:
        """Yield a parameter's readers, past casts and views, each with the slices that it takes over `size` devices."""
        for user in dict.fromkeys(self.graph.users[name]):
            node = self.graph.by_name[user]
            row = node.row
            options = axis_options(row, self.graph.signature(node), size, certified(node)) if row is not None else []
            taken = [(needs[p], made) for _, needs, made in options for p, i in enumerate(node.inputs) if i == name]
            if user not in self.origin:
                yield node, frozenset(layout for layout, _ in taken if layout.is_shard)
                continue
            for reader, inner in self._readers(user, size, certified):
                yield reader, frozenset(layout for layout, made in taken if layout.is_shard and made in inner)


def _is_only_uneven(shape: tuple[int, ...], shard: Layout, size: int) -> bool:
    """Return whether a few more entries would let the devices have slices."""
    return shard.blocks == 1 and shard.dim < len(shape) and -shape[shard.dim] % size <= MOST_PADDING * shape[shard.dim]


def _origin(graph: Graph, name: str) -> str | None:
    """Return the parameter that a value is, possibly transposed, reshaped or cast; None for other values."""
    if not is_weight(graph, name):
        return None
    node = graph.by_name[name]
    while node.op != "parameter":
        node = graph.by_name[node.inputs[0]]
    return node.name


# ---- the residual stream ----


def residual(graph: Graph) -> frozenset[str]:
    """Return the operators that lie between one part of a network and the next.

    In a transformer that is the residual stream: the sums to which attention and the MLP are added, with norms and
    dropouts; lookups are not among them. Tensor parallelism leaves it whole on every device, unless its sequence
    (Megatron's `sequence_parallel`) or its width is split too.

    A sum skips a part if one operand was made of the other by a product with a weight. All operators that are reached
    from such sums, forward and back, lie between parts, up to the next such product, attention, lookup or weight.
    """
    number = {node.name: i for i, node in enumerate(graph.nodes)}
    weights = {node.name for node in graph.nodes if is_weight(graph, node.name)}
    products = {node.name for node in graph.nodes if weight_factors(graph, node, None)}
    inside = products.union(*(members for _, members in attentions(graph, weights)))
    outer = weights | constant_nodes(graph) | {node.name for node in graph.nodes if node.is_leaf}

    def between(names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in inside and name not in outer]

    def skipped(node: Node) -> list[str]:
        """Return the operand that skips a part, if this is such a sum."""
        if node.op != "add" or len(set(node.inputs)) < 2 or node.name in inside or not outer.isdisjoint(node.inputs):
            return []
        first, last = sorted(node.inputs, key=number.__getitem__)
        made_of = set(postorder([last], lambda n: since(n, number[first])))
        return [first] if first in made_of and not products.isdisjoint(made_of - {first}) else []

    def since(name: str, least: int) -> list[str]:
        return [i for i in graph.by_name[name].inputs if i not in outer and number[i] >= least]

    sums = {node.name: operands for node in graph.nodes if (operands := skipped(node))}
    readers = (user for operands in sums.values() for name in operands for user in graph.users[name])
    after = postorder([*sums, *between(readers)], lambda name: between(graph.users[name]))
    before = postorder(sums, lambda name: between(graph.by_name[name].inputs))
    return frozenset([*after, *before])
