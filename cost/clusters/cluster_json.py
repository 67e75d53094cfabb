"""Reading cluster files: every mistake is named by its place, such as `cluster.json: levels[1].latency_s`.

`cluster.schema.json` beside this file says the same as a JSON Schema, for editors and other programs; a test holds the
two together. Fields that have a default may be left out. Version 1 had no kinds of links: there, a level's name says.
"""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from shardwright.cost.clusters.cluster import FORMAT, VERSION, Cluster, ClusterPart, CollectiveLine
from shardwright.cost.clusters.device import Device, slowest_device
from shardwright.cost.clusters.schedules import read_schedules
from shardwright.cost.clusters.topology import LINK_KINDS, Level
from shardwright.pcg import checks
from shardwright.pcg.arguments import PATH
from shardwright.pcg.errors import ClusterError

_Kind = TypeVar("_Kind", Device, Level, CollectiveLine)
_VERSIONS = (1, VERSION)
_KIND_OF_NAME = {**{kind: kind for kind in LINK_KINDS}, "xgmi": "nvlink", "rank": "host"}  # in files of version 1


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read the cluster in the JSON file at `path`.

    Raises:
        ClusterError: the file is absent, truncated, or describes an impossible cluster.
    """
    PATH.check("Cluster.load(path=...)", path, ClusterError)
    try:
        text = Path(path).read_text(encoding="utf-8")
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


def read_cluster(data: object, source: str = "cluster") -> Cluster:
    """Return the cluster from its JSON form (`Cluster.to_json`); `source` names it in errors.

    Raises:
        ClusterError: naming the field, what was expected, what was found and what to do.
    """
    if isinstance(data, dict) and "format" in data and data["format"] != FORMAT:
        raise ClusterError(f"{source}: format: expected {FORMAT!r}, got {data['format']!r}; is it a cluster file?")
    if isinstance(data, dict) and "version" in data and not _is_version(data["version"]):
        expected = " or ".join(map(str, _VERSIONS))
        advice = "use the release of Shardwright that wrote the file, or write it again with this one"
        raise ClusterError(f"{source}: version: expected {expected}, got {data['version']!r}; {advice}")
    is_mixed = isinstance(data, dict) and bool(data.get("parts"))
    device_field = () if is_mixed else ("device",)
    required = ("format", "version", "name", *device_field, "levels", "backend", "provenance")
    top: dict[str, Any] = checks.json_object(data, source, required, ("collectives", "parts", "schedules"))
    parts = [_read_part(entry, place) for entry, place in _entries(top.get("parts", []), f"{source}: parts")]
    device = (
        slowest_device([part.device for part in parts]) if parts else _read(Device, top["device"], f"{source}: device")
    )
    links = _with_kinds(top["levels"]) if top["version"] == 1 else top["levels"]
    levels = _read_each(Level, links, f"{source}: levels")
    collectives = _read_each(CollectiveLine, top.get("collectives", []), f"{source}: collectives")
    schedules = read_schedules(top.get("schedules"), f"{source}: schedules")
    with checks.located(f"{source}: "):
        return Cluster(
            top["name"], device, levels, top["backend"], top["provenance"], collectives, tuple(parts), schedules
        )


def _is_version(value: object) -> bool:
    return value in _VERSIONS and not isinstance(value, bool)


def _with_kinds(levels: object) -> object:
    """Return the levels of a version 1 file with kinds derived from their names; non-levels are left alone."""
    if not isinstance(levels, list):
        return levels
    return [
        {"kind": _KIND_OF_NAME.get(level["name"], "network"), **level}
        if isinstance(level, dict) and isinstance(level.get("name"), str)
        else level
        for level in levels
    ]


def _read_part(value: object, place: str) -> ClusterPart:
    fields_of_part: dict[str, Any] = checks.json_object(value, place, ("device", "levels"))
    device = _read(Device, fields_of_part["device"], f"{place}.device")
    levels = _read_each(Level, fields_of_part["levels"], f"{place}.levels")
    with checks.located(f"{place}."):
        return ClusterPart(device, levels)


def _read_each(kind: type[_Kind], value: object, place: str) -> tuple[_Kind, ...]:
    return tuple(_read(kind, entry, place_of_entry) for entry, place_of_entry in _entries(value, place))


def _entries(value: object, place: str) -> list[tuple[object, str]]:
    return [(entry, f"{place}[{index}]") for index, entry in enumerate(checks.json_list(value, place, "objects"))]


def _read(kind: type[_Kind], value: object, place: str) -> _Kind:
    required = [entry.name for entry in fields(kind) if entry.default is MISSING and entry.default_factory is MISSING]
    optional = [entry.name for entry in fields(kind) if entry.name not in required]
    entries: dict[str, Any] = checks.json_object(value, place, required, optional)
    with checks.located(f"{place}."):
        return kind(**entries)
