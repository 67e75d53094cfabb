"""The choices of one operator or one parameter on a mesh, and each choice's own cost.

Choices of operators (`pcg.choice`), one per mesh axis, come from the op table's factor strings through certified row
rules only; the `CertifiedSplits` object decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import product
from math import gcd, lcm, prod
from typing import Protocol

import numpy as np

from shardwright.cost.collectives.moves import MoveCosts
from shardwright.cost.compute.compute import Compute
from shardwright.cost.compute.operators import NodeCost, OperatorPart, Option, local_bytes
from shardwright.cost.timeline.clock import SHARING, exposed_s
from shardwright.cost.timeline.memory import Stored, kept_bytes, update_s
from shardwright.pcg.analysis import Written
from shardwright.pcg.attrs import Attr
from shardwright.pcg.bounds import ALL, Band
from shardwright.pcg.choice import COPIED, WHOLE, Choice, Choices, indivisible
from shardwright.pcg.factors import Signature
from shardwright.pcg.graph import Node
from shardwright.pcg.layout import Layout, Layouts, R, S
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.offers import alone
from shardwright.pcg.optable import ROWS
from shardwright.pcg.row import Row
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.optimizers import Optimizer
from shardwright.pcg.types import ITEM_BYTES, TensorType
from shardwright.search.choices.reshard import can_hold, valid_states


class CertifiedSplits(Protocol):
    """A function that gives the split choices of a node that carry a certificate."""

    def __call__(
        self, node: Node, operands: Sequence[TensorType], blocked: Sequence[Choice] = (), /
    ) -> frozenset[Choice]:
        """Return the certified choices: all without blocks, and those of the `blocked` ones."""
        ...


@dataclass(frozen=True, eq=False)
class Domain:
    """The choices of one variable.

    splits        per choice: the node's `split`; nothing for a parameter
    operands      per choice: the layouts that each operand must have
    result        per choice: the layouts of the result
    time_s        per choice: seconds of forward and backward (of the optimizer's update, for a parameter)
    kept_bytes    per choice: bytes that stay on a device until backward (weights, gradients and moments, for a
                  parameter)
    """

    splits: tuple[Choices, ...]
    operands: tuple[tuple[Layouts, ...], ...]
    result: tuple[Layouts, ...]
    time_s: np.ndarray
    kept_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.result)


AxisOption = tuple[Choice, Layouts, Layout]
"""A choice along one axis, and the layouts that it asks for and gives."""


@dataclass(frozen=True, eq=False)
class AxisOptions:
    """The options of an operator along one axis; equal ones are one object, so that what is made of them is kept.

    Attributes:
        split: by option, the factors and the dimensions of result and operands that it splits.
        blocks: the numbers of blocks in all choices and layouts.
        sends: whether devices send each other something under one of them.
    """

    options: tuple[AxisOption, ...]

    @cached_property
    def split(self) -> tuple[set[tuple[int, int] | str], ...]:
        def split_by(choice: Choice, *layouts: Layout) -> set[tuple[int, int] | str]:
            return {*choice.factors, *((number, x.dim) for number, x in enumerate(layouts) if x.is_shard)}

        return tuple(split_by(choice, made, *needs) for choice, needs, made in self.options)

    @cached_property
    def blocks(self) -> set[int]:
        return {x.blocks for choice, needs, made in self.options for x in (choice, made, *needs)}

    @cached_property
    def sends(self) -> bool:
        return any(choice.sends for choice, _, _ in self.options)


@cache
def _interned(options: tuple[AxisOption, ...]) -> AxisOptions:
    return AxisOptions(options)


@lru_cache(maxsize=1 << 14)
def options_along(
    op: str, attrs: tuple[tuple[str, Attr], ...], shapes: tuple[tuple[int, ...], ...], size: int,
    certified: frozenset[Choice], *, sending: bool, copied: bool,
) -> AxisOptions:  # fmt: skip
    """Return the options along an axis that the shapes of operands and result can hold.

    Those that are `sending` and `copied` are left out where these are false.
    """
    if (row := ROWS.find(op)) is None:
        return _interned(((WHOLE, (R,) * (len(shapes) - 1), R),))
    signature = row.signature(shapes[:-1], dict(attrs))
    left = frozenset(c for c in certified if (sending or not c.sends) and (copied or c != COPIED))
    options = axis_options(row, signature, size, left)
    return _interned(tuple(option for option in options if _is_held([option], signature, shapes, (size,))))


def axis_options(row: Row, signature: Signature, size: int, certified: frozenset[Choice]) -> list[AxisOption]:
    """Return the splits of an operator along one axis of `size` devices: (choice, operand layouts, result layout)."""
    plain = alone(row, [f.name for f in signature.factors if f.role != "fixed" and f.size % size == 0])
    others = [c for c in sorted(certified) if (c.blocks > 1 or c.sends) and indivisible(signature, [c], [size]) is None]
    return [(c, *c.layouts(signature, row)) for c in (*plain, *others) if c in certified]


def _is_held(
    combination: Sequence[AxisOption],
    signature: Signature,
    shapes: Sequence[tuple[int, ...]],
    sizes: tuple[int, ...],
) -> bool:
    """Return whether factors, and the shapes of operands and result, can hold a combination of options of axes."""
    layouts = zip(*((*needs, made) for _, needs, made in combination), strict=True)
    is_held = all(can_hold(extents, of_tensor, sizes) for extents, of_tensor in zip(shapes, layouts, strict=True))
    return is_held and indivisible(signature, [choice for choice, _, _ in combination], sizes) is None


@dataclass(frozen=True, eq=False)
class Options:
    """The choices of one operator, for any recomputation; seconds are of all microbatches.

    parts    the different parts of the operator that choices leave a device; `of`: the number of each choice's part
    """

    cost: NodeCost
    choices: tuple[Option, ...]
    parts: Sequence[OperatorPart]
    of: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray

    def domain(self, saved: tuple[int | str, ...] = (), *, twice: bool = False) -> Domain:
        """Return the domain; `saved`: values for backward that only this node pays for; `twice`: forward runs again."""
        kept_bytes = np.array([self.cost.part_bytes(part, saved) for part in self.parts], dtype=float)
        splits, operands, result = zip(*self.choices, strict=True)
        return Domain(splits, operands, result, self.forward_s * (1 + twice) + self.backward_s, kept_bytes[self.of])


def node_options(
    node: Node,
    operands: Sequence[TensorType],
    result: TensorType,
    mesh: Mesh,
    certified: Sequence[frozenset[Choice]],
    costs: MoveCosts,
    compute: Compute,
    written: Written,
    band: Band = ALL,
) -> Options:
    """Return the choices of one operator that are `certified` on each axis; `written`: how it is written in code.

    `band`: which keys queries see, if it is attention. Microbatches send each other nothing.
    """
    sizes, shapes = mesh.sizes, (*(t.shape for t in operands), result.shape)
    attrs = tuple(attr for attr in node.attrs if attr[0] != "seed")
    per_axis = tuple(
        options_along(node.op, attrs, shapes, size, offered, sending=name != TIME, copied=result.grad)
        for name, size, offered in zip(mesh.names, sizes, certified, strict=True)
    )
    cost = NodeCost(node, operands, result, sizes, compute, (), written, band)
    choices, numbers = combine(per_axis, cost.signature, shapes, sizes)
    parts, of = cost.parts([along.options for along in per_axis], numbers)
    forward_s, backward_s = np.array([cost.part_s(part) for part in parts]).T[:, of]
    sharing = SHARING[compute.device.kind]
    for number, choice in enumerate(choices if any(along.sends for along in per_axis) else ()):
        for exchange in cost.exchanges(*choice):
            forward_s[number] += exposed_s(costs.exchange_s(exchange), forward_s[number], sharing)
            if result.grad:
                back = costs.exchange_s(exchange, backward=True)
                backward_s[number] += exposed_s(back, backward_s[number], sharing)
    many = mesh.num_microbatches
    return Options(cost, choices, parts, of, many * forward_s, many * backward_s)


def combine(
    per_axis: tuple[AxisOptions, ...],
    signature: Signature | None,
    shapes: Sequence[tuple[int, ...]],
    sizes: tuple[int, ...],
) -> tuple[tuple[Option, ...], np.ndarray]:
    """Return the combinations over the axes that all shapes can hold, and the number of each one's option by axis.

    `shapes`: of the operands, then of the result.
    """
    if signature is None:
        return combined(per_axis, None, (), sizes)
    parts = prod(sizes) * lcm(*set[int]().union(*(along.blocks for along in per_axis)))
    factors = tuple(replace(f, size=gcd(f.size, parts)) for f in signature.factors)
    cut = tuple(tuple([gcd(extent, parts) for extent in extents]) for extents in shapes)
    return combined(per_axis, replace(signature, factors=factors), cut, sizes)


@lru_cache(maxsize=4096)
def combined(
    per_axis: tuple[AxisOptions, ...],
    signature: Signature | None,
    shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
) -> tuple[tuple[Option, ...], np.ndarray]:
    """Return `combine` for extents cut to what matters."""
    choices, numbers, shared = _together(per_axis)
    left = [
        i
        for i, of_factor in enumerate(shared)
        if not of_factor or (signature and _is_held(of_factor, signature, shapes, sizes))
    ]
    return tuple([choices[i] for i in left]), numbers[left]


@lru_cache(maxsize=4096)
def _together(
    per_axis: tuple[AxisOptions, ...],
) -> tuple[list[Option], np.ndarray, list[tuple[AxisOption, ...]]]:
    """Return all combinations, the number of each one's option by axis, and its options, if axes split the same thing.

    Those that do may not fit.
    """
    choices, shared = list[Option](), list[tuple[AxisOption, ...]]()
    split = product(*(along.split for along in per_axis))
    for combination, parts in zip(product(*(along.options for along in per_axis)), split, strict=True):
        names, needs, made = zip(*combination, strict=True)
        choices.append((names, tuple(zip(*needs, strict=True)), made))
        shared.append(() if len(set().union(*parts)) == sum(map(len, parts)) else combination)
    shape = tuple(len(along.options) for along in per_axis)
    return choices, np.indices(shape).reshape(len(shape), -1).T, shared


def storage_domain(
    parameter: TensorType,
    used_as: Sequence[Sequence[Layout]],
    sizes: tuple[int, ...],
    compute: Compute,
    optimizer: Optimizer = "adam",
) -> Domain:
    """Return the ways to store a parameter: whole, as an operator wants it, or sharded along any dimension (ZeRO-3)."""
    per_axis = []
    for axis, size in enumerate(sizes):
        shards = {x for x in used_as[axis] if x.is_shard}
        shards |= {S(d) for d, extent in enumerate(parameter.shape) if extent % size == 0 and size > 1}
        per_axis.append([R, *sorted(shards)])
    stored = valid_states(parameter.shape, per_axis, sizes)
    sharded = np.array([local_bytes(parameter, s, sizes) for s in stored], dtype=float)
    elements = sharded / ITEM_BYTES[parameter.dtype]
    one, run = Stored(1.0, parameter.dtype, parameter.grad, False, parameter.dtype, parameter.shape), _run(optimizer)
    parts = {n: one._replace(num_elements=n) for n in elements.tolist()}
    updated = {n: update_s(part, run, compute.device) for n, part in parts.items()}
    bytes_of = {n: kept_bytes(part, run) for n, part in parts.items()}
    return Domain(
        ((),) * len(stored),
        ((),) * len(stored),
        stored,
        np.array([updated[n] for n in elements.tolist()])
        + (compute.device.update_overhead_s if parameter.grad else 0.0),
        np.array([bytes_of[n] for n in elements.tolist()]),
    )


@cache
def _run(optimizer: Optimizer) -> Execution:
    return DEFAULT.assuming(optimizer=optimizer)
