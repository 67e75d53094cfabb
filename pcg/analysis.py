"""Facts of a graph without a cluster: which nodes are constant, stored or kept for backward, and which repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from shardwright.pcg.choice import Choice
from shardwright.pcg.factors import Signature
from shardwright.pcg.foreign import is_foreign
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.layout import Layout, R
from shardwright.pcg.mesh import TIME
from shardwright.pcg.moves import source_of
from shardwright.pcg.offers import offered
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import REPLICATE
from shardwright.pcg.row import Row

CONSTANT_BYTES = 64 << 20
"""The largest size of a constant that is kept; larger ones are computed anew in each step."""
Written = Literal["", "copy", "fused", "part"]
"""The part of a node in the code that runs for it, beyond its row; see `written`."""


def following(node: Node, signature: Signature, where: Mapping[str, Layout], row: Row) -> tuple[Choice, Layout] | None:
    """Return the split of an operator along a dimension that operands carry as in `where`, and the result's layout.

    Returns None if there is no such split, or no operand carries the dimension. A result that is `P` has it summed
    away.
    """
    blocks = sorted({where[i].blocks for i in node.inputs if i in where})
    for choice, operands, result in offered(row, signature, lambda size: blocks) if blocks else ():
        if any(where.get(name) == x for name, x in zip(node.inputs, operands, strict=True)):
            return choice, result
    return None


def constant_nodes(graph: Graph) -> frozenset[str]:
    """Return the nodes that no parameter reaches, nor the tensor at the cut where a part of a graph begins."""
    reached: set[str] = set()
    for node in graph.nodes:
        if not reached.isdisjoint(node.inputs) or node.op == "parameter" or (node.is_leaf and node.attr("grad")):
            reached.add(node.name)
    return frozenset(n.name for n in graph.nodes if n.name not in reached)


def computed_once(graph: Graph) -> frozenset[str]:
    """Return timeless nodes that no leaf, opaque operator or draw reaches, such as masks and positions.

    They are computed before the first step, and the ones that steps read stay. Nodes larger than `CONSTANT_BYTES`, and
    nodes made of these, are computed anew.
    """
    once: set[str] = set()
    for node in graph.nodes:
        if not once.issuperset(node.inputs) or node.is_leaf or node.op == OPAQUE or node.is_random:
            continue
        if is_timeless(graph, node.name) and graph.types[node.name].local_bytes(graph.mesh) <= CONSTANT_BYTES:
            once.add(node.name)
    return frozenset(once)


def computed_in_one(graph: Graph) -> frozenset[str]:
    """Return the nodes that depend on the batch and on parameters: one stage computes them for later ones.

    All others (masks, counts, views of weights, a table of biases by position) are computed by each stage that reads
    them.
    """
    batch, weights = set[str](), set[str]()
    for node in graph.nodes:
        if node.op == "input" or not batch.isdisjoint(node.inputs):
            batch.add(node.name)
        if node.op == "parameter" or not weights.isdisjoint(node.inputs):
            weights.add(node.name)
    return frozenset(batch & weights)


def drawn_everywhere(graph: Graph) -> frozenset[str]:
    """Return the draws, other than dropout's, that every stage makes, in one order: those that no parameter reaches.

    So the generators of all stages stay in the same state.
    """
    constant = constant_nodes(graph)
    return frozenset(
        n.name for n in graph.nodes if n.may_draw and not n.is_random and not is_foreign(n) and n.name in constant
    )


def buffers_in_backward(graph: Graph) -> frozenset[str]:
    """Return the targets of buffers that the graph updates although backward may read their old value.

    These are buffers that reach an operator with a gradient through operators without one, which may give views of
    them.
    """
    updated = {key for key, _ in graph.outputs}
    before: dict[str, frozenset[str]] = {}
    read = frozenset[str]()
    for node in graph.nodes:
        target = str(node.attr("target")) if node.op == "buffer" else ""
        before[node.name] = frozenset({target} & updated).union(*(before[name] for name in node.inputs))
        if graph.types[node.name].grad:
            read, before[node.name] = read | before[node.name], frozenset()
    return read


def is_timeless(graph: Graph, name: str) -> bool:
    """Return whether a value is the same for all microbatches."""
    mesh = graph.mesh
    return mesh.num_microbatches == 1 or graph.types[name].layouts[mesh.index(TIME)] == R


def kept_constants(graph: Graph, once: frozenset[str]) -> frozenset[str]:
    """Return the nodes of `once` whose memory stays: nodes read later, or the node that a read view is a view of.

    A view of less than the whole is kept by itself.
    """
    results = {name for _, name in graph.outputs}
    read = (name for name in once if name in results or any(user not in once for user in graph.users[name]))
    return frozenset(_memory_of(graph, name) for name in read)


def _memory_of(graph: Graph, name: str) -> str:
    node = graph.by_name[name]
    while node.op == REPLICATE or (_is_view(node) and not copies_data(graph, node)):
        node = graph.by_name[node.inputs[0]]
    whole, part = (graph.types[n].local_bytes(graph.mesh) for n in (node.name, name))
    return node.name if whole <= part else name


def _is_view(node: Node) -> bool:
    return node.row is not None and node.row.view and bool(node.inputs)


def copies_data(graph: Graph, node: Node) -> bool:
    """Return whether a view has to copy: a reshape of something that is not contiguous, moved or not in between.

    A permutation has to copy if a product of batches reads it and its batch dimensions are not one in memory: torch
    multiplies batches of a single dimension, such as the heads of eager attention, and reshapes to that.
    """
    if node.op == "permute":
        return _moves_batch(graph, node) and any(_reads_as_batch(graph, r) for r in _readers(graph, node))
    if node.op != "reshape":
        return False
    source = source_of(graph, node.inputs[0])
    if source.op == "expand":
        return _joins_repeated(graph, source, node)
    return source.op == "permute" or (source.op == "slice" and not _splits_dims(graph, source, node))


def _joins_repeated(graph: Graph, expand: Node, reshape: Node) -> bool:
    """Return whether a reshape joins dimensions of which some repeat the same memory, on one device."""
    wide, after = (graph.types[node.name].local_shape(graph.mesh) for node in (expand, reshape))
    before = graph.types[expand.inputs[0]].local_shape(graph.mesh)
    strides, stride = [0] * len(wide), 1
    for dim in range(1, len(before) + 1):
        if before[-dim] == wide[-dim]:
            strides[-dim] = stride
        stride *= before[-dim]
    return not all(
        strides[left] == strides[right] * wide[right]
        for dims in _joined(wide, after)
        for left, right in pairwise(dim for dim in dims if wide[dim] > 1)
    )


def _joined(before: Sequence[int], after: Sequence[int]) -> Iterator[list[int]]:
    """Yield the dimensions of `before` that a reshape takes together, in runs as short as possible."""
    rest, dims, old, new = list(after), list[int](), 1, 1
    for dim, extent in enumerate(before):
        dims.append(dim)
        old *= extent
        while rest and new < old:
            new *= rest.pop(0)
        if old == new:
            yield dims
            dims = []


def _moves_batch(graph: Graph, node: Node) -> bool:
    """Return whether dimensions before the last two were not neighbours before this permutation and those it follows.

    Strides join any dimension of one element, on one device, with its neighbours.
    """
    shape = graph.types[node.name].local_shape(graph.mesh)
    dims, source = list(range(len(shape))), node
    while source.op in ("permute", REPLICATE):
        if source.op == "permute":
            before = source.attr("dims")
            assert isinstance(before, tuple)
            dims = [int(str(before[dim])) for dim in dims]
        source = graph.by_name[source.inputs[0]]
    batch = [dim for dim, extent in zip(dims[:-2], shape[:-2], strict=True) if extent > 1]
    singles = {dim for dim, extent in zip(dims, shape, strict=True) if extent == 1}
    return any(set(range(dim + 1, after)) - singles or after < dim for dim, after in pairwise(batch))


def _readers(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the readers of values whose dimensions lie in memory as those of `node`.

    Parallel operators other than replication make new memory; a pointwise operator gives its result the order of its
    operand. Moving a product, such as a scale, in front of another one saves no copy.
    """
    pending = [*graph.users[node.name]]
    while pending:
        reader = graph.by_name[pending.pop(0)]
        if reader.op == REPLICATE or _keeps_order(graph, reader):
            pending += graph.users[reader.name]
        else:
            yield reader


