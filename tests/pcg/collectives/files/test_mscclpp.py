"""MSCCL++'s plans: read, written, read again; older names; every wrong field named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.files.documents import read_text
from shardwright.pcg.collectives.files.mscclpp import read_mscclpp, write_mscclpp
from shardwright.pcg.collectives.onesided import plan_of
from shardwright.pcg.collectives.plan import Plan
from shardwright.pcg.errors import ScheduleError
from shardwright.verifier.collectives import verify_plan
from tests.each import each
from tests.verifier.collectives.test_plans import RIGHT, switched

PAIR = plan_of(build("direct", "all_gather", (2,)), in_place=True)
Change = Callable[[Any], object]


@each("plan", RIGHT, ids=lambda one: f"{one.name} {one.kind}")
def test_plans_come_back(plan: Plan) -> None:
    if all(rank.output_chunks and rank.input_chunks for rank in plan.ranks):
        again = read_mscclpp(write_mscclpp(plan))
        assert again == plan
        assert verify_plan(again).is_certified


def test_older_names() -> None:
    data = json.loads(write_mscclpp(switched()))
    for gpu in data["gpus"]:
        for channel in gpu["channels"]:
            if "buffer_type" in channel:
                channel["buff"] = channel.pop("buffer_type")
    for key in ("buffer_alignment", "min_message_size", "max_message_size", "num_threads_per_block"):
        del data[key]
    assert read_mscclpp(json.dumps(data)) == switched()


@each(
    ("change", "problem"),
    [
        (lambda d: d.update(gpus=[]), "expected 1 to 1024 gpus, got 0"),
        (lambda d: d.update(protocol="LL128"), "protocol: expected one of Simple, LL, got 'LL128'"),
        (lambda d: d.update(inplace=1), "inplace: expected true or false"),
        (lambda d: d.update(more=1), "more: expected one of name, collective"),
        (lambda d: d.pop("collective"), "expected the key 'collective'"),
        (lambda d: d["gpus"][1].update(id=0), r"gpus\[1\].id: expected a whole number from 1 to 1, got 0"),
        (lambda d: d["gpus"][0].update(output_chunks=-1), "output_chunks: expected a whole number from 0"),
        (
            lambda d: d["gpus"][0]["channels"][0].update(connected_to=[0]),
            "expected channels to other ranks, got one to 0",
        ),
        (
            lambda d: d["gpus"][0]["channels"].append(d["gpus"][0]["channels"][0]),
            "expected one list of memory channels",
        ),
        (lambda d: d["gpus"][0]["remote_buffers"][0].update(type="x"), "expected one of i, o, s, got 'x'"),
        (
            lambda d: d["gpus"][0]["remote_buffers"][0].update(rank=2),
            "rank: expected a whole number from 0 to 1, got 2",
        ),
        (lambda d: tb(d).update(id=1), "id: expected a whole number from 0 to 0, got 1"),
        (lambda d: tb(d)["channels"][0].update(channel_ids=[1]), "expected memory channels of the gpu's 1, got 1"),
        (lambda d: tb(d)["remote_buffer_refs"][0].update(remote_buffer_ids=[1]), "from 0 to 0, got 1"),
        (lambda d: tb(d)["ops"][0].update(name="glre"), "name: expected one of copy, put"),
        (lambda d: tb(d)["ops"][0].update(channel_ids=[1]), r"channel_ids\[0\]: expected a whole number from 0 to 0"),
        (lambda d: tb(d)["ops"][0].update(src="i"), "src: expected one of name, src_buff"),
        (
            lambda d: tb(d)["ops"][3]["dst_buff"][0].update(buffer_id=1),
            "buffer_id: expected a whole number from 0 to 0",
        ),
        (lambda d: tb(d)["ops"][3]["dst_buff"][0].update(size=0), "size: expected a whole number from 1"),
        (
            lambda d: tb(d)["ops"][0].update(tbg_info={"tb_id": 2, "tbg_size": 2}),
            "tb_id: expected a whole number from 0 to 1",
        ),
        (lambda d: tb(d)["ops"][0].update(name="pipeline"), "expected a pipeline with iter_context and ops"),
        (lambda d: tb(d)["ops"][0].update(reduce_op="xor"), "expected one of sum, min, max"),
        (lambda d: tb(d)["ops"][0].update(name="barrier"), "expected the key 'barrier_id'"),
    ],
)
def test_wrong_plans(change: Change, problem: str) -> None:
    data = json.loads(write_mscclpp(PAIR))
    change(data)
    with pytest.raises(ScheduleError, match=problem):
        read_mscclpp(json.dumps(data), "p")


def tb(data: dict[str, Any]) -> dict[str, Any]:
    """The first block of the first rank."""
    return data["gpus"][0]["threadblocks"][0]


def test_what_todays_reader_would_refuse_is_not_written() -> None:
    with pytest.raises(ScheduleError, match="gpu 0: expected chunks of input and output, got 0"):
        write_mscclpp(replace(PAIR, ranks=tuple(rank._replace(input_chunks=0) for rank in PAIR.ranks)))
    with pytest.raises(ScheduleError, match="expected at most 64 operations in a block"):
        write_mscclpp(plan_of(build("ring", "all_reduce", (8,))))


@each(
    ("kind", "options", "problem"),
    [
        ("broadcast", {}, "expected one of all_gather, reduce_scatter, all_reduce, all_to_all, got 'broadcast'"),
        ("all_to_all", {"in_place": True}, "expected an all_to_all out of place"),
        ("all_gather", {"blocks": 0}, "expected at least one block, got 0"),
    ],
)
def test_what_is_no_plan(kind: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        plan_of(build("direct", kind, (3,)), **options)


@pytest.mark.skipif("SHARDWRIGHT_SCHEDULES" not in os.environ, reason="SHARDWRIGHT_SCHEDULES names a folder of files")
def test_plans_of_others_are_right() -> None:
    files = sorted(Path(os.environ["SHARDWRIGHT_SCHEDULES"]).glob("mscclpp*.json"))
    assert files
    for file in files:
        verdict = verify_plan(read_mscclpp(read_text(file), file.name))
        assert verdict.is_certified, (file.name, verdict.refusals)
