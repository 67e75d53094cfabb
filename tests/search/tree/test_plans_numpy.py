"""Plans in NumPy: what every device computes, step by step, against the serial graph and against torch.

No process group, no autograd and no torch kernels take part, so a failure here is a wrong plan, not a wrong lowering.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench.accuracy import prepare
from bench.plans import TWO_AXES, Case, forced
from examples.zoo import ZOO
from shardwright.pcg.capture.capture import Captured, capture, find_loss
from shardwright.pcg.capture.importing import LOSS
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import denote, run_devices, run_serial
from shardwright.pcg.padding.rows import with_rows
from shardwright.search.request.spaces import batch_size
from tests.models import grid, zoo

CASES = [*forced(2), TWO_AXES[-1], Case("searched (fast links)", 4, fast_links=True)]
WITH_DROPOUT = ("gpt", "gpt2", "bert", "t5")

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Example:
    captured: Captured
    leaves: Mapping[str, Array]
    values: Mapping[str, Array]
    torch_loss: float


@lru_cache(maxsize=2)
def example(name: str, train: bool) -> Example:
    """A captured model, its leaves in fp64, the serial graph's values and torch's loss in fp32."""
    if train:
        known = prepare(name)
        model, batch, captured, loss = known.model, known.batch, known.captured, known.reference.loss
    else:
        torch.manual_seed(0)
        model, batch = ZOO[name]()
        captured = capture(model.eval(), batch)
        with torch.no_grad():
            found = find_loss(model(**batch))
        assert found is not None
        loss = found.item()
    leaves = as_leaves(captured, model, batch)
    return Example(captured, leaves, run_serial(captured.graph, leaves), loss)


def as_leaves(captured: Captured, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Array]:
    sources: dict[str, Mapping[str, Tensor]] = {
        "input": batch,
        "parameter": dict(model.named_parameters(remove_duplicate=False)),
        "buffer": dict(model.named_buffers(remove_duplicate=False)),
        "constant": captured.constants,
    }
    leaves = {n.name: sources[n.op][str(n.attr("target"))] for n in captured.graph.nodes if n.is_leaf}
    return {name: as_array(tensor) for name, tensor in leaves.items()}


def as_array(tensor: Tensor) -> Array:
    """A copy, since the model's buffers change when it runs; floats in fp64."""
    array = tensor.detach().numpy().copy()
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def assert_same_outputs(parallel: Graph, serial: Graph, found: Mapping[str, list[Array]], expected: Example) -> None:
    """Every output, on every device, is the serial graph's."""
    names = dict(serial.outputs)
    assert dict(parallel.outputs).keys() == names.keys()
    for key, name in parallel.outputs:
        for array in found[name]:
            np.testing.assert_allclose(array, expected.values[names[key]], rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.parametrize(("name", "case"), grid(CASES, each=1))
def test_devices_compute_what_the_serial_graph_does(name: str, case: Case) -> None:
    """In train mode: dropout included, which draws from the reference semantics' own generator."""
    expected = example(name, train=True)
    serial = expected.captured.graph
    parallel = case.plan(serial, name).graph
    found = run_devices(parallel, expected.leaves)
    assert_same_outputs(parallel, serial, found, expected)


@pytest.mark.parametrize("case", [*forced(2), *TWO_AXES], ids=str)
@pytest.mark.parametrize("name", ["gpt", "mixtral", "dlrm"])
def test_every_value_denotes_the_serial_value(name: str, case: Case) -> None:
    """Not only the loss: every node that the plan has in common with the serial graph, in whatever layout."""
    expected = example(name, train=True)
    serial = expected.captured.graph
    parallel = case.plan(serial, name).graph
    found = run_devices(parallel, expected.leaves)
    for node in serial.nodes:
        if node.name in found:
            value = denote(found[node.name], parallel.types[node.name], parallel.mesh)
            np.testing.assert_allclose(value, expected.values[node.name], rtol=1e-9, atol=1e-9, err_msg=node.name)


@pytest.mark.parametrize("name", zoo())
def test_the_serial_graph_has_torchs_loss_also_with_a_row_added(name: str) -> None:
    """In train mode, or in eval mode where dropout would draw other numbers. Torch's own loss is fp32."""
    expected = example(name, train=name not in WITH_DROPOUT)
    graph = expected.captured.graph
    loss = expected.values[dict(graph.outputs)[LOSS]]
    assert float(loss) == pytest.approx(expected.torch_loss, rel=1e-6)
    more = with_rows(graph, batch_size(graph), batch_size(graph) + 1)
    found = {name: [value] for name, value in run_serial(more, expected.leaves).items()}
    assert_same_outputs(more, graph, found, expected)
