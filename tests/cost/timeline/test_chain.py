"""Units over stages by the exact program, against all ways to spread them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, product
from math import inf
from random import Random

import pytest

from shardwright.cost.timeline.chain import Place, Spread, Unit, chained
from shardwright.pcg.errors import PlanError
from tests.each import each


def all_spreads(places: Sequence[Place]) -> Iterator[Spread]:
    num_units, num_stages = len(places[0].ways[0]), len(places)
    for cuts in combinations(range(1, num_units), num_stages - 1):
        ends = (*cuts, num_units)
        sizes = tuple(end - start for start, end in zip((0, *cuts), ends, strict=True))
        for ways in product(*(range(len(place.ways)) for place in places)):
            yield Spread(sizes, ways)


def measured(places: Sequence[Place], found: Spread, many: int) -> tuple[float, bool]:
    """Seconds of a step, and whether all stages have room."""
    start, seconds, fits = 0, list[float](), True
    for place, size, way in zip(places, *found, strict=True):
        seconds.append(sum(unit.seconds for unit in place.ways[way][start : start + size]))
        fits &= place.num_bytes(way, start, start + size) <= place.free_bytes
        start += size
    return sum(seconds) + (many - 1) * max(seconds), fits


def random_places(random: Random) -> list[Place]:
    """Devices that differ, ways that trade time for memory, and often too little of that."""
    num_units, num_stages, num_ways = random.randint(3, 7), random.randint(2, 3), random.randint(1, 3)
    plain = [(random.choice((1, 1, 2, 5)), random.randint(0, 4), random.randint(0, 6)) for _ in range(num_units)]
    ways = [
        tuple(Unit(s * (1 + 0.3 * way), stored, kept / (1 + way), random.randint(0, 2)) for s, stored, kept in plain)
        for way in range(num_ways)
    ]
    places = list[Place]()
    for stage in range(num_stages):
        slower = random.choice((1, 1, 2, 3))
        own = tuple(tuple(unit._replace(seconds=slower * unit.seconds) for unit in way) for way in ways)
        places.append(Place(own, num_stages - stage, random.choice((inf, 10.0, 20.0, 35.0))))
    return places


def test_no_spread_that_fits_is_faster() -> None:
    """400 random cases; the bounds that are tried are 0.2 % apart, and even memory counts a ten-thousandth."""
    random, infeasible, uneven, several = Random(5), 0, 0, 0
    for _ in range(400):
        places, many = random_places(random), random.choice((1, 2, 8, 64))
        found = chained(places, many)
        fitting = [s for s, fits in (measured(places, other, many) for other in all_spreads(places)) if fits]
        if found is None:
            assert not fitting
            infeasible += 1
            continue
        own_s, fits = measured(places, found, many)
        assert fits
        assert min(fitting) <= own_s * (1 + 1e-9)
        assert own_s <= min(fitting) * (1 + 3e-3)
        uneven += max(found.sizes) > min(found.sizes) + 1
        several += len(set(found.ways)) > 1
    assert min(infeasible, uneven, several) >= 20


def test_equal_stages_are_as_even_as_can_be() -> None:
    """The ends take longer, so the stages in the middle have more of the blocks; the first keeps most of each."""
    units = (Unit(2.0), *[Unit(1.0)] * 12, Unit(3.0))
    assert chained([Place((units,))] * 4, 8) == Spread((3, 4, 4, 3), (0, 0, 0, 0))
    kept = (tuple(Unit(1.0, 0.0, 1.0) for _ in range(10)),)
    places = [Place(kept, in_flight, 100.0) for in_flight in (4, 3, 2, 1)]
    found = chained(places, 8)
    assert found is not None
    assert found.sizes == (1, 3, 3, 3)


def test_stages_with_more_in_flight_make_more_again() -> None:
    ways = (tuple(Unit(1.0, 0.0, 4.0) for _ in range(8)), tuple(Unit(1.25, 0.0, 1.0) for _ in range(8)))
    found = chained([Place(ways, in_flight, 20.0) for in_flight in (4, 3, 2, 1)], 64)
    assert found is not None
    assert found == Spread((2, 2, 2, 2), (1, 1, 0, 0))


@each("free_bytes", [-10.0, 0.0, 0.5])
def test_nothing_fits_where_nothing_is_free(free_bytes: float) -> None:
    """A stage may need more than its memory beside its units."""
    places = [Place(((Unit(1.0, 1.0),) * 4,)), Place(((Unit(1.0, 1.0),) * 4,), 1, free_bytes)]
    assert chained(places, 4) is None


@each(("units", "stages"), [(1, 2), (3, 4)])
def test_too_few_units_are_refused(units: int, stages: int) -> None:
    with pytest.raises(PlanError, match=f"{stages} virtual stages, but the model has only {units} sections to put on"):
        chained([Place(((Unit(1.0),) * units,))] * stages, 4)


def test_very_many_units_are_spread_as_well() -> None:
    """Neighbours are taken together: 6,000 take no longer than a few hundred, also where one takes nearly all."""
    random = Random(7)
    units = tuple(Unit(random.choice((1.0, 2.0, 5.0)), 1.0, 1.0, random.random()) for _ in range(6000))
    places = [Place((units,), 4 - stage) for stage in range(4)]
    found = chained(places, 8)
    assert found is not None
    assert sum(found.sizes) == len(units)
    total_s = sum(unit.seconds for unit in units)
    assert measured(places, found, 8)[0] <= 1.01 * (total_s + 7 * total_s / 4)
    one = (*units[:2999], Unit(1e9), *units[3000:])
    lopsided = chained([Place((one,))] * 4, 8)
    assert lopsided is not None
    assert sum(lopsided.sizes) == len(units)
    assert min(lopsided.sizes) >= 1


def least_slowest_s(units_s: Sequence[float], num_stages: int) -> float:
    """Of all ways to cut units, the least time of the slowest stage: stage by stage, for every number of units."""
    until = [0.0, *accumulate(units_s)]
    best = until[1:]
    for stage in range(2, num_stages + 1):
        best = [
            min((max(best[i - 1], until[end] - until[i]) for i in range(stage - 1, end)), default=inf)
            for end in range(1, len(until))
        ]
    return best[-1]


@each("seed", range(12))
def test_stages_of_very_unlike_numbers_of_units_are_found(seed: int) -> None:
    """A few units take as long as all others together, so that one stage may have nearly all units."""
    random = Random(seed)
    num_units, num_stages, many = (
        random.choice((30, 90, 140)),
        random.choice((3, 8, 24)),
        random.choice((1, 4, 64, 1000)),
    )
    heavy = set(random.sample(range(num_units), num_stages - 1))
    units = tuple(Unit(100.0 if i in heavy else random.random()) for i in range(num_units))
    places = [Place((units,))] * num_stages
    found = chained(places, many)
    assert found is not None
    total_s = sum(unit.seconds for unit in units)
    slowest_s = least_slowest_s([unit.seconds for unit in units], num_stages)
    assert measured(places, found, many)[0] <= (total_s + (many - 1) * slowest_s) * (1 + 3e-3)


def test_a_stage_that_is_much_faster_may_have_nearly_all_units() -> None:
    slow, fast = tuple(Unit(1.0) for _ in range(60)), tuple(Unit(0.01) for _ in range(60))
    found = chained([Place((slow,)), Place((fast,)), Place((slow,)), Place((slow,))], 64)
    assert found == Spread((1, 57, 1, 1), (0, 0, 0, 0))
