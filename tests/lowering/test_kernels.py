"""Every row's torch expression against its NumPy reference, forward and backward, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardwright.lowering.emit import emit
from shardwright.lowering.program import compile_source
from shardwright.pcg.graph import Graph, Node, leaf, make_attrs
from shardwright.pcg.optable import ROWS
from tests.each import each
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
