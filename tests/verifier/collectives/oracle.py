"""An oracle of programs that shares nothing with the judge but the data: all interleavings, and numbers.

It walks every reachable state of a small program, as places of its blocks. Where nothing can go on, the program blocks.
Where two steps that touch the same memory can both go on, and one of them writes, they race. One walk with random
numbers shows the result.
"""

from __future__ import annotations

import random
from collections import defaultdict

from shardwright.pcg.collectives.program import Place, Program, Step

MODULUS = (1 << 61) - 1
MOST_STATES = 60_000
ADDS_SOURCE, ADDS_TARGET = {"rrc", "rrcs", "rrs", "cpy", "re", "s"}, {"re"}
RECEIVES, SENDS, STORES = (
    {"r", "rcs", "rrc", "rrcs", "rrs"},
    {"s", "rcs", "rrcs", "rrs"},
    {"r", "rcs", "rrc", "rrcs", "cpy", "re"},
)

State = tuple[int, ...]


class Wrong(Exception):  # noqa: N818
    """Why the program is wrong."""


class Machine:
    def __init__(self, program: Program, capacity: int) -> None:
        self.program, self.capacity = program, capacity
        self.blocks = [(rank, index) for rank, one in enumerate(program.ranks) for index in range(len(one.blocks))]
        self.number = {block: place for place, block in enumerate(self.blocks)}
        self.sends, self.receives = self.totals(SENDS, "send"), self.totals(RECEIVES, "receive")

    def steps(self, place: int) -> tuple[Step, ...]:
        rank, index = self.blocks[place]
        return self.program.ranks[rank].blocks[index].steps

    def totals(self, ops: set[str], end: str) -> list[list[int]]:
        """For each block, how many of the first n steps send or receive."""
        found = []
        for place in range(len(self.blocks)):
            counts = [0]
            for step in self.steps(place):
                counts.append(counts[-1] + (step.op in ops))
            found.append(counts)
        return found

    def connections(self) -> dict[tuple[int, int, int], list[list[int]]]:
        ends: dict[tuple[int, int, int], list[list[int]]] = defaultdict(lambda: [[], []])
        for place, (rank, index) in enumerate(self.blocks):
            block = self.program.ranks[rank].blocks[index]
            if self.sends[place][-1]:
                ends[rank, block.send, block.channel][0].append(place)
            if self.receives[place][-1]:
                ends[block.receive, rank, block.channel][1].append(place)
        return ends

    def ready(self, place: int, state: State, queues: dict[int, dict[str, int]]) -> bool:
        if state[place] == len(self.steps(place)):
            return False
        step, (rank, _) = self.steps(place)[state[place]], self.blocks[place]
        if step.after is not None and state[self.number[rank, step.after[0]]] <= step.after[1]:
            return False
        if step.op in RECEIVES:
            other = queues[place]["from"]
            if self.sends[other][state[other]] <= self.receives[place][state[place]]:
                return False
        if step.op in SENDS:
            other = queues[place]["to"]
            return self.sends[place][state[place]] - self.receives[other][state[other]] < self.capacity
        return True