def _keeps_order(graph: Graph, node: Node) -> bool:
    pointwise = node.row is not None and node.row.pointwise
    return pointwise and sum(bool(graph.types[name].shape) for name in node.inputs) == 1


def _reads_as_batch(graph: Graph, reader: Node) -> bool:
    return reader.op == "matmul" and len(graph.types[reader.name].shape) > 3


def _splits_dims(graph: Graph, before: Node, after: Node) -> bool:
    """Return whether a reshape only cuts dimensions up, which strides can express, whatever they were."""
    old, new = (graph.types[n.name].shape for n in (before, after))
    rest = list(new)
    for extent in old:
        size = 1
        while rest and (size < extent or (size == extent == 1 and rest[0] == 1)):
            size *= rest.pop(0)
            if extent == 1:
                break
        if size != extent:
            return False
    return not rest


def written(graph: Graph, node: Node) -> Written:
    """Return how a node is written in code; "" if it is a kernel of its own, or none.

    copy    a view that has to copy
    fused   the addition of a bias by the product before it, while it writes its result
    part    a slice that cuts up a dimension together with others: their gradients are concatenated, once
    """
    match node.op:
        case "permute" | "reshape":
            return "copy" if copies_data(graph, node) else ""
        case "add":
            a, b = node.inputs
            return "fused" if _biases(graph, a, b, node) or _biases(graph, b, a, node) else ""
        case "slice":
            return "part" if len(cut_with(graph, node)) > 1 else ""
        case _:
            return ""


