"""Every operator that may have padding computes the same with it, gradients too, whatever the padding holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph, Node, Source
from shardwright.pcg.optable import ROWS
from shardwright.pcg.padding.laws import FINITE, may_stretch
from shardwright.pcg.padding.longer import padded
from shardwright.pcg.padding.stretches import Padding, Stretch, around, holders
from shardwright.pcg.types import is_float
from tests.each import each
from tests.pcg.run_torch import run_torch
from tests.samples import SAMPLES, Sample

GARBAGE = 0.7


def graph_of(row: str, sample: Sample, *, garbage: bool) -> Graph:
    """A loss of one operator; its operands of floats are parameters, whose padding becomes garbage if so."""
    b = GraphBuilder("float64")
    names = list[str]()
    for i, (shape, dtype) in enumerate(zip(sample.shapes, sample.dtypes, strict=True)):
        name = b.leaf(f"x{i}", "parameter" if is_float(dtype) else "input", shape, dtype, f"x{i}", is_float(dtype))
        names.append(b.op("where", b.op("eq", name, 0.0), GARBAGE, name) if garbage and is_float(dtype) else name)
    b.at("it", Source())
    result = b.op(row, *names, **dict(sample.attrs))
    b.at("after", Source())
    shape = b.shape(result)
    weights = b.leaf("weights", "constant", shape, "float64", "weights")
    product = b.op("mul", b.op("cast", result, dtype="float64"), weights)
    return b.graph([("loss", b.op("sum", product, dims=tuple(range(len(shape))), keepdim=False))])


def paddings_of(graph: Graph, node: Node, factor: int, own: Stretch) -> Iterator[Padding]:
    """More entries of a factor in each parameter that has it."""
    signature = graph.signature(node)
    for position in holders(signature, factor):
        for dim, members in enumerate(signature.operands[position]):
            if factor in members:
                yield Padding(f"x{position}", dim, around(members, signature, factor, own))


def stretches_of(size: int) -> Iterator[Stretch]:
    """Two more entries; one more in each half; one more pair."""
    yield Stretch(1, size, size + 2, 1)
    if size % 2 == 0:
        yield from (Stretch(2, size // 2, size // 2 + 1, 1), Stretch(1, size // 2, size // 2 + 1, 2))


def cases() -> Iterator[tuple[str, int, int, Stretch, bool]]:
    for row in sorted(FINITE):
        for number, sample in enumerate(SAMPLES[row][:3]):
            signature = ROWS[row].signature(sample.shapes, dict(sample.attrs))
            node = Node(row, row, ("",) * len(sample.shapes), tuple(sample.attrs.items()))
            for factor, found in enumerate(signature.factors):
                floats = [i for i in holders(signature, factor) if is_float(sample.dtypes[i])]
                for own in stretches_of(found.size) if floats else ():
                    if may_stretch(node, ROWS[row], signature, factor, own):
                        yield row, number, factor, own, True
                        if found.role != "map":
                            yield row, number, factor, own, False


@each("row, number, factor, own, garbage", cases())
def test_padding_changes_neither_values_nor_gradients(
    row: str, number: int, factor: int, own: Stretch, garbage: bool
) -> None:
    sample = SAMPLES[row][number]
    graph = graph_of(row, sample, garbage=garbage)
    longer = padded(graph, list(paddings_of(graph, graph.by_name["it"], factor, own)))
    its = [n for n in longer.nodes if n.name.startswith("it") and n.op == row][-1]
    assert [longer.types[name].shape for name in its.inputs] != sample.shapes, "it has no padding"
    values = dict(zip((f"x{i}" for i in range(len(sample.shapes))), sample.arrays(1), strict=True))
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    want, expected = run(graph, tensors)
    got, found = run(longer, tensors)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    for name, gradient in expected.items():
        longer_one = found[name]
        assert torch.isfinite(longer_one).all()
        inner = longer_one[tuple(slice(extent) for extent in gradient.shape)]
        torch.testing.assert_close(inner, gradient, rtol=1e-10, atol=1e-12)


def run(graph: Graph, values: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients of parameters; their padding is zeros."""
    leaves, parameters = dict[str, Tensor](), dict[str, Tensor]()
    for node in graph.nodes:
        if not node.is_leaf:
            continue
        target, shape = str(node.attr("target")), graph.types[node.name].shape
        if node.op == "parameter":
            value = values[target]
            pads = [n for own, of in zip(reversed(shape), reversed(value.shape), strict=True) for n in (0, own - of)]
            leaves[node.name] = parameters[target] = F.pad(value, pads).requires_grad_()
        elif target == "weights":
            count = graph.types[node.name].num_elements
            leaves[node.name] = torch.linspace(0.5, 1.5, count, dtype=torch.float64).reshape(shape)
        else:
            leaves[node.name] = values[target]
    loss = run_torch(graph, leaves)[graph.loss]
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in parameters.items() if p.grad is not None}
