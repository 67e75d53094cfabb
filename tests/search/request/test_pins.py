"""Pins: what users ask for is kept to on every mesh, costs what it costs, and is explained where it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from bench.decoders import Decoder, captured
from shardwright.pcg.choice import WHOLE, Split
from shardwright.pcg.dispatch import Sent
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.reports.facts import PlanFacts
from shardwright.reports.plan import PlanReport
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan
from shardwright.search.request.asked import LayoutPin, PinsLike, parse, texts
from shardwright.search.request.limits import SplitBound
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.search.graphs import blocks, cluster, every_choice

DECODER = captured(Decoder("llama", 1, 32, 4, 2, 48, 80), batch=8, seq=16, even=True)
PLANNER = Planner(cluster(4, link_bytes_per_s=1e10, latency_s=1e-7), every_choice)
Holds = Callable[[PlanFacts], bool]


def planned(pins: PinsLike | None, graph: Graph = DECODER, **guide: Any) -> Plan:
    guide = {"recompute": "none", "microbatches": 1, **guide}
    plan = PLANNER.plan(graph, pins=pins, compared=False, **guide)
    check_plan(plan, graph, every_choice)
    return plan


SMALL = blocks(16, 16, layers=1, seq=8)
FREE = planned(None, SMALL)


def degree(facts: PlanFacts, use: str) -> int:
    """Into how many parts the operators that are split most are split along this."""
    uses = facts.uses.values()
    return max(prod(n for own, n in zip(u, facts.mesh.sizes, strict=True) if own == use) for u in uses)


def between(facts: PlanFacts) -> int:
    """Into how many parts the residual stream is split that are not examples."""
    own = [facts.uses[n.name] for n in facts.graph.nodes if n.op in ("add", "rms_norm")]
    return max(prod(n for use, n in zip(u, facts.mesh.sizes, strict=True) if use in ("sequence", "features"))
               for u in own)  # fmt: skip


def stored(facts: PlanFacts, part: str = "") -> set[tuple[str, ...]]:
    """How the parameters are kept whose names have this part."""
    return {
        facts.storage[leaf.name] for leaf in facts.graph.leaves("parameter") if part in str(leaf.attr("target"))
    }  # fmt: skip


def gathered(facts: PlanFacts) -> int:
    """Of how many devices slices of one parameter are put together."""
    return max(prod(n for kept, n in zip(own, facts.mesh.sizes, strict=True) if kept == "gathered")
               for own in facts.storage.values())  # fmt: skip


KEPT: Mapping[str, Holds] = {
    "no tensor": lambda f: degree(f, "features") == 1,
    "tensor<=2": lambda f: degree(f, "features") <= 2,
    "tensor=2": lambda f: degree(f, "features") == 2,
    "tensor>=4": lambda f: degree(f, "features") >= 4,
    "no data": lambda f: degree(f, "batch") == 1,
    "data=4": lambda f: degree(f, "batch") == 4,
    "no context": lambda f: degree(f, "sequence") == 1,
    "context>=2": lambda f: degree(f, "sequence") >= 2,
    "no residual": lambda f: between(f) == 1,
    "residual<=2": lambda f: between(f) <= 2,
    "no zero": lambda f: gathered(f) == 1,
    "y<=1": lambda f: len(f.mesh) == 1,
    "y=2": lambda f: f.mesh.sizes == (2, 2),
    "embed=S(0)": lambda f: all("sharded" in own for own in stored(f, "embed")),
    "layers.0=whole": lambda f: stored(f, "layers") <= {("whole",), ("whole", "whole")},
    "*.down=sharded": lambda f: all("sharded" in own for own in stored(f, "down")),
    "*norm=gathered": lambda f: all("gathered" in own and "sharded" not in own for own in stored(f, "norm.")),
    "*.up=x:S(1),y:whole": lambda f: stored(f, ".up") == {("sharded", "whole")},
    "*.down=x:gathered,y:sharded": lambda f: stored(f, ".down") == {("gathered", "sharded")},
}


@each("pin", KEPT)
def test_a_pin_is_kept_to_and_costs_what_it_costs(pin: str) -> None:
    """No plan is better, and its bound not lower, than one that may do more."""
    own = planned(pin, SMALL)
    assert KEPT[pin](PlanFacts(own)), own.graph
    assert own.report.bound_s >= FREE.report.bound_s * (1 - 1e-9)
    assert own.asked.pins == (pin,)


def test_what_a_plan_does_anyway_costs_nothing_to_ask_for() -> None:
    free = planned(None, mesh=Mesh.of(dp=2, tp=2))
    facts = PlanFacts(free)
    used = {"data": "batch", "context": "sequence", "tensor": "features"}
    pins = [f"{role}<={degree(facts, use)}" for role, use in used.items()]
    for leaf in free.graph.leaves("parameter"):
        kept = ",".join(f"{axis}:{how}" for axis, how in zip(["dp", "tp"], facts.storage[leaf.name], strict=True))
        pins.append(f"{leaf.attr('target')}={kept}")
    again = planned(pins, mesh=Mesh.of(dp=2, tp=2))
    assert again.graph == free.graph
    assert free.report.bound_s <= again.report.bound_s <= again.prediction.step_s * (1 + 1e-9)


def test_zero_is_stored_in_slices_and_gathered() -> None:
    facts = PlanFacts(planned(["zero=4", "no tensor", "no context"]))
    assert gathered(facts) == 4
    assert "whole" not in {kept for own in stored(facts, ".up") for kept in own}


def test_a_pin_of_one_block_is_of_that_block_alone() -> None:
    """Blocks that are pinned apart are not folded."""
    graph = blocks(16, 16, layers=4, seq=16)
    facts = PlanFacts(planned("layers.2.mlp.up=gathered", graph, mesh=Mesh.of(x=4)))
    found = {leaf.attr("target"): facts.storage[leaf.name] for leaf in graph.leaves("parameter")}
    assert {name for name, own in found.items() if own == ("gathered",)} == {"layers.2.mlp.up.weight"}


def test_memory_is_a_limit_as_that_of_the_device() -> None:
    limit = int(0.8 * FREE.prediction.memory.total_bytes)
    own = planned(f"memory<={limit}B", SMALL)
    assert own.prediction.memory.total_bytes <= limit == own.report.limit_bytes
    assert planned(None, SMALL).report.limit_bytes == FREE.report.limit_bytes > limit


def test_what_pins_leave_no_room_for_would_fit_without_them() -> None:
    need = FREE.prediction.memory.total_bytes
    plan = planned(f"memory<={need // 3}B", SMALL)
    (own,) = (r for r in plan.report.remedies if r.what.endswith(", without the pin of memory"))
    assert own.step_s < plan.prediction.step_s  # the fastest that is known, not the smallest
    small = Planner(cluster(4, memory_bytes=need // 2), every_choice)
    pinned = small.plan(SMALL, pins="*=whole", recompute="none", microbatches=1)
    assert any(remedy.what.endswith(", without the pins") for remedy in pinned.report.remedies)


def test_plans_by_hand_do_not_take_its_place_unless_they_keep_to_the_pins() -> None:
    """Here the sum of compute and communication misses data parallelism, which overlaps."""
    search, graph = Planner(cluster(4, link_bytes_per_s=1e9), every_choice), blocks(16, 64, layers=2, seq=16)
    kept, other = (search.plan(graph, pins=pin, microbatches=1, recompute="none") for pin in ("no context", "tensor=4"))
    by_hand = min(a.prediction.step_s for a in other.alternatives if a.name == "data parallel")
    assert kept.prediction.step_s <= by_hand < other.prediction.step_s
    assert degree(PlanFacts(other), "features") == 4


def test_the_plan_file_has_what_was_asked_for_and_explain_says_it(tmp_path: Any) -> None:
    pins = {"head": {"tp": "S(0)"}, "tensor": "<=2", "memory": "<=12GB"}
    plan = planned(pins, mesh=Mesh.of(dp=2, tp=2), roles=["free", "tensor"], recompute={"blocks.0": "full"})
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    told = (
        "mesh dp=2,tp=2; roles free,tensor; microbatches 1; recompute blocks.0=full; head=tp:S(0); tensor<=2; "
        "memory<=12GB"
    )
    assert str(loaded.asked) == told
    for field, value, message in (
        ("pins", ["tensor<=" + "9" * 5000], r"plan: pin 'tensor<=9+' is not understood"),
        ("mesh", {"dp": 2, "mb": 2}, "'mb' names the microbatches and comes first"),
        ("roles", ["any"], "asked.roles.0.: expected one of 'data', 'zero',"),
        ("recompute", "some", "asked.recompute: "),
    ):
        with pytest.raises(PlanError, match=message):
            Plan.from_json({**plan.to_json(), "asked": {field: value}})
    assert f"asked for       {told}" in str(PlanReport(loaded))
    assert PlanReport(loaded).data()["asked"] == loaded.to_json()["asked"]
    assert "asked for" not in str(PlanReport(PLANNER.plan(blocks(layers=1), compared=False)))


@each(
    "pins, message",
    [
        ("tensor", "pin 'tensor' is not understood: give NAME=LAYOUT"),
        ("head=S(0", "pin 'head=S(0' is not understood"),
        ("head=whole,", "pin 'head=whole,' is not understood"),
        ("tensor<=4GB", "pin 'tensor<=4GB': tensor is a number of devices, such as tensor<=8"),
        ("memory<=4", "pin 'memory<=4': memory is in B, kB, MB, GB or TB, such as memory<=40GB"),
        ("no memory", "pin 'no memory': memory is a limit, such as memory<=40GB"),
        ("memory>=4GB", "pin 'memory>=4GB': memory is a limit, such as memory<=40GB"),
        ("data<=0", "pin 'data<=0': expected a number of devices from 1 on"),
        ("data<=1.5", "pin 'data<=1.5': expected a number of devices from 1 on"),
        ("tp<=2", "'tp' is none of data, context, tensor, zero, residual and no axis; the meshes that are searched"),
        ("residual>=2", "pin 'residual>=2': residual is a limit, such as residual<=2 or no residual"),
        ("residual=1", "pin 'residual=1': residual is a limit"),
        ("lm_head=whole", "pin 'lm_head=whole': no parameter or module is called so; there is head"),
        ("head=tp:whole", "axis 'tp' is unknown, the meshes that are searched have x and y; leave the axis out"),
        (["data<=2", "data>=4"], "pins 'data>=4' and 'data<=2' contradict each other; leave one out"),
        (["head=whole", "h*=S(0)"], "pins 'head=whole' and 'h*=S(0)' contradict each other for head.weight"),
        (["head=x:S(0)", "*=x:S(1)"], "pins 'head=x:S(0)' and '*=x:S(1)' contradict each other for head.weight"),
        (["*=gathered", "head=x:sharded"], "pins '*=gathered' and 'head=x:sharded' contradict each other"),
        ("head=S(2)", "pin 'head=S(2)': head.weight is 80 × 32, of which 2 devices cannot have slices S(2)"),
        ("*norm*=S(0)", "takes blocks.0.norm_1.weight (32) over 2 devices as no slices, or whole; give one of these"),
        ("data>=8", "no mesh of 4 devices keeps to all that is asked for"),
        (["tensor>=4", "data>=2", "no context"],
         "tensor>=4; data>=2; no context\nwithout one of these there is a plan: tensor>=4; data>=2"),
        (["no tensor", "*.up*=sharded"], "splits operators as 'no tensor' forbids; for slices"),
        (["no zero", "*=gathered"], "without one of these there is a plan: no zero; *=gathered"),
        (["tensor>=4", "data>=2", "*=gathered", "*.up=S(0)"], "contradict each other"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_explained(pins: PinsLike, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        planned(pins)
    assert message in str(raised.value)


def test_pins_of_several_axes_that_go_together_do_not_contradict() -> None:
    together = ("w=gathered", "w=a:whole"), ("w=a:sharded", "w=b:whole"), ("w=a:S(0)", "w=a:S(0,3)"), ("w=sharded",) * 2
    apart = ("w=whole", "w=a:sharded"), ("w=gathered", "w=a:sharded"), ("w=a:whole", "w=a:gathered")
    for pins, expected in ((together, False), (apart, True)):
        for texts_ in pins:
            (one,), (other,) = map(parse, texts_)
            assert isinstance(one, LayoutPin)
            assert isinstance(other, LayoutPin)
            assert one.contradicts(other) == other.contradicts(one) == expected, texts_


def test_a_dispatch_counts_as_a_split_of_its_tokens() -> None:
    data = SplitBound(4, 2, frozenset({Split("t")}), others=False, wanted=frozenset({Split("t")}))
    assert data.is_over((Sent("e", "t"), WHOLE), (4, 1))
    assert data.is_met((Sent("e", "t"), WHOLE), (4, 1))
    assert not SplitBound(1, 1, frozenset({Split("t")}), others=True, wanted=frozenset()).is_over(
        (Sent("e", "t"),), (4,)
    )


def test_roles_and_pins_that_contradict_each_other() -> None:
    guide: dict[str, Any] = {"mesh": Mesh.of(dp=2, tp=2), "roles": ["data", "tensor"]}
    with pytest.raises(
        PlanError, match="without one of these there is a plan: mesh dp=2,tp=2; roles data,tensor; no t"
    ):
        planned("no tensor", **guide)
    with pytest.raises(PlanError, match="no mesh of 4 devices keeps to all"):
        planned("tp<=1", **guide)
    with pytest.raises(PlanError, match=r"axis 'x' is unknown, the mesh .dp=2, tp=2. has dp and tp; name one of them"):
        planned("head=x:whole", **guide)
    with pytest.raises(PlanError, match=r"the pins and roles of axes leave no layout for head\.weight"):
        planned("head=dp:gathered", **guide)
    with pytest.raises(PlanError, match=r"the pins and roles of axes leave no layout for "):
        planned("*=whole", mesh=guide["mesh"], roles=["zero", "tensor"])


def test_a_batch_that_is_too_small_for_a_degree() -> None:
    with pytest.raises(PlanError, match=r"pin 'data>=4': on mesh .* nothing can be split in so many ways"):
        planned("data>=4", blocks(2, 15, seq=3))


def test_pins_are_texts_or_by_name() -> None:
    assert texts(None) == texts([]) == ()
    assert texts("no zero") == texts(["no zero", "no zero"]) == ("no zero",)
    assert texts({"a.b": {"x": "S(0)", "y": "whole"}, "c": "sharded", "tensor": 4, "data": ">=2"}) == (
        "a.b=x:S(0),y:whole", "c=sharded", "tensor=4", "data>=2",
    )  # fmt: skip
    spaced, plain = parse("w = x:S(0,3), y:R"), parse("w=x:S(0,3),y:whole")
    assert [replace(pin, text="") for pin in spaced] == [replace(pin, text="") for pin in plain]
