"""Nodes of a graph: frozen, with one result each, referred to by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.pcg.attrs import Attr
from shardwright.pcg.choice import Choices
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.layout import Layouts
from shardwright.pcg.optable import ROWS, Row
from shardwright.pcg.parallel import PARALLEL_OPS

RECEIVED = "received"
"""The operator of a value that a pipeline stage gets from the one before it."""
PADDED_FROM = "padded_from"
"""The attribute of a parameter that is padded with zeros (`pcg.padding`): the shape that it has in the model."""
PAIRS = "pairs"
"""The attribute of a leaf of complex numbers: their dtype in the model. Its last dimension has their two parts."""
LEAVES = ("input", "parameter", "buffer", "constant", RECEIVED)
OPAQUE = "opaque"
FOREIGN = "shardwright.foreign"
"""The target of an opaque operator that stands for a foreign call (`pcg.foreign`)."""


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a node: the user's module path and source line."""

    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        return f"{self.module or 'model'}" + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True, slots=True)
class Node:
    """An application of an operator. `split` has one choice per mesh axis; leaves and parallel operators have none."""

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()
    split: Choices = ()
    source: Source = field(default=Source(), compare=False)

    def attr(self, name: str) -> Attr:
        for key, value in self.attrs:
            if key == name:
                return value
        raise GraphError(f"{self}: no attribute {name!r}; it has {[k for k, _ in self.attrs]}")

    @property
    def is_leaf(self) -> bool:
        return self.op in LEAVES

    @property
    def unpadded(self) -> Shape:
        """The shape that a leaf has in the model."""
        attrs = dict(self.attrs)
        shape = attrs.get(PADDED_FROM, attrs["shape"])
        return shape if isinstance(shape, tuple) else ()

    @property
    def is_complex(self) -> bool:
        """Return whether it is a leaf of complex numbers, held as pairs of real ones."""
        return self.is_leaf and any(key == PAIRS for key, _ in self.attrs)

    @property
    def is_parallel(self) -> bool:
        return self.op in PARALLEL_OPS

    @property
    def row(self) -> Row | None:
        """The row of its operator, if that is in the op table."""
        return ROWS.find(self.op)

    @property
    def is_random(self) -> bool:
        """Return whether it draws from the generator."""
        return self.row is not None and self.row.random

    @property
    def may_draw(self) -> bool:
        """Return whether it may draw from the generator.

        An opaque operator may, unless torch says that it does not. A foreign call that draws has a number for it.
        """
        if self.op == OPAQUE and self.attr("target") == FOREIGN:
            return self.draw is not None
        return self.is_random or (self.op == OPAQUE and may_draw(str(self.attr("target"))))

    @property
    def draw(self) -> int | None:
        """The number of its draw among dropouts, or among all others, or None; results of one call share it."""
        return next((value for key, value in self.attrs if key == "seed" and isinstance(value, int)), None)

    def __str__(self) -> str:
        return f"%{self.name} = {self.op}({', '.join(self.inputs)})" + (
            f" at {self.source}" if self.source.module else ""
        )


def may_draw(target: str) -> bool:
    """Return whether an operator without a row may draw. Torch marks its own; other libraries' marks are unreliable."""
    import torch

    namespace, *path = target.split(".")
    op = torch.ops.aten if namespace == "aten" else None
    for part in path:
        op = getattr(op, part, None)
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", (torch.Tag.nondeterministic_seeded,))


def make_attrs(**attrs: Attr) -> tuple[tuple[str, Attr], ...]:
    """Return attributes in the order in which equal nodes have them."""
    return tuple(sorted(attrs.items()))


def leaf(name: str, op: str, shape: Shape, dtype: str, target: str, *, grad: bool = False, layouts: Layouts = (),
         source: Source = Source(), pairs: str = "") -> Node:  # fmt: skip
    """Return a leaf node.

    `target` is the batch key of an input, the qualified name of a parameter, buffer or constant. `pairs`: the dtype of
    the complex numbers that it is in the model; "": it is real there too.
    """
    text, also = tuple(str(x) for x in layouts), {PAIRS: pairs} if pairs else {}
    attrs = make_attrs(shape=tuple(shape), dtype=dtype, target=target, grad=grad, layouts=text, **also)
    return Node(name, op, (), attrs, (), source)


# ---- names of outputs ----

_RESULT = ".result."


def result_key(number: int) -> str:
    """Return the name of an output that is one of the model's results."""
    return f"{_RESULT}{number}"


def is_result(key: str) -> bool:
    """Return whether an output is one of the model's results, and neither its loss nor a buffer."""
    return key.startswith(_RESULT) and key.removeprefix(_RESULT).isdecimal()
