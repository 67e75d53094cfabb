"""The page: one small file that loads nothing, escapes what it shows, and whose script runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.browser import browser, findings, opened
from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.reports.plan import PlanReport
from shardwright.reports.units import seconds, size
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.view.page import page, write_page
from tests.search.graphs import blocks, cluster, every_choice, mlp
from tests.shardwright.page import evaluated, text_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Planner(cluster(4), every_choice).plan(
        mlp(layers=3), "Net", mesh=Mesh.of(dp=2, tp=2), roles=("data", "tensor")
    )


def data_of(text: str) -> dict[str, object]:
    match = re.search(r'<script type="application/json" id="plan">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_it_loads_nothing(plan: Plan) -> None:
    text = page(plan)
    assert not re.search(r"https?://|src=|@import|url\(|<link", text)
    assert "default-src 'none'" in text


def test_every_placeholder_is_filled(plan: Plan) -> None:
    assert not re.search(r"\{\{\w+\}\}", page(plan))


def test_it_carries_the_plan(plan: Plan) -> None:
    data = data_of(page(plan))
    assert data["model"] == "Net"
    assert data["fingerprint"] == plan.fingerprint
    assert len(page(plan)) < 112_000


def test_names_cannot_become_markup(plan: Plan) -> None:
    evil = "</script><script>alert(1)</script>{{data}}"
    text = page(replace(plan, model=evil))
    assert evil not in text
    assert data_of(text)["model"] == evil
    assert "<title>&lt;/script&gt;" in text


def test_a_page_that_cannot_be_written_is_an_error(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot write the page: No such file or directory"):
        write_page(plan, tmp_path / "nowhere" / "plan.html")
    assert list(tmp_path.iterdir()) == []


def test_the_script_runs(plan: Plan, tmp_path: Path) -> None:
    text = text_of(plan, tmp_path)
    for part in ("Predicted step", "dp · 2 devices · data parallel", "tp · 2 devices · tensor parallel", "layers",
                 "data parallel", "ZeRO-3", "tensor parallel 4", "all-reduce", "partial sums all-reduced"):  # fmt: skip
        assert part in text


def test_all_memory_is_drawn(tmp_path: Path) -> None:
    """The driver's part of a GPU's memory, too: the page says what `explain` says."""
    plan = Planner(Cluster.preset("dgx-h100", 1, 2), every_choice).plan(mlp(), "Net")
    text = text_of(plan, tmp_path)
    assert plan.prediction.memory.context_bytes > 0
    assert f"context {size(plan.prediction.memory.context_bytes)}" in text
    assert size(plan.prediction.memory.total_bytes) in text


def test_the_script_searches(plan: Plan, tmp_path: Path) -> None:
    assert re.search(r"\b[1-9]\d* found", text_of(plan, tmp_path, "#q=all-reduce&theme=dark"))
    assert "0 found" in text_of(plan, tmp_path, "#q=nosuchthing")


def test_every_parameter_is_found_by_its_whole_name(tmp_path: Path) -> None:
    """Though equal blocks are folded; and nothing else is."""
    planner = Planner(cluster(2, link_bytes_per_s=1e12), every_choice)
    found = planner.plan(blocks(layers=12), "Net", mesh=Mesh.of(dp=2), roles=("zero",))
    names = [str(n.attr("target")) for n in found.graph.leaves("parameter")]
    said = evaluated(found, tmp_path, f"{json.dumps(names)}.map((n) => [...byName(n)].map((i) => i.name))")
    assert said == [[name.rpartition(".")[2]] for name in names]
    assert "1 found" in text_of(found, tmp_path, "#q=Layers.11.mlp.up.weight")
    assert "1 found" in text_of(found, tmp_path, "#q=layers.11.norm")
    assert "0 found" in text_of(found, tmp_path, "#q=layers.12.mlp.up.weight")


def test_the_table_of_modules_fits_1280_pixels(tmp_path: Path) -> None:
    """With an axis of time and two of devices; the page's margins take 94 pixels."""
    planner = Planner(cluster(4), every_choice)
    found = planner.plan(mlp(), "Net", mesh=Mesh.of(mb=2, dp=2, tp=2), roles=("data", "tensor"))
    columns = evaluated(found, tmp_path, "treeColumns()")
    least = [int(pixels) for pixels in re.findall(r"(\d+)px", columns)]
    assert len(least) == 7  # two of them axes of devices
    assert sum(least) + 14 * (len(least) - 1) + 12 <= 1280 - 94


