"""What a plan sends encoded: nothing unless it is allowed, and of what is allowed what pays, the most exact first."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.pcg.encodings import Encodings
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.search.effort import WORTH_ENCODING
from shardwright.search.exact.solving import Candidate
from shardwright.search.plan import Plan
from shardwright.search.request.encodings import allowed
from shardwright.search.tree.encodings import extremes, most_exact_first
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.search.graphs import cluster, every_choice, mlp

SLOW, FAST = 1e7, 1e13
BOTH: Encodings = (("weights", "int8"), ("gradients", "int4"))


def planned(encodings: Any, base: Encodings = (), *, role: str = "zero", link: float = SLOW) -> Plan:
    planner = Planner(cluster(2, link_bytes_per_s=link, latency_s=1e-9), every_choice, encodings=base)
    words: dict[str, Any] = {"mesh": Mesh.of(x=2), "roles": (role,), "microbatches": 1, "recompute": "none"}
    return planner.plan(mlp(64, 256, 256), compared=False, encodings=encodings, **words)


def test_nothing_is_encoded_unless_it_is_allowed() -> None:
    assert planned(None).execution.encodings == ()
    assert planned({"gradients": ["exact"]}).execution.encodings == ()


@each("role, given, base, expected", [
    ("zero", "auto", BOTH, BOTH), ("zero", ["int8"], (), (("weights", "int8"), ("gradients", "int8"))),
    ("zero", {"weights": ["exact", "fp8", "int8"]}, (), (("weights", "int8"),)),  # as many bytes, and more exact
    ("zero", {"gradients": "int8"}, (("gradients", "int8"),), (("gradients", "int8"),)),
    ("data", "auto", BOTH, (("gradients", "int4"),)),  # nothing is gathered
])  # fmt: skip
def test_over_a_slow_link_what_is_allowed_is_taken(role: str, given: Any, base: Encodings, expected: Encodings) -> None:
    exact, plan = planned(None, role=role), planned(given, base, role=role)
    assert plan.execution.encodings == expected
    assert plan.prediction.step_s < 0.8 * exact.prediction.step_s
    assert plan.prediction.communication_bytes < 0.7 * exact.prediction.communication_bytes
    assert plan.report.bound_s <= plan.prediction.step_s
    assert Plan.from_json(plan.to_json()) == plan


def test_over_a_fast_link_nothing_is_gained() -> None:
    """But what is asked for in any case is sent so."""
    assert planned("auto", BOTH, link=FAST).execution.encodings == ()
    assert planned({"gradients": "int4"}, link=FAST).execution.encodings == (("gradients", "int4"),)


def test_what_is_chosen_is_as_fast_as_any_that_is_allowed() -> None:
    plan = planned("auto", BOTH)
    for other in most_exact_first(allowed("auto")):
        pinned = {"weights": "exact", "gradients": "exact", **dict(other)}
        assert plan.prediction.step_s <= planned(pinned, other).prediction.step_s * (1 + WORTH_ENCODING)


def test_layouts_are_searched_for_the_most_and_for_the_fewest_bytes() -> None:
    assert extremes(None) == ((),)
    assert extremes(allowed("auto")) == [(), BOTH]
    assert extremes(allowed({"weights": "int8"})) == [(("weights", "int8"),)]
    order = most_exact_first(allowed("auto"))
    assert (order[0], len(order), len(set(order))) == ((), 9, 9)
    assert order[1] in ((("weights", "int8"),), (("gradients", "int8"),))
    assert order[-1] == (("weights", "fp8"), ("gradients", "int4"))


def test_the_search_counts_what_is_sent() -> None:
    """In the sum that it minimizes as in what it tells."""
    found = list[Candidate]()
    for encodings in ((), BOTH):
        planner = Planner(cluster(2, link_bytes_per_s=SLOW), every_choice, encodings=encodings)
        for role in ("data", "zero"):
            found.append(planner.solve(mlp(64, 256, 256), Mesh.of(x=2), (role,), "test"))
            assert found[-1].bound_s == pytest.approx(found[-1].prediction.serial_s, rel=1e-3)
            assert found[-1].execution == Execution(encodings=encodings)
    data, zero, own_data, own_zero = (one.prediction.communication_s for one in found)
    assert own_data < 0.2 * data
    assert own_zero < 0.3 * zero
