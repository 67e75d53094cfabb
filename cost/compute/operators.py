"""Time of one operator, and the bytes that it keeps for backward, under each way to split it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from shardwright.cost.compute.compute import Compute
from shardwright.cost.compute.work import Local, Passes, passes
from shardwright.pcg.analysis import Written
from shardwright.pcg.attrs import Attr
from shardwright.pcg.bounds import ALL, Band
from shardwright.pcg.choice import (
    Choice,
    Choices,
    Exchange,
    Running,
    degrees,
    exchanges,
    num_senders,
    sends,
    step_along,
)
from shardwright.pcg.graph import Node
from shardwright.pcg.layout import Layout, Layouts, local_shape
from shardwright.pcg.optable import LocalShapes
from shardwright.pcg.ring import Used, used_by
from shardwright.pcg.row import BESIDE
from shardwright.pcg.step.execution import draws_whole
from shardwright.pcg.types import ITEM_BYTES, TensorType

_Shape = tuple[int, ...]


def local_bytes(tensor: TensorType, layouts: Layouts, sizes: tuple[int, ...]) -> float:
    """Return the bytes of one device's part of a tensor in these layouts."""
    return prod(local_shape(tensor.shape, layouts, sizes)) * ITEM_BYTES[tensor.dtype]


class OperatorPart(NamedTuple):
    """A device's part of an operator: local shapes, sizes of its factors, how many devices send it rows, its `step`.

    `used`: what it uses of what others send it.
    """

    operands: tuple[_Shape, ...]
    result: _Shape
    extents: _Shape
    senders: int
    step: int
    used: Used


Option = tuple[Choices, tuple[Layouts, ...], Layouts]
"""A split of an operator, with the layouts of its operands and of its result."""


