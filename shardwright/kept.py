"""Captures that are kept in the cache folder: of a given plan, of other shapes, and of models of configs.

    plan, forward on tensors without data ──digest──▶ a file: the captured graph, how it compared with an eager step,
                                                      and the plan of another batch

A file is found by what decides its contents: the first plan, every operator that the forward calls and on what, this
code and torch's version. For a model of a config, which `shardwright plan` builds, the config and transformers' code
stand for the forward. It is data: the plan in it is checked as any plan file is, and proven again from the graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.files import cache_folder, write_whole
from shardwright.pcg.foreign import calls
from shardwright.pcg.graph import Graph
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.planning import Traced
from shardwright.search.plan import CaptureCheck, Plan, stored

if TYPE_CHECKING:
    from torch import nn

    from shardwright.pcg.capture.alike import ForwardTrace

MOST_FILES = 256
"""The number of captures that are kept: the ones that were made last."""


class StoredPlan(NamedTuple):
    """A plan, the first one or that of another batch, and the captured graph that it is of."""

    plan: Plan
    captured: Graph


def traced(model: nn.Module, batch: Mapping[str, Any], first: Plan) -> ForwardTrace | None:
    """Return what a model's forward calls for a batch; None where programs of it are not kept."""
    if first.execution.per_microbatch or calls(first.graph):
        return None
    from shardwright.pcg.capture.capture import trace_of  # captures of configs are found without torch

    return trace_of(model, batch, first.execution.precision)


def key_of(trace: ForwardTrace | None, first: Plan) -> str | None:
    """Return the name of the file for a batch of a model; None where it is not known what decides its contents."""
    forward = None if trace is None else trace.digest()
    if forward is None:
        return None
    plan = print_graph(first.graph), first.execution.to_json(), first.asked.to_json(), first.cluster.to_json()
    return _digest((forward, plan, version("torch"), _code()))


def find(key: str, first: Plan) -> StoredPlan | None:
    """Return what is kept under a name; None where nothing is, or where it is damaged."""
    try:
        record = json.loads(_path(key).read_bytes())
        plan = (
            Plan.from_json(record["plan"])
            if "plan" in record
            else replace(first, capture_check=_check(record["check"]))
        )
        made = StoredPlan(plan, parse_graph("\n".join(record["captured"])).validate())
    except (OSError, ValueError, LookupError, TypeError, ShardwrightError):
        return None
    return made if stored(made.plan.graph) == stored(first.graph) else None


def keep(key: str, made: StoredPlan, first: Plan) -> None:
    """Keep a captured graph, and its plan unless that is the first, which is given again.

    A folder that cannot be written is not an error: a later run makes them.
    """
    check = made.plan.capture_check
    is_first = made.plan.graph is first.graph
    record = {"check": check and check.to_json()} if is_first else {"plan": made.plan.to_json()}
    _write(key, record, made.captured)


def trace_key(facts: object) -> str:
    """Return the name of the file for a model's capture, which follows from these facts, this code and torch."""
    return _digest((facts, version("torch"), _code()))


def find_trace(key: str) -> Traced | None:
    """Return the captured model that is kept under a name; None where nothing is, or where it is damaged."""
    try:
        record = json.loads(_path(key).read_bytes())
        graph = parse_graph("\n".join(record["captured"])).validate()
        return Traced(record["model"], graph, record["precision"], tuple(record["per_microbatch"]))
    except (OSError, ValueError, LookupError, TypeError, ShardwrightError):
        return None


def keep_trace(key: str, traced: Traced) -> None:
    """Keep a captured model, if its graph says all of it: not where parts run as they are."""
    if isinstance(traced.precision, (str, NoneType)) and not calls(traced.graph):
        record = {"model": traced.model, "precision": traced.precision, "per_microbatch": traced.per_microbatch}
        _write(key, record, traced.graph)


def _write(key: str, record: Mapping[str, object], captured: Graph) -> None:
    """Write a file. A folder that cannot be written is not an error. Only the last files stay."""
    text = json.dumps({**record, "captured": print_graph(captured).splitlines()})
    with suppress(OSError, PlanError):
        write_whole(_path(key), text, "a program", PlanError, make_folder=True)
        files = sorted(_path(key).parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-MOST_FILES]:
            path.unlink(missing_ok=True)


def _check(record: Mapping[str, Any] | None) -> CaptureCheck | None:
    return None if record is None else CaptureCheck.from_json(record)


def _path(key: str) -> Path:
    return cache_folder() / "programs" / f"{key}.json"


@lru_cache(maxsize=1)
def _code() -> str:
    """Return a digest of the code that captures and plans, and that makes models of configs."""
    root = Path(__file__).resolve().parent
    folders = [(root / name).resolve() for name in ("pcg", "search", "cost", "substitutions", "verifier", "cli")]
    paths = (*root.glob("*.py"), *(path for folder in folders for path in folder.rglob("*")))
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in (".py", ".json")):
        digest.update(f"{path.name} {len(content := path.read_bytes())} ".encode())
        digest.update(content)
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
