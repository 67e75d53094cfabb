"""Parallel graphs for tests: a serial graph and a split choice per node, with the steps between layouts inserted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardwright.pcg.graph import Graph, Node, fits, infer, make_attrs
from shardwright.pcg.layout import Layout, Layouts, R, innermost
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.offers import parse_choices
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import TensorType

Choose = Callable[[Node, int, list[TensorType]], str]
"""The split choice of a node on one axis, given its operands as they are: a factor's name, "R", "C" or "P0"."""


class Parallelizer:
    """Inserts parallel operators so that every operand is what its reader's split asks for."""

    def __init__(self, serial: Graph, mesh: Mesh, choose: Choose, storage: Mapping[str, Layouts]) -> None:
        self.serial, self.mesh, self.choose, self.storage = serial, mesh, choose, storage
        self.nodes: dict[str, Node] = {}
        self.types: dict[str, TensorType] = {}
        self.made: dict[tuple[str, Layouts], str] = {}

    def run(self) -> Graph:
        for node in self.serial.nodes:
            if node.is_leaf:
                layouts = tuple(str(x) for x in self.storage.get(str(node.attr("target")), (R,) * len(self.mesh)))
                attrs = tuple((k, layouts if k == "layouts" else v) for k, v in node.attrs)
                self._append(replace(node, attrs=attrs))
            else:
                self._operator(node)
        whole = (R,) * len(self.mesh)
        outputs = tuple((key, self._at(name, whole)) for key, name in self.serial.outputs)
        return Graph(tuple(self.nodes.values()), outputs, self.mesh).without_dead_nodes().validate()

    def _operator(self, node: Node) -> None:
        kinds = [self.serial.types[name] for name in node.inputs]
        if node.op == "opaque":
            inputs = tuple(self._at(name, (R,) * len(self.mesh)) for name in node.inputs)
            self._append(replace(node, inputs=inputs))
            return
        signature = ROWS[node.op].signature([t.shape for t in kinds], dict(node.attrs))
        operands = [self.types[i] for i in node.inputs]
        split = parse_choices(self.choose(node, axis, operands) for axis in range(len(self.mesh)))
        per_axis = [choice.layouts(signature, ROWS[node.op])[0] for choice in split]
        needs = [tuple(axis[i] for axis in per_axis) for i in range(len(kinds))]
        inputs = tuple(self._at(name, need) for name, need in zip(node.inputs, needs, strict=True))
        self._append(replace(node, inputs=inputs, split=split))

    def _append(self, node: Node) -> str:
        self.types[node.name] = infer(node, [self.types[i] for i in node.inputs], self.mesh)
        self.nodes[node.name] = node
        return node.name

    def _at(self, name: str, need: Layouts) -> str:
        """Undo from the inside out what differs or stands in the way, then apply what is needed from the outside in."""
        while True:
            have = self.types[name].layouts
            wrong = [a for a in range(len(need)) if not fits(self.types[name], a, need[a])]
            leaving = {have[a].dim for a in wrong if have[a].is_shard}
            ready = [
                a for a in wrong if have[a].kind == "R" and need[a].dim not in leaving and self._ready(have, need, a)
            ]
            summed = [a for a in wrong if have[a].kind == "P"]
            dims = {x.dim for a in wrong for x in (have[a], need[a]) if x.is_shard}
            inner = [a for a, x in enumerate(have) if x.is_shard and x.dim in dims and innermost(have, a)]
            if summed or (not ready and inner):
                name = self._step(name, (summed or sorted(inner, key=lambda a: a not in wrong))[0], R)
            elif ready:
                axis = min(ready, key=lambda a: (need[a].dim, need[a].blocks, a))
                name = self._step(name, axis, need[axis])
            else:
                return name

    def _ready(self, have: Layouts, need: Layouts, axis: int) -> bool:
        after = (*have[:axis], need[axis], *have[axis + 1 :])
        return not need[axis].is_shard or innermost(after, axis)

    def _step(self, name: str, axis: int, after: Layout) -> str:
        have, axis_name = self.types[name].layouts[axis], self.mesh.names[axis]
        op = {"P": "reduce", "S": "combine"}.get(have.kind) or ("partition" if after.is_shard else "replicate")
        attrs = make_attrs(axis=axis_name)
        if op == "partition":
            attrs = make_attrs(axis=axis_name, dim=after.dim, blocks=after.blocks)
        made = f"{name}.{op}_{axis_name}" + (f"_{after.dim}_{after.blocks}" if after.is_shard else "")
        if made not in self.nodes:
            self._append(Node(made, op, (name,), attrs, (), self.nodes[name].source))
        return made


def parallelize(serial: Graph, mesh: Mesh, choose: Choose, storage: Mapping[str, Layouts] | None = None) -> Graph:
    """The parallel graph in which each node takes the split that `choose` names, with the given parameter storage."""
    return Parallelizer(serial, mesh, choose, storage or {}).run()


def follow(serial: Graph, mesh: Mesh, data_axes: tuple[int, ...] = ()) -> Choose:
    """Split along what operands are already split along, else replicate; partial sums are reduced at once.

    Along `data_axes` the way parameters are stored is ignored.
    """

    def choose(node: Node, axis: int, operands: list[TensorType]) -> str:
        signature = ROWS[node.op].signature([t.shape for t in operands], dict(node.attrs))
        for i, kind in sorted(enumerate(operands), key=lambda pair: -pair[1].num_elements):
            stored = serial.by_name[node.inputs[i]].op == "parameter"
            if not kind.layouts[axis].is_shard or (stored and axis in data_axes):
                continue
            for index, factor in enumerate(signature.factors):
                fits = factor.role != "fixed" and factor.size % mesh.sizes[axis] == 0
                if fits and signature.split_layouts(index)[0][i] == kind.layouts[axis]:
                    return factor.name
        return "R"

    return choose
