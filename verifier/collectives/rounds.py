"""The judge of schedules: every step read, then written; every link within its rate.

A schedule runs its steps one after the other on each rank, and each rank posts all transfers of a step at once. So no
transfer waits for one of a later step, and nothing blocks even if a send waits for its receive: all partners of the
ranks that are furthest behind have posted the same step or finished it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Topology
from shardwright.pcg.errors import ClusterError
from shardwright.verifier.collectives.values import Value, added, afterwards, before
from shardwright.verifier.collectives.verdict import (
    MOST_REFUSALS,
    Fault,
    Refusal,
    Refused,
    ScheduleCertificate,
    ScheduleVerdict,
    judge_digest,
    subject_hash,
    verdict_of,
)

State = dict[tuple[int, int], Value]


def verify_schedule(schedule: Schedule, topology: Topology | None = None) -> ScheduleVerdict:
    """Judge a schedule: complete, each contribution once, nothing sent before it is there.

    On a topology, every transfer has a path, and steps that claim a number of rounds last no longer.
    """
    return verdict_of(lambda: _proven(schedule, topology))


def _proven(schedule: Schedule, topology: Topology | None) -> ScheduleCertificate:
    _judge_data(schedule)
    facts = () if topology is None else _judge_rates(schedule, topology)
    kind = schedule.collective.kind
    claim = f"{schedule.name}: {kind} of {schedule.num_ranks} ranks in {schedule.num_steps} steps"
    subject = subject_hash(schedule, topology)
    return ScheduleCertificate(subject, judge_digest(), claim, 0, facts)


def _judge_data(schedule: Schedule) -> None:
    state: State = dict(before(schedule.collective))
    for step in schedule.steps:
        _check_writes(step)
        received = [(transfer, _sent(state, transfer)) for transfer in step]
        for transfer, value in received:
            _store(state, transfer, value)
    refusals = _missing(schedule, state)
    if first := [refusal for refusal, _ in zip(refusals, range(MOST_REFUSALS), strict=False)]:
        raise Refused(*first)


def _sent(state: State, transfer: Transfer) -> Value:
    value = state.get((transfer.src, transfer.chunk))
    if value is None:
        problem = f"{transfer}: rank {transfer.src} does not have it yet; send it after it has arrived"
        raise Refused(_refusal("not there", transfer, transfer.src, problem))
    return value


def _store(state: State, transfer: Transfer, value: Value) -> None:
    cell = (transfer.dst, transfer.chunk)
    if transfer.op == "copy":
        state[cell] = value
        return
    if cell not in state:
        problem = f"{transfer}: there is nothing that it could be added to; copy the first one"
        raise Refused(_refusal("not there", transfer, transfer.dst, problem))
    state[cell] = added([state[cell], value], f"{transfer},")


def _check_writes(step: Iterable[Transfer]) -> None:
    """Refuse a step in which a cell is replaced and written by another transfer as well."""
    writes = Counter((transfer.dst, transfer.chunk) for transfer in step)
    for transfer in step:
        if transfer.op == "copy" and writes[transfer.dst, transfer.chunk] > 1:
            problem = (
                f"{transfer}: another transfer of the step writes the same cell; put one of them into a later step"
            )
            raise Refused(_refusal("race", transfer, transfer.dst, problem))


def _missing(schedule: Schedule, state: State) -> Iterator[Refusal]:
    last = max(schedule.num_steps - 1, 0)
    for (rank, chunk), expected in afterwards(schedule.collective).items():
        value = state.get((rank, chunk))
        if value != expected:
            got = "nothing" if value is None else str(value)
            fault: Fault = "counted twice" if getattr(value, "twice", False) else "incomplete"
            yield Refusal(fault, rank, last, chunk, f"expected {expected}, got {got}; mend the transfers to that cell")


def _judge_rates(schedule: Schedule, topology: Topology) -> tuple[str, ...]:
    if topology.num_ranks != schedule.num_ranks:
        problem = f"expected a topology of {schedule.num_ranks} ranks, got {topology.num_ranks}; take another topology"
        raise Refused(Refusal("form", -1, -1, -1, problem))
    if not schedule.transfers:
        return ("nothing is moved",)
    firsts = dict[tuple[int, int, tuple[int, ...]], Transfer]()
    for transfer in schedule.transfers:
        firsts.setdefault((transfer.src, transfer.dst, transfer.via), transfer)
    for transfer in firsts.values():
        try:
            topology.path(transfer.src, transfer.dst, transfer.via)
        except ClusterError as error:
            raise Refused(_refusal("rate", transfer, transfer.src, str(error))) from None
    seconds = schedule.seconds_per_byte(topology)
    round_s = schedule.collective.unit / topology.unit_rate
    for step, (rounds, busy_s) in enumerate(zip(schedule.rounds, seconds, strict=False)):
        if busy_s > rounds * round_s:
            busiest = schedule.steps[step][0]
            problem = f"expected links to be busy for at most {rounds} rounds, got {busy_s / round_s}; give it more"
            raise Refused(Refusal("rate", busiest.src, step, busiest.chunk, problem))
    return (f"{float(sum(seconds)):.4g} s per byte of the whole on {topology.name}, latencies left out",)


def _refusal(fault: Fault, transfer: Transfer, rank: int, problem: str) -> Refusal:
    return Refusal(fault, rank, transfer.step, transfer.chunk, problem)
