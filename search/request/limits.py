"""The limits that pins set to a search space: to choices of operators, and to storage and moves of parameters.

Nothing here adds costs. Choices that a pin excludes are not in a domain, moves that it excludes cost infinity, so that
the search stays as exact as it is. The pins exclude:

    NAME=whole       storage in slices; uses in slices
    NAME=sharded     other storage; uses along that axis that are not in the slices which are stored
    NAME=gathered    whole storage; uses in slices
    data<=n          operators whose batch is split more than n ways; context: the sequence; tensor: all else
    residual<=n      operators between parts of a network that are split more than n ways, the batch aside
    zero<=n          uses of a parameter for which slices of more than n devices are put together
    data>=n          other choices of operators whose batch can be split in so many ways; context, tensor as above
    zero>=n          storage in fewer slices, of parameters that can be stored in so many
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

import numpy as np

from shardwright.pcg.choice import Choice
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts
from shardwright.pcg.mesh import Mesh
from shardwright.search.choices.domain import Domain
from shardwright.search.choices.reshard import Closure
from shardwright.search.request.asked import RESIDUAL, Bound, LayoutPin
from shardwright.search.request.restrict import (
    CONTEXT,
    DATA,
    EXPERT,
    FREE,
    RING,
    TENSOR,
    ULYSSES,
    ZERO,
)

BOUNDED = (DATA, CONTEXT, TENSOR, ZERO, RESIDUAL)
"""The names that bounds may have: roles, and the operators between parts of a network (`search.request.limited`)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Pins of layouts, and bounds of roles' degrees and axes' sizes.

    `stored`: the exact layouts of parameters on the axes of devices, by name, where they are stored already.
    """

    layouts: tuple[LayoutPin, ...] = ()
    bounds: tuple[Bound, ...] = ()
    stored: tuple[tuple[str, Layouts], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.layouts or self.bounds or self.stored)

    def allow(self, mesh: Mesh, roles: Sequence[str]) -> bool:
        """Return whether some use of each axis keeps to the bounds, and the mesh has the axes that pins name."""
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
        """Return whether some pin names only one of two parameters that stand for each other."""
        target = {leaf.name: str(leaf.attr("target")) for leaf in graph.leaves("parameter")}
        stored = dict(self.stored)
        pairs = [(target[a], target[b]) for a, b in alike.items() if a in target]  # else a buffer
        named = any(pin.names(a) != pin.names(b) for pin in self.layouts for a, b in pairs)
        return named or any(stored.get(a) != stored.get(b) for a, b in pairs)


NO_LIMITS = Limits()
_USES = {FREE: (DATA, CONTEXT, TENSOR, ""), ZERO: (DATA,), EXPERT: (DATA,), ULYSSES: (CONTEXT,), RING: (CONTEXT,)}
"""The uses of an axis of a role by operators: DATA, CONTEXT, TENSOR, or "" where it splits none."""


def _within(bound: Bound, value: int) -> bool:
    return bound.low <= value and (bound.high is None or value <= bound.high)


def _degree(role: str, use: Sequence[str], sizes: Sequence[int]) -> int:
    return prod(size for role_of_axis, size in zip(use, sizes, strict=True) if role_of_axis == role)


# ---- what is left of a domain ----


@dataclass(frozen=True, slots=True)
class SplitBound:
    """A bound of the number of ways in which one operator is split for a role.

    `choices`: the choices that count for `high`, or all but these where `others`; `wanted`: those that count for `low`.
    Choices are seen from outside: a dispatch is a split of the rows that it sends.
    """

    low: int
    high: int | None
    choices: frozenset[Choice]
    others: bool
    wanted: frozenset[str]

    def is_over(self, split: Sequence[Choice], sizes: Sequence[int]) -> bool:
        sizes_divided = (n for c, n in _dividing(split, sizes) if (c in self.choices) != self.others)
        return self.high is not None and prod(sizes_divided) > self.high

    def is_met(self, split: Sequence[Choice], sizes: Sequence[int]) -> bool:
        sizes_wanted = (n for c, n in _dividing(split, sizes) if c in self.wanted or c.unblocked in self.wanted)
        return prod(sizes_wanted) >= self.low


def _dividing(split: Sequence[Choice], sizes: Sequence[int]) -> Iterator[tuple[Choice, int]]:
    """Return the choices that divide the work, seen from outside, with the sizes of their axes."""
    return ((choice.outward, size) for choice, size in zip(split, sizes, strict=True) if choice.factors)


@dataclass(frozen=True, slots=True)
class Splits:
    """The bounds of an operator's choices, and the operands that it reads whole on some axes."""

    sizes: tuple[int, ...]
    bounds: tuple[SplitBound, ...]
    whole: tuple[tuple[int, int], ...]

    def left(self, domain: Domain, numbers: Sequence[int]) -> Sequence[int]:
        """Return the choices that keep to the pins; a least degree counts only where some choice reaches it."""
        left = [n for n in numbers if self._keeps(domain, n)]
        for bound in self.bounds:
            left = [n for n in left if bound.is_met(domain.splits[n], self.sizes)] or left
        return left

    def _keeps(self, domain: Domain, number: int) -> bool:
        split, operands = domain.splits[number], domain.operands[number]
        if any(operands[position][axis].is_shard for position, axis in self.whole):
            return False
        return not any(bound.is_over(split, self.sizes) for bound in self.bounds)


