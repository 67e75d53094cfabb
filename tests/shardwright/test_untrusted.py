"""Plan files and rule files are data from anyone: damaged or hostile ones are errors, and nothing in one is executed.

A mutant is a good file with one or two places changed: a value of another type, a text that would be code, a line gone.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwright.lowering.text.emit import emit
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.graph import Graph, Source
from shardwright.pcg.step.late import sink_reductions
from shardwright.reports.comparison import ComparisonReport
from shardwright.reports.plan import PlanReport
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.verifier.rulefile import read_rules
from shardwright.view.page import page
from tests.models import WHOLE_GRIDS
from tests.search.graphs import cluster, every_choice, mlp
from tests.verifier.test_rulefile import GOOD

CANARY = "canary"
CODE = (
    "a\n    canary()", '"""\ncanary()\n"""', "x'); canary() #", "canary()", "{canary}", "__import__('os').canary()",
    "torch.canary()", "a\u2028canary()", "a\rcanary()", "\x1b[2Jcanary()\x07", "\\", "'", '"', "a\\", "block 0",
    "mask 0", "leaf canary", "draw 1", "ℂanary", "class", "batch", "_", "0", "h_1x",
    "x", "exit",
)  # fmt: skip
"""Texts that would be code where they are pasted, that steer a terminal, or that the program uses itself."""
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 10**40, 1e308, -0.5, 0.5, math.nan, math.inf, "", " ", "R", "fp8", "4", [], {},
    [[]], ["a"], {"canary": "canary()"}, [1, 2, 3], [None], {"x": 0}, *CODE,
)  # fmt: skip
LITERALS = ("None", "True", "-1", "0", "7", "1e999", "nan", "()", "(1,)", "('x', 'y')", "''", "99999999999999999999",
            "(((((((((())))))))))", "(" * 5000 + ")" * 5000, "'float32'", "'S(0)'", "1.5")  # fmt: skip


def graph() -> Graph:
    """Blocks with sources, dropouts, an operator without a row, and attributes of many kinds."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 4, 8), "float32", "x")
    for i in range(2):
        weight = b.leaf(f"w{i}", "parameter", (8, 8), "float32", f"layers.{i}.up.weight", grad=True)
        scale = b.leaf(f"g{i}", "parameter", (8,), "float32", f"layers.{i}.norm.weight", grad=True)
        b.at("n", Source(f"layers.{i}.norm", "model.py:2"))
        y = b.op("rms_norm", x, scale, normalized_dims=1, eps=1e-6)
        b.at("h", Source(f"layers.{i}.up", "model.py:3"))
        y = b.op("gelu", b.op("linear", y, weight), approximate="none")
        y = b.op("dropout", y, p=0.5, seed=i)
        b.at("a", Source(f"layers.{i}", "model.py:4"))
        x = b.op("add", x, y)
    b.at("l", Source("", "model.py:5"))
    x = b.op("permute", b.op("cast", x, dtype="float32"), dims=(1, 0, 2))
    x = b.op("reshape", x, shape=(4, 64))
    attrs: dict[str, Any] = {"args": (("$", 0), 1), "kwargs": (), "shape": (4, 64), "dtype": "float32"}
    x = b.op("opaque", x, target="aten.triu.default", result=0, **attrs)
    return b.graph([("loss", b.op("sum", x, dims=(0, 1), keepdim=False))])


@cache
def good() -> tuple[tuple[Graph, dict[str, Any]], ...]:
    """Serial graphs, and plans of them as they are in files."""
    found = []
    for serial, links in ((graph(), 1e9), (mlp(64, 64, 256), 1e11)):
        planner = Planner(cluster(4, link_bytes_per_s=links), every_choice)
        mesh_of_plan = planner.plan(serial, "Model")
        found.append((serial, json.loads(json.dumps(mesh_of_plan.to_json()))))
    return tuple(found)


