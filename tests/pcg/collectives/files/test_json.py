"""Our own JSON, SCCL's and TACCL's, and ForestColl's trees: read and written, and every wrong field named."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from shardwright.cost.clusters.networks import PRESETS, preset_topology
from shardwright.cost.clusters.taccl import taccl_topology
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.files.documents import read_text
from shardwright.pcg.collectives.files.forestcoll import read_forest
from shardwright.pcg.collectives.files.own import read_schedule, read_topology, write_schedule, write_topology
from shardwright.pcg.collectives.files.sccl import read_sccl, read_sccl_topology
from shardwright.pcg.collectives.files.taccl import read_sketch, read_taccl_machine
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.errors import ShardwrightError
from shardwright.verifier.collectives import verify_schedule
from tests.each import each

MACHINE = {"name": "NDv2", "gpus_per_node": 8, "nics_per_node": 1, "alpha": 0.3, "node_betas_list": [23, 46],
           "node_invbws_list": [23, 46], "remote_invbw": 107, "remote_alpha": 2.6, "remote_beta": 105}  # fmt: skip
SKETCH = {"nnodes": 2, "intranode_sketch": {"strategy": "switch", "switches": [[0, 1], [2, 3]],
          "switch_hyperedge_strategy": ["uc-min", "uc-max"]},
          "internode_sketch": {"strategy": "relay", "internode_conn": {"0": [1], "2": [3]}, "enforce_ordering": True},
          "symmetry_offsets": [[4, 8]], "hyperparameters": {"input_chunkup": 2}}  # fmt: skip


def to(senders: object) -> dict[str, object]:
    """The sketch with these senders and receivers between machines."""
    return {**SKETCH, "internode_sketch": {"strategy": "relay", "internode_conn": senders}}


FOREST = """\
<Algo nchunkspernode="1">
  <tree root="(0, 'GPU', 0)" index="0" nchunks="1" height="1">
    <send src="(0, 'GPU', 0)" dst="(0, 'GPU', 1)" path="(0, 'GPU', 0),(0, 'NVSwitch', 0),(0, 'GPU', 1)"/>
    <send src="(0, 'GPU', 1)" dst="(0, 'GPU', 10)" path="(0, 'GPU', 1),(0, 'GPU', 10)"/>
  </tree>
  <tree root="(0, 'GPU', 1)" index="0" nchunks="1" height="1">
    <send src="(0, 'GPU', 1)" dst="(0, 'GPU', 0)" path=""/>
    <send src="(0, 'GPU', 1)" dst="(0, 'GPU', 10)" path=""/>
  </tree>
  <tree root="(0, 'GPU', 10)" index="0" nchunks="1" height="1">
    <send src="(0, 'GPU', 10)" dst="(0, 'GPU', 0)" path=""/>
    <send src="(0, 'GPU', 10)" dst="(0, 'GPU', 1)" path=""/>
  </tree>
</Algo>
"""


TREE = '<tree root="{0}" nchunks="65536"><send src="{0}" dst="{1}"/></tree>'
MANY = f"<Algo>{100 * (TREE.format(0, 1) + TREE.format(1, 0))}</Algo>"


def sccl(kind: str = "all_gather") -> str:
    """A ring of three ranks in SCCL's form, as its encoder writes it."""
    schedule = build("ring", kind, (3,))
    whole = schedule.collective
    chunks = [
        {"msccl_type": "chunk", "pre": list(pre), "post": list(chunk.targets), "addr": index}
        for index, chunk in enumerate(whole.chunks)
        for pre in (zip(chunk.sources) if whole.reduces else [chunk.sources])
    ]
    steps = [
        {"msccl_type": "step", "rounds": 1, "sends": [[t.chunk, t.src, t.dst] for t in step]} for step in schedule.steps
    ]
    links = [[int(src != dst) for src in range(3)] for dst in range(3)]
    data: dict[str, Any] = {
        "msccl_type": "algorithm", "name": "ring", "input_map": {}, "output_map": {}, "steps": steps,
        "instance": {"msccl_type": "instance", "steps": 2, "extra_rounds": 0, "chunks": 1},
        "collective": {"msccl_type": "collective", "name": "c", "nodes": 3, "chunks": chunks, "triggers": {}},
        "topology": {"msccl_type": "topology", "name": "t", "links": links, "switches": [[[0, 1], [2], 1, "nic"]]},
    }  # fmt: skip
    return json.dumps(data)


