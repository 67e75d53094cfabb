"""Whatever is folded is found by its whole name."""

from __future__ import annotations

import pytest

from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.reports.facts import PlanFacts
from shardwright.reports.finding import FoundReport, find
from shardwright.reports.modules import module_tree
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice


@pytest.fixture(scope="module")
def plan() -> Plan:
    planner = Planner(cluster(2, link_bytes_per_s=1e12), every_choice)
    return planner.plan(blocks(layers=12), "Net", mesh=Mesh.of(dp=2), roles=("zero",))


def test_every_parameter_is_found_by_its_name(plan: Plan) -> None:
    tree = module_tree(PlanFacts(plan))
    for node in plan.graph.leaves("parameter"):
        name = str(node.attr("target"))
        (found,) = find(tree, name)
        kind = plan.graph.types[node.name]
        assert (found.name, found.row.kind, found.row.shape) == (name, "weight", kind.shape)
        assert found.row.layouts == tuple(map(str, kind.layouts))
    assert find(tree, "layers.11.mlp.up.weight")[0].shown_in == "layers.0–11.mlp.up"


def test_what_is_inside_a_module_is_found(plan: Plan) -> None:
    tree = module_tree(PlanFacts(plan))
    names = [found.name for found in find(tree, "layers.7.mlp")]
    assert names[:3] == ["layers.7.mlp.linear", "layers.7.mlp.relu", "layers.7.mlp.linear#2"]
    assert {"layers.7.mlp.up.weight", "layers.7.mlp.down.weight"} <= {*names}
    assert [f.name for f in find(tree, "mlp.up.weight")] == ["layers.0.mlp.up.weight"]
    assert [f.row.name for f in find(tree, "layers.7.mlp.linear")] == ["linear", "linear#2"]


def test_what_the_timeline_names_is_found_by_that_name(plan: Plan) -> None:
    """And is one operator: the timeline, memory, profiles and rewrites call it so."""
    facts = PlanFacts(plan)
    tree, labels = module_tree(facts), list[str]()
    for node in plan.graph.nodes:
        if node.is_leaf or node.is_parallel or node.name in facts.constants:
            continue
        block, label = facts.names.of(node.name)
        labels.append(f"{block}.{label}" if block else label)
        (found,) = find(tree, labels[-1])
        assert found.row.name.partition("#")[0] == node.op
        assert find(tree, f"{labels[-1]}/combine") == [found]
    assert len(set(labels)) == len(labels) > 30


@pytest.mark.parametrize("name", ["layers.12.mlp.up.weight", "layers.1.mlp.up.weigh", "layers.1", "nothing", ""])
def test_what_is_not_there_is_an_error_with_what_is(plan: Plan, name: str) -> None:
    if name == "layers.1":  # a module of one digit is not a beginning of layers.10
        assert all(f.name.startswith("layers.1.") for f in find(module_tree(PlanFacts(plan)), name))
        return
    with pytest.raises(PlanError, match=f"--find {name}: the plan has no parameter, operator or module of this name"):
        find(module_tree(PlanFacts(plan)), name)


def test_what_is_found_is_told(plan: Plan) -> None:
    text = str(FoundReport(plan, "layers.3.mlp.up.weight"))
    for part in ("layers.3.mlp.up.weight: weight, float32", "shape     64 × 16, on a device 32 × 16",
                 "dp        S(0): gathered", "stored    2.05 kB", "moves     dp: S(0) → ",
                 "shown in  layers.0–11.mlp.up"):  # fmt: skip
        assert part in text
    table = str(FoundReport(plan, "layers.3"))
    assert "layers.3: 8 operators and parameters" in table
    assert FoundReport(plan, "layers.3.mlp.up.weight").data()[0]["stored_bytes"] == 2048
