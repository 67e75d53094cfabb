"""`explain`, the page and plan.json say the same of a plan, category by category, and parts add up to their sums."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.accuracy import prepare
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero, with_lifetimes
from shardwright.pcg.step.parameters import module_block
from shardwright.pcg.step.recompute import Recompute
from shardwright.reports.comparison import Beside
from shardwright.reports.facts import PlanFacts, memory_verdict, serial_parts, step_parts, usable_bytes
from shardwright.reports.finding import FoundReport
from shardwright.reports.modules import module_tree
from shardwright.reports.named import Names
from shardwright.reports.plan import PlanReport
from shardwright.reports.timeline import TimelineReport, plan_timeline, step_passes
from shardwright.reports.tree import Module
from shardwright.reports.units import percent, seconds, size
from shardwright.reports.wording import called, faster_or_slower, move_text, quality, standing
from shardwright.search.plan import Alternative, Plan
from shardwright.search.tree.planner import Planner
from tests.each import some
from tests.search.graphs import blocks, every_choice
from tests.shardwright.page import evaluated, text_of

LAYERS = 48
MODELS = some(("mlp", "gpt", "dlrm", "large", "timed"), 3)
TIMED: dict[str, tuple[Zero, Recompute]] = {
    "layers.0": ("zero-1", "none"), "layers.1": ("zero-1", "none"), "layers.2": ("zero-2", "none"),
    "layers.3": ("kept", "none"), "layers.4": ("zero-3", "full"), "layers.5": ("zero-3", "full"),
}  # fmt: skip
"""Blocks of the model "timed", which has four microbatches: lifetimes of their weights, and what is made again."""


@cache
def plan(name: str) -> Plan:
    """Of a model of the zoo on two axes of GPUs; or of large blocks on 64, some of them made again."""
    if name not in ("large", "timed"):
        graph, mesh, nodes = prepare(name).captured.graph, Mesh.of(dp=2, tp=4), 1
    else:
        layers = LAYERS if name == "large" else len(TIMED)
        graph, mesh, nodes = blocks(64, 4096, layers, 2048), Mesh.of(dp=8, tp=8), 8
    roles, count = ("zero", "tensor"), 4 if name == "timed" else 1
    planner = Planner(Cluster.preset("dgx-h100", nodes), every_choice)
    found = planner.plan(graph, name, mesh=mesh, roles=roles, microbatches=count, recompute="none")
    if name == "large":
        again = replace(found.execution, recompute=tuple((f"layers.{n}", "full") for n in range(32, LAYERS)))
        found = replace(found, execution=again, prediction=predict(found.graph, found.cluster, again))
    return timed(found) if name == "timed" else found


def timed(found: Plan) -> Plan:
    """The plan with lifetimes and recomputation block by block."""
    homes = {leaf.name: module_block(str(leaf.attr("target"))) for leaf in found.graph.leaves("parameter")}
    changed = with_lifetimes(found.graph, {leaf: TIMED.get(home, ("zero-1",))[0] for leaf, home in homes.items()})
    again = replace(found.execution, recompute=tuple((block, mode) for block, (_, mode) in TIMED.items()))
    return replace(found, graph=changed, execution=again, prediction=predict(changed, found.cluster, again))


@cache
def read(name: str) -> tuple[dict[str, Any], str, str, dict[str, Any]]:
    """plan.json, what `explain` says of it, the page's text, and what the page draws from."""
    with tempfile.TemporaryDirectory() as folder:
        plan(name).save(path := Path(folder, "plan.json"))
        again, report = Plan.load(path), PlanReport(Plan.load(path))
        return json.loads(path.read_text()), str(report), text_of(again, path.parent), report.data()


