"""Any file of a schedule, program, plan or topology: what it is, is in the file itself."""

from __future__ import annotations

import os
from typing import NamedTuple

from shardwright.pcg.collectives.files.documents import read_json, read_text
from shardwright.pcg.collectives.files.forestcoll import read_forest
from shardwright.pcg.collectives.files.msccl import read_msccl
from shardwright.pcg.collectives.files.mscclpp import read_mscclpp
from shardwright.pcg.collectives.files.own import SCHEDULE, TOPOLOGY, read_schedule, read_topology
from shardwright.pcg.collectives.files.sccl import read_sccl, read_sccl_topology
from shardwright.pcg.collectives.plan import Plan
from shardwright.pcg.collectives.program import Program
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.collectives.topology import Topology
from shardwright.pcg.errors import ScheduleError


class Contents(NamedTuple):
    """The contents of a file: a schedule, a program or a plan, and the topology that it names, if it names one."""

    form: str
    subject: Schedule | Program | Plan
    topology: Topology | None = None


def read_collective(path: str | os.PathLike[str]) -> Contents:
    """Return what a file holds: a schedule of ours, MSCCL's XML, MSCCL++'s or SCCL's JSON, or ForestColl's trees.

    Raises:
        ScheduleError, ClusterError: naming the file and the place, what was expected, what was found and what to do.
    """
    text, source = read_text(path), str(path)
    if text.lstrip("\ufeff \t\r\n").startswith("<"):
        return _of_xml(text, source)
    node = read_json(text, source)
    if node.has("format") and node.get("format").value == SCHEDULE:
        return Contents("schedule", read_schedule(text, source))
    if node.has("msccl_type") or node.has("sccl_type"):
        return Contents("SCCL algorithm", *read_sccl(text, source))
    if node.has("gpus") and node.has("collective"):
        return Contents("MSCCL++ plan", read_mscclpp(text, source))
    known = "a schedule of ours, MSCCL's XML, MSCCL++'s or SCCL's JSON, or ForestColl's trees"
    raise ScheduleError(f"{source}: expected {known}, got other JSON; is it another file?")


def read_links(path: str | os.PathLike[str]) -> Topology:
    """Return the topology of a file: ours or SCCL's.

    Raises:
        ScheduleError, ClusterError: naming the file and the place, what was expected, what was found and what to do.
    """
    text, source = read_text(path), str(path)
    node = read_json(text, source)
    if node.has("format") and node.get("format").value == TOPOLOGY:
        return read_topology(text, source)
    if node.has("msccl_type") or node.has("sccl_type"):
        return read_sccl_topology(text, source)
    raise ScheduleError(f"{source}: expected a topology of ours or SCCL's, got other JSON; is it another file?")


def _of_xml(text: str, source: str) -> Contents:
    start = text.find("<Algo")
    if 0 <= start < (text.find("<algo") if "<algo" in text else len(text)):
        return Contents("ForestColl trees", read_forest(text, source))
    return Contents("MSCCL program", read_msccl(text, source))
