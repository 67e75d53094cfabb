"""The type of a value: logical shape, dtype, one layout per mesh axis, and whether a gradient flows."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from shardwright.pcg.layout import Layout, Layouts, local_shape
from shardwright.pcg.mesh import Mesh

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
COMPLEX = {"complex64": "float32", "complex128": "float64"}
"""The dtype of real and imaginary parts, by that of complex numbers. Graphs hold the parts alone."""
_RANK = {name: rank for rank, name in enumerate(ITEM_BYTES)}


def is_float(dtype: str) -> bool:
    """Return whether the dtype holds rounded real numbers: no integers, no bools."""
    return dtype.startswith(("float", "bfloat"))


def promote(*dtypes: str) -> str:
    """Return the dtype that an operation over operands of these dtypes computes in."""
    widest = max(dtypes, key=_RANK.__getitem__)
    if {"float16", "bfloat16"} <= set(dtypes) and widest in ("float16", "bfloat16"):
        return "float32"
    return widest


class TensorType(NamedTuple):
    """A logical tensor on a mesh. `layouts` has one entry per mesh axis and is empty in a serial graph.

    It is a tuple, as costs are looked up by the types of operands and results.
    """

    shape: tuple[int, ...]
    dtype: str
    layouts: Layouts = ()
    grad: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of the logical tensor."""
        return self.num_elements * ITEM_BYTES[self.dtype]

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        return local_shape(self.shape, self.layouts, mesh.sizes)

    def local_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of one device's part."""
        return prod(self.local_shape(mesh)) * ITEM_BYTES[self.dtype]

    def along(self, axis: int, layout: Layout) -> TensorType:
        """Return the type with another layout along one axis."""
        return self._replace(layouts=(*self.layouts[:axis], layout, *self.layouts[axis + 1 :]))

    def erased(self) -> TensorType:
        """Return the serial type, which has no mesh."""
        return TensorType(self.shape, self.dtype, (), self.grad)

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}"
        if self.layouts:
            text += "{" + ",".join(map(str, self.layouts)) + "}"
        return text if self.grad else text + "'"
