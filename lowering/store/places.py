"""Parameters and buffers that a graph reads: their shapes, layouts, and the stages that have them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwright.lowering.store.storage import real_shape
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts
from shardwright.pcg.mesh import TIME
from shardwright.pcg.stages import Stages


@dataclass(frozen=True)
class Place:
    """The way in which a graph reads a parameter or buffer: its layout on each axis of devices, and the stages.

    `shape`: the model's; `padded`: the one with padding, in which it is stored. `trained`: whether the graph computes a
    gradient of it. `is_complex`: whether it has complex numbers, whose pairs are the last dimension of both shapes.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    layouts: Layouts
    stages: tuple[int, ...]
    trained: bool
    is_complex: bool = False

    def check(self, name: str, value: Tensor | None, *, elsewhere: bool = False) -> None:
        """Raise `PlanError` unless the model's tensor of this name is such a one. `elsewhere`: it may be missing."""
        if value is None:
            if elsewhere:
                return
            raise PlanError(f"the plan has a parameter or buffer {name!r} that the model does not; plan for this model")
        if (shape := real_shape(value)) != tuple(self.shape):
            raise PlanError(
                f"{name}: the plan has shape {list(self.shape)}, the model {list(shape)}; plan for this model"
            )
        if value.is_complex() != self.is_complex:
            plan, model = ("complex", "real") if self.is_complex else ("real", "complex")
            raise PlanError(f"{name}: the plan has {plan} numbers, the model {model} ones; plan for this model")


def places(graph: Graph, stages: Stages) -> dict[str, Place]:
    """Return the place of each parameter and buffer that a graph reads, by name. `stages`: the same graph, cut."""
    readers = dict[str, set[int]]()
    for number, part in enumerate(stages.graphs):
        for node in part.nodes:
            if node.op in ("parameter", "buffer"):
                readers.setdefault(str(node.attr("target")), set()).add(number % stages.num_stages)
    place_of = dict[str, Place]()
    for node in graph.nodes:
        if node.op in ("parameter", "buffer"):
            name, kind = str(node.attr("target")), graph.types[node.name]
            on_devices = tuple(x for axis, x in zip(graph.mesh.names, kind.layouts, strict=True) if axis != TIME)
            stages_of = tuple(sorted(readers.get(name, ())))
            place_of[name] = Place(node.unpadded, kind.shape, on_devices, stages_of, kind.grad, node.is_complex)
    return place_of
