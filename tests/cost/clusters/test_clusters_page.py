"""docs/clusters.md says what is so: its file loads, its examples run, its tables have every row with its figures."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import shardwright.cost
from shardwright.cost.clusters.cluster import Cluster, Level
from shardwright.cost.clusters.presets import GPUS, LINKS, PRESETS
from shardwright.cost.clusters.topology import LINK_KINDS, TOPOLOGIES
from shardwright.pcg.errors import ClusterError

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "clusters.md").read_text(encoding="utf-8")
SCHEMA = json.loads(
    (Path(shardwright.cost.__file__).parent / "clusters" / "cluster.schema.json").read_text(encoding="utf-8")
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_file() -> None:
    (text,) = blocks("json")
    jsonschema.validate(json.loads(text), SCHEMA)
    cluster = Cluster.from_json(json.loads(text))
    assert cluster.num_devices == 128
    assert cluster.levels[1].topology == "torus"


def test_the_examples() -> None:
    found: dict[str, Any] = {"Cluster": Cluster, "Level": Level}
    ways, pods, schedules = blocks("python")
    exec(pods, found)
    sites = found["sites"]
    assert isinstance(sites, Cluster)
    assert [level.size for level in sites.levels] == [8, 32, 8, 2]
    assert all(hasattr(Cluster, name) for name in re.findall(r"Cluster\.(\w+)\(", ways))
    assert all(hasattr(Cluster, name) for name in re.findall(r"cluster\.(\w+)\(", schedules))


def test_the_tables() -> None:
    assert all(f"`{word}`" in PAGE for word in (*TOPOLOGIES, *LINK_KINDS))
    for name, machine in PRESETS.items():
        link, network = LINKS[GPUS[machine.gpu].link], LINKS[machine.network]
        row = (
            f"| `{name}` | {machine.gpus} {machine.gpu} | {link.name} {link.topology}, "
            f"{GPUS[machine.gpu].link_gb_per_s:g}{', two processors' if machine.sockets == 2 else ''} | "
            f"{network.topology}, {machine.network_gb_per_s:g}"
        )
        assert row in PAGE
    for name, gpu in GPUS.items():
        assert f"| {name} | {gpu.memory_gib:g} | {gpu.memory_tb_per_s:g} | {gpu.tflops['fp32']:g} | " in PAGE
        shares = (gpu.memory_share, gpu.attention_efficiency, gpu.matmul_efficiency)
        assert f"| {' | '.join(f'{share:g}' for share in shares)} | {gpu.source} |" in PAGE


def test_the_errors() -> None:
    """Each line of the page is an error that the library gives."""
    data = json.loads(blocks("json")[0])
    lines: list[str] = []
    for field, value in (("bandwidth_bytes_per_s", 0), ("dims", [4, 3])):
        wrong = json.loads(json.dumps(data))
        wrong["levels"][1][field] = value
        lines.append(_message(lambda wrong=wrong: Cluster.from_json(wrong, "cluster.json")))
    lines.append(_message(lambda: Cluster.preset("dgx-h100", 4).part(range(3, 3))))
    assert "```\n" + "\n".join(lines) + "\n```" in PAGE


def _message(call: Callable[[], object]) -> str:
    with pytest.raises(ClusterError) as caught:
        call()
    return str(caught.value)
