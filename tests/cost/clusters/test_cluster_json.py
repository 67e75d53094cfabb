"""Cluster files: round trips, every mistake named by its place, and agreement with the published schema."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright.cost
from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster, CollectiveLine
from shardwright.cost.clusters.device import PRECISIONS, Device
from shardwright.cost.clusters.presets import PRESETS
from shardwright.cost.clusters.topology import LINK_KINDS, TOPOLOGIES, Level
from shardwright.cost.compute.kernels import Kernel
from shardwright.pcg.errors import ClusterError
from shardwright.pcg.optable import ROWS
from tests.each import each

SCHEMA = json.loads(
    (Path(shardwright.cost.__file__).parent / "clusters" / "cluster.schema.json").read_text(encoding="utf-8")
)

jsonschema.Draft202012Validator.check_schema(SCHEMA)  # once
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

positive = st.floats(min_value=1e-15, max_value=1e18)
by_operator = st.dictionaries(st.sampled_from(sorted(ROWS)), st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=3)
names = st.text(min_size=1).filter(lambda text: bool(text.strip()))
devices = st.builds(
    Device,
    name=names,
    memory_bytes=st.integers(1, 2**60),
    memory_bytes_per_s=positive,
    flops_per_s=st.dictionaries(st.sampled_from(PRECISIONS), positive).map(lambda rates: {"fp32": 1e12, **rates}),
    matmul_efficiency=st.floats(0.01, 1),
    op_overhead_s=st.floats(0, 1),
    kind=st.just("cuda"),
    operators=by_operator,
    paces=by_operator,
    first_uses=by_operator,
)


@st.composite
def levels(draw: st.DrawFn) -> Level:
    topology = draw(st.sampled_from(TOPOLOGIES))
    dims = tuple(draw(st.lists(st.integers(1, 16), min_size=1, max_size=3))) if topology in ("torus", "mesh") else ()
    size = math.prod(dims) if dims else draw(st.integers(1, 4096))
    kind, ratio = draw(st.sampled_from(LINK_KINDS)), draw(st.floats(1, 100))
    return Level(draw(names), size, draw(positive), draw(st.floats(0, 1)), kind, topology, ratio, dims)


lines = st.builds(
    CollectiveLine,
    collective=st.sampled_from(COLLECTIVES),
    group_size=st.integers(2, 64),
    latency_s=st.floats(0, 1),
    s_per_byte=positive,
    fit_error=st.none() | st.floats(0, 2),
)


@st.composite
def mixed_clusters(draw: st.DrawFn) -> Cluster:
    """Two parts of one structure and a level of both."""
    inside = draw(levels())
    pair = [Cluster(draw(names), draw(devices), (inside, draw(levels())), "gloo", draw(names)) for _ in range(2)]
    nodes = sum(cluster.levels[1].size for cluster in pair)
    return Cluster.join(pair, Level(draw(names), nodes, draw(positive), draw(st.floats(0, 1))), draw(names))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    stack = tuple(draw(st.lists(levels(), min_size=1, max_size=3)))
    measured = tuple(draw(st.lists(lines, max_size=3))) if len(stack) == 1 else ()
    return Cluster(draw(names), draw(devices), stack, draw(st.sampled_from(["nccl", "gloo"])), draw(names), measured)


def two_levels() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(Cluster.preset("dgx-h100", nodes=4).to_json()))
    return data


def changed(path: list[str | int], value: object) -> dict[str, Any]:
    """A good cluster with one entry replaced."""
    data: Any = two_levels()
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return data


def without(path: list[str | int]) -> dict[str, Any]:
    """A good cluster with one entry removed."""
    data: Any = two_levels()
    place = data
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return data


def test_files_of_version_1() -> None:
    """Kinds of links came with version 2; before, names said them."""
    names = {
        "nvlink": "nvlink",
        "xgmi": "nvlink",
        "pcie": "pcie",
        "network": "network",
        "rank": "host",
        "own": "network",
    }
    for name, kind in names.items():
        data = two_levels() | {"version": 1}
        link = {"name": name, "size": 2, "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6}
        VALIDATOR.validate(data | {"levels": [link]})
        assert Cluster.from_json(data | {"levels": [link]}).levels == (Level(name, 2, 1e9, 1e-6, kind),)  # type: ignore[arg-type]
    written = Cluster.from_json(two_levels() | {"version": 1}).to_json()
    assert written["version"] == 2


@given(clusters() | mixed_clusters())
@settings(max_examples=50)
def test_round_trip(cluster: Cluster) -> None:
    data = json.loads(json.dumps(cluster.to_json()))
    assert Cluster.from_json(data) == cluster
    VALIDATOR.validate(data)


def test_files(tmp_path: Path) -> None:
    cluster = Cluster.preset("aws-p5", nodes=2)
    path = tmp_path / "new" / "cluster.json"
    cluster.save(path)
    assert Cluster.load(path) == cluster
    assert list(path.parent.iterdir()) == [path]


LEVEL = ["levels", 1]
ERRORS = [
    (
        changed([*LEVEL, "bandwidth_bytes_per_s"], -3),
        "c.json: levels[1].bandwidth_bytes_per_s: expected a positive number, got -3; give it in bytes per second",
    ),
    (
        changed([*LEVEL, "bandwidth_bytes_per_s"], "4e9"),
        "c.json: levels[1].bandwidth_bytes_per_s: expected a positive number, got '4e9'; give it in bytes per second",
    ),
    (
        changed([*LEVEL, "size"], 2.5),
        (
            "c.json: levels[1].size: expected a positive integer, got 2.5; it is how many units of the level below "
            "this level joins"
        ),
    ),
    (
        changed(["device", "flops_per_s", "fp32"], 0),
        "c.json: device.flops_per_s.fp32: expected a positive number, got 0; give it in FLOP per second",
    ),
    (
        changed(["name"], 7),
        "c.json: name: expected a non-empty string, got 7; it is what people call the cluster",
    ),
    (
        without(["device", "kind"]),
        (
            "c.json: device: missing field 'kind', got 'name', 'memory_bytes', 'memory_bytes_per_s', 'flops_per_s', "
            "'matmul_efficiency', 'op_overhead_s', 'attention_efficiency', 'attention_backward_efficiency', "
            "'vector_flops_per_s', 'num_units', 'kernel_s', 'update_overhead_s', 'step_overhead_s', 'put_off_s', "
            "'host_bytes_per_s', 'context_bytes', 'operators', 'kernels', 'paces', 'first_uses'; add it"
        ),
    ),
    (
        without(["backend"]),
        (
            "c.json: missing field 'backend', got 'format', 'version', 'name', 'device', 'levels', 'provenance', "
            "'collectives'; add it"
        ),
    ),
    (
        changed([*LEVEL, "latency_us"], 4),
        (
            "c.json: levels[1]: unknown field 'latency_us'; remove it or correct it to one of 'name', 'size', "
            "'bandwidth_bytes_per_s', 'latency_s', 'kind', 'topology', 'oversubscription', 'dims'"
        ),
    ),
    (
        changed(["topology"], "torus"),
        (
            "c.json: unknown field 'topology'; remove it or correct it to one of 'format', 'version', 'name', "
            "'device', 'levels', 'backend', 'provenance', 'collectives', 'parts', 'schedules'"
        ),
    ),
    (
        changed([*LEVEL, "topology"], "star"),
        (
            "c.json: levels[1].topology: expected one of 'switch', 'ring', 'mesh', 'pcie', 'rail', 'torus', "
            "'fat-tree', got 'star'; choose one of them"
        ),
    ),
    (
        changed([*LEVEL, "oversubscription"], 0.5),
        (
            "c.json: levels[1].oversubscription: expected a number of at least 1, got 0.5; give it in times what the "
            "level carries; 1 is a full network"
        ),
    ),
    (
        changed([*LEVEL, "topology"], "torus"),
        "c.json: levels[1].dims: expected the grid of the torus, got none; give dims whose product is 4",
    ),
    (
        changed([*LEVEL, "dims"], [2, 2]),
        ("c.json: levels[1].dims: expected none for topology 'rail', got [2, 2]; remove them or make it a 'torus'"),
    ),
    (changed(["levels"], {}), "c.json: levels: expected a list of objects, got {}"),
    (changed(["levels"], []), "c.json: levels: expected at least one level, got none; give the innermost first"),
    (
        changed(LEVEL, 8),
        (
            "c.json: levels[1]: expected an object with the fields 'name', 'size', 'bandwidth_bytes_per_s', "
            "'latency_s', got 8"
        ),
    ),
    (
        changed(["collectives"], [{"collective": "all_reduce"}]),
        "c.json: collectives[0]: missing field 'group_size', 'latency_s', 's_per_byte', got 'collective'; add it",
    ),
    (
        changed(["device", "kind"], "cpu"),
        "c.json: backend: expected 'gloo' for a device of kind 'cpu', got 'nccl'; NCCL moves data between GPUs only",
    ),
    (
        changed(["parts"], []) | {"device": None},
        (
            "c.json: device: expected an object with the fields 'name', 'memory_bytes', 'memory_bytes_per_s', "
            "'flops_per_s', 'matmul_efficiency', 'op_overhead_s', 'kind', got None"
        ),
    ),
    (
        changed(["parts"], [{"device": {}}]),
        (
            "c.json: unknown field 'device'; remove it or correct it to one of 'format', 'version', 'name', 'levels', "
            "'backend', 'provenance', 'collectives', 'parts', 'schedules'"
        ),
    ),
    (
        without(["device"]) | {"parts": [{"device": {}}]},
        "c.json: parts[0]: missing field 'levels', got 'device'; add it",
    ),
    (
        without(["device"]) | {"parts": [{"device": two_levels()["device"], "levels": []}]},
        "c.json: parts[0].levels: expected at least one level, got none; give the innermost first",
    ),
    (changed(["format"], "plan"), "c.json: format: expected 'shardwright-cluster', got 'plan'; is it a cluster file?"),
    (
        changed(["version"], 3),
        (
            "c.json: version: expected 1 or 2, got 3; use the release of Shardwright that wrote the file, or write it "
            "again with this one"
        ),
    ),
    (
        [1, 2],
        (
            "c.json: expected an object with the fields 'format', 'version', 'name', 'device', 'levels', 'backend', "
            "'provenance', got [1, 2]"
        ),
    ),
]


@each(("data", "message"), ERRORS, ids=[message[8:60] for _, message in ERRORS])
def test_every_mistake_is_named_by_its_place(data: Any, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.from_json(data, "c.json")
    assert str(caught.value) == message
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(data)


def test_a_context_that_takes_all_memory() -> None:
    """Which no schema can tell: it would have to compare two fields."""
    data = changed(["device", "context_bytes"], 10**12)
    with pytest.raises(ClusterError) as caught:
        Cluster.from_json(data, "c.json")
    memory = f"less than the memory of {data['device']['memory_bytes']} bytes"
    expected = f"expected {memory}, got 1000000000000; correct the one or the other"
    assert str(caught.value) == f"c.json: device.context_bytes: {expected}"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "true", "null"])
def test_numbers_that_are_none(number: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    text = json.dumps(changed(["levels", 0, "bandwidth_bytes_per_s"], "here"))
    path.write_text(text.replace('"here"', number))
    with pytest.raises(ClusterError, match=r"cluster\.json: levels\[0\]\.bandwidth_bytes_per_s: expected a positive"):
        Cluster.load(path)


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    text = json.dumps(two_levels())
    for length in range(0, len(text), 7):
        path.write_text(text[:length])
        with pytest.raises(ClusterError, match=r"cluster\.json: line 1: expected JSON, got: .*; the file is truncated"):
            Cluster.load(path)


def _not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def _too_deep(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, r"no such cluster file; check the path, or write one with Cluster\.preset"),
        (lambda path: path.mkdir(), r"cannot read the cluster file \(Is a directory\); check the path"),
        (_not_text, r"expected JSON text in UTF-8, got other bytes; is it a cluster file\?"),
        (_too_deep, r"expected a cluster, got JSON nested too deeply"),
    ],
)
def test_what_is_no_cluster_file(make: Callable[[Path], object], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    make(path)
    with pytest.raises(ClusterError, match=rf"cluster\.json: {problem}"):
        Cluster.load(path)


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"cannot write the cluster file: .*; choose a writable path"):
        Cluster.preset("t4-box").save(tmp_path / "file" / "cluster.json")


def _paths(data: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else []
    return [found for key, value in entries for found in ((*path, key), *_paths(value, (*path, key)))]


KERNELS = (
    Kernel("matmul", (1, 2, 2, 2), 16.0, 48.0, "float32", seconds=1e-6),
    Kernel("copy", (64,), 0.0, 512.0, "float32", seconds=1e-6),
)
GOOD: list[dict[str, Any]] = [
    two_levels(),
    json.loads(
        json.dumps(
            Cluster(
                "cpu",
                Device("cpu", 10**9, 1e10, {"fp32": 1e11}, 0.9, 3e-6, "cpu", kernels=KERNELS),
                (Level("rank", 4, 1e9, 1e-4, "host", "torus", 1.5, (4,)),),
                "gloo",
                "test",
                (CollectiveLine("all_gather", 4, 1e-4, 1e-9, 0.1), CollectiveLine("broadcast", 2, 1e-4, 1e-9)),
            ).to_json()
        )
    ),
]
GOOD.append(json.loads(json.dumps(Cluster.mixed([("dgx-h100", 1), ("dgx-a100", 2)]).to_json())))
ODD = [0, 1, -1, 0.5, 2.0, 1e400, True, False, None, "", " ", "x", "cpu", "gloo", "nccl", [], {}, [1], {"x": 1}]
CHANGES = [
    (index, path)
    for index, data in enumerate(GOOD)
    for path in _paths(data)
    if path[:2] != ("parts", 1) or len(path) == 2  # has the fields of the first part
]


def _changes() -> list[tuple[str, Any]]:
    cases: list[tuple[str, Any]] = []
    for index, path in CHANGES:
        for number, value in enumerate([*ODD, "remove", "add", "repeat"]):
            data: Any = copy.deepcopy(GOOD[index])
            place = data
            for step in path[:-1]:
                place = place[step]
            if number < len(ODD):
                place[path[-1]] = value
            elif value == "remove":
                del place[path[-1]]
            elif isinstance(place, list):
                place.append(copy.deepcopy(place[0]) if value == "repeat" else 1)
            else:
                place[f"{path[-1]}_"] = 1
            cases.append((f"{path} {value!r}", data))
    return cases


def _is_beyond_schemas(data: Any) -> bool:
    """A grid of other than `size` units, parts of other than all devices, or a context that takes all memory."""
    try:
        devices = [part["device"] for part in data.get("parts", [])] or [data["device"]]
        if any(device["context_bytes"] >= device["memory_bytes"] for device in devices):
            return True
        joined = math.prod(level["size"] for level in data["levels"])
        parts = [math.prod(level["size"] for level in part["levels"]) for part in data.get("parts", [])]
        return bool(parts and sum(parts) != joined) or any(
            level.get("dims") and math.prod(level["dims"]) != level["size"] for level in data["levels"]
        )
    except (AttributeError, KeyError, TypeError):
        return False


def test_validator_and_schema_agree() -> None:
    """On every field of two clusters, replaced by every odd value, removed, added to or repeated."""
    disagree: list[str] = []
    for change, data in _changes():
        try:
            Cluster.from_json(data)
            good = True
        except ClusterError:
            good = False
        beyond_schemas = "inf" in change or _is_beyond_schemas(data)  # no such number in JSON; no sums of fields
        if good != VALIDATOR.is_valid(data) and not beyond_schemas:
            disagree.append(change)
    assert not disagree


@each("name", PRESETS)
def test_presets_fit_the_schema(name: str) -> None:
    VALIDATOR.validate(json.loads(json.dumps(Cluster.preset(name, nodes=2).to_json())))