@pytest.mark.parametrize("name", MODELS)
def test_they_say_the_same(name: str) -> None:
    file, explained, page, _ = read(name)
    for prediction in (file["prediction"], *(a["prediction"] for a in file["alternatives"])):
        used = sum(prediction["memory"].values())
        assert size(used) in explained
        assert size(used) in page
        assert seconds(prediction["step_s"]) in explained
        assert seconds(prediction["step_s"]) in page
    own = file["prediction"]
    used = sum(own["memory"].values())
    for key, num_bytes in own["memory"].items():
        if num_bytes:
            category = key.removesuffix("_bytes")
            assert re.search(rf"\n  {category} +{size(num_bytes)} +{percent(num_bytes / used)}", explained), category
            assert f"{category} {size(num_bytes)}" in page
    for parts in (step_parts, serial_parts):
        for what, part_s in parts(plan(name).prediction).items():
            if seconds(part_s) != "0":
                assert f"{what} {seconds(part_s)}" in explained
                assert f"{what} {seconds(part_s)}" in page
    assert seconds(own["serial_s"]) in explained
    assert f"one by one, without overlap: {seconds(own['serial_s'])}" in page
    for said in (*standing(plan(name)), quality(plan(name))):
        assert said in explained
        assert said in page


@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up(name: str) -> None:
    found = plan(name)
    for p in (found.prediction, *(a.prediction for a in found.alternatives)):
        assert sum(step_parts(p).values()) == pytest.approx(p.step_s)
        assert sum(serial_parts(p).values()) == pytest.approx(p.serial_s)
        assert min(step_parts(p).values()) >= -1e-6 * p.step_s
        assert sum(p.memory.by_category().values()) == p.memory.total_bytes
    tree = module_tree(PlanFacts(found))
    total, p = tree.total, found.prediction
    assert total.compute_s == pytest.approx(p.compute_s)
    assert total.communication_s == pytest.approx(p.communication_s)
    assert total.sent_bytes == pytest.approx(p.communication_bytes)
    assert total.stored_bytes == p.memory.parameters_bytes
    for _, _, module in tree.walk():
        inside = (module.own, *(child.total for child in module.children))
        for whole, *parts in zip(module.each, *inside, strict=True):
            assert whole == pytest.approx(sum(parts))


