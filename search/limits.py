"""What pins leave of a search space: choices of operators, storage of parameters, and moves of parameters.

Nothing here adds costs. Choices that a pin excludes are not in a domain, moves that it excludes cost infinity, so that
the search stays as exact as it is. What is excluded:

    NAME=whole       storage in slices; uses in slices
    NAME=sharded     other storage; uses along that axis that are not in the slices which are stored
    NAME=gathered    whole storage; uses in slices
    data<=n          operators of which the batch is split more than n ways; context, tensor: the sequence, all else
    zero<=n          uses of a parameter for which slices of more than n devices are put together
    data>=n          other choices of operators which the batch can be split in so many ways; context, tensor as above
    zero>=n          storage in fewer slices, of parameters that can be stored in so many
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

import numpy as np

from shardwright.pcg.analysis import is_whole
from shardwright.pcg.factors import parse_choice
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.layout import Layout, Layouts
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.search.asked import Bound, LayoutPin
from shardwright.search.domain import Domain, axis_options
from shardwright.search.problem import NoLayoutsError
from shardwright.search.reshard import Closure
from shardwright.search.restrict import (
    CONTEXT,
    DATA,
    FREE,
    TENSOR,
    ZERO,
    batch_factors,
    is_weight,
    penalties,
    weight_factors,
)

BOUNDED = (DATA, CONTEXT, TENSOR, ZERO)
"""The roles whose degrees can be bounded."""
Certified = Callable[[Node], frozenset[str]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Pins of layouts, and bounds of roles' degrees and axes' sizes."""

    layouts: tuple[LayoutPin, ...] = ()
    bounds: tuple[Bound, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.layouts or self.bounds)

    def allow(self, mesh: Mesh, roles: Sequence[str]) -> bool:
        """Whether some use of each axis keeps to the bounds, and the mesh has the axes that pins name."""
        size = dict(zip(mesh.names, mesh.sizes, strict=True))
        axes = [(b, size.get(b.what, 1)) for b in self.bounds if b.what not in BOUNDED]
        if not all(_within(b, n) for b, n in axes) or not all(p.axis in size for p in self.layouts if p.axis):
            return False
        zero = prod(n for n, role in zip(mesh.sizes, roles, strict=True) if role == ZERO)
        sliced = [b for b in self.bounds if b.what == ZERO]
        if any(b.low > mesh.num_devices or (b.high is not None and zero > b.high) for b in sliced):
            return False
        uses = product(*(_USES.get(role, (role,)) for role in roles))
        return any(all(_within(b, _degree(b.what, use, mesh.sizes)) for b in self.bounds if b.what in BOUNDED[:3])
                   for use in uses)  # fmt: skip

    def tell_apart(self, graph: Graph, alike: Mapping[str, str]) -> bool:
        """Whether parameters that stand for each other are not meant by the same pins."""
        target = {leaf.name: str(leaf.attr("target")) for leaf in graph.leaves("parameter")}
        return any(pin.names(target[a]) != pin.names(target[b]) for pin in self.layouts for a, b in alike.items())


NO_LIMITS = Limits()
_USES = {FREE: (DATA, CONTEXT, TENSOR, ""), ZERO: (DATA,)}
"""What an axis of a role may be to operators: DATA, CONTEXT, TENSOR, or "" where it splits none."""


def _within(bound: Bound, value: int) -> bool:
    return bound.low <= value and (bound.high is None or value <= bound.high)


def _degree(role: str, use: Sequence[str], sizes: Sequence[int]) -> int:
    return prod(size for own, size in zip(use, sizes, strict=True) if own == role)


# ---- what is left of a domain ----


@dataclass(frozen=True, slots=True)
class SplitBound:
    """How many ways one operator may be split along what a role splits.

    `choices`: these, or all but these where `others`; `wanted`: those that count for `low`.
    """

    low: int
    high: int | None
    choices: frozenset[str]
    others: bool
    wanted: frozenset[str]

    def is_over(self, split: Sequence[str], sizes: Sequence[int]) -> bool:
        own = (n for c, n in zip(split, sizes, strict=True) if not is_whole(c) and (c in self.choices) != self.others)
        return self.high is not None and prod(own) > self.high

    def is_met(self, split: Sequence[str], sizes: Sequence[int]) -> bool:
        own = (n for c, n in zip(split, sizes, strict=True) if not is_whole(c) and self._counts(c))
        return prod(own) >= self.low

    def _counts(self, choice: str) -> bool:
        return choice in self.wanted or parse_choice(choice)[0] in self.wanted


@dataclass(frozen=True, slots=True)
class Splits:
    """What is left of an operator's choices: bounds, and operands that it reads whole on some axes."""

    sizes: tuple[int, ...]
    bounds: tuple[SplitBound, ...]
    whole: tuple[tuple[int, int], ...]

    def left(self, domain: Domain, numbers: Sequence[int]) -> Sequence[int]:
        """Those of the choices that keep to the pins. Where none is split in as many ways as it should be, all are."""
        found = [n for n in numbers if self._keeps(domain, n)]
        for bound in self.bounds:
            found = [n for n in found if bound.is_met(domain.splits[n], self.sizes)] or found
        return found

    def _keeps(self, domain: Domain, number: int) -> bool:
        split, operands = domain.splits[number], domain.operands[number]
        if any(operands[position][axis].is_shard for position, axis in self.whole):
            return False
        return not any(bound.is_over(split, self.sizes) for bound in self.bounds)


