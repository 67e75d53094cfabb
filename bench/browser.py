"""Pages of plans in a real browser: whether they show the numbers of `explain` and of the plan file, and how soon.

Chromium opens each page, 1280 and 1920 pixels wide, light and dark, with everything unfolded. Nothing may be asked of
the network or said on the console, nothing may be wider than what holds it, and every number with a unit that `explain`
prints has to be on the page: of the step and its parts, memory, stages, communication, weights and what is largest at
the peak. Of the plan file these are the step and the memory of the plan and of every other plan. Left out are shares
(the page draws them), notes on what is not listed, the parts of other plans' steps and memory (it draws those too), and
the table of modules, whose page is a tree of other parts.

    python -m bench.browser [NAME ...]    prints a table; 1 where a page lacks anything
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.entangled import Example
from bench.search import deepseek_v3, llama_8b, llama_70b, llama_405b
from examples.zoo import ZOO
from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.mesh import Mesh
from shardwright.reports.plan import PlanReport
from shardwright.reports.units import seconds, size
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified
from shardwright.view.page import page

UNFOLDED = """
  const ready_ms = performance.now();
  [...document.querySelectorAll("button")].filter((b) => b.textContent === "open all").forEach((b) => b.click());
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  const answer = {
    text: document.body.innerText,
    ready_ms,
    clipped: [...document.querySelectorAll("body *")]
      .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === "visible")
      .map((e) => `${e.tagName} ${e.className}: ${e.textContent.slice(0, 60)}`),
  };"""
_QUANTITY = re.compile(r"(?<![\w.])\d[\d.,]*\s(?:ns|µs|ms|s|min|h|B|kB|MB|GB|TB)(?![\w/])")
_ELSEWHERE = ("Modules", "Compared with", "Do not fit")
"""Paragraphs of `explain` that the page shows in another form."""


class Large(NamedTuple):
    """A plan for GPUs, by what is asked for."""

    build: Callable[[], Example]
    nodes: int
    asked: Mapping[str, Any]


LARGE: Mapping[str, Large] = {
    "Llama-8B": Large(llama_8b, 8, {}),
    "Llama-70B": Large(llama_70b, 32, {"mesh": Mesh.of(x=64, y=4)}),
    "Llama-70B, 8 stages": Large(llama_70b, 32, {"stages": 8, "mesh": Mesh.of(x=4, y=8)}),
    "Llama-405B, 16 stages": Large(llama_405b, 2048, {"stages": 16, "mesh": Mesh.of(x=128, y=8)}),
    "DeepSeek-V3": Large(deepseek_v3, 256, {"mesh": Mesh.of(x=8, y=256)}),
}


class Opened(NamedTuple):
    """The answer of a script in a page, and the lines on the console."""

    answer: Any
    console: Sequence[str]


def browser() -> str | None:
    """The program, where there is one."""
    return shutil.which("chromium")


def opened(text: str, folder: Path, script: str, width: int = 1280, link: str = "") -> Opened:
    """A page in a headless browser: the value of `answer` when a script has run in it."""
    put = f"<script>{script}; document.title = 'ANSWER ' + JSON.stringify(answer);</script>"
    target = folder / "plan.html"
    target.write_text(text.replace("</body>", put + "</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},2000"]
    address = target.as_uri() + (f"#{link}" if link else "")
    command = [browser() or "chromium", *options, "--dump-dom", f"--user-data-dir={folder / 'profile'}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (answer,) = re.findall(r"<title>ANSWER (.*?)</title>", done.stdout, re.DOTALL)
    return Opened(json.loads(html.unescape(answer)), [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def quantities(text: str) -> set[str]:
    """Numbers with units."""
    return {" ".join(found.split()) for found in _QUANTITY.findall(text)}


def said(plan: Plan) -> set[str]:
    """Return the quantities that the page of a plan has to show."""
    found = set[str]()
    for paragraph in PlanReport(plan).paragraphs():
        if not paragraph.title.startswith(_ELSEWHERE):
            rows = (cell for row in paragraph.rows for cell in row)
            found |= quantities("\n".join((paragraph.title, *paragraph.lines, *rows)))
    told = plan.to_json()  # of the file, which has the numbers whole
    for own in (told, *told["alternatives"]):
        prediction = own["prediction"]
        found |= quantities(f"{seconds(prediction['step_s'])}, {size(sum(prediction['memory'].values()))}")
    return found


def findings(plan: Plan, folder: Path) -> Iterator[str]:
    """Yield the faults of a plan's page. The last line says how large the page is and how soon it is there."""
    text, slowest = page(plan), 0.0
    for width, theme in ((1280, "light"), (1920, "dark")):
        answer, console = opened(text, folder, UNFOLDED, width, f"theme={theme}")
        yield from (f"{width} {theme}: {line}" for line in (*console, *answer["clipped"]))
        if lacks := sorted(said(plan) - quantities(answer["text"])):
            yield f"{width} {theme}: the page does not show {', '.join(lacks)}"
        slowest = max(slowest, answer["ready_ms"])
    yield f"{len(text.encode()) / 1e3:.0f} kB, ready after {slowest:.0f} ms"


def _plans(names: Sequence[str]) -> Iterator[tuple[str, Plan]]:
    certified = Certified()
    for name in names:
        torch.manual_seed(0)
        build, nodes, asked = LARGE.get(name) or Large(ZOO[name], 1, {})
        graph, cluster = capture(*build()).graph, Cluster.preset("dgx-h100", nodes=nodes)
        yield name, Planner(cluster, certified, rules=certified.by_name()).plan(graph, name, **asked)


def main(arguments: Sequence[str] | None = None) -> int:
    """Open them all; 1 where one lacks anything."""
    parser = argparse.ArgumentParser(prog="python -m bench.browser", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((*ZOO, *LARGE))}; by default all")
    options, bad = parser.parse_args(arguments), 0
    torch.set_num_threads(1)
    for name, plan in _plans(options.names or (*ZOO, *LARGE)):
        with tempfile.TemporaryDirectory() as folder:
            *wrong, how = findings(plan, Path(folder))
        bad += bool(wrong)
        print(f"{name}: {how}", *wrong, sep="\n    ", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
