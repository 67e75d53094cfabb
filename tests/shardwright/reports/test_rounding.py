"""What a plan says is exact and what is rounded: of a small model in mixed precision, item by item."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.pcg.step.execution import Execution
from shardwright.reports.facts import PlanFacts
from shardwright.reports.plan import PlanReport
from shardwright.reports.rounding import Rounding, precision, roundings
from shardwright.search.plan import Plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()


def planned(role: str, **options: object) -> Plan:
    mesh = {"mesh": {"x": 2}, "roles": [role]}
    return sw.plan(Net(), sw.Cluster.local(2), kwargs={"x": torch.randn(8, 16)}, **mesh, **options)  # type: ignore[arg-type]


def test_mixed_precision_item_by_item() -> None:
    found = planned("zero", precision="amp_bf16", reduce_dtype="bfloat16")
    listed = list(roundings(PlanFacts(found)))
    assert {
        Rounding("weights that are cast, from float32", "bfloat16", 2, "each once"),
        Rounding("weights that are stored", "float32", 4, "nothing"),
        Rounding("weights that are gathered", "bfloat16", 2, "each slice, before it"),
        Rounding("weights that are gathered", "float32", 2, "nothing"),
        Rounding("gradients that are accumulated", "float32", 4, "every addition"),
        Rounding("gradients that are summed over devices", "bfloat16", 4,
                 "each device's gradient once, and every addition"),
        Rounding("optimizer states, of weights", "float32", 4, "what the update gives"),
        Rounding("loss", "float32", 1, "what it is"),
    } <= set(listed)  # fmt: skip
    data, text = PlanReport(found).data()["precision"], str(PlanReport(found))
    assert [Rounding(**row) for row in data["rounding"]] == listed
    assert data["reduce_dtype"] == "bfloat16"
    assert "to bfloat16 by 2^-8, float32 by 2^-24 at most" in text
    assert all(row.rounded in text for row in listed)


def test_partial_sums_are_told() -> None:
    """Under tensor parallelism devices have summands of what a product gives, in the dtype of the product."""
    (row,) = (r for r in roundings(PlanFacts(planned("tensor", precision="amp_bf16"))) if r.what.startswith("sums of"))
    assert (row.dtype, row.rounded) == ("bfloat16", "every summand, and every addition")
    (row,) = (r for r in roundings(PlanFacts(planned("tensor"))) if r.what.startswith("sums of"))
    assert row.dtype == "float32"


def test_in_a_line() -> None:
    plain = planned("data")
    lines = {
        None: "nothing is rounded but as one process rounds",
        "tf32": "matrix products and convolutions round what",
    }
    for name, line in lines.items():
        facts = PlanFacts(replace(plain, execution=Execution(name)))  # type: ignore[arg-type]
        assert line in precision(facts)
    assert "one process" not in precision(PlanFacts(replace(plain, execution=Execution("tf32"))))


def test_parameters_in_16_bits() -> None:
    """All weights are gathered so; the loss is in 16 bits too, as the model does not widen it."""
    found = PlanFacts(planned("zero", precision="bf16_params"))
    listed = list(roundings(found))
    assert {
        Rounding("weights that are cast, from float32", "bfloat16", 4, "each once"),
        Rounding("weights that are gathered", "bfloat16", 4, "each slice, before it"),
        Rounding("gradients that are summed over devices", "float32", 4, "every addition"),
        Rounding("loss", "bfloat16", 1, "what it is"),
    } <= set(listed)
    assert precision(found).endswith(
        "rounded to bfloat16: weights where they are read, and what operators give; kept in float32: weights, what is "
        "accumulated of their gradients, optimizer states"
    )