class NodeCost:
    """Time and kept bytes of one operator under each of its choices.

    `operands` and `result` are logical types; `grad` says which get a gradient. `saved` lists the values that backward
    keeps and that no other operator is charged for; `written` says how the operator is written in code. `band` says
    which keys queries see, if it is attention.
    """

    def __init__(
        self,
        node: Node,
        operands: Sequence[TensorType],
        result: TensorType,
        sizes: tuple[int, ...],
        compute: Compute,
        saved: tuple[int | str, ...],
        written: Written,
        band: Band = ALL,
    ) -> None:
        self.band = band
        self.operands, self.result, self.sizes = tuple(operands), result, sizes
        self.compute, self.kept = compute, saved
        self.written: Written = written
        self.op, self.attrs = node.op, node.attrs
        self.row = node.row
        self._known = _known_parts(compute, self.op, self.attrs, self.operands, result, written)
        self.signature = self.row.signature([t.shape for t in operands], dict(self.attrs)) if self.row else None

    def passes(self, split: Choices, needs: tuple[Layouts, ...], result: Layouts) -> Passes:
        """Return the kernels of one device's part, forward and backward."""
        return self._costed(self.part(split, needs, result))[0]

    def passes_s(self, split: Choices, needs: tuple[Layouts, ...], result: Layouts) -> tuple[float, float]:
        """Return the seconds of forward and of backward."""
        return self.part_s(self.part(split, needs, result))

    def part_s(self, part: OperatorPart) -> tuple[float, float]:
        """Return the seconds of forward and of backward of a part."""
        return self._costed(part)[1]

    def _costed(self, part: OperatorPart) -> tuple[Passes, tuple[float, float]]:
        if (costs := self._known.get(part)) is None:
            costs = self._known[part] = self._part_costs(part)
        return costs

    def _part_costs(self, part: OperatorPart) -> tuple[Passes, tuple[float, float]]:
        """Return the kernels of a part, and their seconds."""
        shaped = zip(self.operands, part.operands, strict=True)
        operands = tuple(TensorType(shape, t.dtype, (), t.grad) for t, shape in shaped)
        result = TensorType(part.result, self.result.dtype, (), self.result.grad)
        drawn = num_drawn(self.compute.device.kind, self.result, part.result) if self.row and self.row.random else 0
        local = Local(self.row, dict(self.attrs), self.signature, part.extents, operands, result, drawn, self.written,
                      part.senders, part.step, part.used)  # fmt: skip
        return (kernels := passes(local)), self.compute.passes_s(self.op, kernels)

    def part(self, split: Choices, needs: tuple[Layouts, ...], result: Layouts) -> OperatorPart:
        """Return the part that a split leaves a device."""
        shapes = tuple(local_shape(t.shape, n, self.sizes) for t, n in zip(self.operands, needs, strict=True))
        returned, extents = local_shape(self.result.shape, result, self.sizes), self._extents(split)
        counted = self.row.offset if self.row is not None else None
        step = step_along(split, self.sizes, counted)
        return OperatorPart(shapes, returned, extents, num_senders(split, self.sizes), step, self._used(split))

    def _used(self, split: Choices) -> Used:
        """Return what a device uses of what others send it."""
        if self.signature is None:
            return Used(num_senders(split, self.sizes))
        return used_by(self.band, self.signature, split, self.sizes)

    def _extents(self, split: Choices) -> tuple[int, ...]:
        """Return the sizes of the signature's factors on one device."""
        if self.signature is None:
            return ()
        divided = degrees(split, self.sizes)
        return tuple(f.size // divided.get(f.name, 1) for f in self.signature.factors)

    def parts(
        self, per_axis: Sequence[Sequence[tuple[Choice, Layouts, Layout]]], numbers: np.ndarray
    ) -> tuple[list[OperatorPart], np.ndarray]:
        """Return the distinct parts of combinations of options, and for each combination the number of its part.

        `per_axis`: the options along each axis, each a choice with the layouts of operands and result; `numbers`: of
        the options of each combination, by axis.
        """
        shapes = [*(t.shape for t in self.operands), self.result.shape]
        factors = tuple(f.size for f in self.signature.factors) if self.signature else ()
        ends = list(accumulate([*map(len, shapes), len(factors)], initial=0))
        among = np.ones((len(numbers), ends[-1] + 4), np.int64)
        for axis, (size, options) in enumerate(zip(self.sizes, per_axis, strict=True)):
            rows = [self._among(choice, size, (*needs, made), ends) for choice, needs, made in options]
            among *= np.array(rows)[numbers[:, axis]]
        local = np.array([*chain.from_iterable(shapes), *factors, 1, 1, 1, 1]) // np.maximum(among, 1)
        local[:, -4:] = among[:, -4:]
        if self.band != ALL:
            splits = (tuple(options[n][0] for options, n in zip(per_axis, row, strict=True)) for row in numbers)
            local[:, -2:] = [self._used(split) for split in splits]
        distinct = dict[tuple[int, ...], int]()
        of = [distinct.setdefault(row, len(distinct)) for row in map(tuple, local.tolist())]
        return [_part(row, ends) for row in distinct], np.array(of, np.intp)

    def _among(self, choice: Choice, size: int, layouts: Sequence[Layout], ends: Sequence[int]) -> list[int]:
        """Return how many devices of an axis share each dimension and factor, and the last four numbers of its part.

        The step is that of a balanced ring, which a ring of the search becomes if it can. All senders count as used.
        """
        shares = [1] * (ends[-1] + 4)
        for start, layout in zip(ends, layouts, strict=False):
            if layout.kind == "S":
                shares[start + layout.dim] = size
        if self.signature is not None and choice.factors:
            shares[ends[-2] : -4] = [size if f.name in choice.factors else 1 for f in self.signature.factors]
        is_spaced = self.row is not None and self.row.spaced and self.row.offset in choice.factors
        step, senders = size if is_spaced and (choice.blocks > 1 or choice.sends) else 1, choice.senders(size)
        shares[-4:] = senders, step, *Used(senders)
        return shares

    def exchanges(self, split: Choices, needs: tuple[Layouts, ...], result: Layouts) -> tuple[Exchange, ...]:
        """Return the exchanges between devices while the operator runs, by axis in the order of forward."""
        if self.row is None or self.signature is None or not sends(split):
            return ()
        dtypes, grads = [t.dtype for t in (*self.operands, self.result)], [t.grad for t in self.operands]
        shapes = self._shapes(self.part(split, needs, result))
        return exchanges(Running(self.row, self.signature, split, self.sizes, shapes, dtypes, grads, self.band))

    def kept_bytes(self, split: Choices, needs: tuple[Layouts, ...], result: Layouts) -> float:
        """Return the bytes that stay on a device for the backward pass."""
        return self.part_bytes(self.part(split, needs, result), self.kept)

    def part_bytes(self, part: OperatorPart, saved: Sequence[int | str]) -> float:
        """Return the bytes of the `saved` values of a part."""
        total = 0.0
        for item in saved:
            if item == "result":
                total += prod(part.result) * ITEM_BYTES[self.result.dtype]
            elif item in BESIDE:
                assert self.row is not None
                total += self.row.beside_bytes(item, self._shapes(part), self.operands[0].dtype)
            else:
                total += prod(part.operands[int(item)]) * ITEM_BYTES[self.operands[int(item)].dtype]
        return total

    def _shapes(self, part: OperatorPart) -> LocalShapes:
        whole = tuple(t.shape for t in self.operands)
        return LocalShapes(whole, self.result.shape, part.operands, part.result, part.senders)


def _part(row: tuple[int, ...], ends: Sequence[int]) -> OperatorPart:
    *shapes, factors = (row[start:end] for start, end in pairwise(ends))
    senders, step, *used = row[-4:]
    return OperatorPart(tuple(shapes[:-1]), shapes[-1], factors, senders, step, Used(*used))


def num_drawn(kind: str, result: TensorType, local: Sequence[int]) -> int:
    """Return how many elements a random operator draws on a device that has a part of shape `local`."""
    return result.num_elements if draws_whole(kind) else prod(local)


@lru_cache(maxsize=1 << 12)
def _known_parts(
    compute: Compute,
    op: str,
    attrs: tuple[tuple[str, Attr], ...],
    operands: tuple[TensorType, ...],
    result: TensorType,
    written: Written,
) -> dict[OperatorPart, tuple[Passes, tuple[float, float]]]:
    """Return where the costs of an operator's parts are kept, on all meshes: searches ask very often."""
    return {}
