"""An oracle of plans that shares nothing with the judge but the data: all interleavings of small plans, and numbers.

Between two `nop`s the operations of a block may happen in any order, as the threads of a block are not together there.
Every reachable state is a set of operations that ended. Two operations that can both go on and touch the same memory
race. It knows no packets, pipelines, block groups, switches and barriers.
"""

from __future__ import annotations

import random
from itertools import combinations

from shardwright.pcg.collectives.plan import DATA, Action, Plan, Span

MODULUS = (1 << 61) - 1
MOST_STATES = 40_000
Cell = tuple[int, str, int]
State = tuple[frozenset[int], ...]


class Wrong(Exception):  # noqa: N818
    """Why the plan is wrong."""


class Machine:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        assert all(len(rank.blocks) == 1 for rank in plan.ranks)
        self.actions = [rank.blocks[0].actions for rank in plan.ranks]

    def peer(self, rank: int, position: int) -> int:
        return self.plan.ranks[rank].peers["memory"][self.plan.ranks[rank].blocks[0].channels["memory"][position]]

    def started(self, done: frozenset[int], rank: int, index: int) -> bool:
        """Whether the operations before the last `nop` have ended; a `nop` needs all before it."""
        actions = self.actions[rank]
        nops = [i for i in range(index) if actions[i].name == "nop"]
        least = index if actions[index].name == "nop" else (nops[-1] + 1 if nops else 0)
        return all(i in done for i in range(least))

    def counted(self, done: frozenset[int], rank: int, peer: int, names: tuple[str, ...]) -> int:
        return sum(
            self.peer(rank, position) == peer
            for i in done if self.actions[rank][i].name in names for position in self.actions[rank][i].channels
        )  # fmt: skip

    def ready(self, state: State, rank: int, index: int) -> bool:
        if index in state[rank] or not self.started(state[rank], rank, index):
            return False
        action = self.actions[rank][index]
        if action.name not in ("wait", "rlxwait"):
            return True
        waits, signals = ("wait", "rlxwait"), ("signal", "rlxsignal")
        earlier = [i for i in range(index) if self.actions[rank][i].name in waits]
        if any(i not in state[rank] for i in earlier):
            return False
        peers = [self.peer(rank, position) for position in action.channels]
        return all(
            self.counted(state[p], p, rank, signals) >= self.counted(state[rank], rank, p, waits) + peers.count(p)
            for p in peers
        )

    def cells(self, rank: int, action: Action, span: Span) -> list[Cell]:
        plan, buffer = self.plan, str(span.place)
        if isinstance(span.place, int):
            remote = plan.ranks[rank].remote_buffers[plan.ranks[rank].blocks[0].remote_buffers["memory"][span.place]]
            rank, buffer = remote.rank, remote.buffer
        sizes = {"input": plan.ranks[rank].input_chunks, "output": plan.ranks[rank].output_chunks,
                 "scratch": plan.ranks[rank].scratch_chunks}  # fmt: skip
        if span.first < 0 or span.first + span.size > sizes[buffer]:
            raise Wrong("bounds")
        shift = 0
        if plan.in_place and buffer != "scratch":
            small = {"all_gather": "input", "reduce_scatter": "output"}.get(plan.kind)
            shift = rank * plan.pieces if buffer == small else 0
            buffer = "user"
        return [(rank, buffer, span.first + shift + i) for i in range(span.size)]

    def effect(self, rank: int, action: Action) -> list[tuple[list[Cell], list[Cell]]]:
        """What the operation adds, and where it stores that, chunk by chunk."""
        if action.name not in DATA:
            return []
        sources = [self.cells(rank, action, span) for span in action.sources]
        targets = [self.cells(rank, action, span) for span in action.targets]
        if len({len(cells) for cells in (*sources, *targets)}) != 1 or not sources or not targets:
            raise Wrong("ranges of several sizes")
        if DATA[action.name].sums:
            added, stored = zip(*sources, strict=True), zip(*targets, strict=True)
            return [(list(one), list(other)) for one, other in zip(added, stored, strict=True)]
        if len(sources) != len(targets):
            raise Wrong("pairs")
        return [([a], [b]) for s, t in zip(sources, targets, strict=True) for a, b in zip(s, t, strict=True)]


