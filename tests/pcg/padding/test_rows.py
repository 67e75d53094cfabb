"""Rows added to a batch: results are those of the batch, for every row of the op table and for whole models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import run_serial
from shardwright.pcg.optable import ROWS
from shardwright.pcg.padding.rows import with_rows
from tests.each import each
from tests.samples import SAMPLES, Array, Sample

ADDED = 3
NEVER = {"arange", "contiguous", "detach", "dropout", "full", "histc", "index_put"}
"""The operators that do not work on added rows: without operands, left out, drawn, or of all rows together."""


def graphs(name: str, sample: Sample) -> Iterator[tuple[Graph, dict[str, Array], int]]:
    """Yield an operator whose rows are a dimension of an operand, with values and their number, for every dimension.

    Where it has so many elements, rows also lie between others: two times all of them, or each two elements long.
    """
    arrays = sample.arrays()
    for position, operand in enumerate(sample.operands):
        for (dim, size), (before, others) in product(enumerate(operand.shape), ((1, 1), (2, 1), (1, 2))):
            if size < before * others or size % (before * others):
                continue
            made, values, inputs = GraphBuilder(), dict[str, Array](), list[str]()
            for i, array in enumerate(arrays):
                if i != position:
                    inputs.append(made.leaf(f"t{i}", "constant", array.shape, str(array.dtype), f"t{i}"))
                    values[inputs[-1]] = array
                    continue
                apart = array.reshape(*array.shape[:dim], before, -1, others, *array.shape[dim + 1 :])
                order = [dim + 1, *(d for d in range(apart.ndim) if d != dim + 1)]
                leaf = made.leaf(f"t{i}", "input", apart.transpose(order).shape, str(array.dtype), f"t{i}")
                values[leaf] = apart.transpose(order)
                back = made.op("permute", leaf, dims=tuple(int(d) for d in np.argsort(order)))
                inputs.append(made.op("reshape", back, shape=array.shape))
            result = made.op(name, *inputs, **sample.attrs)
            yield made.graph([("loss", result)]), values, size // (before * others)


def has_more(graph: Graph, before: Graph, name: str) -> bool:
    """Whether an operator works on more elements than before."""
    sizes = [sum(g.types[i].num_elements for n in g.nodes if n.op == name for i in n.inputs) for g in (before, graph)]
    return sizes[1] > sizes[0]


@each("name", sorted(ROWS))
def test_every_operator_gives_what_it_gives_for_the_true_rows(name: str) -> None:
    carried = False
    for sample in SAMPLES[name]:
        for graph, values, size in graphs(name, sample):
            more = with_rows(graph, size, size + ADDED)
            expected = run_serial(graph, values)[dict(graph.outputs)["loss"]]
            np.testing.assert_allclose(run_serial(more, values)[dict(more.outputs)["loss"]], expected, 1e-9, 1e-9)
            carried = carried or has_more(more, graph, name)
    assert carried != (name in NEVER)


def net() -> tuple[Graph, dict[str, Array]]:
    """Seven rows of four: a mean by a constant, products of pairs, a maximum, rows in parts of a dimension."""
    made, rng = GraphBuilder(), np.random.default_rng(0)
    x = made.leaf("x", "input", (7, 4), "float64", "x")
    w = made.leaf("w", "parameter", (4, 4), "float64", "w", grad=True)
    h = made.op("linear", x, w)
    pairs = made.op("matmul", h, made.op("permute", h, dims=(1, 0)))
    mean = made.op("mul", made.op("sum", h, dims=(0, 1), keepdim=False), 1 / 28)
    largest = made.op("amax", h, dims=(0,), keepdim=False)
    flat = made.op("relu", made.op("reshape", h, shape=(28,)))
    apart = made.op("relu", made.op("reshape", made.op("permute", h, dims=(1, 0)), shape=(28,)))
    loss = made.op("add", mean, made.op("sum", made.op("mul", flat, apart), dims=(0,), keepdim=False))
    for y in (pairs, largest, made.op("relu", made.op("reshape", flat, shape=(1, 28)))):
        loss = made.op("add", loss, made.op("sum", y, dims=tuple(range(len(made.shape(y)))), keepdim=False))
    values = {"x": rng.standard_normal((7, 4)), "w": rng.standard_normal((4, 4))}
    return made.graph([("loss", loss), (".result.0", h)]), values


def test_sums_of_rows_are_those_of_the_batch_and_results_have_its_rows() -> None:
    graph, values = net()
    more = with_rows(graph, 7, 8)
    before, after = run_serial(graph, values), run_serial(more, values)
    for (key, name), (other, renamed) in zip(graph.outputs, more.outputs, strict=True):
        assert key == other
        assert before[name].shape == after[renamed].shape
        np.testing.assert_allclose(after[renamed], before[name], rtol=1e-12)
    (linear,), (largest,) = ([n for n in more.nodes if n.op == op] for op in ("linear", "amax"))
    assert more.types[linear.name].shape == (8, 4)
    assert more.types[largest.inputs[0]].shape == (7, 4)
    assert {more.types[n.name].shape for n in more.nodes if n.op == "relu"} == {(32,), (1, 32)}
    assert {more.types[n.name].shape for n in more.nodes if n.op == "matmul"} == {(8, 8)}


def test_pairs_of_rows_as_classes_are_those_of_the_batch() -> None:
    """A contrastive loss: each row's own is the right one among all, which the padding is not."""
    made, rng = GraphBuilder(), np.random.default_rng(0)
    x = made.leaf("x", "input", (3, 2), "float64", "x")
    own = made.leaf("t", "constant", (3,), "int64", "t")
    pairs = made.op("matmul", x, made.op("permute", x, dims=(1, 0)))
    loss = made.op("cross_entropy_sum", pairs, own, ignore_index=-100, label_smoothing=0.0)
    graph, values = made.graph([("loss", loss)]), {"x": rng.standard_normal((3, 2)), "t": np.arange(3)}
    more = with_rows(graph, 3, 4)
    np.testing.assert_allclose(run_serial(more, values)[more.loss], run_serial(graph, values)[graph.loss], rtol=1e-12)
    (found,) = (n for n in more.nodes if n.op == "cross_entropy_sum")
    assert more.types[found.inputs[0]].shape == (4, 3)