@dataclass(frozen=True, slots=True)
class Stored:
    """What is left of the ways to store a parameter: `pins` with the number of their axis, -1 for any."""

    sizes: tuple[int, ...]
    pins: tuple[tuple[int, LayoutPin], ...]
    least: int

    def left(self, domain: Domain, numbers: Sequence[int]) -> Sequence[int]:
        """Those of the choices that keep to the pins; where none has so many slices as it should have, all."""
        found = [n for n in numbers if all(self._keeps(pin, axis, domain.result[n]) for axis, pin in self.pins)]
        return [n for n in found if self._slices(domain.result[n]) >= self.least] or found

    def _slices(self, state: Layouts) -> int:
        return prod(size for layout, size in zip(state, self.sizes, strict=True) if layout.is_shard)

    def _keeps(self, pin: LayoutPin, axis: int, state: Layouts) -> bool:
        devices = (layout for layout, size in zip(state, self.sizes, strict=True) if size > 1)
        own = [state[axis]] if axis >= 0 else list(devices)
        if pin.kept == "whole":
            return not any(layout.is_shard for layout in own)
        return any(map(pin.takes, own))


@dataclass(frozen=True, slots=True)
class Moves:
    """Which moves of a parameter are left; `exact`: it is as it is stored, but for its dtype."""

    sizes: tuple[int, ...]
    pins: tuple[tuple[int, LayoutPin], ...]
    most: int | None
    exact: bool

    def keep(self, start: Layouts, end: Layouts, put_together: frozenset[int], sliced: frozenset[int]) -> bool:
        """Whether a path may be taken along which the value is put together, and sliced, on these axes."""
        if self.most is not None and prod(self.sizes[axis] for axis in put_together) > self.most:
            return False
        return all(self._keeps(pin, axis, start, end, put_together, sliced) for axis, pin in self.pins)

    def _keeps(
        self, pin: LayoutPin, axis: int, start: Layouts, end: Layouts, put: frozenset[int], sliced: frozenset[int]
    ) -> bool:
        axes = [axis] if axis >= 0 else [a for a, size in enumerate(self.sizes) if size > 1]
        if pin.kept == "whole":
            return sliced.isdisjoint(axes)
        if pin.kept == "gathered":
            return True
        stay = [a for a in axes if a not in put and start[a].is_shard and end[a].is_shard]
        return any(not self.exact or pin.takes(start[a]) for a in stay)


def limited_moves(closure: Closure, moves: Moves) -> Closure:
    """The closure without the paths that are excluded."""
    cost, states = closure.cost.copy(), closure.states
    for i, j in zip(*np.nonzero(np.isfinite(closure.cost)), strict=True):
        put, sliced = _along(closure, int(i), int(j))
        if not moves.keep(states[i], states[j], put, sliced):
            cost[i, j] = inf
    return replace(closure, cost=cost)


def _along(closure: Closure, i: int, j: int) -> tuple[frozenset[int], frozenset[int]]:
    """The axes on which slices are put together on the path, and those on which slices are taken."""
    put, sliced = set[int](), set[int]()
    while i != j:
        k = int(closure.next_state[i, j])
        for axis, (before, after) in enumerate(zip(closure.states[i], closure.states[k], strict=True)):
            if before != after:
                put |= {axis} if before.is_shard else set()
                sliced |= {axis} if after.is_shard else set()
        i = k
    return frozenset(put), frozenset(sliced)


# ---- of one graph on one mesh ----


