"""Time of one operator and what it keeps for backward, under each way to split it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.cost.compute import Compute
from shardwright.pcg.analysis import is_whole
from shardwright.pcg.graph import OPAQUE, Node
from shardwright.pcg.layout import Layouts, local_shape
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import ITEM_BYTES, TensorType, is_float


def local_bytes(tensor: TensorType, layouts: Layouts, sizes: tuple[int, ...]) -> float:
    """Bytes of one device's part of a tensor in these layouts."""
    return prod(local_shape(tensor.shape, layouts, sizes)) * ITEM_BYTES[tensor.dtype]


class NodeCost:
    """Time and kept bytes of one operator under each of its choices."""

    def __init__(
        self,
        node: Node,
        operands: Sequence[TensorType],
        result: TensorType,
        sizes: tuple[int, ...],
        compute: Compute,
        kept: tuple[int | str, ...],
        copies: bool,
    ) -> None:
        self.operands, self.result, self.sizes = operands, result, sizes
        self.compute, self.kept = compute, kept
        self.row = ROWS[node.op] if node.op != OPAQUE else None
        if self.row is None:
            self.flops = float(result.num_elements)
        else:
            self.flops = self.row.flops(self.row.signature([t.shape for t in operands], dict(node.attrs)))
        self.moves_data = self.row is None or not self.row.view or copies
        floats = [t.dtype for t in (*operands, result) if is_float(t.dtype)]
        self.dtype = floats[-1] if floats else "float32"
        self.num_grads = sum(t.grad for t in operands) if result.grad else 0

    def time_s(self, split: tuple[str, ...], needs: tuple[Layouts, ...], result: Layouts) -> float:
        """Forward and backward. A contraction's backward is one contraction per operand that needs a gradient."""
        passes = 1 + (self.num_grads if self.row and self.row.contraction else min(self.num_grads, 1))
        if not self.moves_data:
            return passes * self.compute.device.op_overhead_s / 2
        degree = prod(size for size, choice in zip(self.sizes, split, strict=True) if not is_whole(choice))
        returned = local_bytes(self.result, result, self.sizes)
        num_bytes = returned + sum(self._read_bytes(t, n, returned) for t, n in zip(self.operands, needs, strict=True))
        if self.row and self.row.random:  # every device draws the mask of the whole tensor
            degree, num_bytes = 1, num_bytes + 2 * self.result.num_bytes
        return passes * float(self.compute.time_s(self.flops / degree, num_bytes, self.dtype))

    def _read_bytes(self, operand: TensorType, layouts: Layouts, returned: float) -> float:
        """A lookup reads what it returns, not its whole table."""
        read = local_bytes(operand, layouts, self.sizes)
        return min(read, returned) if self.row is not None and self.row.lookup else read

    def kept_bytes(self, needs: tuple[Layouts, ...], result: Layouts) -> float:
        total = 0.0
        for item in self.kept:
            if item == "result":
                total += local_bytes(self.result, result, self.sizes)
            elif item == "mask":
                total += prod(local_shape(self.result.shape, result, self.sizes))
            else:
                total += local_bytes(self.operands[int(item)], needs[int(item)], self.sizes)
        return total
