"""Random networks with relays, links one way, shared resources and unlike rates: all kinds, sizes and weights."""

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.scheduled import ScheduledCollective, chunk_lengths
from shardwright.lowering.trial.collectives import example_input, example_output, whole_elements
from shardwright.pcg.collectives.collective import KINDS, RULES, Collective
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.collectives.topology import Link, Resource, Topology
from shardwright.pcg.errors import ClusterError
from shardwright.search.collectives.sketch import Sketch
from shardwright.search.collectives.synthesis import Synthesized, synthesize
from tests.each import in_whole_grids
from tests.search.collectives.right import assert_right


def network(draw: random.Random, most_ranks: int) -> Topology | None:
    ranks, relays = draw.randrange(2, most_ranks + 1), draw.randrange(3)
    order = draw.sample(range(ranks + relays), ranks + relays)
    pairs: set[tuple[int, int]] = {*pairwise(order), *((a, b) for a, b in (draw.sample(order, 2) for _ in order))}
    edges = sorted({*pairs, *((b, a) for a, b in pairs if draw.random() < 0.9)})
    links = tuple(Link(a, b, Fraction(draw.choice((10, 20, 25)) * 10**8), draw.choice((0.0, 1e-6))) for a, b in edges)
    shared = frozenset(draw.sample(edges, min(2, len(edges))))
    nic = Resource("shared", Fraction(draw.choice((5, 50)) * 10**8), shared)
    try:
        return Topology("random", ranks, links, tuple(f"relay {n}" for n in range(relays)), (nic,))
    except ClusterError:  # not connected
        return None


class Drawn(NamedTuple):
    network: Topology
    found: Synthesized


def drawn(seed: int, most_ranks: int = 6) -> Iterator[Drawn]:
    """What is synthesized for a network, a kind, a size and weights, all drawn; the best is the last."""
    draw = random.Random(seed)
    topology, kind = network(draw, most_ranks), KINDS[seed % 8]
    if topology is None:
        return
    ranks, root = topology.num_ranks, draw.randrange(topology.num_ranks)
    units = RULES[kind].num_units(ranks, root)
    weights = [1, *(draw.randrange(4) for _ in range(units - 1))] if draw.random() < 0.4 and units > 1 else None
    size, sketch = draw.choice((1e3, 1e6, 1e9)), Sketch(pieces=(3,))
    for one in synthesize(topology, kind, size, root=root, weights=weights, budget_s=0.1, sketch=sketch):
        yield Drawn(topology, one)


def test_random_networks() -> None:
    judged = 0
    for seed in range(48):
        for topology, one in drawn(seed):
            assert_right(one.schedule, topology)
            assert one.seconds >= one.bound_s * (1 - 1e-9), seed
            judged += 1
    assert judged > 40


@in_whole_grids
def test_schedules_of_300_random_networks_run() -> None:
    """On as many gloo ranks as the network has; the results are what the collectives say, and torch's."""
    best = [own[-1] for seed in range(500) if (own := list(drawn(seed, 8)))][:300]
    assert len(best) == 300
    for topology, one in best:
        assert_right(one.schedule, topology)
    for num_ranks in range(2, 9):
        own = [one.schedule for _, one in best if one.schedule.num_ranks == num_ranks]
        assert len({schedule.collective.kind for schedule in own}) == len(RULES)
        assert run_ranks(wrong_ones, num_ranks, 120, args=(own,)) == [[]] * num_ranks


def wrong_ones(schedules: Sequence[Schedule]) -> list[str]:
    """Of these, the schedules that give this rank something else than they should."""
    assert dist.group.WORLD is not None
    return [schedule.name for schedule in schedules if not is_right_here(schedule, dist.group.WORLD)]


def is_right_here(schedule: Schedule, group: dist.ProcessGroup) -> bool:
    whole, rank = schedule.collective, dist.get_rank()
    size = whole_elements(whole, 4)
    lengths = chunk_lengths(whole, size)
    given, expected = example_input(whole, lengths, rank), example_output(whole, lengths, rank)
    by_torch = torchs(whole, given.clone(), torch.empty_like(expected))
    result = ScheduledCollective(schedule, group, timeout_s=30).run(given, size)
    return torch.equal(result, expected) and (by_torch is None or torch.equal(result, by_torch))


def torchs(whole: Collective, given: Tensor, result: Tensor) -> Tensor | None:
    """What torch's collective gives; None: it has none for these shares, or not for this rank."""
    if whole.kind == "all_reduce":
        dist.all_reduce(given)
        return given
    gives = {
        "all_gather": dist.all_gather_single,
        "reduce_scatter": dist.reduce_scatter_single,
        "all_to_all": dist.all_to_all_single,
    }
    if whole.kind not in gives or not whole.has_equal_units:
        return None
    gives[whole.kind](result, given)
    return result
