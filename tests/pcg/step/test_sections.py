"""Sections of a model, which stages have: what lies in which."""

from __future__ import annotations

import pytest

from shardwright.pcg import analysis
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Source
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.sections import sections


def test_a_large_constant_between_blocks_is_no_section_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "CONSTANT_BYTES", 0)  # what is larger is computed anew, where it is read first
    b = GraphBuilder()
    x = b.leaf("x", "input", (4, 8), "float32", "x")
    for i in range(3):
        weight = b.leaf(f"w{i}", "parameter", (8, 8), "float32", f"layers.{i}.weight", grad=True)
        b.at("c", Source(""))
        ones = b.op("full", shape=(4, 8), value=float(i), dtype="float32")  # as of several blocks: it lies in none
        b.at("y", Source(f"layers.{i}"))
        x = b.op("add", b.op("linear", x, weight), ones)
    b.at("l", Source(""))
    loss = b.op("sum", x, dims=(0, 1), keepdim=False)
    cut = sections(Operations(b.graph([("loss", loss)]), Execution.of(num_stages=2)), {}, by_block=True)
    assert [section.name for section in cut[:-1]] == ["#0", "layers.0", "layers.1", "layers.2"]
    assert [section.stretch.operations[0].name[0] for section in cut[2:-1]] == ["c", "c"]
    assert [o.name for o in cut[-1].stretch.operations] == [loss]
