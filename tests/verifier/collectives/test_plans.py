"""Plans of one-sided operations: certified where right, with faults named; no mutant that matters gets through."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.onesided import plan_of
from shardwright.pcg.collectives.plan import DATA, Action, Plan, PlanBlock, PlanRank, RemoteBuffer, Span, SwitchGroup
from shardwright.verifier.collectives import verify_plan
from tests.each import each
from tests.verifier.collectives.plan_oracle import fault_of

NOP = Action("nop")
SMALL = [
    plan_of(build(name, kind, (2,), pieces), in_place=in_place)
    for name, kind, pieces, in_place in [
        ("direct", "all_gather", 1, False), ("direct", "all_gather", 2, True), ("one-shot", "all_reduce", 1, True),
        ("one-shot", "all_reduce", 2, False), ("direct", "reduce_scatter", 1, True), ("direct", "all_to_all", 1, False),
        ("direct", "all_reduce", 1, True),
    ]
]  # fmt: skip


def local(buffer: str, first: int, size: int = 1) -> Span:
    return Span("local", {"i": "input", "o": "output", "s": "scratch"}[buffer], first, size)  # pyright: ignore[reportArgumentType]


def remote(first: int, place: int = 0) -> Span:
    return Span("remote", place, first, 1)


def block(
    *actions: Action, kind: str = "memory", buffers: tuple[int, ...] = (0,), **channels: tuple[int, ...]
) -> PlanBlock:
    """A block with a channel and a buffer of a kind, or with these channels and no buffer."""
    return PlanBlock(actions, channels or {kind: (0,)}, {} if channels or not buffers else {kind: buffers})


def on(kind: str, name: str, *channels: int) -> Action:
    return Action(name, channel_type=kind, channels=channels or (0,))


def packets(parts: int = 2) -> Plan:
    """Two ranks, a chunk each: send mine as packets; add the other's packets to mine. Each in `parts` blocks."""

    def rank(r: int) -> PlanRank:
        peer = RemoteBuffer(1 - r, "scratch", ("memory",))
        send = Action("ppkt", (local("i", 0),), (remote(0),), "memory")
        add = Action("repkt", (local("i", 0), local("s", 0)), (local("o", 0),), reduce_op="sum")
        blocks = [block(a._replace(part=(p, parts))) for a in (send, add) for p in range(parts)]
        return PlanRank(1, 1, 1, tuple(blocks), {"memory": (1 - r,)}, (), (peer,))

    return Plan("packets", "all_reduce", (rank(0), rank(1)), in_place=False, protocol="LL")


def summed(reduce_op: str) -> Action:
    """Return what `packets(1)` adds by, of another kind."""
    return packets(1).ranks[0].blocks[1].actions[0]._replace(reduce_op=reduce_op)


def ported() -> Plan:
    """Two ranks put their chunk through a port, with the signal right behind."""

    def rank(r: int) -> PlanRank:
        peer = RemoteBuffer(1 - r, "output", ("port",))
        put = Action("pws", (local("o", r),), (remote(r),), "port", (0,))
        actions = (on("port", "signal"), on("port", "wait"), NOP, put, on("port", "flush"), on("port", "wait"))
        return PlanRank(1, 2, 0, (block(*actions, kind="port"),), {"port": (1 - r,)}, (), (peer,))

    return Plan("ported", "all_gather", (rank(0), rank(1)), in_place=True)


