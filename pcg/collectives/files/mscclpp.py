"""MSCCL++'s execution plans: JSON of one-sided operations. Read with the names of 2024 as well, written with today's.

The format is what microsoft/mscclpp 1f5f065d reads (src/core/executor/execution_plan.cc). Positions are of two kinds: a
rank lists channels and remote buffers, a block lists which of those it uses, and an operation names a place in the
block's list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwright.pcg.collectives.files.documents import Node, read_json
from shardwright.pcg.collectives.files.msccl import BUFFERS, COLLECTIVES, LETTERS, NAMES
from shardwright.pcg.collectives.plan import (
    MOST_SOURCES,
    OPERATIONS,
    Action,
    Plan,
    PlanBlock,
    PlanRank,
    RemoteBuffer,
    Span,
    SwitchGroup,
)
from shardwright.pcg.errors import ScheduleError

MOST_RANKS, MOST_CHUNKS, MOST_BLOCKS, MOST_CHANNELS = 1024, 1 << 16, 1024, 1 << 14
MOST_ACTIONS, MOST_SEMAPHORES, MOST_PARTS = 64, 16, 1024
_TYPES = ("memory", "port")
_TOP = ("name", "collective", "protocol", "inplace", "reuse_resources", "gpus", "num_threads_per_block",
        "use_double_scratch_buffer", "buffer_alignment", "min_message_size", "max_message_size")  # fmt: skip
_GPU = ("id", "input_chunks", "output_chunks", "scratch_chunks", "threadblocks", "channels", "remote_buffers",
        "semaphores")  # fmt: skip
_OP = ("name", "src_buff", "dst_buff", "channel_ids", "channel_type", "tbg_info", "barrier_id", "num_threadblocks",
       "semaphore_ids", "reduce_op", "iter_context", "ops")  # fmt: skip


def read_mscclpp(text: str, source: str = "plan") -> Plan:
    """Return the plan of a file.

    Raises:
        ScheduleError: naming the place, what was expected, what was found and what to do.
    """
    top = read_json(text, source).known(_TOP)
    gpus = top.get("gpus").items()
    if not 0 < len(gpus) <= MOST_RANKS:
        raise top.get("gpus").error(f"expected 1 to {MOST_RANKS} gpus, got {len(gpus)}; is it a plan?")
    name = top.get("collective").text()
    return Plan(
        name=top.get("name").text(),
        kind=COLLECTIVES.get(name.replace("_", "").lower(), name),
        ranks=tuple(_rank(gpu, rank, len(gpus)) for rank, gpu in enumerate(gpus)),
        in_place=top.get("inplace").flag(),
        protocol=top.get("protocol").one_of(("Simple", "LL")),
        reuse_resources=top.has("reuse_resources") and top.get("reuse_resources").flag(),
        num_threads=_optional(top, "num_threads_per_block", 1024, 1, 1 << 12),
        double_scratch=top.has("use_double_scratch_buffer") and top.get("use_double_scratch_buffer").flag(),
        alignment=_optional(top, "buffer_alignment", 16, 1, 1 << 30),
        min_bytes=_optional(top, "min_message_size", 0, 0, 1 << 64),
        max_bytes=_optional(top, "max_message_size", (1 << 64) - 1, 0, 1 << 64),
    )


def write_mscclpp(plan: Plan) -> str:
    """Return a plan as JSON that today's reader takes.

    Raises:
        ScheduleError: chunks of input or output that are 0, which its size check divides by; too many operations.
    """
    for rank, one in enumerate(plan.ranks):
        if not one.input_chunks or not one.output_chunks:
            raise ScheduleError(f"{plan.name}: gpu {rank}: expected chunks of input and output, got 0; name both alike")
        long = next((len(block.actions) for block in one.blocks if len(block.actions) > MOST_ACTIONS), None)
        if long is not None:
            problem = f"expected at most {MOST_ACTIONS} operations in a block, got {long}"
            raise ScheduleError(f"{plan.name}: gpu {rank}: {problem}; take a schedule of fewer steps")
    head = {
        "name": plan.name, "collective": NAMES.get(plan.kind, plan.kind), "protocol": plan.protocol,
        "inplace": plan.in_place, "reuse_resources": plan.reuse_resources,
        "gpus": [_gpu_json(rank, one) for rank, one in enumerate(plan.ranks)],
        "num_threads_per_block": plan.num_threads, "use_double_scratch_buffer": plan.double_scratch,
        "buffer_alignment": plan.alignment, "min_message_size": plan.min_bytes, "max_message_size": plan.max_bytes,
    }  # fmt: skip
    return json.dumps(head, indent=1) + "\n"


def _optional(node: Node, key: str, default: int, least: int, most: int) -> int:
    return node.get(key).number(least, most) if node.has(key) else default


def _list(node: Node, key: str, most: int) -> list[Node]:
    """Return the entries of a list that may be missing."""
    entries = node.get(key).items() if node.has(key) else []
    if len(entries) > most:
        raise node.get(key).error(f"expected at most {most} entries, got {len(entries)}; is it a plan?")
    return entries


def _rank(gpu: Node, rank: int, num_ranks: int) -> PlanRank:
    gpu.known(_GPU).get("id").number(rank, rank)
    peers: dict[str, tuple[int, ...]] = {}
    groups = list[SwitchGroup]()
    for entry in _list(gpu, "channels", MOST_CHANNELS):
        kind = entry.get("channel_type").one_of((*_TYPES, "switch"))
        if kind == "switch":
            groups += _groups(entry, num_ranks)
            continue
        if kind in peers:
            raise entry.error(f"expected one list of {kind} channels, got two; join them")
        peers[kind] = entry.get("connected_to").numbers(0, num_ranks - 1)
        if rank in peers[kind]:
            raise entry.error(f"expected channels to other ranks, got one to {rank} itself; remove it")
    sizes = (gpu.get(f"{name}_chunks").number(0, MOST_CHUNKS) for name in ("input", "output", "scratch"))
    remote = tuple(_remote(entry, num_ranks) for entry in _list(gpu, "remote_buffers", MOST_CHANNELS))
    semaphores = tuple(s.get("init_value").number(0, 1 << 30) for s in _list(gpu, "semaphores", MOST_SEMAPHORES))
    inputs, outputs, scratch = sizes
    counts = {kind: len(of_kind) for kind, of_kind in peers.items()} | {"switch": len(groups)}
    blocks = tuple(
        _block(tb, number, counts, len(remote)) for number, tb in enumerate(_list(gpu, "threadblocks", MOST_BLOCKS))
    )
    return PlanRank(inputs, outputs, scratch, blocks, peers, tuple(groups), remote, semaphores)


def _groups(entry: Node, num_ranks: int) -> list[SwitchGroup]:
    letter = entry.get("buffer_type" if entry.has("buffer_type") else "buff").one_of(tuple(BUFFERS))
    return [
        SwitchGroup(
            BUFFERS[letter], group.get("size").number(1, MOST_CHUNKS), group.get("ranks").numbers(0, num_ranks - 1)
        )
        for group in entry.get("rank_groups").items()
    ]


def _remote(entry: Node, num_ranks: int) -> RemoteBuffer:
    types = tuple(kind.one_of(_TYPES) for kind in entry.get("access_channel_types").items())
    letter = entry.get("type").one_of(tuple(BUFFERS))
    return RemoteBuffer(entry.get("rank").number(0, num_ranks - 1), BUFFERS[letter], types)


def _block(tb: Node, number: int, counts: Mapping[str, int], num_remote: int) -> PlanBlock:
    tb.get("id").number(number, number)
    channels = {
        entry.get("channel_type").one_of((*_TYPES, "switch")): entry.get("channel_ids").numbers(0, MOST_CHANNELS)
        for entry in _list(tb, "channels", 8)
    }
    for kind, ids in channels.items():
        if max(ids, default=-1) >= counts.get(kind, 0):
            raise tb.error(
                f"channels: expected {kind} channels of the gpu's {counts.get(kind, 0)}, got {max(ids)}; correct it"
            )
    remote = {
        entry.get("access_channel_type").one_of(_TYPES): entry.get("remote_buffer_ids").numbers(0, num_remote - 1)
        for entry in _list(tb, "remote_buffer_refs", 8)
    }
    actions = tuple(_action(op, channels, remote, nested=False) for op in _list(tb, "ops", 1 << 12))
    return PlanBlock(actions, channels, remote)


def _action(
    op: Node, channels: Mapping[str, tuple[int, ...]], remote: Mapping[str, tuple[int, ...]], *, nested: bool
) -> Action:
    name = op.known(_OP).get("name").one_of(OPERATIONS)
    kind = op.get("channel_type").one_of((*_TYPES, "switch", "none")) if op.has("channel_type") else ""
    spans = {
        key: tuple(_span(e, kind, channels, remote) for e in _list(op, key, MOST_SOURCES))
        for key in ("src_buff", "dst_buff")
    }
    body = tuple(_action(inner, channels, remote, nested=True) for inner in _list(op, "ops", MOST_ACTIONS))
    if (name == "pipeline") != op.has("iter_context") or (nested and body) or bool(body) != (name == "pipeline"):
        raise op.error("expected a pipeline with iter_context and ops, and none inside of it; correct the operation")
    return Action(
        name=name,
        sources=spans["src_buff"],
        targets=spans["dst_buff"],
        channel_type=kind,
        channels=tuple(e.number(0, len(channels.get(kind, ())) - 1) for e in _list(op, "channel_ids", MOST_SOURCES)),
        part=_part(op.get("tbg_info")) if op.has("tbg_info") else None,
        barrier=(op.get("barrier_id").number(0, 255), op.get("num_threadblocks").number(1, MOST_BLOCKS))
        if name == "barrier" else None,
        semaphores=tuple(e.number(0, MOST_SEMAPHORES - 1) for e in _list(op, "semaphore_ids", MOST_SEMAPHORES)),
        reduce_op=op.get("reduce_op").one_of(("sum", "min", "max")) if op.has("reduce_op") else "",
        body=body,
        unit_bytes=op.get("iter_context").get("unit_size").number(1, 1 << 40) if body else 0,
        num_chunks=op.get("iter_context").get("num_chunks").number(1, MOST_CHUNKS) if body else 0,
    )  # fmt: skip


def _part(node: Node) -> tuple[int, int]:
    size = node.get("tbg_size").number(1, MOST_PARTS)
    return node.get("tb_id").number(0, size - 1), size


def _span(
    node: Node, kind: str, channels: Mapping[str, tuple[int, ...]], remote: Mapping[str, tuple[int, ...]]
) -> Span:
    index, size = node.get("index").number(0, MOST_CHUNKS), node.get("size").number(1, MOST_CHUNKS)
    if node.has("type"):
        return Span("local", BUFFERS[node.get("type").one_of(tuple(BUFFERS))], index, size)
    if node.has("switch_channel_id"):
        return Span("switch", node.get("switch_channel_id").number(0, len(channels.get("switch", ())) - 1), index, size)
    return Span("remote", node.get("buffer_id").number(0, len(remote.get(kind, ())) - 1), index, size)


def _gpu_json(rank: int, one: PlanRank) -> dict[str, Any]:
    channels: list[dict[str, Any]] = [
        {"channel_type": kind, "connected_to": peers} for kind, peers in one.peers.items()
    ]
    for group in one.groups:
        ranks = {"size": group.size, "ranks": group.ranks}
        channels.append({"channel_type": "switch", "buffer_type": LETTERS[group.buffer], "rank_groups": [ranks]})
    remote = [
        {"rank": r.rank, "type": LETTERS[r.buffer], "access_channel_types": r.channel_types} for r in one.remote_buffers
    ]
    blocks = [
        {
            "id": number,
            "ops": [_action_json(action) for action in block.actions],
            "channels": [{"channel_type": kind, "channel_ids": ids} for kind, ids in block.channels.items()],
            "remote_buffer_refs": [{"access_channel_type": kind, "remote_buffer_ids": ids}
                                   for kind, ids in block.remote_buffers.items()],
        }
        for number, block in enumerate(one.blocks)
    ]  # fmt: skip
    return {
        "id": rank, "input_chunks": one.input_chunks, "output_chunks": one.output_chunks,
        "scratch_chunks": one.scratch_chunks, "threadblocks": blocks, "channels": channels, "remote_buffers": remote,
        "semaphores": [{"init_value": value} for value in one.semaphores],
    }  # fmt: skip


def _action_json(action: Action) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": action.name,
        "src_buff": [_span_json(span) for span in action.sources],
        "dst_buff": [_span_json(span) for span in action.targets],
        "channel_ids": action.channels,
        "channel_type": action.channel_type,
        "semaphore_ids": action.semaphores,
        "reduce_op": action.reduce_op,
        "ops": [_action_json(inner) for inner in action.body],
    }
    entry = {key: value for key, value in entry.items() if value}
    if action.part:
        entry["tbg_info"] = {"tb_id": action.part[0], "tbg_size": action.part[1]}
    if action.barrier:
        entry |= {"barrier_id": action.barrier[0], "num_threadblocks": action.barrier[1]}
    if action.body:
        entry["iter_context"] = {"unit_size": action.unit_bytes, "num_chunks": action.num_chunks}
    return entry


def _span_json(span: Span) -> dict[str, Any]:
    place = {"local": "type", "remote": "buffer_id", "switch": "switch_channel_id"}[span.reach]
    value = span.place if isinstance(span.place, int) else LETTERS[span.place]
    return {place: value, "index": span.first, "size": span.size}