# ---- mutants ----


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value but the whole."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def change(data: Any, draw: random.Random) -> None:
    """One place of a JSON value gets another value, is removed, or is joined by something new."""
    *path, key = draw.choice(list(places(data)))
    parent = data
    for step in path:
        parent = parent[step]
    match draw.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[draw.choice(CODE)] = parent.pop(key)
        case 2:
            other = data
            for step in draw.choice(list(places(data))):
                other = other[step]
            parent[key] = copy.deepcopy(other)
        case 3 if isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[draw.randrange(len(parent))]))
        case _:
            parent[key] = draw.choice(ODD)


SOURCE, VALUE = re.compile(r"@[\w.]*(?: \([^)]*\))?"), re.compile(r"(?<==)(?:\([^{]*?\)(?=[,}])|'[^']*'|[\w.-]+)")


def renamed(lines: list[str], old: str, new: str) -> list[str]:
    return [re.sub(rf"{re.escape(old)}(?![\w.])", lambda _: new, line) for line in lines]


def change_text(lines: list[str], draw: random.Random) -> list[str]:
    """A graph of which one line, one name or one value is another."""
    number = draw.randrange(len(lines))
    line, text = lines[number], "\n".join(lines)
    match draw.randrange(10):
        case 0:
            other = draw.randrange(len(lines))
            lines[number], lines[other] = draw.choice((line, lines[other])), line
        case 1:
            return lines[:number] + draw.choice(([], [line, line])) + lines[number + 1 :]
        case 2:
            return renamed(lines, draw.choice(re.findall(r"%[\w.]+", text) or ["%"]), f"%{draw.choice(CODE)!r}")
        case 3 | 4:  # where nodes come from
            new = f"@{draw.choice(CODE) + draw.choice(('', '.0'))!r} ({draw.choice(CODE)!r})"
            return renamed(lines, draw.choice(SOURCE.findall(text) or ["@"]), new)
        case 5 | 6:
            if values := list(VALUE.finditer(line)):
                value = draw.choice(values)
                same = [v for v in VALUE.findall(text) if v[0] == value[0][0]]
                new = draw.choice((draw.choice(LITERALS), draw.choice(same or ["0"]), repr(draw.choice(CODE))))
                lines[number] = f"{line[: value.start()]}{new}{line[value.end() :]}"
        case 7:
            keys = sorted(set(re.findall(r"\w+(?==)", text))) or ["="]
            lines[number] = re.sub(rf"\b{draw.choice(keys)}=", f"{draw.choice(keys)}=", line)
        case 8:
            words = sorted({word for text in lines for word in re.findall(r"[\w.]+|[^\w\s]", text)})
            tokens = re.split(r"(\W)", line)
            tokens[draw.randrange(len(tokens))] = draw.choice(words)
            lines[number] = "".join(tokens)
        case _:
            at = draw.randrange(len(line) + 1)
            lines[number] = line[:at] + draw.choice(CODE) + line[at + draw.randrange(3) :]
    return lines


def rename_axis(plan: dict[str, Any], draw: random.Random) -> None:
    """The mesh's axis, wherever the file names it."""
    new = draw.choice((*CODE, "torch", "leaf", "F", "rt", "draw", "mb", "é"))
    (old,) = plan["mesh"]["names"]
    plan["mesh"]["names"] = [new]
    lines = [re.sub(rf"(?<=[\[(]){old}=", lambda _: f"{new}=", line) for line in plan["graph"]]
    plan["graph"] = renamed(lines, f"axis='{old}'", f"axis={new!r}")