def in_browser(found: Plan, folder: Path, script: str, width: int = 1280) -> Any:
    """In a real browser, where there is one: the value of `answer` when a script has run in the page of a plan.

    Nothing is to be said on the console.
    """
    if browser() is None:
        pytest.skip("no Chromium to lay the page out: `make browser` installs it")
    answer, console = opened(page(found), folder, script, width)
    assert console == []
    return answer


def test_nothing_is_clipped_at_1280_pixels(tmp_path: Path) -> None:
    """With every module open: no element is narrower than what it holds."""
    planner = Planner(Cluster.preset("dgx-h100", 2), every_choice)
    found = planner.plan(blocks(32, 256, 12, 64), "Net", mesh=Mesh.of(mb=2, dp=4, tp=4), roles=("zero", "tensor"))
    script = """
      [...document.querySelectorAll("button")].find((b) => b.textContent === "open all").click();
      walk(root, (module) => { module.ownOpen = true; });
      drawTree(document.getElementById("tree"));
      const answer = [innerWidth, ...[...document.querySelectorAll("body *")]
        .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1)
        .map((e) => e.className + ":" + e.textContent)]"""
    assert in_browser(found, tmp_path, script) == [1280]


def test_long_layouts_have_room(tmp_path: Path) -> None:
    """Fused projections of large models are split in blocks such as S(0,16384)."""
    planner = Planner(Cluster.preset("dgx-h100", 2), every_choice)
    found = planner.plan(mlp(), "Net", mesh=Mesh.of(dp=2), roles=("zero",))
    script = """
      walk(root, (module) => {
        module.open = module.ownOpen = true;
        for (const row of module.rows) row.layouts[0] = "S(0,16384)";
      });
      document.getElementById("modules").replaceChildren();
      drawModules();
      const chips = [...document.querySelectorAll("#tree .chip")];
      const answer = [chips.length > 0, ...chips.map((e) => e.parentElement)
        .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)]"""
    assert in_browser(found, tmp_path, script) == [True]


def test_a_browser_draws_what_happens_over_time(tmp_path: Path) -> None:
    """The timeline, memory and parameters, and what is done with keys and with the mouse."""
    planner = Planner(Cluster.preset("dgx-h100", 1), every_choice)
    found = planner.plan(
        blocks(64, 2048, 6, 512), "Net", mesh=Mesh.of(dp=4), roles=("zero",), stages=2, microbatches=8, schedule="1f1b"
    )
    script = Path(__file__).with_name("browse.js").read_text(encoding="utf-8")
    answer = in_browser(found, tmp_path, script)
    step, names = seconds(found.prediction.step_s), list(found.graph.leaves("parameter"))
    assert answer["drawn"] == [True, True]
    assert f"the whole step, {step}" in answer["whole"]
    assert answer["other"] != answer["whole"]
    assert (answer["zoomed"], answer["dragged"]) == (True, True)
    label, block, when, microbatch = answer["tip"].splitlines()
    assert re.match(r"(mlp|norm)", label)
    assert re.fullmatch(r"layers\.[0-2]", block)
    assert re.fullmatch(r".+s, from .+ on", when)
    assert re.fullmatch(r"(forward|backward) of microbatch \d", microbatch)
    assert (answer["rows"], answer["sorted"]) == (1 + len(names), "bytes ↑")


def test_the_keyboard_zooms_where_the_time_goes(plan: Plan, tmp_path: Path) -> None:
    script = """
      const cells = () => [...document.querySelectorAll("#icicle .cell[tabindex]")];
      const told = document.getElementById("tip");
      const before = cells().length, answer = [before > 1, told.hidden];
      cells()[1].focus();
      answer.push(told.hidden, told.textContent.includes("of which communication"));
      const second = cells()[1].textContent;
      cells()[1].dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
      answer.push(cells().length < before, cells()[0].textContent === second);"""
    assert in_browser(plan, tmp_path, script) == [True, True, False, True, True, True]