def cells(program: Program, rank: int, place: Place, count: int) -> list[tuple[int, str, int]]:
    """Memory that a range touches; in place, the input is a part of the output or the other way round."""
    each = max(1, program.num_chunks // program.num_ranks)
    found = []
    for offset in range(place.offset, place.offset + count):
        name, at = place.buffer, offset
        if program.in_place and name in ("input", "output"):
            small = {"all_gather": "input", "reduce_scatter": "output"}.get(program.kind, "")
            name, at = "user", offset + (rank * each if name == small else 0)
        found.append((rank, name, at))
    return found


def touched(
    program: Program, rank: int, step: Step
) -> tuple[list[list[tuple[int, str, int]]], list[tuple[int, str, int]]]:
    """What a step reads, element by element, and what it writes."""
    source = cells(program, rank, step.source, step.num_chunks)
    target = cells(program, rank, step.destination, step.num_chunks)
    reads = [
        [*([source[j]] if step.op in ADDS_SOURCE else []), *([target[j]] if step.op in ADDS_TARGET else [])]
        for j in range(step.num_chunks)
    ]
    return reads, target if step.op in STORES else []


def check_bounds(program: Program) -> None:
    whole = program.num_chunks
    each = whole // program.num_ranks
    small = {"all_gather": ("input", each), "reduce_scatter": ("output", each)}.get(program.kind, ("", 0))
    for one in program.ranks:
        for block in one.blocks:
            for step in block.steps:
                if step.after is not None:
                    other, number = step.after
                    if not (0 <= other < len(one.blocks) and 0 <= number < len(one.blocks[other].steps)):
                        raise Wrong("waits for nothing")
                for place, used in ((step.source, step.op in ADDS_SOURCE), (step.destination, step.op in STORES)):
                    declared = {"input": one.input_chunks, "output": one.output_chunks, "scratch": one.scratch_chunks}
                    room = declared[place.buffer]
                    if place.buffer != "scratch":
                        room = min(room, small[1] if place.buffer == small[0] else whole)
                    if used and not 0 <= place.offset <= place.offset + step.num_chunks <= room:
                        raise Wrong("bounds")


def wire(machine: Machine) -> dict[int, dict[str, int]]:
    """The other ends of every block's connections."""
    queues: dict[int, dict[str, int]] = defaultdict(dict)
    for (src, dst, _), (senders, receivers) in machine.connections().items():
        if len(senders) != 1 or len(receivers) != 1 or min(src, dst) < 0 or src == dst:
            raise Wrong("messages without one sender and one receiver")
        if machine.sends[senders[0]][-1] != machine.receives[receivers[0]][-1]:
            raise Wrong("messages that nobody receives, or nobody sends")
        sent = [s.num_chunks for s in machine.steps(senders[0]) if s.op in SENDS]
        if sent != [s.num_chunks for s in machine.steps(receivers[0]) if s.op in RECEIVES]:
            raise Wrong("messages of another length")
        queues[senders[0]]["to"] = receivers[0]
        queues[receivers[0]]["from"] = senders[0]
    return queues


def explore(program: Program, capacity: int = 1 << 30) -> None:
    """Raise `Wrong` if the program can block or race."""
    check_bounds(program)
    machine = Machine(program, capacity)
    queues = wire(machine)
    effects = {
        (place, n): touched(program, machine.blocks[place][0], step)
        for place in range(len(machine.blocks))
        for n, step in enumerate(machine.steps(place))
    }
    for reads, writes in effects.values():
        crossing = any(cell in writes and writes.index(cell) != j for j, row in enumerate(reads) for cell in row)
        if crossing or len(set(writes)) < len(writes):
            raise Wrong("a step that overwrites what it reads")
    start: State = tuple(0 for _ in machine.blocks)
    seen, todo, end = {start}, [start], tuple(len(machine.steps(place)) for place in range(len(machine.blocks)))
    while todo:
        state = todo.pop()
        able = [place for place in range(len(state)) if machine.ready(place, state, queues)]
        if not able and state != end:
            raise Wrong("blocks")
        for i, one in enumerate(able):
            for other in able[:i]:
                (r1, w1), (r2, w2) = effects[one, state[one]], effects[other, state[other]]
                flat1, flat2 = {c for row in r1 for c in row}, {c for row in r2 for c in row}
                if set(w1) & (set(w2) | flat2) or set(w2) & flat1:
                    raise Wrong("races")
        for place in able:
            after = (*state[:place], state[place] + 1, *state[place + 1 :])
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if len(seen) > MOST_STATES:
            raise RuntimeError("the oracle is for small programs")


def run(program: Program, seed: int = 0) -> None:
    """Raise `Wrong` unless a run in some order, with random numbers, gives the collective's result."""
    chance, machine = random.Random(seed), Machine(program, 1 << 30)
    queues, state = wire(machine), [0] * len(machine.blocks)
    memory: dict[tuple[int, str, int], int] = {}
    inputs = [[chance.randrange(MODULUS) for _ in range(program.num_chunks)] for _ in program.ranks]
    each = program.num_chunks // program.num_ranks
    for rank, values in enumerate(inputs):
        size = each if program.kind == "all_gather" else program.num_chunks
        if program.kind != "broadcast" or rank == program.root:
            memory |= dict(zip(cells(program, rank, Place("input", 0), size), values, strict=False))
    for rank, one in enumerate(program.ranks):
        for of, to in one.copies if not program.in_place else ():
            memory[cells(program, rank, Place("output", to), 1)[0]] = memory[
                cells(program, rank, Place("input", of), 1)[0]
            ]
    flying: dict[int, list[list[int]]] = defaultdict(list)
    while able := [place for place in range(len(state)) if machine.ready(place, tuple(state), queues)]:
        place = chance.choice(able)
        step, (rank, _) = machine.steps(place)[state[place]], machine.blocks[place]
        message = flying[queues[place]["from"]].pop(0) if step.op in RECEIVES else [0] * step.num_chunks
        reads, writes = touched(program, rank, step)
        if any(cell not in memory for row in reads for cell in row):
            raise Wrong("reads what is not there")
        values = [(message[j] + sum(memory[cell] for cell in reads[j])) % MODULUS for j in range(step.num_chunks)]
        memory |= dict(zip(writes, values, strict=False))
        if step.op in SENDS:
            flying[place].append(values)
        state[place] += 1
    for rank in range(program.num_ranks):
        for offset, value in enumerate(due(program, inputs, rank)):
            if memory.get(cells(program, rank, Place("output", offset), 1)[0]) != value:
                raise Wrong("another result")


def due(program: Program, inputs: list[list[int]], rank: int) -> list[int]:
    n, chunks = program.num_ranks, program.num_chunks
    each = chunks // n
    sums = [sum(values[c] for values in inputs) % MODULUS for c in range(chunks)]
    return {
        "all_reduce": sums,
        "reduce_scatter": sums[rank * each : rank * each + each],
        "all_gather": [inputs[c // each][c % each] for c in range(each * n)] if each else [],
        "all_to_all": [inputs[c // each][rank * each + c % each] for c in range(each * n)] if each else [],
        "broadcast": inputs[program.root],
    }[program.kind]


def fault_of(program: Program) -> str:
    """Why a program is wrong; "" if it is right."""
    try:
        explore(program)
        run(program)
    except Wrong as wrong:
        return str(wrong)
    return ""


def blocks_with(program: Program, capacity: int) -> bool:
    try:
        explore(program, capacity)
    except Wrong as wrong:
        return str(wrong) == "blocks"
    return False