class Limited:
    """What limits leave of the choices for one serial graph on one mesh."""

    def __init__(self, limits: Limits, graph: Graph, mesh: Mesh) -> None:
        self.limits, self.graph, self.mesh, self.sizes = limits, graph, mesh, mesh.device_sizes
        self.bounds = {bound.what: bound for bound in limits.bounds if bound.what in BOUNDED}
        self.batch, self.sequence = batch_factors(graph), batch_factors(graph, 1, integers_only=True)
        self.free = penalties(graph, self.batch)
        self.pinned = {
            leaf.name: pins for leaf in graph.leaves("parameter")
            if (pins := tuple(p for p in limits.layouts if p.names(str(leaf.attr("target")))))
        }  # fmt: skip
        self.origin = {node.name: origin for node in graph.nodes if (origin := _origin(graph, node.name)) is not None}
        self.whole = self._read_whole()

    def operator(self, node: Node) -> Splits | None:
        """What is left of an operator's choices; None: all."""
        bounds = () if node.name in self.origin or node.name in self.free else tuple(self._split_bounds(node))
        whole = tuple(self.whole.get(node.name, ()))
        return Splits(self.sizes, bounds, whole) if bounds or whole else None

    def storage(self, leaf: Node) -> Stored | None:
        """What is left of the ways to store a parameter; None: all."""
        least = self.bounds[ZERO].low if ZERO in self.bounds else 1
        pins = self._on_axes(leaf.name)
        return Stored(self.sizes, pins, least) if pins or least > 1 else None

    def moves(self, name: str) -> Moves | None:
        """What is left of the moves of a value; None: all."""
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
            own = self.storage(node) if node.op == "parameter" else None
            return own is not None and any(own._slices(state) >= low for state in domain.result)
        left = None if node.is_leaf else self.operator(node)
        own = [b for b in left.bounds if b.low == low and b.wanted == self._wanted(role, node)] if left else []
        return any(b.is_met(split, self.sizes) for b in own for split in domain.splits)

    def _split_bounds(self, node: Node) -> Iterator[SplitBound]:
        for role, bound in self.bounds.items():
            if role == ZERO:
                continue
            own, others = self._choices(role, node)
            yield SplitBound(bound.low, bound.high, own, others, self._wanted(role, node))

    def _choices(self, role: str, node: Node) -> tuple[frozenset[str], bool]:
        """What a role splits an operator along: these choices, or all but these."""
        batch, sequence = ({found[node.name]} if node.name in found else set[str]()
                           for found in (self.batch, self.sequence))  # fmt: skip
        own = {DATA: batch, CONTEXT: sequence}
        return (frozenset(own[role]), False) if role in own else (frozenset(batch | sequence), True)

    def _wanted(self, role: str, node: Node) -> frozenset[str]:
        """What an operator should be split along where a role has a least degree."""
        if role == TENSOR:
            return frozenset(f for f, _ in weight_factors(self.graph, node, self.batch.get(node.name)))
        return self._choices(role, node)[0]

    def _on_axes(self, name: str) -> tuple[tuple[int, LayoutPin], ...]:
        """The pins of a parameter, with the numbers of their axes."""
        return tuple((self.mesh.index(p.axis) if p.axis else -1, p) for p in self.pinned.get(name, ()))

    def _sizes_of(self, pin: LayoutPin) -> Sequence[int]:
        if pin.axis:
            return (self.sizes[self.mesh.index(pin.axis)],)
        return sorted({size for size in self.sizes if size > 1})

    def _read_whole(self) -> Mapping[str, set[tuple[int, int]]]:
        """By operator, the operands and axes that it may read no slice of, as they are gathered for use."""
        found = defaultdict[str, set[tuple[int, int]]](set)
        devices = [axis for axis, name in enumerate(self.mesh.names) if name != TIME]
        for node in self.graph.nodes:
            for position, name in enumerate(node.inputs) if node.name not in self.origin else ():
                for axis, pin in self._on_axes(self.origin.get(name, "")):
                    if pin.kept == "gathered":
                        found[node.name] |= {(position, a) for a in ([axis] if axis >= 0 else devices)}
        return found

    def _refusal(self, name: str, pin: LayoutPin, size: int, certified: Certified) -> str:
        """Why a parameter cannot be stored and used so among `size` devices, or ""."""
        kind, target = self.graph.types[name], self.graph.by_name[name].attr("target")
        shard, shape = pin.shard, " × ".join(map(str, kind.shape))
        if shard is not None and (shard.dim >= len(kind.shape) or kind.shape[shard.dim] % (size * shard.blocks)):
            return f"pin {pin.text!r}: {target} is {shape}, of which {size} devices cannot have slices {shard}"
        for node, takes in self._readers(name, size, certified):
            if not any(map(pin.takes, takes)):
                good = ", ".join(map(str, sorted(takes))) or "no slices"
                return (
                    f"pin {pin.text!r}: {node.op} at {node.source} takes {target} ({shape}) over {size} devices as "
                    f"{good}, or whole; give one of these, or 'gathered' for slices that are put together for use"
                )
        return ""

    def _readers(self, name: str, size: int, certified: Certified) -> Iterator[tuple[Node, frozenset[Layout]]]:
        """Who reads a parameter, past casts and views, and in which slices of it over one axis of `size` devices."""
        for user in dict.fromkeys(self.graph.users[name]):
            node = self.graph.by_name[user]
            options = [] if node.op == OPAQUE else axis_options(node, self.graph.signature(node), size, certified(node))
            taken = [(needs[p], made) for _, needs, made in options for p, i in enumerate(node.inputs) if i == name]
            if user not in self.origin:
                yield node, frozenset(layout for layout, _ in taken if layout.is_shard)
                continue
            for reader, inner in self._readers(user, size, certified):
                yield reader, frozenset(layout for layout, made in taken if layout.is_shard and made in inner)


def _origin(graph: Graph, name: str) -> str | None:
    """The parameter that a value is, possibly transposed, reshaped or cast."""
    if not is_weight(graph, name):
        return None
    node = graph.by_name[name]
    while node.op != "parameter":
        node = graph.by_name[node.inputs[0]]
    return node.name
