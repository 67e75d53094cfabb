"""Every row's torch expression against its NumPy reference, forward and backward, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.lowering.runtime import kernels
from shardwright.lowering.text.emit import emit
from shardwright.lowering.text.program import compile_source
from shardwright.pcg.graph import Graph, Node, leaf, make_attrs
from shardwright.pcg.optable import ROWS
from tests.each import each
from tests.lowering.runs import load_backends
from tests.samples import SAMPLES, Sample

CASES = [pytest.param(name, i, id=f"{name}-{i}") for name in ROWS for i in range(len(SAMPLES.get(name, [])))]
STEP = 1e-5


def row_graph(name: str, sample: Sample) -> Graph:
    """The row applied to parameters (where a gradient can flow) and buffers."""
    leaves = [
        leaf(
            f"t{i}",
            "parameter" if o.dtype == "float64" else "buffer",
            o.shape,
            o.dtype,
            f"t{i}",
            grad=o.dtype == "float64",
        )
        for i, o in enumerate(sample.operands)
    ]
    node = Node("result", name, tuple(n.name for n in leaves), make_attrs(**sample.attrs))
    return Graph((*leaves, node), (("loss", "result"),)).validate()


def run(graph: Graph, tensors: list[torch.Tensor]) -> torch.Tensor:
    program = compile_source(emit(graph))
    leaves, device = {f"t{i}": t for i, t in enumerate(tensors)}, torch.device("cpu")
    return program.forward(leaves, {}, program.constants(device), [], None, device)["loss"]


def test_every_row_has_samples() -> None:
    assert set(SAMPLES) == set(ROWS)
    assert all(SAMPLES.values())


@each(("name", "i"), CASES)
def test_forward(name: str, i: int) -> None:
    sample = SAMPLES[name][i]
    graph, arrays = row_graph(name, sample), sample.arrays()
    if name == "cast":
        arrays = [a.astype(np.float32) if a.dtype == np.float64 else a for a in arrays]
    torch.manual_seed(0)
    found = run(graph, [torch.from_numpy(np.asarray(a)) for a in arrays])
    expected = ROWS[name].numpy(*arrays, **sample.attrs)
    assert tuple(found.shape) == graph.types["result"].shape == expected.shape
    assert str(found.dtype).removeprefix("torch.") == graph.types["result"].dtype
    if ROWS[name].random:
        expected = np.where(found.numpy() == 0, 0, arrays[0] / (1 - sample.attrs["p"]))
        assert 0 < (found == 0).double().mean() < 2 * sample.attrs["p"]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


@each(("name", "i"), CASES)
def test_gradient(name: str, i: int) -> None:
    """The directional derivative of the NumPy reference, by central differences, against autograd's."""
    sample = SAMPLES[name][i]
    graph = row_graph(name, sample)
    if not graph.types["result"].grad or ROWS[name].random or name == "cast":
        pytest.skip("no gradient flows, or it depends on a draw")
    arrays, rng = sample.arrays(), np.random.default_rng(1)
    tensors = [torch.from_numpy(np.asarray(a)).requires_grad_(a.dtype == np.float64) for a in arrays]
    found = run(graph, tensors)
    cotangent = rng.standard_normal(tuple(found.shape))
    if found.requires_grad:  # torch knows of some operators that their derivative is zero
        (found * torch.from_numpy(np.asarray(cotangent))).sum().backward()
    for at in sample.differentiable:
        direction = rng.standard_normal(arrays[at].shape)

        def value(step: float, at: int = at, direction: Any = direction) -> float:
            moved = [a + step * direction if k == at else a for k, a in enumerate(arrays)]
            return float((ROWS[name].numpy(*moved, **sample.attrs) * cotangent).sum())

        expected = (value(STEP) - value(-STEP)) / (2 * STEP)
        gradient = tensors[at].grad
        got = 0.0 if gradient is None else float((gradient.numpy() * direction).sum())
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-6), f"operand {at}"


QUERIES = 12


def attention_inputs(keys: int) -> list[torch.Tensor]:
    """Four query heads share two key heads."""
    torch.manual_seed(0)
    shapes = (2, 4, QUERIES, 6), (2, 2, keys, 6), (2, 2, keys, 5)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def causal_part(part: int, parts: int, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Of the queries, with the keys, the values and a mask."""
    rows = slice(part * QUERIES // parts, (part + 1) * QUERIES // parts)
    mask = (m[..., rows, :] if m.shape[-2:-1] == (QUERIES,) else m for m in others[2:])
    return kernels.sdpa(True, None, rows.start, q[..., rows, :], *others[:2], *mask)


@each("mask", ["none", "b h q k", "q k", "b 1 1 k", "b h q 1", "1 1 1 1", "k"])
@each("keys", [1, 4, 7, 12, 40])
def test_parts_of_causal_queries_are_those_of_the_whole(keys: int, mask: str) -> None:
    """Fewer keys than queries, so that parts lie behind the last one, or more; with masks of bools and of numbers."""
    operands, sizes = attention_inputs(keys), {"b": 2, "h": 4, "q": QUERIES, "k": keys, "1": 1}
    shape = [sizes[dim] for dim in mask.split()] if mask != "none" else []
    masks = [(torch.rand(shape) > 0.2,), (torch.randn(shape, dtype=torch.float64),)] if shape else [()]
    for own in masks:
        whole = kernels.sdpa(True, None, None, *operands, *own)
        cotangent = torch.randn_like(whole)
        expected = whole, *torch.autograd.grad(whole, operands, cotangent)
        for parts in (2, 4):
            found = torch.cat([causal_part(part, parts, *operands, *own) for part in range(parts)], -2)
            for got, wanted in zip((found, *torch.autograd.grad(found, operands, cotangent)), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
def test_parts_of_causal_queries_compile_without_graph_breaks() -> None:
    load_backends()
    operands = attention_inputs(QUERIES)
    for part in range(3):
        compiled = torch.compile(partial(causal_part, part, 3), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*operands), causal_part(part, 3, *operands))