def _biases(graph: Graph, product: str, bias: str, node: Node) -> bool:
    """Return whether `product` is a matrix product that nothing else reads, and `bias` a vector along its columns."""
    shape = graph.types[node.name].shape
    if graph.types[bias].shape != shape[-1:] or graph.types[product].shape != shape:
        return False
    reader, source = node.name, graph.by_name[product]
    while source.is_parallel and graph.users[source.name] == (reader,):
        reader, source = source.name, graph.by_name[source.inputs[0]]
    product_of_matrices = source.op == "linear" or (source.op == "matmul" and len(shape) == 2)
    return product_of_matrices and graph.users[source.name] == (reader,)


def cut_with(graph: Graph, node: Node) -> Sequence[Node]:
    """Return the slices that together cut a dimension into consecutive pieces, in order, if `node` is one of them."""
    if node.op != "slice":
        return ()
    dim, whole = node.attr("dim"), node.inputs[0]
    readers = [graph.by_name[reader] for reader in dict.fromkeys(graph.users[whole])]
    alike = [n for n in readers if n.op == "slice" and n.attr("dim") == dim and n.split == node.split]
    alike.sort(key=lambda n: int(str(n.attr("start"))))
    end = 0
    for n in alike:
        if (n.attr("start"), n.attr("step")) != (end, 1):
            return ()
        end = int(str(n.attr("stop")))
    return alike if end == graph.types[whole].shape[int(str(dim))] else ()


def saved_by(node: Node, grads: Sequence[bool]) -> tuple[int | str, ...]:
    """Return what a differentiated operator keeps for backward, as in `Row.saves`; an unknown one keeps everything.

    `grads`: which operands get a gradient. An operand that the result is linear in is kept for the others' gradients
    only: of the product of an activation and a constant, the constant.
    """
    return _saved_by(node.op, tuple(grads))


@lru_cache(maxsize=1 << 12)
def _saved_by(op: str, grads: tuple[bool, ...]) -> tuple[int | str, ...]:
    row = ROWS.get(op)
    if row is None:
        return (*range(len(grads)), "result")
    if row.joint:
        return row.saves
    others = [any(grads[:i]) or any(grads[i + 1 :]) for i in range(len(grads))]
    return tuple(
        item for item in row.saves
        if not isinstance(item, int) or (item < len(grads) and ((item,) not in row.linear_in or others[item]))
    )  # fmt: skip


def summed_in_place(graph: Graph, name: str) -> bool:
    """Return whether a sum over ranks may overwrite its operand, which is new memory that nothing else reads."""
    row = graph.by_name[name].row
    return len(graph.users[name]) == 1 and row is not None and row.fresh


def read_again(graph: Graph) -> set[str]:
    """Return the parameters whose memory an operator's backward reads, also through views and parallel operators."""
    parameters, roots = set[str](), {leaf.name: leaf.name for leaf in graph.leaves("parameter")}
    for node in graph.nodes:
        if roots.keys().isdisjoint(node.inputs):
            continue
        view = node.is_parallel or (node.row is not None and node.row.view and written(graph, node) != "copy")
        if view or (node.op == "cast" and source_of(graph, node.name).op == "parameter"):
            if node.inputs[0] in roots:
                roots[node.name] = roots[node.inputs[0]]
        elif graph.types[node.name].grad:
            saved = saved_by(node, [graph.types[name].grad for name in node.inputs])
            read = [node.inputs[item] for item in saved if isinstance(item, int)]
            parameters.update(roots[name] for name in read if name in roots)
    return parameters