def test_the_keyboard_opens_and_sorts_and_keeps_the_focus(plan: Plan, tmp_path: Path) -> None:
    """What is drawn anew has the focus where it was: else the next key would go to the top of the page."""
    script = """
      const focused = () => document.activeElement, answer = [];
      const press = (key) => { focused().dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })); say(); };
      const word = () => focused().textContent.trim().split(" ")[0];
      const say = () => answer.push(`${focused().getAttribute("aria-expanded") || ""} ${word()}`.trim());
      root.open = false;
      drawTree(at("tree"));
      document.querySelector("#tree [tabindex]").focus();
      ["Enter", "ArrowLeft", "ArrowRight", "ArrowDown", "ArrowUp", " "].forEach(press);
      for (const title of ["bytes", "name"]) {
        const titles = [...document.querySelectorAll("#parameters th button")];
        const button = titles.find((b) => b.textContent.startsWith(title));
        button.focus();
        button.click();
        say();
      }
      const colouring = [...document.querySelectorAll("#where button")].at(-1);
      colouring.focus();
      colouring.click();
      answer.push(focused().textContent, focused().getAttribute("aria-pressed"));"""
    answer = in_browser(plan, tmp_path, script)
    inner = answer[3]
    assert inner not in {"true ▾Net", "false ▸Net"}
    tree = ["true ▾Net", "false ▸Net", "true ▾Net", inner, "true ▾Net", "false ▸Net"]
    assert answer == [*tree, "bytes", "name", "colour by tp", "true"]


def test_names_lead_to_the_tree(tmp_path: Path) -> None:
    """From what is largest in memory, and from parameters: one operator has one name."""
    found = Planner(cluster(4), every_choice).plan(blocks(layers=12), "Net", mesh=Mesh.of(dp=4), roles=("zero",))
    script = """
      const answer = ["memory", "parameters"].map((id) => [...document.querySelectorAll(`#${id} .link`)].map((name) => {
        name.click();
        return [name.textContent, Number(at("hits").textContent.split(" ")[0])];
      }))"""
    memory, parameters = in_browser(found, tmp_path, script)
    assert {"mlp.up.weight", "mlp:relu"} <= {name for name, _ in memory}
    assert all(1 <= hits <= 2 for _, hits in memory), memory
    assert len(parameters) == len(list(found.graph.leaves("parameter")))
    assert {hits for _, hits in parameters} == {1}


def test_where_the_time_goes_has_the_rows_of_explain(plan: Plan, tmp_path: Path) -> None:
    """Also a 0 where nothing of what is sent is hidden."""
    script = """
      const answer = [...document.querySelectorAll("#step tr")].slice(1).map((row) =>
        [...row.children].filter((cell) => !cell.querySelector(".bar")).map((cell) => cell.textContent))"""
    told = next(p for p in PlanReport(plan).paragraphs() if p.title == "Where the time goes").rows
    assert any(row[-1] == "0" for row in told)
    assert in_browser(plan, tmp_path, script) == [list(row) for row in told]


def test_a_narrow_window_and_a_long_name_push_nothing_out_of_it(plan: Plan, tmp_path: Path) -> None:
    """Tables scroll within their section; a tip breaks its words, and begins within the window."""
    script = """
      const cell = at("icicle").firstChild, shownTip = at("tip");
      cell.dispatchEvent(new MouseEvent("mousemove", { clientX: 5, clientY: 5 }));
      shownTip.textContent = "self_attn.".repeat(60);
      const answer = [document.documentElement.scrollWidth <= innerWidth, shownTip.scrollWidth <= shownTip.clientWidth,
        shownTip.getBoundingClientRect().left >= 0]"""
    longer = replace(plan, model="Net" * 60)
    for width in (800, 500):
        assert in_browser(longer, tmp_path, script, width) == [True, True, True]


def test_a_browser_shows_the_numbers_of_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan in stages with others beside it; what the page lacks is told. `python -m bench.browser` has many."""
    if browser() is None:
        pytest.skip("no Chromium to lay the page out: `make browser` installs it")
    planner = Planner(Cluster.preset("dgx-h100", 1), every_choice)
    found = planner.plan(blocks(64, 2048, 6, 512), "Net", mesh=Mesh.of(dp=4), roles=("zero",), stages=2)
    (how,) = findings(found, tmp_path)
    assert re.fullmatch(r"\d+ kB, ready after \d+ ms", how)
    longer = replace(found, prediction=replace(found.prediction, step_s=1.01 * found.prediction.step_s))
    monkeypatch.setattr("bench.browser.page", lambda plan: page(found))
    *wrong, _ = findings(longer, tmp_path)
    assert [line.partition(" ")[0] for line in wrong] == ["1280", "1920"]
    assert all(seconds(longer.prediction.step_s) in line for line in wrong)


def test_the_script_runs_for_one_device(tmp_path: Path) -> None:
    text_of(Planner(cluster(1), every_choice).plan(mlp(), "Net"), tmp_path)