def mutant(plan: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    found = copy.deepcopy(plan)
    if draw.random() < 0.03:
        rename_axis(found, draw)
    for _ in range(draw.choice((1, 1, 1, 2))):
        if draw.random() < 0.7 and isinstance(found.get("graph"), list):
            found["graph"] = change_text([str(line) for line in found["graph"]] or [""], draw)
        else:
            change(found, draw)
    return found


# ---- what is done with them ----


def uses(data: dict[str, Any], serial: Graph, dry: bool = True) -> int:
    """Everything that is done with a plan file short of a run; how many of these steps took it."""
    plan = Plan.from_json(json.loads(json.dumps(data)), "plan.json")
    steps: list[Callable[[], object]] = [
        lambda: check_plan(plan, serial, lambda node, *more: every_choice(node, *more) if node.row else frozenset()),
        lambda: prints(f"{PlanReport(plan)}{ComparisonReport({'plan.json': plan})}{plan!r}"),
        lambda: is_inert(page(plan)),
        lambda: runs_nothing(emit(sink_reductions(plan.graph).validate())),
        *([lambda: dry_run(plan.graph, 0, plan.execution)] if dry else []),
    ]
    return 1 + sum(allowed(step) for step in steps)


def allowed(step: Callable[[], object]) -> bool:
    try:
        step()
    except ShardwrightError as error:
        prints(str(error))
        return False
    return True


def prints(text: str, begins: str = "") -> None:
    assert text.startswith(begins), text
    assert all(c.isprintable() or c == "\n" for c in text), ascii(text)
    assert not re.search(r"\bNaN\b|\bnan [µm]?s\b", text), text


def is_inert(text: str) -> None:
    assert text.count("</script") == 2, "the data ends the script"
    assert "NaN" not in text.rpartition('type="application/json"')[2]


def runs_nothing(source: str) -> None:
    """The program only calls what the emitter writes."""
    for node in ast.walk(ast.parse(source)):
        assert not (isinstance(node, ast.Call) and ast.unparse(node.func) == CANARY), source
        assert not (isinstance(node, ast.Attribute) and node.attr == CANARY), source
        assert not isinstance(node, (ast.ClassDef, ast.Lambda, ast.Global, ast.While)), source
    compile(source, "program", "exec")


@pytest.mark.parametrize("seed", range(2))
def test_no_plan_file_is_code_or_a_crash(seed: int) -> None:
    """In which `seed` is also which of the plans is changed."""
    serial, plan = good()[seed]
    assert uses(plan, serial) == 6
    draw, taken = random.Random(seed), 0
    many = 800 if WHOLE_GRIDS else 80
    for number in range(many):
        data = mutant(plan, draw)
        start = time.perf_counter()
        try:
            taken += uses(data, serial, dry=number % 16 == 0) > 1
        except PlanError as error:
            prints(str(error), "plan.json: ")
        except Exception as error:
            raise AssertionError(f"mutant {number}: {difference(plan, data)}") from error
        assert time.perf_counter() - start < 5, f"mutant {number} took too long: {difference(plan, data)}"
    assert 0.075 * many < taken < 0.5 * many, f"{taken}: mutants are all alike"


def difference(plan: Any, other: Any, at: str = "") -> str:
    """Where a mutant differs, for a message."""
    if isinstance(plan, dict) and isinstance(other, dict):
        keys = {**plan, **other}
        return "; ".join(filter(None, (difference(plan.get(k), other.get(k), f"{at}.{k}") for k in keys)))
    if isinstance(plan, list) and isinstance(other, list) and at == ".graph":
        return "\n".join(f"{line!r}" for line in other if line not in plan) or "lines moved or gone"
    return "" if plan == other else f"{at}: {other!r}"[:500]


def test_no_rule_file_is_a_crash(tmp_path: Path) -> None:
    draw, path = random.Random(2), tmp_path / "rules.json"
    base = {"version": 1, "rules": copy.deepcopy(list(GOOD))}
    judged = 0
    for number in range(500):
        data = copy.deepcopy(base)
        for _ in range(draw.choice((1, 1, 2, 4))):
            change(data, draw)
        path.write_text(json.dumps(data))
        start = time.perf_counter()
        try:
            entries = read_rules(path).entries
            judged += len(entries)
            assert all((entry.rule is None) == bool(entry.problem) for entry in entries)
        except ShardwrightError as error:
            prints(str(error), str(path))
        except Exception as error:
            raise AssertionError(f"mutant {number}: {difference(base, data)}") from error
        assert time.perf_counter() - start < 5, f"mutant {number} took too long"
    assert judged > 1000
