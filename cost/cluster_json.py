"""Reading cluster files: every mistake is named by its place, such as `cluster.json: levels[1].latency_s`.

`cluster.schema.json` beside this file says the same as a JSON Schema, for editors and other programs; a test holds the
two together. Fields that have a default may be left out. Version 1 had no kinds of links: there, a level's name says.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from shardwright.cost import checks
from shardwright.cost.cluster import FORMAT, VERSION, Cluster, CollectiveLine
from shardwright.cost.device import Device
from shardwright.cost.topology import LINK_KINDS, Level
from shardwright.pcg.errors import ClusterError

_Part = TypeVar("_Part", Device, Level, CollectiveLine)
_VERSIONS = (1, VERSION)
_KIND_OF_NAME = {**{kind: kind for kind in LINK_KINDS}, "xgmi": "nvlink", "rank": "host"}  # in files of version 1


def load_cluster(path: Path) -> Cluster:
    """The cluster in the JSON file at `path`; a `ClusterError` for anything but a good one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        advice = "check the path, or write one with Cluster.preset(...).save(path) or `shardwright calibrate`"
        raise ClusterError(f"{path}: no such cluster file; {advice}") from None
    except OSError as error:
        raise ClusterError(f"{path}: cannot read the cluster file ({error.strerror}); check the path") from error
    except UnicodeDecodeError:
        raise ClusterError(f"{path}: expected JSON text in UTF-8, got other bytes; is it a cluster file?") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        advice = "the file is truncated or edited wrongly; write it again or correct that line"
        raise ClusterError(f"{path}: line {error.lineno}: expected JSON, got: {error.msg}; {advice}") from None
    except RecursionError:
        raise ClusterError(f"{path}: expected a cluster, got JSON nested too deeply; write the file again") from None
    return read_cluster(data, str(path))


def read_cluster(data: object, source: str) -> Cluster:
    """The cluster in parsed JSON; `source` names it in errors."""
    if isinstance(data, dict) and "format" in data and data["format"] != FORMAT:
        raise ClusterError(f"{source}: format: expected {FORMAT!r}, got {data['format']!r}; is it a cluster file?")
    if isinstance(data, dict) and "version" in data and not _is_version(data["version"]):
        expected = " or ".join(map(str, _VERSIONS))
        advice = "use the release of Shardwright that wrote the file, or write it again with this one"
        raise ClusterError(f"{source}: version: expected {expected}, got {data['version']!r}; {advice}")
    required = ("format", "version", "name", "device", "levels", "backend", "provenance")
    top: dict[str, Any] = checks.json_object(data, source, required, ("collectives",))
    device = _read_part(Device, top["device"], source, "device")
    links = _with_kinds(top["levels"]) if top["version"] == 1 else top["levels"]
    levels = _read_parts(Level, links, source, "levels")
    collectives = _read_parts(CollectiveLine, top.get("collectives", []), source, "collectives")
    with checks.located(f"{source}: "):
        return Cluster(top["name"], device, tuple(levels), top["backend"], top["provenance"], tuple(collectives))


def _is_version(value: object) -> bool:
    return value in _VERSIONS and not isinstance(value, bool)


def _with_kinds(levels: object) -> object:
    """The levels of a file of version 1 with the kinds that their names stand for; what is no level is left alone."""
    if not isinstance(levels, list):
        return levels
    return [
        {"kind": _KIND_OF_NAME.get(level["name"], "network"), **level}
        if isinstance(level, dict) and isinstance(level.get("name"), str)
        else level
        for level in levels
    ]


def _read_parts(kind: type[_Part], value: object, source: str, name: str) -> list[_Part]:
    entries = checks.json_list(value, f"{source}: {name}", "objects")
    return [_read_part(kind, entry, source, f"{name}[{index}]") for index, entry in enumerate(entries)]


def _read_part(kind: type[_Part], value: object, source: str, place: str) -> _Part:
    required = [entry.name for entry in fields(kind) if entry.default is MISSING and entry.default_factory is MISSING]
    optional = [entry.name for entry in fields(kind) if entry.name not in required]
    entries: dict[str, Any] = checks.json_object(value, f"{source}: {place}", required, optional)
    with checks.located(f"{source}: {place}."):
        return kind(**entries)
