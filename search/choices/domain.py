"""The choices of one operator or one parameter on a mesh, and each choice's own cost.

Choices of operators (`pcg.choice`), one per mesh axis, come from the op table's factor strings through certified row
rules only; the `CertifiedSplits` object decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from math import gcd, lcm, prod
from typing import Protocol

import numpy as np

from shardwright.cost.collectives.moves import MoveCosts
from shardwright.cost.compute.compute import Compute
from shardwright.cost.compute.operators import NodeCost, OperatorPart, Option, local_bytes
from shardwright.cost.timeline.memory import Stored, kept_bytes, update_bytes
from shardwright.pcg.analysis import Written
from shardwright.pcg.choice import COPIED, WHOLE, Choice, Choices, indivisible
from shardwright.pcg.factors import Signature
from shardwright.pcg.graph import OPAQUE, Node
from shardwright.pcg.layout import Layout, Layouts, R, S
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.offers import alone
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.optimizers import Optimizer
from shardwright.pcg.types import ITEM_BYTES, TensorType
from shardwright.search.choices.reshard import can_hold, replicated, valid_states


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


def axis_options(node: Node, signature: Signature, size: int, certified: frozenset[Choice]) -> list[AxisOption]:
    """Return the splits of this node along one axis of `size` devices: (choice, operand layouts, result layout)."""
    row = ROWS[node.op]
    plain = alone(row, [f.name for f in signature.factors if f.role != "fixed" and f.size % size == 0])
    others = [c for c in sorted(certified) if (c.blocks > 1 or c.sends) and indivisible(signature, [c], [size]) is None]
    return [(c, *c.layouts(signature, row)) for c in (*plain, *others) if c in certified]


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

    def domain(self, kept: tuple[int | str, ...] = (), *, twice: bool = False) -> Domain:
        """Return the domain; `kept`: values for backward that only this node pays for; `twice`: forward runs again."""
        kept_bytes = np.array([self.cost.part_bytes(part, kept) for part in self.parts], dtype=float)
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
) -> Options:
    """Return the choices of one operator that are `certified` on each axis; `written`: how it is written in code."""
    sizes = mesh.sizes
    if node.op == OPAQUE:
        whole = replicated(len(sizes))
        choices = (((WHOLE,) * len(sizes), (whole,) * len(operands), whole),)
    else:
        signature = ROWS[node.op].signature([t.shape for t in operands], dict(node.attrs))
        per_axis = [axis_options(node, signature, size, own) for size, own in zip(sizes, certified, strict=True)]
        for axis in [mesh.index(TIME)] if TIME in mesh.names else []:  # microbatches send each other nothing
            per_axis[axis] = [o for o in per_axis[axis] if not o[0].sends]
        if not result.grad:
            per_axis = [[o for o in axis if o[0] != COPIED] for axis in per_axis]
        choices = combine(per_axis, signature, operands, result.shape, sizes)
    cost = NodeCost(node, operands, result, sizes, compute, (), written)
    parts, of = cost.parts(choices)
    forward_s, backward_s = np.array([cost.part_s(part) for part in parts]).T[:, of]
    for number, choice in enumerate(choices):
        for exchange in cost.exchanges(*choice):
            forward_s[number] += sum(costs.exchange_s(exchange))
            backward_s[number] += sum(costs.exchange_s(exchange, backward=True)) if result.grad else 0.0
    many = mesh.num_microbatches
    return Options(cost, choices, parts, of, many * forward_s, many * backward_s)


def combine(
    per_axis: Sequence[Sequence[AxisOption]],
    signature: Signature,
    operands: Sequence[TensorType],
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
) -> tuple[Option, ...]:
    """Return the combinations over the axes that all shapes can hold."""
    blocks = {layout.blocks for axis in per_axis for _, needs, made in axis for layout in (*needs, made)}
    blocks |= {choice.blocks for axis in per_axis for choice, _, _ in axis}
    parts = prod(sizes) * lcm(*blocks)

    def alike(extents: Sequence[int]) -> tuple[int, ...]:
        return tuple(gcd(extent, parts) for extent in extents)

    factors = tuple(replace(f, size=gcd(f.size, parts)) for f in signature.factors)
    shapes = tuple(alike(extents) for extents in (shape, *(t.shape for t in operands)))
    return combined_alike(tuple(map(tuple, per_axis)), replace(signature, factors=factors), shapes, sizes)


@lru_cache(maxsize=4096)
def combined_alike(
    per_axis: tuple[tuple[AxisOption, ...], ...],
    signature: Signature,
    shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
) -> tuple[Option, ...]:
    """Return the combinations for extents cut to what matters; `shapes`: of the result, then of the operands."""

    def hold(combination: Sequence[AxisOption], own: tuple[int, ...]) -> bool:
        layouts = zip(*((made, *needs) for _, needs, made in combination), strict=True)
        is_held = all(can_hold(extents, x, own) for extents, x in zip(shapes, layouts, strict=True))
        return is_held and indivisible(signature, [choice for choice, _, _ in combination], own) is None

    alone = tuple(
        tuple(option for option in options if hold([option], (size,)))
        for options, size in zip(per_axis, sizes, strict=True)
    )
    return tuple(choice for choice, shared in _together(alone) if not shared or hold(shared, sizes))


@lru_cache(maxsize=4096)
def _together(per_axis: tuple[tuple[AxisOption, ...], ...]) -> tuple[tuple[Option, tuple[AxisOption, ...]], ...]:
    """Return all combinations; one whose axes split the same thing comes with its options, as it may not fit."""
    found, split = (
        list[tuple[Option, tuple[AxisOption, ...]]](),
        [list(map(_split_by, options)) for options in per_axis],
    )
    for combination, parts in zip(product(*per_axis), product(*split), strict=True):
        names, needs, made = zip(*combination, strict=True)
        apart = len(set().union(*parts)) == sum(map(len, parts))
        found.append(((names, tuple(zip(*needs, strict=True)), made), () if apart else combination))
    return tuple(found)


def _split_by(option: AxisOption) -> set[tuple[int, int] | str]:
    """Return the factors and the dimensions of result and operands that one axis splits; disjoint axes always fit."""
    choice, needs, made = option
    dims: set[tuple[int, int] | str] = {(number, x.dim) for number, x in enumerate((made, *needs)) if x.is_shard}
    return dims.union(choice.factors)


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
    moved, kept = ({n: of(part, run) for n, part in parts.items()} for of in (update_bytes, kept_bytes))
    return Domain(
        ((),) * len(stored),
        ((),) * len(stored),
        stored,
        np.array([moved[n] for n in elements.tolist()]) / compute.device.memory_bytes_per_s
        + (compute.device.update_overhead_s if parameter.grad else 0.0),
        np.array([kept[n] for n in elements.tolist()]),
    )


@cache
def _run(optimizer: Optimizer) -> Execution:
    return DEFAULT.assuming(optimizer=optimizer)