def switched(ready: int = 4) -> Plan:
    """Three blocks in a pipeline: copy in, add over the switch, copy out; semaphores hand on, signals meet the peer."""

    def rank(r: int) -> PlanRank:
        meet = (on("memory", "signal"), on("memory", "wait"), NOP)
        add = Action("glres", (Span("switch", 0, r, 1),), (Span("switch", 0, r, 1),), "switch")
        moves = [
            (Action("copy", (local(a, i),), (local(b, i),))) for a, b in (("i", "s"), ("s", "o")) for i in range(2)
        ]
        bodies = (
            (
                Action("sem_acquire", semaphores=(2,)),
                NOP,
                *moves[:2],
                NOP,
                *meet,
                Action("sem_release", semaphores=(0,)),
            ),
            (Action("sem_acquire", semaphores=(0,)), NOP, add, NOP, Action("sem_release", semaphores=(1,))),
            (
                Action("sem_acquire", semaphores=(1,)),
                NOP,
                *meet,
                *moves[2:],
                NOP,
                Action("sem_release", semaphores=(2,)),
            ),
        )
        blocks = tuple(block(Action("pipeline", body=body, unit_bytes=1024, num_chunks=1),
                             memory=(i // 2,), switch=(0,))
                       for i, body in enumerate(bodies))  # fmt: skip
        return PlanRank(
            2, 2, 2, blocks, {"memory": (1 - r,) * 2}, (SwitchGroup("scratch", 2, (0, 1)),), (), (0, 0, ready)
        )

    return Plan("switched", "all_reduce", (rank(0), rank(1)), in_place=False)


def met(count: int = 2) -> Plan:
    """Two blocks each copy a chunk to scratch, meet, and copy the other's to the output; one rank alone."""
    moves = [[Action("copy", (local(a, i),), (local(z, i),)) for i in range(2)] for a, z in (("i", "s"), ("s", "o"))]
    meet = Action("barrier", barrier=(0, count))
    blocks = tuple(PlanBlock((moves[0][b], meet, moves[1][1 - b]), {}, {}) for b in range(2))
    return Plan("met", "all_reduce", (PlanRank(2, 2, 2, blocks, {}),), in_place=False)


RIGHT = [*SMALL, packets(), packets(1), ported(), switched(), met()]


def refused(plan: Plan) -> str:
    verdict = verify_plan(plan)
    assert not verdict.is_certified
    return str(verdict.refusals[0])


def put(plan: Plan, rank: int, index: int, at: int, action: Action | None) -> Plan:
    """Return the plan with another action, or without it."""
    one = plan.ranks[rank]
    blocks = list(one.blocks)
    actions = list(blocks[index].actions)
    actions[at : at + 1] = [action] if action else []
    blocks[index] = blocks[index]._replace(actions=tuple(actions))
    return replace(plan, ranks=(*plan.ranks[:rank], one._replace(blocks=tuple(blocks)), *plan.ranks[rank + 1 :]))


def mutate(chance: random.Random, plan: Plan) -> Plan:
    rank = chance.randrange(plan.num_ranks)
    actions = plan.ranks[rank].blocks[0].actions
    at = chance.randrange(len(actions))
    action, kind = actions[at], chance.choice(["drop", "drop", "swap", "name", "span", "span", "twice"])
    if kind == "drop":
        return put(plan, rank, 0, at, None)
    if kind == "swap" and at:
        return put(put(plan, rank, 0, at, actions[at - 1]), rank, 0, at - 1, action)
    if kind == "name" and action.name in DATA:
        return put(plan, rank, 0, at, action._replace(name=chance.choice(["copy", "put", "re", "res"])))
    if kind == "name" and action.channels:
        return put(plan, rank, 0, at, action._replace(name=chance.choice(["signal", "wait"])))
    if kind == "span" and action.targets:
        end = chance.choice(["sources", "targets"])
        spans = list(getattr(action, end))
        i, field = chance.randrange(len(spans)), chance.choice(["first", "size", "place"])
        other = chance.choice(["input", "output", "scratch"]) if spans[i].reach == "local" else spans[i].place
        change = (
            {"place": other} if field == "place" else {field: max(0, getattr(spans[i], field) + chance.choice([-1, 1]))}
        )
        spans[i] = spans[i]._replace(**change)
        return put(plan, rank, 0, at, action._replace(**{end: tuple(spans)}))
    return put(put(plan, rank, 0, at, action), rank, 0, at, None) if kind != "twice" else _twice(plan, rank, at)


def _twice(plan: Plan, rank: int, at: int) -> Plan:
    one = plan.ranks[rank]
    actions = one.blocks[0].actions
    blocks = (one.blocks[0]._replace(actions=(*actions[:at], actions[at], *actions[at:])),)
    return replace(plan, ranks=(*plan.ranks[:rank], one._replace(blocks=blocks), *plan.ranks[rank + 1 :]))


@each("plan", RIGHT, ids=lambda one: f"{one.name} {one.kind}")
def test_what_is_right_is_certified(plan: Plan) -> None:
    verdict = verify_plan(plan)
    assert verdict.is_certified, verdict.refusals
    assert verdict.certificate is not None
    assert plan.kind in verdict.certificate.claim


@each("plan", SMALL, ids=lambda one: f"{one.name} {one.kind}")
def test_no_mutant_that_matters_is_certified(plan: Plan) -> None:
    chance, harmful = random.Random(3), 0
    assert not fault_of(plan)
    for _ in range(70):
        mutant = mutate(chance, plan)
        truth, verdict = fault_of(mutant), verify_plan(mutant)
        assert not (truth and verdict.is_certified), (truth, mutant)
        assert all(min(r.rank, r.step, r.chunk) >= 0 for r in verdict.refusals)
        harmful += bool(truth)
    assert harmful > 20


@each("n", [3, 4, 8])
def test_schedules_become_plans(n: int) -> None:
    for name, kind in (
        ("direct", "all_reduce"),
        ("ring", "all_gather"),
        ("bruck", "all_to_all"),
        ("line", "reduce_scatter"),
    ):
        for in_place in (False,) if kind == "all_to_all" else (False, True):
            for blocks in (1, 2):
                assert verify_plan(plan_of(build(name, kind, (n,)), in_place=in_place, blocks=blocks)).is_certified


@each(
    ("plan", "problem"),
    [
        (put(SMALL[0], 0, 0, 6, None), "race: "),  # the nop between put and signal
        (put(ported(), 0, 0, 3, Action("put", (local("o", 0),), (remote(0),), "port", (0,))), "deadlock: rank 1"),
        (put(packets(1), 0, 0, 0, None), "one step that writes the packets of scratch[0] as packets of rank 1, got 0"),
        (put(packets(1), 0, 0, 0, Action("put", (local("i", 0),), (remote(0),), "memory")), "scratch of rank 1"),
        (put(packets(1), 0, 1, 0, Action("re", (local("i", 0), local("s", 0)), (local("o", 0),))), "scratch of rank 0"),
        (put(met(), 0, 0, 0, None), "not there: rank 0"),
        (put(packets(1), 0, 0, 0, Action("ppkt", (local("i", 0),), (local("s", 0),), "memory")), "a remote target"),
        (put(packets(1), 0, 0, 0, Action("ppkt", (local("i", 0, 2),), (remote(0),), "memory")), "input[0:2]"),
        (put(packets(1), 0, 1, 0, Action("upkt", (local("o", 0),), (local("o", 0),))), "packets in scratch, got"),
        (switched(0), "deadlock: rank 0"),
        (met(3), "expected 3 blocks at barrier 0, got 2"),
        (replace(met(), kind="broadcast"), "expected one of all_gather, reduce_scatter"),
        (put(packets(1), 1, 1, 0, summed("max")), "block 1, step 0 (repkt): expected sums, got 'max'"),
        (put(put(packets(1), 0, 1, 0, summed("min")), 1, 1, 0, summed("min")), "expected sums, got 'min'"),
        (put(ported(), 0, 0, 0, None), "as many waits as signals at channel 0 of port"),
        (put(ported(), 0, 0, 0, Action("sem_acquire", semaphores=(1,))), "semaphore of the rank, of which there are 0"),
        (put(ported(), 0, 0, 0, Action("signal", channel_type="port")), "expected channels, got none"),
    ],
)  # fmt: skip
def test_faults_are_named(plan: Plan, problem: str) -> None:
    assert problem in refused(plan)


def test_what_is_not_listed_is_refused_with_its_place() -> None:
    """Positions and numbers of channels, buffers and ranks; none of them counts from the end."""

    def changed(*, rank: Mapping[str, object] | None = None, **block: object) -> str:
        plan = ported()
        first = plan.ranks[0]
        own = first.blocks[0]._replace(**block)
        return refused(replace(plan, ranks=(first._replace(blocks=(own,), **(rank or {})), plan.ranks[1])))

    def signal(number: int) -> Action:
        return Action("signal", channel_type="port", channels=(number,))

    def stored(number: int) -> Action:
        return Action("gstore", (local("i", 0),), (Span("switch", number, 0, 1),))

    buffer = ported().ranks[0].remote_buffers[0]
    for number in (-1, 4):
        for text, what, count in (
            (changed(channels={"port": (number,)}), "port channel of the rank", 1),
            (changed(remote_buffers={"port": (number,)}), "remote buffer of the rank", 1),
            (changed(rank={"peers": {"port": (number,)}}), "rank", 2),
            (changed(rank={"remote_buffers": (buffer._replace(rank=number),)}), "rank", 2),
            (refused(put(ported(), 0, 0, 0, signal(number))), "port channel of the block", 1),
            (refused(put(switched(), 0, 1, 0, stored(number))), "switch channel of the block", 1),
        ):  # fmt: skip
            assert text.startswith("form: rank 0, step ")
            assert f"expected a {what}, of which there are {count}, got number {number}; list it" in text
    assert "port channel of the rank, of which there are 0" in changed(rank={"peers": {}})
    assert "port channel of the block, of which there are 0" in changed(channels={})
    assert "port buffer of the block, of which there are 0" in changed(remote_buffers={})


def test_a_relaxed_signal_shows_no_data() -> None:
    plan = SMALL[2]
    for rank in (0, 1):
        for at, action in enumerate(plan.ranks[rank].blocks[0].actions):
            if action.name in ("signal", "wait"):
                plan = put(plan, rank, 0, at, action._replace(name=f"rlx{action.name}"))
    assert not fault_of(plan)  # in order, but not visible
    assert refused(plan).startswith("race: ")


def test_several_blocks_on_a_channel_are_in_no_order() -> None:
    plan = switched()
    blocks = tuple(b._replace(channels={**b.channels, "memory": (0,)}) for b in plan.ranks[0].blocks)
    assert "expected one block at channel 0 of memory, got several" in refused(
        replace(plan, ranks=(plan.ranks[0]._replace(blocks=blocks), plan.ranks[1]))
    )


def test_pipelines_take_turns_alike() -> None:
    plan = switched()
    (action,) = plan.ranks[0].blocks[1].actions
    assert "expected pipelines of one unit_size" in refused(put(plan, 0, 1, 0, action._replace(unit_bytes=2048)))
    assert "expected ranges of 2 chunks in a pipeline, got 1" in refused(
        put(plan, 0, 1, 0, action._replace(num_chunks=2))
    )


@each("reader", [True, False])
def test_packets_and_plain_data_do_not_share_scratch(reader: bool) -> None:
    """Also not at other places, since packets take twice the room that they name."""
    plan = packets(1)
    wide = replace(plan, ranks=tuple(rank._replace(scratch_chunks=4) for rank in plan.ranks))
    scratch, output = local("s", 3), local("o", 0)
    plain = Action("copy", (scratch,), (output,)) if reader else Action("copy", (output,), (scratch,))
    assert "expected scratch of rank 1 to hold packets alone or plain data alone, got both" in refused(
        put(wide, 1, 0, 1, plain)
    )
    assert verify_plan(wide).is_certified


def test_parts_of_cells_are_counted_before_they_are_made() -> None:
    plan = packets(1009)
    wide = replace(plan, ranks=tuple(r._replace(input_chunks=60_000, output_chunks=60_000) for r in plan.ranks))
    assert "expected at most 2097152 parts of cells, got 242160000" in refused(wide)


def test_parts_are_few() -> None:
    with pytest.raises(AssertionError, match="in at most 1024 parts, got 1025"):
        raise AssertionError(refused(packets(1025)))