def rows_of_modules(explained: str) -> list[tuple[int, list[str]]]:
    """Depths and cells of the table of modules."""
    table = explained.split("\nModules\n")[1].split("\n\n")[0].split("\n")
    start = next(i for i, line in enumerate(table) if line.startswith("  module "))
    rows = [line for line in table[start + 1 :] if " differs from " not in line and " further inside" not in line]
    return [((len(row) - len(row.lstrip()) - 2) // 2, re.split(r"\s{2,}", row.strip())) for row in rows]


UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def number(text: str) -> float:
    value, _, unit = text.partition(" ")
    return float(value) * UNITS.get(unit, 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_the_shown_rows_add_up_to_the_row_above_them(name: str) -> None:
    """As they are written, of all repeats together: the parts of a module are the module, the modules are the plan."""
    rows = rows_of_modules(str(PlanReport(plan(name), depth=9)))
    p = plan(name).prediction
    assert rows[0][1][-3:] == [seconds(p.compute_s), seconds(p.communication_s), size(p.memory.parameters_bytes)]
    num_checked = 0
    for at, (depth, cells) in enumerate(rows):
        below = []
        for inner, other in rows[at + 1 :]:
            if inner <= depth:
                break
            below += [other] if inner == depth + 1 else []
        for column in (-3, -2, -1) if below else ():
            whole = number(cells[column])
            assert sum(number(c[column]) for c in below) == pytest.approx(whole, rel=0.01 * len(below)), cells
            num_checked += 1
    assert num_checked >= 3


def flat(module: Mapping[str, Any], times: int = 1) -> dict[str, tuple[str, str, str]]:
    """Modules of the page's data as the page shows them: seconds of compute, of communication, bytes stored."""
    times *= module["count"]
    own = (seconds(times * module["compute_s"]), seconds(times * module["communication_s"]),
           size(times * module["stored_bytes"]))  # fmt: skip
    found = {module["label"]: own}
    for child in module["children"]:
        found |= {f"{module['label']}/{key}": value for key, value in flat(child, times).items()}
    return found


def told(module: Module, times: int = 1) -> dict[str, tuple[str, str, str]]:
    times *= len(module.members)
    total = module.each.times(times)
    own = (seconds(total.compute_s), seconds(total.communication_s), size(total.stored_bytes))
    found = {module.label: own}
    for child in module.children:
        found |= {f"{module.label}/{key}": value for key, value in told(child, times).items()}
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_page_has_the_modules_of_explain(name: str) -> None:
    _, explained, page, data = read(name)
    tree = module_tree(PlanFacts(plan(name)))
    assert flat(data["tree"]) == told(tree)
    for _, times, module in tree.walk():
        total = module.each.times(times)
        assert module.label in page or module.label not in explained
        if f"\n  {module.label} " in explained or f" {module.label} (" in explained:
            assert seconds(total.compute_s + total.communication_s) in page
    assert data["modules_note"] in page
    assert data["modules_note"] in explained


def test_numbers_are_written_alike(tmp_path: Path) -> None:
    """The page's script has the units of `explain`, also where a number lies in the middle of two."""
    values = [0, 1e-12, 4e-9, 5.1e-9, 1e-7, 9.994e-6, 9.995e-6, 0.00125, 0.0999499, 0.09995, 0.5, 0.99949, 0.9995, 1.0,
              2.675, 59.95, 99.95, 100.5, 101.5, 1234.5, 1, 2, 511, 999, 999.5, 1000, 1005, 100_500_000, 101_500_000,
              12_345_678, 9.995e9, 3.3e12, 1e15, 3599.4, 3599.5, 3600, 3630, 3690, 110_557]  # fmt: skip
    shares = [0, 1e-9, 0.0009, 0.001, 0.00125, 0.0994, 0.0995, 0.125, 0.225, 0.5, 0.985, 0.99, 0.9901, 0.9999, 1]
    said = evaluated(plan("mlp"), tmp_path, f"[{values}.map(time), {values}.map(bytes), {shares}.map(percent)]")
    assert said == [list(map(seconds, values)), list(map(size, values)), list(map(percent, shares))]


# ---- beside others ----


def beside(base: Plan, *others: tuple[str, float, float]) -> Plan:
    """The plan with alternatives: names, steps as multiples of its own, and shares of the memory of a device."""

    def other(name: str, factor: float, share: float) -> Alternative:
        memory = replace(base.prediction.memory, activations_bytes=0)
        rest = round(share * base.cluster.device.memory_bytes) - memory.total_bytes
        memory = replace(memory, activations_bytes=rest)
        prediction = replace(base.prediction, step_s=factor * base.prediction.step_s, memory=memory)
        return Alternative(name, base.mesh, prediction, share <= 0.9)

    return replace(base, alternatives=tuple(other(*entry) for entry in others))


def test_who_is_faster_is_said_of_what_fits(tmp_path: Path) -> None:
    base = found = plan("mlp")
    step = seconds(base.prediction.step_s)
    cases: list[tuple[list[tuple[str, float, float]], tuple[str, str]]] = [
        ([], ("not compared", "no other plan was tried")),
        ([("ZeRO-3", 0.9, 1.2)], ("nothing else fits", "the only other plan, ZeRO-3, needs ")),
        ([("ZeRO-3", 0.9, 0.95)], ("nothing else fits", "the only other plan, ZeRO-3, needs ")),
        ([("ZeRO-3", 0.9, 1.2), ("ZeRO-2", 0.9, 1.1)],
         ("nothing else fits", "none of 2 other plans does; the smallest, ZeRO-2, needs ")),
        ([("ZeRO-3", 0.9, 1.2), ("ZeRO-2", 1.25, 0.5)],
         ("25 % faster", "than the best plan by hand that fits: ZeRO-2")),
        ([("search on [x=8]", 0.9, 0.5), ("ZeRO-2", 1.25, 0.5)],
         ("11 % slower", "than the best other plan that fits: search on [x=8]")),
        ([("search on [x=8]", 1.1, 0.5), ("ZeRO-2", 0.9, 1.5)],
         ("10 % faster", "than the best other plan that fits: search on [x=8]")),
        ([("ZeRO-3", 1.0, 0.5)], ("the same", f"as the best plan by hand that fits: ZeRO-3, {step}")),
    ]  # fmt: skip
    for others, (headline, text) in cases:
        found = beside(base, *others)
        said = standing(found)
        assert said.headline == headline
        assert said.text.startswith(text)
        joined = " " if text.startswith(("as ", "than ")) else ": "  # "nothing else fits: the only other plan …"
        assert f"beside others   {headline}{joined}{text}" in str(PlanReport(found))
    assert " ".join(standing(found)) in text_of(found, tmp_path)


def test_what_does_not_fit_is_not_said_to_be_faster(tmp_path: Path) -> None:
    found = beside(plan("mlp"), ("ZeRO-3", 0.9, 1.2), ("ZeRO-2", 0.8, 0.95), ("hybrid", 2.5, 0.5), ("data", 11, 0.5))
    said = {a.name: (memory_verdict(found, a), *Beside.alternative(found, a)) for a in found.alternatives}
    over = {a.name: size(a.prediction.memory.total_bytes - usable_bytes(found)) for a in found.alternatives}
    assert said == {
        "ZeRO-3": ("does not fit", "", f"does not fit, {over['ZeRO-3']} too much"),
        "ZeRO-2": ("may not fit", "", f"may not fit, {over['ZeRO-2']} too much"),
        "hybrid": ("fits", "2.5 × slower", ""),
        "data": ("fits", "11.0 × slower", "absurd"),
    }
    explained, page = str(PlanReport(found)), text_of(found, tmp_path)
    assert "11 % faster" not in explained + page
    assert "25 % faster" not in explained + page
    for name, (_, faster, remark) in said.items():
        row = next(line for line in explained.split("\n") if line.startswith(f"  {name} "))
        assert faster in row
        assert row.endswith(remark)
        assert faster in page
        assert remark in page
    assert faster_or_slower(154.4, 1.0) == "154 × slower"


def test_a_plan_that_does_not_fit_says_so_on_the_page(tmp_path: Path) -> None:
    found = plan("mlp")
    tight = replace(found.cluster.device, memory_bytes=found.prediction.memory.total_bytes // 2)
    found = replace(
        found,
        cluster=replace(found.cluster, device=tight),
        prediction=replace(found.prediction, device_bytes=tight.memory_bytes),
    )
    assert "does not fit" in text_of(found, tmp_path)
    assert standing(beside(found, ("ZeRO-3", 2.0, 0.5)))[0] == "does not fit"


def test_estimates_are_marked(tmp_path: Path) -> None:
    found = beside(plan("mlp"), ("ZeRO-3", 1.5, 0.5), ("ZeRO-2", 20, 0.5))
    assert "estimated: of one block" not in str(PlanReport(found))
    found = replace(found, alternatives=tuple(replace(a, estimated=True) for a in found.alternatives))
    assert [Beside.alternative(found, a).remark for a in found.alternatives] == ["estimated", "absurd, estimated"]
    assert standing(found).text.endswith(", estimated")
    explained, page = str(PlanReport(found)), text_of(found, tmp_path)
    assert "estimated: of one block for all that are equal; the others are of the whole graph" in explained
    assert "absurd, estimated" in page
    assert [a["estimated"] for a in found.to_json()["alternatives"]] == [True, True]


# ---- folds that differ ----


def test_two_folds_say_in_what_they_differ() -> None:
    tree = module_tree(PlanFacts(plan("large")))
    folds = {m.label: m.differs for _, _, m in tree.walk() if len(m.members) > 1}
    assert folds == {"layers.0–31": "", "layers.32–47": "from layers.0–31: made again in backward"}
    _, explained, page, _ = read("large")
    assert "layers.32–47 differs from layers.0–31: made again in backward" in explained
    assert "differs from layers.0–31: made again in backward" in page


# ---- microbatches, lifetimes of gathered weights, what is made again ----


def test_how_a_step_is_run_is_said_alike() -> None:
    found = plan("timed")
    file, explained, page, data = read("timed")
    facts = PlanFacts(found)
    way = "4 microbatches, each of 16 of the batch's 64; made again in backward: all of layers.4–5 (2 of 6 blocks)"
    way += "; changes of layout in 2 pieces beside products"
    assert data["way"] == way
    step_by_step = str(TimelineReport(found, plan_timeline(found, found.execution)))
    for said_there in (explained, page, step_by_step):
        assert way in said_there
        assert "mb=4" not in said_there  # they are no devices
    for said_there in (explained, step_by_step):
        assert "mesh [dp=8, tp=8]" in said_there
    assert dict(zip(*file["mesh"].values(), strict=True)) == {"mb": 4, "dp": 8, "tp": 8}
    assert file["execution"]["recompute"] == {block: mode for block, (_, mode) in TIMED.items()}
    assert "over one device" not in explained + page
    assert data["precision"]["text"] in explained
    assert data["precision"]["text"] in page
    for gathered in data["gathered"]:
        stored, whole = size(gathered["stored_bytes"]), size(gathered["gathered_bytes"])
        row = rf"\n +{gathered['count']} +{gathered['where']} +{re.escape(gathered['name'])} +dp .* {stored} +{whole}\n"
        assert re.search(row, explained), gathered
        assert f"{gathered['name']}: {gathered['words']}" in explained
        assert gathered["words"] in page
        assert f"{stored} {whole}" in page
    assert sum(g.count for g in facts.gathered) == facts.axes[1].num_weights["gathered"] == 1 + 3 * len(TIMED)
    expected = Counter(TIMED.get(p.module, ("zero-1",))[0] for p in facts.parameters.values())
    assert facts.axes[1].num_gathered == expected
    assert {zero: sum(g.count for g in facts.gathered if g.zero == zero) for zero in expected} == expected


def test_a_collective_is_counted_as_often_as_its_lifetime_says() -> None:
    """And what is sent is that often seven eighths of the whole, as in any ring of eight."""
    found = plan("timed")
    counts: dict[Zero, tuple[int, int]] = {"zero-1": (1, 1), "zero-2": (1, 4), "kept": (4, 4), "zero-3": (8, 4)}
    facts = PlanFacts(found)
    traffic = {(t.num_forward, t.num_backward): t for t in facts.traffic if t.what == "weight" and t.axis == "dp"}
    for zero, count in counts.items():
        gathered = [g for g in facts.gathered if g.zero == zero]
        assert traffic[count].count == sum(g.count for g in gathered)
        whole = sum(g.gathered_bytes for g in gathered)
        assert traffic[count].sent_bytes == pytest.approx(sum(count) * whole * 7 / 8)
    assert {count: move_text(t, found.mesh) for count, t in traffic.items()} == {
        (1, 1): "all-gathered once a step; gradients reduce-scattered once a step",
        (1, 4): "all-gathered once a step; gradients reduce-scattered in each microbatch",
        (4, 4): "all-gathered in each microbatch; gradients reduce-scattered in each microbatch",
        (8, 4): "all-gathered in each microbatch, again in its backward; gradients reduce-scattered in each microbatch",
    }
    again = [t for t in facts.traffic if t.what == "activation" and t.num_forward == 8]
    assert [(t.count, move_text(t, found.mesh).rpartition("; ")[2]) for t in again] == [
        (2, "the value again for backward")
    ]


@pytest.mark.parametrize("name", ["large", "timed"])
def test_what_it_costs_and_saves_to_make_it_again(name: str) -> None:
    found = plan(name)
    facts, own = PlanFacts(found), found.prediction
    kept = predict(found.graph, found.cluster, replace(found.execution, recompute="none"))
    (remade,) = facts.recomputation.remade
    assert remade.compute_s == pytest.approx(own.compute_s - kept.compute_s)
    assert remade.communication_s == pytest.approx(own.communication_s - kept.communication_s)
    assert remade.compute_s > 0
    _, explained, page, data = read(name)
    saved = size(kept.memory.total_bytes - own.memory.total_bytes)
    assert f"{seconds(kept.step_s)} a step and {size(kept.memory.total_bytes)} on each device" in data["saving"]
    assert data["saving"].endswith(f"costs {seconds(own.step_s - kept.step_s)} and saves {saved}")
    row = f"{remade.blocks} all {remade.num_operators} {seconds(remade.compute_s)} {seconds(remade.communication_s)}"
    for said_there in (explained, page):
        assert data["saving"] in said_there
        assert row in re.sub(" +", " ", said_there)
    assert PlanFacts(plan("mlp")).recomputation.without is None


def test_lifetimes_are_told_of_every_weight(tmp_path: Path) -> None:
    found = plan("timed")
    tree = module_tree(PlanFacts(found))
    assert {m.label: m.differs.partition(" (")[0] for _, _, m in tree.walk() if m.label.startswith("layers.")} == {
        "layers.0–1": "",
        "layers.2": "from layers.0–1: other lifetimes",
        "layers.3": "from layers.0–1: other lifetimes",
        "layers.4–5": "from layers.0–1: made again in backward; other lifetimes",
    }
    for block, name in (("layers.1", "ZeRO-1"), ("layers.3", r"ZeRO-3 \(kept\)"), ("layers.5", "ZeRO-3")):
        said = str(FoundReport(found, f"{block}.mlp.up.weight"))
        assert re.search(rf"\n  lifetime +{name}: gathered ", said)
    operator = str(FoundReport(found, "layers.5.norm.rms_norm"))
    assert re.search(r"on a device 2 × .* in each microbatch\n", operator)
    assert re.search(r"compute +\S+ \S+ a step, \S+ \S+ in each of 4 microbatches, made again in backward", operator)
    weights = evaluated(found, tmp_path, 'plan.rows.filter((r) => r.kind === "weight").map((r) => r.lifetime)')
    assert set(weights) == {"ZeRO-1", "ZeRO-2", "ZeRO-3 (kept)", "ZeRO-3"}
    assert "3 found" in text_of(found, tmp_path, "#q=(kept)")


def test_the_comparison_says_how_each_plan_is_run() -> None:
    found = plan("timed")
    file, explained, page, data = read("timed")
    explained, page = (re.sub(r"\s+", " ", text) for text in (explained, page))
    assert Plan.from_json(file, "plan.json").alternatives == found.alternatives
    rows = {row["name"]: row for row in data["alternatives"]}
    assert {row["num_microbatches"] for row in rows.values()} == {4}
    assert [rows[name]["lifetimes"] for name in ("ZeRO-3", "ZeRO-2", "data parallel")] == ["ZeRO-3", "ZeRO-2", ""]
    for other in file["alternatives"]:
        own = rows[other["name"]]
        told = " ".join(filter(None, (other["name"], own["mesh"], "4", own["lifetimes"], own["again"])))
        assert f"{told} {seconds(other['prediction']['step_s'])}" in explained
        assert told in page
    for said_there in (explained, page):
        assert "this plan [dp=8, tp=8] 4 ZeRO-1, ZeRO-2, ZeRO-3 (kept), ZeRO-3 by block" in said_there
    other = replace(found.alternatives[0], execution=Execution(recompute="selective"))
    assert Alternative.from_json(json.loads(json.dumps(other.to_json())), found.cluster) == other
    assert called(other) == f"{other.name}, selective recomputation"
    assert called(replace(other, name="ZeRO-3, full recomputation")) == "ZeRO-3, full recomputation"


def test_the_passes_of_a_step_add_up_to_it() -> None:
    for name, microbatches in (("timed", 4), ("large", 1)):
        found = plan(name)
        timeline = plan_timeline(found, found.execution)
        passes = step_passes(timeline)
        assert sum(p.total_s for p in passes) == pytest.approx(timeline.step_s)
        for direction in ("forward", "backward"):
            assert sum(p.num_alike for p in passes if p.name == direction) == microbatches
        assert (passes[0].name, passes[0].microbatches) == ("forward", "1")
        assert passes[-1].name == "end of the step"
    found = plan("timed")
    told = str(TimelineReport(found, plan_timeline(found, found.execution)))
    assert re.search(r"\n  forward +2–3 ", told)
    assert re.search(r"at the peak +\w+ of microbatch [1-4] of 4: ", told)
    moment = Names(found.graph).moment(found.prediction.peak_at)
    assert f"peak: {moment}" in str(PlanReport(found))
