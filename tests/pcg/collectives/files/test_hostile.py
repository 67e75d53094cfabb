"""Files that were damaged: readers and judges end with an error that we raise, or with a verdict, and soon."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

from shardwright.cost.clusters.networks import preset_topology
from shardwright.cost.clusters.taccl import taccl_topology
from shardwright.cost.clusters.wired import wired_topology
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.files.anyfile import read_collective, read_links
from shardwright.pcg.collectives.files.msccl import write_msccl
from shardwright.pcg.collectives.files.mscclpp import write_mscclpp
from shardwright.pcg.collectives.files.own import write_schedule, write_topology
from shardwright.pcg.collectives.files.taccl import read_sketch, read_taccl_machine
from shardwright.pcg.collectives.plan import Plan
from shardwright.pcg.collectives.program import Program
from shardwright.pcg.collectives.threads import program_of
from shardwright.pcg.errors import ShardwrightError
from shardwright.verifier.collectives import verify_plan, verify_program, verify_schedule
from tests.cost.clusters.test_wired import NCCL, topo
from tests.pcg.collectives.files.test_json import FOREST, MACHINE, SKETCH, sccl
from tests.verifier.collectives.test_plans import packets, switched

RING = build("ring", "all_reduce", (3,))
TEXTS = [
    write_schedule(RING), write_topology(preset_topology("ndv2")), write_msccl(program_of(RING)), sccl("all_reduce"),
    write_mscclpp(packets()), write_mscclpp(switched()), FOREST, json.dumps(MACHINE), json.dumps(SKETCH),
    NCCL, topo(4, {(0, 1): "NV4", (2, 3): "PIX"}),
]  # fmt: skip
TOKENS = [
    "-1",
    "0",
    "1",
    "2",
    "7",
    "99999999",
    "1e9",
    "null",
    '"s"',
    '"rrc"',
    '"nop"',
    '"wait"',
    '"put"',
    "{",
    "]",
    "<",
    ">",
]
SOON_S = 5.0


def damaged(chance: random.Random, text: str) -> str:
    """Replace a number or a word, or cut a piece out."""
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if chance.random() < 0.7:
            found = chance.choice(list(re.finditer(r'-?\d+|"[a-z]+"', text)) or [re.match("", text)])
            assert found is not None
            start, end = found.span()
        else:
            start = chance.randrange(len(text))
            end = start + chance.randrange(40)
        text = text[:start] + chance.choice(TOKENS) + text[end:]
    return text


def judged(path: Path) -> None:
    subject, topology = read_collective(path)[1:]
    if isinstance(subject, Program):
        verify_program(subject)
    elif isinstance(subject, Plan):
        verify_plan(subject)
    else:
        verify_schedule(subject, topology)


def test_damaged_files_end_soon(tmp_path: Path) -> None:
    chance, path, refused = random.Random(0), tmp_path / "file", 0
    for _ in range(400):
        text = damaged(chance, chance.choice(TEXTS))
        path.write_text(text)
        begin = time.process_time()
        for read in (
            judged, read_links, lambda _, text=text: taccl_topology(read_taccl_machine(text), 2),
            lambda _, text=text: read_sketch(text), lambda _, text=text: wired_topology(text, "text", "A100-40", 2),
        ):  # fmt: skip
            try:
                read(path)
            except ShardwrightError:
                refused += 1
        assert time.process_time() - begin < SOON_S
    assert refused > 800