@each("name", PRESETS)
def test_topologies_come_back(name: str) -> None:
    topology = preset_topology(name)
    assert read_topology(write_topology(topology)) == topology


@each("kind", ["all_gather", "all_reduce", "broadcast", "all_to_all"])
def test_schedules_come_back(kind: str) -> None:
    schedule = build("direct" if kind == "all_to_all" else "ring", kind, (4,), 2)
    assert read_schedule(write_schedule(schedule)) == schedule
    uneven = Schedule("u", collective("gather", 2, weights=[2, 1]), (Transfer(0, 1, 0, 1, "copy", (7, 8)),), (3,))
    assert read_schedule(write_schedule(uneven)) == uneven


@each(
    ("field", "value", "problem"),
    [
        ("format", "plan", "s: format: expected one of shardwright-schedule, got 'plan'"),
        ("version", 2, "s: version: expected a whole number from 1 to 1, got 2"),
        ("kind", "sum", "s: kind: expected one of all_gather"),
        ("num_ranks", 0, "s: num_ranks: expected a whole number from 1 to 65536, got 0"),
        ("num_ranks", True, "got True"),
        ("reduces", 1, "s: reduces: expected true or false, got 1"),
        ("rounds", [1.5], r"s: rounds\[0\]: expected a whole number"),
        (
            "chunks",
            [["1/0", [0], [1]]],
            r's: chunks\[0\]\[0\]: expected a whole number or a fraction such as "3/8", got \'1/0\'',
        ),
        ("chunks", [[0.5, [0], [1]]], "got 0.5"),
        ("chunks", [["1/2", [0]]], r"s: chunks\[0\]: expected 3 to 3 entries, got 2"),
        ("chunks", [["1/2", [4], [1]]], r"s: chunks\[0\]\[1\]\[0\]: expected a whole number from 0 to 3, got 4"),
        ("chunks", {}, "s: chunks: expected a list, got an object of 0"),
        ("transfers", [[0, 0, 1, 0, "add"]], r"s: transfers\[0\]\[4\]: expected one of copy, reduce, got 'add'"),
        ("transfers", [[0, 0, 9, 0, "copy"]], "expected two ranks from 0 to 3, got 0 and 9"),
        ("name", 3, "s: name: expected text, got 3"),
        ("more", 3, "s: more: expected one of format, version"),
    ],
)
def test_wrong_schedules(field: str, value: object, problem: str) -> None:
    data = json.loads(write_schedule(build("ring", "all_gather", (4,)))) | {field: value}
    with pytest.raises(ShardwrightError, match=problem):
        read_schedule(json.dumps(data), "s")


@each(
    ("text", "problem"),
    [
        ('{"a": ', "s, line 1, column 7: expected JSON, got expecting value; is the file whole"),
        ('{"a": NaN}', "s: expected JSON, got the number NaN"),
        ('{"b": 1, "c": 1, "a": 1, "c": 2, "a": 2}', "the key 'c' twice in an object"),
        ('{"a": 1, "a": 2}', "s: expected JSON, got the key 'a' twice in an object"),
        ("[" * 100_000, "s: expected JSON, got nesting that is too deep"),
        ("[]", "s: expected an object, got a list of 0"),
        ("{}", "s: expected the key 'format', got 'none'"),
        ("9" * 5000, "s: expected JSON, got"),
    ],
    ids=lambda text: text[:20],
)
def test_wrong_documents(text: str, problem: str) -> None:
    with pytest.raises(ShardwrightError, match=problem):
        read_schedule(text, "s")


def test_links_that_are_none() -> None:
    data = json.loads(write_topology(preset_topology("ring:4")))
    for entry, problem in (
        ([0, 1, 0, 0.0], "Link.rate_bytes_per_s"),
        ([0, 1, 5, -1], "at least 0, got -1"),
        ([0, 1], "4 to 4"),
    ):
        with pytest.raises(ShardwrightError, match=problem):
            read_topology(json.dumps(data | {"links": [entry]}))


