"""Time of one operator and what it keeps for backward, under each way to split it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from shardwright.cost.compute.compute import Compute
from shardwright.cost.compute.work import Local, Passes, passes
from shardwright.pcg.analysis import Written, is_whole
from shardwright.pcg.attrs import Attr
from shardwright.pcg.dispatch import Dispatch, dispatches, num_senders
from shardwright.pcg.factors import parts_of
from shardwright.pcg.graph import Node
from shardwright.pcg.layout import Layouts, local_shape
from shardwright.pcg.optable import ROWS, LocalShapes
from shardwright.pcg.step.execution import draws_whole
from shardwright.pcg.types import ITEM_BYTES, TensorType

_Shape = tuple[int, ...]


def local_bytes(tensor: TensorType, layouts: Layouts, sizes: tuple[int, ...]) -> float:
    """Bytes of one device's part of a tensor in these layouts."""
    return prod(local_shape(tensor.shape, layouts, sizes)) * ITEM_BYTES[tensor.dtype]


class NodeCost:
    """Time and kept bytes of one operator under each of its choices.

    `operands` and `result` are logical types; `grad` says which get a gradient. `kept` lists what backward keeps and
    nobody else is charged for; `written` says how it is written in code.
    """

    def __init__(
        self,
        node: Node,
        operands: Sequence[TensorType],
        result: TensorType,
        sizes: tuple[int, ...],
        compute: Compute,
        kept: tuple[int | str, ...],
        written: Written,
    ) -> None:
        self.operands, self.result, self.sizes = tuple(operands), result, sizes
        self.compute, self.kept = compute, kept
        self.written: Written = written
        self.op, self.attrs = node.op, node.attrs
        self.row = node.row
        self.signature = self.row.signature([t.shape for t in operands], dict(self.attrs)) if self.row else None
        self._known: dict[object, tuple[Passes, tuple[float, float]]] = {}

    def passes(self, split: tuple[str, ...], needs: tuple[Layouts, ...], result: Layouts) -> Passes:
        """The kernels of one device's part, forward and backward."""
        return self._costed(split, needs, result)[0]

    def passes_s(self, split: tuple[str, ...], needs: tuple[Layouts, ...], result: Layouts) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        return self._costed(split, needs, result)[1]

    def time_s(self, split: tuple[str, ...], needs: tuple[Layouts, ...], result: Layouts) -> float:
        """Seconds of forward and backward together."""
        return sum(self.passes_s(split, needs, result))

    def _costed(
        self, split: tuple[str, ...], needs: tuple[Layouts, ...], result: Layouts
    ) -> tuple[Passes, tuple[float, float]]:
        """Choices that leave a device the same part cost the same."""
        shapes = tuple(local_shape(t.shape, n, self.sizes) for t, n in zip(self.operands, needs, strict=True))
        returned, extents = local_shape(self.result.shape, result, self.sizes), self._extents(split)
        key = (shapes, returned, extents, num_senders(split, self.sizes))
        if key not in self._known:
            part = self.op, self.attrs, self.operands, self.result, *key, self.written
            self._known[key] = _part_costs(self.compute, *part)
        return self._known[key]

    def _extents(self, split: tuple[str, ...]) -> tuple[int, ...]:
        """The sizes of the signature's factors on one device."""
        if self.signature is None:
            return ()
        degrees: dict[str, int] = {}
        for choice, size in zip(split, self.sizes, strict=True):
            for name, _ in () if is_whole(choice) else parts_of(choice):
                degrees[name] = degrees.get(name, 1) * size
        return tuple(f.size // degrees.get(f.name, 1) for f in self.signature.factors)

    def dispatches(self, split: tuple[str, ...], needs: tuple[Layouts, ...], result: Layouts) -> tuple[Dispatch, ...]:
        """What is sent of its rows, by axis in the order of forward."""
        if self.row is None or self.signature is None:
            return ()
        dtypes, grads = [t.dtype for t in (*self.operands, self.result)], [t.grad for t in self.operands]
        shapes = self._shapes(split, needs, result)
        return dispatches(self.row, self.signature, split, self.sizes, shapes, dtypes, grads)

    def kept_bytes(self, split: tuple[str, ...], needs: tuple[Layouts, ...], result: Layouts) -> float:
        """Bytes that stay on a device for the backward pass."""
        total = 0.0
        for item in self.kept:
            if item == "result":
                total += local_bytes(self.result, result, self.sizes)
            elif item == "mask":
                total += prod(local_shape(self.result.shape, result, self.sizes))
            elif item == "inside":
                total += self._inside_bytes(split, needs, result)
            else:
                total += local_bytes(self.operands[int(item)], needs[int(item)], self.sizes)
        return total

    def _inside_bytes(self, split: tuple[str, ...], needs: tuple[Layouts, ...], result: Layouts) -> float:
        assert self.row is not None
        return self.row.inside_bytes(self._shapes(split, needs, result), self.operands[0].dtype)

    def _shapes(self, split: tuple[str, ...], needs: tuple[Layouts, ...], result: Layouts) -> LocalShapes:
        return LocalShapes(
            tuple(t.shape for t in self.operands),
            self.result.shape,
            tuple(local_shape(t.shape, n, self.sizes) for t, n in zip(self.operands, needs, strict=True)),
            local_shape(self.result.shape, result, self.sizes),
            num_senders(split, self.sizes),
        )


def num_drawn(kind: str, result: TensorType, local: Sequence[int]) -> int:
    """Elements of its result that a random operator draws on a device of this kind, which has a part of this shape."""
    return result.num_elements if draws_whole(kind) else prod(local)


@lru_cache(maxsize=1 << 16)
def _part_costs(
    compute: Compute,
    op: str,
    attrs: tuple[tuple[str, Attr], ...],
    operands: tuple[TensorType, ...],
    result: TensorType,
    shapes: tuple[_Shape, ...],
    returned: _Shape,
    extents: _Shape,
    senders: int,
    written: Written,
) -> tuple[Passes, tuple[float, float]]:
    """The kernels of a part of an operator and their seconds, on whatever mesh: searches ask very often."""
    row, own = ROWS.get(op), dict(attrs)
    signature = row.signature([t.shape for t in operands], own) if row else None
    local = tuple(TensorType(shape, t.dtype, (), t.grad) for t, shape in zip(operands, shapes, strict=True))
    mine = TensorType(returned, result.dtype, (), result.grad)
    drawn = num_drawn(compute.device.kind, result, returned) if row is not None and row.random else 0
    found = passes(Local(row, own, signature, extents, local, mine, drawn, written, senders))
    return found, compute.passes_s(op, found)
