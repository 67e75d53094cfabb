"""Schedules as a part of a cluster: from words, folders and files, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.schedules import Schedules, Synthesized
from shardwright.cost.clusters.topology import Level
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.files.msccl import write_msccl
from shardwright.pcg.collectives.files.own import write_schedule
from shardwright.pcg.collectives.threads import program_of
from shardwright.pcg.errors import ClusterError, ScheduleError

LOCAL = Cluster.local(2)
RING, TREE = build("ring", "all_reduce", (4,)), build("double-tree", "all_reduce", (4,))


def test_a_word_a_folder_and_a_file_round_trip(tmp_path: Path) -> None:
    for schedule in (RING, TREE):
        (tmp_path / f"{schedule.name}.json").write_text(write_schedule(schedule))
    (tmp_path / "notes.txt").write_text("not read")
    folder, wish = LOCAL.with_schedules(tmp_path), LOCAL.with_schedules("synthesized")
    assert folder.schedules == Schedules([RING, TREE])
    assert isinstance(wish.schedules, Synthesized)
    assert "schedules" not in LOCAL.to_json()
    for cluster in (LOCAL, folder, wish):
        again = Cluster.from_json(json.loads(json.dumps(cluster.to_json())))
        assert (again, hash(again)) == (cluster, hash(cluster))
    assert len({LOCAL, folder, wish, LOCAL.with_schedules(Schedules([RING]))}) == 4
    assert Cluster.from_json({**LOCAL.to_json(), "schedules": str(tmp_path)}) == folder
    joined = Cluster.join([folder, folder], Level("net", 2, 1e9, 1e-5))
    assert joined.schedules == folder.schedules == folder.part(range(1)).schedules


def test_what_is_no_schedule_is_refused(tmp_path: Path) -> None:
    def refused(kind: type[Exception], given: object, words: str) -> None:
        with pytest.raises(kind, match=words):
            Cluster.from_json({**LOCAL.to_json(), "schedules": given}, "c.json")

    refused(ClusterError, "synthesised", "expected 'synthesized' or a folder of schedules, got 'synthesised'")
    refused(ClusterError, 3, r"c.json: schedules.*got 3; give one of them")
    refused(ClusterError, str(tmp_path), "expected .json or .xml files of schedules, got none")
    refused(ScheduleError, [{"format": "shardwright-schedule"}], r"c.json: schedules\[0\]")
    (tmp_path / "ring.xml").write_text(write_msccl(program_of(RING)))
    refused(ClusterError, str(tmp_path), "ring.xml: expected a schedule, got a MSCCL program")
    with pytest.raises(ClusterError, match="the planner makes them"):
        Synthesized().candidates("all_reduce", LOCAL.levels, 2)
    with pytest.raises(ClusterError, match="expected the same schedules in all clusters"):
        Cluster.join([LOCAL, replace(LOCAL, schedules=Synthesized())], Level("net", 2, 1e9, 1e-5))