@each("kind", ["all_gather", "all_reduce", "reduce_scatter", "broadcast"])
def test_sccl_algorithms(kind: str) -> None:
    schedule, topology = read_sccl(sccl(kind))
    assert schedule.transfers == build("ring", kind, (3,)).transfers
    assert schedule.collective == build("ring", kind, (3,)).collective
    assert topology.resources[0].edges == {(0, 2), (1, 2)}
    assert verify_schedule(schedule, topology).is_certified
    assert read_sccl_topology(sccl(kind), round_rate=25) == read_sccl(sccl(kind), round_rate=25)[1]


def test_sccl_kinds_of_more_cells_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.pcg.collectives.collective.MOST_CELLS", 5)  # an all-reduce would have six
    assert read_sccl(sccl("broadcast"))[0].collective == collective("broadcast", 3)


def test_sccl_older_files_and_their_times() -> None:
    older = sccl().replace("msccl_type", "sccl_type")
    assert read_sccl(older)[0] == read_sccl(sccl())[0]
    timed = json.loads(sccl())
    timed["steps"][0]["sends"] = [[*send, 0.5, 0] for send in timed["steps"][0]["sends"]]
    assert read_sccl(json.dumps(timed))[0] == read_sccl(sccl())[0]


def test_sccl_links_have_the_receiver_first() -> None:
    one_way = {"msccl_type": "topology", "name": "t", "links": [[0, 0, 1], [2, 0, 0], [0, 3, 0]], "switches": []}
    topology = read_sccl_topology(json.dumps(one_way))
    assert {(link.src, link.dst): topology.multiplicity(link) for link in topology.links} == {
        (2, 0): 1,
        (0, 1): 2,
        (1, 2): 3,
    }


def test_sccl_rounds_are_judged() -> None:
    busy = json.loads(sccl())
    busy["steps"] = [
        {"msccl_type": "step", "rounds": 1, "sends": [*busy["steps"][0]["sends"], [1, 1, 0], [2, 2, 1], [0, 0, 2]]}
    ]
    assert verify_schedule(*read_sccl(json.dumps(busy))).refusals[0].fault == "rate"


@each(
    ("change", "problem"),
    [
        ({"msccl_type": "instance"}, "expected an algorithm, got instance"),
        ({"steps": [{"rounds": 0, "sends": []}]}, r"steps\[0\].rounds: expected a whole number from 1"),
        ({"steps": [{"rounds": 1, "sends": [[9, 0, 1]]}]}, r"steps\[0\].sends\[0\]: expected an address of a chunk"),
        ({"steps": [{"rounds": 1, "sends": [[0, 0]]}]}, r"expected \[address, from, to\], got 2 entries"),
        ({"topology": {"name": "t", "links": [[0, 1], [1]], "switches": []}}, r"links\[1\]: expected 2 numbers"),
        ({"topology": {"name": "t", "links": [[0, 0], [0, 0]], "switches": []}}, "got no path from rank 0 to rank 1"),
        ({"topology": {"name": "t", "links": [[0, 1], [1, 0]], "switches": [[[0], [1], 0, "n"]]}}, "from 1 to"),
        (
            {"topology": {"name": "t", "links": [[0, 1], [1, 0]], "switches": []}},
            "expected 2 ranks, as the topology has",
        ),
    ],
)
def test_wrong_sccl_files(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ShardwrightError, match=problem):
        read_sccl(json.dumps(json.loads(sccl()) | change))


def test_taccl_machines() -> None:
    topology = taccl_topology(read_taccl_machine(json.dumps(MACHINE)), 2)
    preset = preset_topology("ndv2:2")
    assert topology.links == preset.links
    assert topology.resources == preset.resources
    two = {**MACHINE, "name": "mine", "gpus_per_node": 2, "links": [[0, 2], [2, 0]]}
    (link, _) = taccl_topology(read_taccl_machine(json.dumps(two))).links
    assert link.rate_bytes_per_s == Fraction(10**12, 46)
    switched = {**MACHINE, "name": "DGX-2", "gpus_per_node": 16, "nics_per_node": 8}
    assert len(taccl_topology(read_taccl_machine(json.dumps(switched)), 2).resources) == 32