@dataclass(frozen=True, slots=True)
class Stored:
    """The limits of a parameter's storage: `pins` with the number of their axis, -1 for any, and the fewest slices.

    `only`: the state that it is in already.
    """

    sizes: tuple[int, ...]
    pins: tuple[tuple[int, LayoutPin], ...]
    least: int
    only: Layouts | None = None

    def left(self, domain: Domain, numbers: Sequence[int]) -> Sequence[int]:
        """Return the choices that keep to the pins; the fewest slices count only where some choice has so many."""
        if self.only is not None:
            return [n for n in numbers if domain.result[n] == self.only]
        left = [n for n in numbers if all(self._keeps(pin, axis, domain.result[n]) for axis, pin in self.pins)]
        return [n for n in left if self.slices(domain.result[n]) >= self.least] or left

    def slices(self, state: Layouts) -> int:
        """Return the number of slices into which this storage divides a parameter."""
        return prod(size for layout, size in zip(state, self.sizes, strict=True) if layout.is_shard)

    def _keeps(self, pin: LayoutPin, axis: int, state: Layouts) -> bool:
        devices = (layout for layout, size in zip(state, self.sizes, strict=True) if size > 1)
        layouts = [state[axis]] if axis >= 0 else list(devices)
        if pin.kept == "whole":
            return not any(layout.is_shard for layout in layouts)
        return any(map(pin.takes, layouts))


@dataclass(frozen=True, slots=True)
class Moves:
    """The limits of a parameter's moves; `exact`: its value is as it is stored, but for its dtype."""

    sizes: tuple[int, ...]
    pins: tuple[tuple[int, LayoutPin], ...]
    most: int | None
    exact: bool

    def keep(self, start: Layouts, end: Layouts, put_together: frozenset[int], sliced: frozenset[int]) -> bool:
        """Return whether a path is allowed that puts the value together, and slices it, on these axes."""
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
    """Return the closure without the paths that are excluded."""
    cost, states = closure.cost.copy(), closure.states
    for i, j in zip(*np.nonzero(np.isfinite(closure.cost)), strict=True):
        put, sliced = _along(closure, int(i), int(j))
        if not moves.keep(states[i], states[j], put, sliced):
            cost[i, j] = inf
    return replace(closure, cost=cost)


def _along(closure: Closure, i: int, j: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the axes on which the path puts slices together, and the axes on which it takes slices."""
    put, sliced = set[int](), set[int]()
    while i != j:
        k = int(closure.next_state[i, j])
        for axis, (before, after) in enumerate(zip(closure.states[i], closure.states[k], strict=True)):
            if before != after:
                put |= {axis} if before.is_shard else set()
                sliced |= {axis} if after.is_shard else set()
        i = k
    return frozenset(put), frozenset(sliced)
