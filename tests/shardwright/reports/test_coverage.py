"""The coverage report: what is counted, and that the catalogue fires on real models."""

from __future__ import annotations

from functools import lru_cache

import pytest

from bench.plans import fast_links
from shardwright.pcg.choice import WHOLE, Split
from shardwright.pcg.graph import Graph, Node, leaf, make_attrs
from shardwright.pcg.layout import P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.reports.coverage import Coverage, CoverageReport
from shardwright.reports.occurrences import Occurrences
from shardwright.substitutions.equations import equation
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.verifier.choices import Certified
from tests.verifier.collect import zoo_graphs

# rules that must fire when a model is planned for links that cost nothing, where nearly everything is split
FIRES = {
    "gpt": {
        "linear [a b c, d c -> a b d] by d",
        "linear [a b c, d c -> a b d] by c",
        "layer_norm [a b c!, c!, c! -> a b c!] by a",
        "matmul [a b c d, a b d e -> a b c e] by b",
        "dropout [a b c -> a b c] by a",
        "embedding [a b, c -> c b] by b",
        "reduce_scatter",
        "gather_copy",
        "unfuse_three_affine",
    },
    "dlrm": {"linear [a b, c b -> a c] by b", "all_to_all"},
}


@lru_cache(maxsize=1)
def surveyed() -> dict[str, Coverage]:
    certified, found = Certified(), {}
    rules = {rule.name: rule for rule in certified.equations()}
    for name, graph in zoo_graphs(*FIRES).items():
        found[name] = Coverage.of(certified)
        found[name].plan(name, graph, fast_links(2), certified, rules)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", FIRES)
def test_the_catalogue_fires_on_a_real_model(model: str) -> None:
    fired = {tally.name for tally in surveyed()[model].tallies.values() if tally.fired}
    assert not FIRES[model] - fired


@pytest.mark.slow
def test_every_form_is_loaded_matched_and_fired() -> None:
    forms = surveyed()["gpt"].by_form()
    for form in ("steps", "serial"):
        assert forms[form]["loaded"] > forms[form]["matched"] >= forms[form]["fired"] > 0, form
    rows = forms["row"]
    assert rows["matched"] + rows["on_demand"] > 100


@pytest.mark.slow
def test_what_fired_had_matched() -> None:
    for coverage in surveyed().values():
        missing = [t.name for t in coverage.tallies.values() if t.fired and not t.matched]
        assert not missing


@pytest.mark.slow
def test_the_report_lists_what_fired_and_what_did_not() -> None:
    coverage = surveyed()["gpt"]
    text, data = str(CoverageReport(coverage, 3)), CoverageReport(coverage).data()
    assert "gpt on fast links (2 devices): [x=2]" in text
    assert "fired, the 3 most frequent" in text
    assert "never fired: " in text
    assert data["forms"] == coverage.by_form()
    assert [t["name"] for t in data["rules"] if t["form"] == "serial" and t["fired"]] == ["unfuse_three_affine"]


def test_a_catalogue_that_fires_nowhere_is_all_zeros() -> None:
    coverage = Coverage.of_rules([CATALOGUE["relu_of_relu"], STEP_RULES["all_reduce"]])
    assert coverage.by_form()["serial"] == {"loaded": 1, "matched": 0, "fired": 0, "on_demand": 0}
    assert "serial: 0 fired\n  never fired: relu_of_relu" in str(CoverageReport(coverage))


# ---- placement rules ----

SPLIT_SUM = equation(
    "split_the_sum",
    {"x": "m i", "w": "o i"},
    "linear(combine(x, axis=a), combine(w, axis=a))",
    "reduce(linear(x, w), axis=a)",
    axes=("a",),
    layouts={"x": ["S(1)"], "w": ["S(1)"]},
)