def test_taccl_sketches() -> None:
    sketch = read_sketch(json.dumps(SKETCH))
    assert (sketch.nodes, sketch.pieces, sketch.symmetry, sketch.order_kept) == (2, 2, ((4, 8),), True)
    assert sketch.switches == (((0, 1), "uc-min"), ((2, 3), "uc-max"))
    assert sketch.senders == {0: (1,), 2: (3,)}
    plain = {**to("direct-map"), "intranode_sketch": {"strategy": "none"}}
    assert read_sketch(json.dumps(plain)).senders == "direct-map"


@each(
    ("data", "problem"),
    [
        ({**MACHINE, "name": "box"}, "topology 'box': expected a matrix of links"),
        ({**MACHINE, "nics_per_node": 3}, "expected NICs that 8 ranks share evenly, got 3"),
        ({**MACHINE, "remote_beta": 0}, "remote_beta: expected more than 0 µs per MB"),
        ({**MACHINE, "alpha": -1}, "alpha: expected a number of at least 0, got -1"),
        ({**MACHINE, "gpus_per_node": 2, "links": [[0, 1], [2, 0]]}, "the same link from"),
        ({**MACHINE, "gpus_per_node": 2, "links": [[0, 3], [3, 0]]}, "expected a whole number from 0 to 2, got 3"),
        ({**MACHINE, "gpus_per_node": 2, "links": [[0, 1]]}, "expected a matrix of 2 × 2"),
        ({**SKETCH, "symmetry_offsets": [[0, 8]]}, "0 < shift ≤ period"),
        ({**SKETCH, "intranode_sketch": {"strategy": "fast"}}, "expected one of none, switch, minmax, maxmin"),
        (to({"0": [1], "1": []}), "as many receivers"),
        (to({"x": [1]}), "the number of a rank, got 'x'"),
        ({**SKETCH, "intranode_sketch": {"strategy": "switch", "switches": [[0]], "switch_hyperedge_strategy": []}},
         "a strategy for each switch"),
    ],
)  # fmt: skip
def test_wrong_taccl_files(data: dict[str, object], problem: str) -> None:
    def read(text: str) -> object:
        return read_sketch(text) if "nnodes" in data else taccl_topology(read_taccl_machine(text), 2)

    with pytest.raises(ShardwrightError, match=problem):
        read(json.dumps(data))


def test_trees() -> None:
    schedule = read_forest(FOREST)
    assert schedule.collective == collective("all_gather", 3)
    assert verify_schedule(schedule).is_certified
    assert Transfer(1, 1, 2, 0) in schedule.transfers  # GPU 10 stands behind GPU 1


@each(
    ("change", "problem"),
    [
        (('<Algo nchunkspernode="1">', "<Algo><bush/>"), "line 1, bush: expected tree inside of Algo"),
        (('nchunks="1"', 'nchunks="2"'), "expected 2 chunks of every root, got 1 of the 2th"),
        (("dst=\"(0, 'GPU', 1)\"", "dst=\"(0, 'NIC', 1)\""), "dst: expected a node that is a root"),
        (("src=\"(0, 'GPU', 1)\"", "src=\"(0, 'GPU', 10)\""), "a sender that the tree has reached"),
        (
            ('<send src="(0, \'GPU\', 1)" dst="(0, \'GPU\', 10)" path=""/>', ""),
            "a tree that reaches every rank, got none to",
        ),
        ((FOREST, "<Algo/>"), "expected trees, got none"),
        ((FOREST, MANY), "expected at most 4194304 transfers, got 13107200; use fewer"),
    ],
    ids=lambda change: change[0][:30],
)
def test_wrong_trees(change: tuple[str, str], problem: str) -> None:
    with pytest.raises(ShardwrightError, match=problem):
        read_forest(FOREST.replace(*change, 1))


@pytest.mark.skipif("SHARDWRIGHT_SCHEDULES" not in os.environ, reason="SHARDWRIGHT_SCHEDULES names a folder of files")
def test_inputs_of_others_are_read() -> None:
    folder = Path(os.environ["SHARDWRIGHT_SCHEDULES"])
    for file in folder.glob("taccl_topo*.json"):
        assert taccl_topology(read_taccl_machine(read_text(file)), 2).num_ranks == 16
    for file in folder.glob("taccl_sk*.json"):
        assert read_sketch(read_text(file)).senders
