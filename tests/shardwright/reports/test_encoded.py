"""What a plan says of what it sends encoded: how many parameters, and each one's bound."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.pcg.encodings import ENCODINGS
from shardwright.reports.encoded import SentEncoded, sent_encoded
from shardwright.reports.facts import PlanFacts
from shardwright.reports.plan import PlanReport
from shardwright.search.plan import Plan
from tests.shardwright.reports.test_rounding import Net


def planned(encodings: dict[str, str] | None, role: str, **options: object) -> Plan:
    mesh = {"mesh": {"x": 2}, "roles": [role]}
    batch = {"x": torch.randn(8, 16)}
    return sw.plan(Net(), sw.Cluster.local(2), kwargs=batch, encodings=encodings, **mesh, **options)  # type: ignore[arg-type]


def test_every_parameter_has_its_bound() -> None:
    plan = planned({"weights": "fp8", "gradients": "int4"}, "zero", precision="amp_bf16")
    found, int4 = sent_encoded(PlanFacts(plan)), ENCODINGS["int4"].bound
    names = ["norm.weight", "norm.bias", "up.weight", "down.weight"]
    assert [one.parameter for one in found if one.what == "weights"] == names
    assert [one.parameter for one in found if one.what == "gradients"] == names
    bounds = {(one.parameter, one.what): one.bound for one in found}
    assert bounds["norm.weight", "weights"] == pytest.approx(ENCODINGS["fp8"].bound)
    assert bounds["up.weight", "weights"] == pytest.approx(ENCODINGS["fp8"].bound + 2**-8)  # gathered in bfloat16
    assert all(bounds[name, "gradients"] == pytest.approx(int4) for name in names)
    text, data = str(PlanReport(plan)), PlanReport(plan).data()
    assert "gathers of weights of 4 parameters as fp8 and sums of gradients of 4 parameters as int4; the graph" in text
    assert "What is sent encoded\n  the graph is proven exact up to these encodings\n" in text
    assert [SentEncoded(**one) for one in data["encoded"]] == list(found)
    gathered = {row["rounded"] for row in data["precision"]["rounding"] if "gathered" in row["what"]}
    assert gathered == {"each, as fp8", "each slice, before it, and then as fp8"}  # norms in float32, the rest cast


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_16_bits_round_comes_on_top(dtype: str | None) -> None:
    report = PlanReport(planned({"gradients": "int4"}, "zero", reduce_dtype=dtype))
    on_top = "casting gradients to bfloat16 and adding them up in it comes on top"
    assert (on_top in str(report)) == (dtype is not None)
    (rounded,) = {row["rounded"] for row in report.data()["precision"]["rounding"] if "summed" in row["what"]}
    first = "each device's gradient once, then" if dtype else "each device's gradient"
    assert rounded == f"{first} as int4, and so a sum that all need; every addition"


def test_a_sum_that_all_ranks_need_is_encoded_twice() -> None:
    (bound,) = {one.bound for one in sent_encoded(PlanFacts(planned({"gradients": "int8"}, "data")))}
    assert bound == pytest.approx((1 + ENCODINGS["int8"].bound) ** 2 - 1)


def test_a_plan_that_sends_values_says_nothing() -> None:
    plan = planned(None, "zero")
    assert sent_encoded(PlanFacts(plan)) == ()
    assert "encoded" not in str(PlanReport(plan))