def parallel() -> Graph:
    """reduce(linear(x, w)) on the second of two axes."""
    x = leaf("x", "input", (4, 8), "float32", "x", layouts=(R, R))
    w = leaf("w", "parameter", (6, 8), "float32", "w", grad=True, layouts=(R, S(1)))
    nodes = (
        x,
        Node("xs", "partition", ("x",), make_attrs(axis="t", dim=1, blocks=1)),
        w,
        Node("y", "linear", ("xs", "w"), (), (WHOLE, Split("i"))),
        Node("z", "reduce", ("y",), make_attrs(axis="t")),
    )
    return Graph(nodes, (("loss", "z"),), Mesh.of(d=2, t=2)).validate()


def test_a_placement_rule_occurs_where_a_side_with_parallel_operators_does() -> None:
    graph = parallel()
    assert graph.types["y"].layouts == (R, P)
    assert Occurrences(graph).of(SPLIT_SUM) == 1
    assert Occurrences(graph.erased()).erased(SPLIT_SUM) == 1


@pytest.mark.parametrize(
    ("guard", "places"), [((), 1), (("i % a == 0",), 1), (("i % (3 * a) == 0",), 0), (("a == 2",), 1)]
)
def test_guards_speak_of_the_degrees_of_the_plan(guard: tuple[str, ...], places: int) -> None:
    rule = equation("split", {"x": "m i", "w": "o i"}, "linear(x, combine(w, axis=a))",
                    "reduce(linear(partition(x, axis=a, dim=1), w), axis=a)",
                    guard, axes=("a",), layouts={"x": ["R"], "w": ["S(1)"]})  # fmt: skip
    assert Occurrences(parallel()).of(rule) == places
    assert Occurrences(parallel().erased()).erased(rule) == 1  # where there are no degrees yet


def test_a_lone_parallel_operator_is_no_occurrence() -> None:
    rule = equation("lone", {"x": "m i"}, "neg(reduce(neg(x), axis=a))", "reduce(x, axis=a)", axes=("a",),
                    layouts={"x": ["P"]})  # fmt: skip
    assert Occurrences(parallel()).of(rule) == 0
    assert Occurrences(parallel().erased()).erased(rule) == 0


@pytest.mark.parametrize(("blocks", "places"), [("", 0), (", blocks=2", 1), (", blocks=n", 1)])
def test_blocks_are_part_of_the_layout(blocks: str, places: int) -> None:
    x = leaf("x", "input", (4, 8), "float32", "x", layouts=(R,))
    nodes = (
        x,
        Node("y", "relu", ("x",), (), (WHOLE,)),
        Node("z", "partition", ("y",), make_attrs(axis="a", dim=1, blocks=2)),
    )
    graph = Graph(nodes, (("loss", "z"),), Mesh.of(a=2))
    rule = equation("blocked", {"x": "m i"}, f"partition(relu(x), axis=a, dim=1{blocks})",
                    f"relu(partition(x, axis=a, dim=1{blocks}))", axes=("a",), layouts={"x": ["R"]})  # fmt: skip
    assert Occurrences(graph).of(rule) == places


@pytest.mark.parametrize(
    ("left", "right", "layouts"),
    [
        ("linear(combine(x, axis=a), combine(w, axis=a))", "reduce(linear(x, w), axis=a)", {"x": ["S(0)"], "w": ["R"]}),
        ("linear(x, combine(w, axis=a))", "combine(linear(x, w), axis=a)", {"x": ["C"], "w": ["S(0)"]}),
    ],
)
def test_other_layouts_or_operators_do_not_occur(left: str, right: str, layouts: dict[str, list[str]]) -> None:
    rule = equation("other", {"x": "m i", "w": "o i"}, left, right, axes=("a",), layouts=layouts)
    assert Occurrences(parallel()).of(rule) == 0


def test_a_rule_of_more_axes_than_the_mesh_occurs_nowhere() -> None:
    rule = equation("wide", {"x": "m"}, "reduce(reduce(reduce(x, axis=a), axis=b), axis=c)",
                    "reduce(reduce(reduce(x, axis=c), axis=b), axis=a)", axes=("a", "b", "c"),
                    layouts={"x": ["P", "P", "P"]})  # fmt: skip
    assert Occurrences(parallel()).of(rule) == 0
