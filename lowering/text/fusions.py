"""Peepholes of the emitter: a few nodes written as one torch call. Each is a named function in `PEEPHOLES`.

A peephole looks at the last node of its pattern. It either declines or returns the expression, the names that it reads
and the nodes that it absorbs. Absorbed nodes have no other reader, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.lowering.text.pieces import attribute
from shardwright.pcg.analysis import cut_with, summed_in_place
from shardwright.pcg.attrs import integer
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import local_blocks
from shardwright.pcg.moves import absorbed
from shardwright.pcg.parallel import COMBINE, PARTITION
from shardwright.pcg.step.operation import Region


@dataclass(frozen=True)
class Fused:
    """Several nodes as one expression: `text`, in which `{0}`, `{1}`, … stand for `inputs`."""

    text: str
    inputs: tuple[str, ...]
    absorbed: tuple[str, ...]


class GraphView:
    """A graph with the questions that peepholes ask: sole readers, places of parallel operators, recomputation.

    `regions` maps each operation to the region that backward recomputes with it, if any.
    """

    def __init__(self, graph: Graph, regions: Mapping[str, Region | None]) -> None:
        self.graph, self.regions = graph, regions
        self.results = {name for _, name in graph.outputs}

    def only(self, name: str, op: str, reader: Node) -> Node | None:
        """Return the node of this name if it is an `op` that only `reader` reads, else None."""
        node = self.graph.by_name[name]
        alone = self.graph.users[name] == (reader.name,) and name not in self.results
        return node if alone and node.op == op else None

    def partial(self, name: str) -> bool:
        return any(layout.kind == "P" for layout in self.graph.types[name].layouts)

    def sums_in_place(self, start: str, node: Node) -> bool:
        """Return whether a sum over ranks may overwrite its operand; both must be recomputed together, if at all."""
        return summed_in_place(self.graph, start) and self.regions.get(start) == self.regions.get(node.name)

    def place(self, node: Node) -> tuple[int, int]:
        """Return the (dim, blocks) that a partition makes or a combine removes; `blocks` counts the local blocks."""
        layouts = self.graph.types[node.name if node.op == PARTITION else node.inputs[0]].layouts
        axis = self.graph.mesh.index(str(node.attr("axis")))
        return layouts[axis].dim, local_blocks(layouts, axis, self.graph.mesh.sizes)


def at(place: tuple[int, int]) -> str:
    """Return a (dim, blocks) as the arguments of a call."""
    return f"{place[0]}" if place[1] == 1 else f"{place[0]}, blocks={place[1]}"


Peephole = Callable[[GraphView, Node], Fused | None]


def _biased(c: GraphView, node: Node, op: str) -> tuple[Node, str] | None:
    """Return (product, bias) if `node` adds a bias to a product that `op` computes, and is not partial; else None."""
    if node.op != "add" or c.partial(node.name):
        return None
    for product, bias in (node.inputs, node.inputs[::-1]):
        inner = c.only(product, op, node)
        if inner is not None and c.graph.types[product].shape == c.graph.types[node.name].shape:
            return inner, bias
    return None


def linear_bias(c: GraphView, node: Node) -> Fused | None:
    """Write linear + bias as `F.linear`."""
    biased = _biased(c, node, "linear")
    if biased is None or c.graph.types[biased[1]].shape != c.graph.types[node.name].shape[-1:]:
        return None
    product, bias = biased
    return Fused("F.linear({0}, {1}, {2})", (*product.inputs, bias), (product.name,))


def addmm(c: GraphView, node: Node) -> Fused | None:
    """Write matmul of two matrices + bias as `torch.addmm`."""
    biased = _biased(c, node, "matmul")
    if biased is None or len(c.graph.types[node.name].shape) != 2:
        return None
    product, bias = biased
    if any(len(c.graph.types[name].shape) != 2 for name in product.inputs):
        return None
    return Fused("torch.addmm({2}, {0}, {1})", (*product.inputs, bias), (product.name,))


def conv2d_bias(c: GraphView, node: Node) -> Fused | None:
    """Write conv2d + a bias that was reshaped to [1, channels, 1, 1] as `F.conv2d`."""
    biased = _biased(c, node, "conv2d")
    wide = None if biased is None else c.only(biased[1], "reshape", node)
    if biased is None or wide is None:
        return None
    shape = c.graph.types[wide.name].shape
    if shape != (1, c.graph.types[node.name].shape[1], 1, 1) or len(c.graph.types[wide.inputs[0]].shape) != 1:
        return None
    product = biased[0]
    attrs = dict(product.attrs)
    weight, x = (c.graph.types[i].local_shape(c.graph.mesh) for i in product.inputs[::-1])
    options = [*(attribute(attrs[key]) for key in ("stride", "padding", "dilation")), x[1] // weight[1]]
    text = f"F.conv2d({{0}}, {{1}}, {{2}}, {', '.join(map(str, options))})"
    return Fused(text, (*product.inputs, *wide.inputs), (product.name, wide.name))


def move(c: GraphView, node: Node) -> Fused | None:
    """Write two parallel operators along one axis as the one function that carries out both."""
    both = absorbed(c.graph, node) if node.is_parallel else None
    if both is None:
        return None
    inner, change = both
    places = [c.place(n) for n in (inner, node) if n.op in (COMBINE, PARTITION)]
    where = [at(place) for place in places] if len(places) == 1 else map(str, places)
    sums = change.kind.function == "reduce_copy" and c.sums_in_place(inner.inputs[0], node)
    text = ", ".join(["{0}", str(node.attr("axis")), *where, *["inplace=True"] * sums])
    return Fused(f"{change.kind.function}({text})", inner.inputs, (inner.name,))


def split_of(c: GraphView, node: Node) -> str | None:
    """Return a slice as an element of one `split` if it and others cut up a dimension; else None.

    The gradient of a split is one concatenation; the gradient of separate slices is a sum of zero-padded tensors.
    """
    alike = cut_with(c.graph, node)
    if len(alike) < 2:
        return None
    dim = integer(dict(node.attrs), "dim")
    sizes = tuple(c.graph.types[n.name].local_shape(c.graph.mesh)[dim] for n in alike)
    return f"{{0}}.split({sizes}, {dim})[{alike.index(node)}]"


PEEPHOLES: tuple[Peephole, ...] = (linear_bias, addmm, conv2d_bias, move)
