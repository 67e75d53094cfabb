"""What the page draws over time, and its table of parameters, is what `explain` and plan.json say."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.tasks import COMPUTE
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Source
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.schedules import orders
from shardwright.reports.comparison import Beside
from shardwright.reports.course import LONGEST_PERIOD, repeated
from shardwright.reports.exposed import sent, sent_text, where_the_time_goes
from shardwright.reports.facts import PlanFacts, usable_bytes
from shardwright.reports.modules import module_tree
from shardwright.reports.parameters import parameters_data, stored_parameters
from shardwright.reports.peak import fullest, largest, peak_values
from shardwright.reports.plan import PlanReport
from shardwright.reports.timeline import step_trace
from shardwright.reports.units import seconds, size
from shardwright.search.plan import Alternative, Plan
from shardwright.search.tree.planner import Planner
from shardwright.view.page import page
from tests.search.graphs import blocks, every_choice
from tests.shardwright.page import evaluated, text_of

SHAPES: dict[str, dict[str, Any]] = {
    "1f1b": {"stages": 2, "microbatches": 8, "schedule": "1f1b"},
    "interleaved": {"stages": 2, "microbatches": 4, "schedule": "interleaved"},
    "zero-bubble": {"stages": 4, "microbatches": 8, "schedule": "zero-bubble", "roles": ("data",)},
    "one stage": {"microbatches": 4, "roles": ("zero", "tensor"), "mesh": Mesh.of(dp=4, tp=2)},
}


@cache
def plan(name: str) -> Plan:
    """Of eight blocks on eight devices."""
    mesh = Mesh.of(dp=8 // SHAPES[name].get("stages", 1))
    asked: dict[str, Any] = {"mesh": mesh, "roles": ("zero",), **SHAPES[name]}
    return Planner(Cluster.preset("dgx-h100", 1), every_choice).plan(blocks(64, 2048, 8, 512), "Net", **asked)


@cache
def facts(name: str) -> PlanFacts:
    return PlanFacts(plan(name))


@cache
def explained(name: str) -> str:
    return str(PlanReport(plan(name)))


EACH = pytest.mark.parametrize("name", SHAPES)


@EACH
def test_the_page_places_what_the_timeline_places(name: str, tmp_path: Path) -> None:
    """Every item of every stage, in the order of the action list, when the simulation has it."""
    code = """course.stages.map((_, stage) => [...placesOf(stage, 0, Infinity)].map((p) =>
      [p.segment.chunk, p.microbatch, p.segment.direction, p.begin, p.begin + p.segment.ready_s]))"""
    drawn, timeline = evaluated(plan(name), tmp_path, code), facts(name).timeline
    run = facts(name).program.execution
    listed = orders(run.schedule, run.assumed.num_microbatches)
    for own, stage, items in zip(drawn, timeline.stages, listed, strict=True):
        assert [(chunk, number, way) for chunk, number, way, _, _ in own[:-1]] == [tuple(item) for item in items]
        for (_, _, _, begin, end), place in zip(own, stage.placed, strict=True):
            expected = place.start_s, place.start_s + place.timeline.ready_s
            assert (begin, end) == pytest.approx(expected, rel=1e-6, abs=1e-8)


@EACH
def test_what_is_drawn_adds_up_to_the_step(name: str, tmp_path: Path) -> None:
    """Compute, waiting and bubble of each stage, from what the page draws; and no longer than the kernels are."""
    code = """course.stages.map((_, stage) => {
      let tasks = 0, waits = 0;
      for (const { segment } of placesOf(stage, 0, Infinity)) {
        tasks += tasksOf(segment)[COMPUTE].busy_s;
        waits += waitsOf(segment).reduce((sum, [from, to]) => sum + to - from, 0);
      }
      const totals = totalsOf(stage);
      return [totals.compute, totals.exposed, totals.bubble, tasks, waits + totals.sums[1] - totals.sums[0]];
    })"""
    drawn, timeline = evaluated(plan(name), tmp_path, code), facts(name).timeline
    for (compute, exposed, bubble, tasks, waits), stage in zip(drawn, timeline.stages, strict=True):
        expected = stage.compute_s, stage.exposed_s, stage.bubble_s
        assert (compute, exposed, bubble) == pytest.approx(expected, rel=1e-6, abs=1e-8)
        assert compute + exposed + bubble == pytest.approx(plan(name).prediction.step_s, rel=1e-6)
        assert (tasks, waits) == pytest.approx(expected[:2], rel=1e-3, abs=2e-3 * timeline.step_s)


@EACH
def test_every_kernel_is_drawn_where_it_runs_and_with_its_block(name: str, tmp_path: Path) -> None:
    code = """course.segments.map((segment) => Object.fromEntries(course.streams.map((stream, number) => {
      const own = tasksOf(segment)[number];
      return [stream, own.labels.map((label, i) =>
        [blockOf(segment, own.blocks[i]), label, own.begins[i], own.ends[i]])];
    })))"""
    places = [place for stage in facts(name).timeline.stages for place in stage.placed]
    segments = dict.fromkeys(
        (p.timeline, *((p.item.chunk, p.item.direction) if p.item else (0, "end"))) for p in places
    )
    for drawn, (timeline, *_) in zip(evaluated(plan(name), tmp_path, code), segments, strict=True):
        for stream, own in drawn.items():
            tasks = zip(timeline.segment.tasks, timeline.starts, timeline.ends, strict=True)
            expected = [(*facts(name).names.of(t.name), start, end) for t, start, end in tasks if t.stream == stream]
            expected = [each for each in expected if each[3] > each[2]]
            assert [(block, label) for block, label, _, _ in own] == [each[:2] for each in expected]
            for (*_, begin, end), (*_, start_s, end_s) in zip(own, expected, strict=True):
                assert (begin, end) == pytest.approx((start_s, end_s), abs=1e-7)


@EACH
def test_memory_that_is_drawn_has_the_peak_of_the_prediction(name: str, tmp_path: Path) -> None:
    code = """course.stages.map((_, stage) => {
      let best = [0];
      for (const place of placesOf(stage, 0, Infinity)) {
        const left = place.left();
        for (const [, more] of [[0, course.categories.map(() => 0)], ...momentsOf(place.segment)]) {
          const held = withSlack(left.map((n, category) => n + more[category]), stage);
          if (summed(held) > summed(best)) best = held;
        }
      }
      return Object.fromEntries([...course.categories, "slack"].map((category, i) => [category, best[i]]));
    })"""
    drawn = evaluated(plan(name), tmp_path, code)
    for own, stage in zip(drawn, facts(name).timeline.stages, strict=True):
        total = stage.memory.total_bytes
        for category, num_bytes in stage.memory.by_category().items():
            assert own.get(category, 0) == pytest.approx(num_bytes, abs=1e-4 * total), category
    highest = max(sum(own.values()) for own in drawn)
    assert highest == pytest.approx(plan(name).prediction.memory.total_bytes, rel=1e-4)


@EACH
def test_values_at_the_peak_add_up_to_memory_by_category(name: str) -> None:
    for number, stage in enumerate(facts(name).timeline.stages):
        found = defaultdict[str, float](float)
        for value in peak_values(facts(name), number):
            assert min(value.num_bytes, value.num_values) > 0
            found[value.category] += value.num_bytes
        for category, num_bytes in stage.memory.by_category().items():
            assert found[category] == pytest.approx(num_bytes, rel=1e-6, abs=1), category


@EACH
def test_the_moment_of_a_peak_is_told_by_the_names_of_the_tree(name: str) -> None:
    """And not by those of the graph, such as `linear_560`, which nobody finds anywhere."""
    inner = {str(node.name) for node in plan(name).graph.nodes}
    told = [facts(name).names.moment(stage.peak_at) for stage in facts(name).timeline.stages]
    assert any(inner & set(stage.peak_at.split()) for stage in facts(name).timeline.stages)
    assert not any(inner & set(moment.split()) for moment in told), told
    assert any(re.search(r": \S+:\S+ .*of layers\.\d$", moment) for moment in told), told
    assert f"peak: {told[fullest(facts(name))]}" in explained(name)


def test_activations_at_the_peak_are_those_of_microbatches_in_flight() -> None:
    """The first of two stages has two in flight under 1F1B, and four blocks; the last of one has been given back."""
    values = peak_values(facts("1f1b"), 0)
    (kept,) = (v for v in values if (v.category, v.label) == ("activations", "mlp:relu"))
    assert (kept.num_values, kept.blocks) == (2 * 4 - 1, "layers.0–3")
    (weights,) = (v for v in values if (v.category, v.label) == ("parameters", "mlp.up.weight"))
    assert (weights.num_values, weights.blocks) == (4, "layers.0–3")


@EACH
def test_every_parameter_is_told_as_the_graph_has_it(name: str, tmp_path: Path) -> None:
    found, graph = stored_parameters(facts(name)), plan(name).graph
    names = [str(leaf.attr("target")) for leaf in graph.leaves("parameter")]
    shown = evaluated(plan(name), tmp_path, "everyParameter().map((p) => [p.full, p.local_bytes, p.ranks, p.copies])")
    assert sorted(row[0] for row in shown) == sorted(names)
    for full, local_bytes, ranks, copies in shown:
        own = found[full]
        assert (own.local_bytes, own.ranks, own.copies) == (local_bytes, ranks, copies)
    assert sum(p.local_bytes for p in found.values()) == module_tree(facts(name)).total.stored_bytes
    assert len(parameters_data(facts(name))) < len(names)  # of equal blocks together


def test_parameters_of_a_stage_are_on_its_ranks() -> None:
    found = stored_parameters(facts("1f1b"))
    assert (found["layers.0.mlp.up.weight"].ranks, found["layers.7.mlp.up.weight"].ranks) == ("0–3", "4–7")
    for own in found.values():
        holders = {"0–3": 4, "4–7": 4, "0–7": 8}[own.ranks]
        assert own.num_bytes == own.local_bytes * holders / own.copies


def test_a_parameter_that_two_stages_read_is_on_the_ranks_of_both() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (64, 512), "float32", "x")
    own, tied = (b.leaf(n, "parameter", (512, 512), "float32", f"{n}.w", grad=True) for n in ("layers.0", "layers.1"))
    for number, weights in enumerate(([own, tied], [tied])):
        b.at("h", Source(f"layers.{number}"))
        for weight in weights:
            x = b.op("relu", b.op("linear", x, weight))
    graph = b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])
    planner = Planner(Cluster.preset("dgx-h100", 1, 4), every_choice)
    found = planner.plan(graph, "Net", mesh=Mesh.of(dp=2), roles=("data",), stages=2, microbatches=2, schedule="1f1b")
    told = {name: (own.ranks, own.copies) for name, own in stored_parameters(PlanFacts(found)).items()}
    assert told == {"layers.0.w": ("0–1", 2), "layers.1.w": ("0–3", 4)}


@EACH
def test_a_step_gives_back_what_it_takes_by_name(name: str) -> None:
    """So what is said to be there at a peak is there."""
    for stage in facts(name).timeline.stages:
        left = defaultdict[tuple[str, str], float](float)
        for place in stage.placed:
            for buffer in place.timeline.segment.buffers:
                times = (buffer.taken is not None) - bool(buffer.freed)
                left[buffer.category, buffer.name] += times * buffer.num_bytes
        assert {key: num_bytes for key, num_bytes in left.items() if num_bytes or not key[1]} == {}


def test_parameters_are_sorted_and_searched(tmp_path: Path) -> None:
    code = """[["layers.3", 0, false], ["up", 6, true], ["nosuchthing", 0, false]].map(([query, column, down]) =>
      sortedParameters({ query, column, down }).map((p) => p.full))"""
    by_name, by_bytes, none = evaluated(plan("one stage"), tmp_path, code)
    assert by_name == ["layers.3.mlp.down.weight", "layers.3.mlp.up.weight", "layers.3.norm.weight"]
    assert by_bytes == [f"layers.{number}.mlp.up.weight" for number in reversed(range(8))]
    assert none == []


@EACH
def test_explain_and_the_page_say_the_same(name: str, tmp_path: Path) -> None:
    """Of what is largest at the peak, and of what is waited for."""
    text, told, waits = text_of(plan(name), tmp_path), str(largest(facts(name))), str(where_the_time_goes(facts(name)))
    for value in peak_values(facts(name), fullest(facts(name)))[:5]:
        for shown in (told, text):
            assert value.label in shown
            assert size(value.num_bytes) in shown
    for each in sent(facts(name)):
        row = next(line for line in waits.split("\n") if sent_text(each) in line)
        assert seconds(each.exposed_s) in row
        assert all(said in text for said in (sent_text(each), seconds(each.exposed_s), seconds(each.hidden_s)))
    assert told in explained(name)
    assert waits in explained(name)


@EACH
def test_exposed_and_hidden_are_told_apart(name: str) -> None:
    """The parts add up to the step, and what is sent to how long its streams are busy, where one is at a time."""
    found, listed, busiest = plan(name).prediction, sent(facts(name)), facts(name).timeline.busiest
    assert sum(own.exposed_s for own in listed) == pytest.approx(found.exposed_s, rel=1e-6)
    for axis, busy_s in busiest.busy_s.items():
        if axis != COMPUTE:
            own = [each for each in listed if each.axis == axis]
            assert sum(each.hidden_s for each in own) <= busy_s * (1 + 1e-9)
            assert sum(each.hidden_s + each.exposed_s for each in own) == pytest.approx(busy_s, rel=0.1)


def test_weights_that_are_gathered_ahead_are_hidden() -> None:
    """Those of one block while the one before computes; only the first one is waited for."""
    weights = {own.axis: own for own in sent(facts("one stage")) if own.kind == "weights"}
    assert weights["dp"].hidden_s > 3 * weights["dp"].exposed_s


def test_sums_of_gradients_over_several_axes_are_of_gradients_on_each() -> None:
    """One message, which is timed as if it were one along each axis."""
    mesh = Mesh.of(node=2, dp=4)
    data = Planner(Cluster.preset("dgx-h100", 1), every_choice).plan(
        blocks(64, 2048, 2, 512), "Net", mesh=mesh, roles=("data", "data")
    )
    kinds = {(own.axis, own.kind) for own in sent(PlanFacts(data))}
    assert {axis for axis, kind in kinds if kind == "gradients"} == {"node", "dp"}


def test_moments_are_told_apart_however_near_one_looks(tmp_path: Path) -> None:
    """`3.00 s` at every line of a chart that shows a millisecond says nothing."""
    code = """[1, 0.1, 1e-3, 1e-5].map((share) => {
      zoomTo(course.step_s * (0.5 - share / 2), course.step_s * (0.5 + share / 2));
      const apart = shownFor() / 5, told = [0, 1, 2, 3, 4].map((k) => moment(shown.from + k * apart, apart));
      return [new Set(told).size, at("shown").textContent];
    })"""
    told = evaluated(plan("1f1b"), tmp_path, code)
    assert [number for number, _ in told] == [5] * 4
    assert "the whole step" in told[0][1]
    for _, text in told[1:]:
        begin, end = text.partition(" of ")[0].rpartition(", ")[2].split(" to ")
        assert begin != end


def test_a_plan_that_is_much_slower_does_not_flatten_the_others(tmp_path: Path) -> None:
    """Its bar is cut; what does not fit is apart, the smallest first, and says by how much."""
    base = plan("one stage")
    step_s, used = base.prediction.step_s, base.prediction.memory.total_bytes
    limit = usable_bytes(base)

    def other(name: str, times: float, num_bytes: int) -> Alternative:
        memory = replace(base.prediction.memory, slack_bytes=base.prediction.memory.slack_bytes + num_bytes - used)
        prediction = replace(base.prediction, step_s=times * step_s, bubble_s=(times - 1) * step_s, memory=memory)
        return Alternative(name, base.mesh, prediction, num_bytes <= limit)

    large = [other("largest", 0.7, 3 * limit), other("large", 0.8, 2 * limit)]
    found = replace(base, alternatives=(other("near", 1.2, used), other("far", 9.0, used), *large))
    code = """[...at("compare").children].filter((made) => made.tag === "table").map((made) =>
      made.children.slice(1).map(({ children }) => {
        const bars = children.flatMap((cell) => cell.children).filter((made) => made.className?.startsWith("bar"));
        return [children[0].textContent, bars[0].className, bars[0].children[0].style.cssText];
      }))"""
    fitting, unfit = evaluated(found, tmp_path, code)
    assert [row[:2] for row in fitting] == [["this plan", "bar"], ["near", "bar"], ["far", "bar cut"]]
    assert float(fitting[0][2].removeprefix("width:").partition("%")[0]) > 100 / 9
    assert [row[0] for row in unfit] == ["large", "largest"]
    assert Beside.alternative(found, large[1]).remark == f"does not fit, {size(limit)} too much"


def test_the_longest_repetition_is_told_once() -> None:
    items = [(0, 0), (0, 0), (1, 5), (2, 0), (1, 5), (2, 0), (1, 5), (2, 0), (3, 9)]
    assert repeated(items) == [(2, [0, 0]), (3, [1, 5, 2, 0]), (1, [3, 9])]
    every = [(number % (LONGEST_PERIOD + 1), 0) for number in range(3 * LONGEST_PERIOD)]
    for some in ([], items, items[:1], every):
        pairs = [pair for times, own in repeated(some) for pair in times * list(zip(own[::2], own[1::2], strict=True))]
        assert pairs == list(some)


def test_many_microbatches_take_no_more_room() -> None:
    """Nor do equal blocks: what comes again is told once."""
    planner = Planner(Cluster.preset("dgx-h100", 1), every_choice)
    pages = [
        page(planner.plan(blocks(512, 256, layers, 8), "Net", mesh=Mesh.of(dp=4), roles=("data",), stages=2,
                          microbatches=count, schedule="1f1b"))
        for layers, count in ((8, 8), (8, 256), (32, 8))
    ]  # fmt: skip
    few, many, deep = map(len, pages)
    assert many < 1.05 * few
    assert deep < 1.4 * few


@EACH
def test_the_trace_that_the_page_saves_is_that_of_the_command(name: str, tmp_path: Path) -> None:
    """The same tasks with the same names, shapes and bytes: as many of each, at the same times in all."""
    code = """(() => {
      const found = {};
      for (const e of traceOf().traceEvents.filter((e) => e.ph === "X" && e.cat !== "segment")) {
        const key = [e.pid, e.cat, e.name, e.args?.shape, e.args?.bytes].join("|");
        found[key] = [(found[key]?.[0] || 0) + 1, (found[key]?.[1] || 0) + e.ts, (found[key]?.[2] || 0) + e.dur];
      }
      return found;
    })()"""
    drawn: dict[str, list[float]] = evaluated(plan(name), tmp_path, code)
    written = defaultdict[str, list[float]](lambda: [0, 0, 0])
    for event in step_trace(plan(name), facts(name).timeline)["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "segment":
            known = event.get("args", {})
            key = (event["pid"], event["cat"], event["name"], known.get("shape", ""), known.get("bytes", ""))
            for at, value in enumerate((1, event["ts"], event["dur"])):
                written["|".join(map(str, key))][at] += value
    assert drawn.keys() == written.keys()
    for key, own in drawn.items():
        assert own == pytest.approx(written[key], rel=1e-4, abs=0.1), key
    assert any("|layers.3.mlp:linear|" in key and " float32|" in key for key in drawn)