def walk(plan: Plan) -> None:
    """Raise `Wrong` if the plan can block or race, or leaves signals behind."""
    machine = Machine(plan)
    effects = {(r, i): machine.effect(r, a) for r, actions in enumerate(machine.actions) for i, a in enumerate(actions)}
    for pairs in effects.values():
        _check_inside(pairs)
    reads = {place: {c for r, _ in pairs for c in r} for place, pairs in effects.items()}
    writes = {place: {c for _, s in pairs for c in s} for place, pairs in effects.items()}
    start: State = tuple(frozenset[int]() for _ in machine.actions)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        able = [place for place in effects if machine.ready(state, *place)]
        if not able and sum(map(len, state)) < len(effects):
            raise Wrong("blocks")
        for one, other in combinations(able, 2):
            if writes[one] & (writes[other] | reads[other]) or writes[other] & reads[one]:
                raise Wrong("races")
        for rank, one in enumerate(plan.ranks):
            late = [p for p in effects if p[1] not in state[p[0]] and any(cell[0] == rank for cell in writes[p])]
            if len(state[rank]) == len(machine.actions[rank]) and late and one.blocks:
                raise Wrong("data that arrives after the end")
        for rank, index in able:
            after = (*state[:rank], state[rank] | {index}, *state[rank + 1 :])
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if len(seen) > MOST_STATES:
            raise RuntimeError("the oracle is for small plans")
    _check_signals(machine)


def _check_inside(pairs: list[tuple[list[Cell], list[Cell]]]) -> None:
    written = [cell for _, stores in pairs for cell in stores]
    crossing = (
        i != j and set(reads) & set(stores) for i, (reads, _) in enumerate(pairs) for j, (_, stores) in enumerate(pairs)
    )
    if len(set(written)) < len(written) or any(crossing):
        raise Wrong("an operation that overwrites what it reads")


def _check_signals(machine: Machine) -> None:
    ended = [frozenset(range(len(actions))) for actions in machine.actions]
    for rank, one in enumerate(machine.plan.ranks):
        for peer in set(one.peers["memory"]):
            signals = machine.counted(ended[rank], rank, peer, ("signal", "rlxsignal"))
            if signals != machine.counted(ended[peer], peer, rank, ("wait", "rlxwait")):
                raise Wrong("signals that nobody waits for")


def run(plan: Plan, seed: int = 0) -> None:
    """Raise `Wrong` unless a run in some order, with random numbers, gives the collective's result."""
    chance, machine = random.Random(seed), Machine(plan)
    n, pieces = plan.num_ranks, plan.pieces
    size = {"all_reduce": pieces, "all_gather": pieces}.get(plan.kind, n * pieces)
    inputs = [[chance.randrange(MODULUS) for _ in range(size)] for _ in range(n)]
    memory = {
        cell: inputs[r][i]
        for r in range(n)
        for i in range(size)
        for cell in machine.cells(r, Action("copy"), Span("local", "input", i, 1))
    }
    state = [frozenset[int]() for _ in range(n)]
    while able := [
        (r, i) for r in range(n) for i in range(len(machine.actions[r])) if machine.ready(tuple(state), r, i)
    ]:
        rank, index = chance.choice(able)
        sums = [(stores, reads) for reads, stores in machine.effect(rank, machine.actions[rank][index])]
        if any(cell not in memory for _, reads in sums for cell in reads):
            raise Wrong("reads what is not there")
        values = [sum(memory[cell] for cell in reads) % MODULUS for _, reads in sums]
        memory |= {cell: value for (stores, _), value in zip(sums, values, strict=True) for cell in stores}
        state[rank] |= {index}
    for rank in range(n):
        for offset, value in enumerate(due(plan, inputs, rank)):
            (cell,) = machine.cells(rank, Action("copy"), Span("local", "output", offset, 1))
            if memory.get(cell) != value:
                raise Wrong("another result")


def due(plan: Plan, inputs: list[list[int]], rank: int) -> list[int]:
    n, k = plan.num_ranks, plan.pieces
    sums = [sum(values) % MODULUS for values in zip(*inputs, strict=True)]
    return {
        "all_reduce": sums,
        "reduce_scatter": sums[rank * k : rank * k + k],
        "all_gather": [value for values in inputs for value in values],
        "all_to_all": [inputs[s][rank * k + j] for s in range(n) for j in range(k)]
        if plan.kind == "all_to_all"
        else [],
    }[plan.kind]


def fault_of(plan: Plan) -> str:
    """Why a plan is wrong; "" if it is right."""
    try:
        walk(plan)
        run(plan)
    except Wrong as wrong:
        return str(wrong)
    return ""
