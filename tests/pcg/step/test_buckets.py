"""Which parameters are gathered together, and which gradients are summed together, at the sizes where that changes."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.pcg.step.buckets import BLOCK_BYTES, BUCKET_BYTES, LARGE_BYTES, Buckets, blocks

Gradient = tuple[str, object, float, int]


def units(gradients: Iterable[Gradient]) -> tuple[list[list[str]], list[list[str]]]:
    """Those launched on the way, and the rest."""
    buckets = Buckets[str]()
    launched = [unit for gradient in gradients if (unit := buckets.add(*gradient)) is not None]
    return launched, buckets.rest()


def test_a_block_ends_with_its_key() -> None:
    assert blocks([("a", 0, 1), ("b", 0, 1), ("c", 1, 1), ("d", 0, 1)]) == [["a", "b"], ["c"], ["d"]]


def test_a_block_is_closed_when_it_has_reached_its_size_and_not_before() -> None:
    half = BLOCK_BYTES // 2
    assert blocks([("a", 0, half), ("b", 0, half), ("c", 0, 1)]) == [["a", "b"], ["c"]]
    assert blocks([("a", 0, half), ("b", 0, half - 1), ("c", 0, 1), ("d", 0, 1)]) == [["a", "b", "c"], ["d"]]
    assert blocks([]) == []


def test_a_large_gradient_is_summed_alone_and_at_once() -> None:
    large, small = ("large", 0, LARGE_BYTES, 0), ("small", 0, LARGE_BYTES - 1, 0)
    assert units([small, large]) == ([["large"]], [["small"]])


def test_a_bucket_is_closed_when_it_has_reached_its_size_and_not_before() -> None:
    size = LARGE_BYTES - 1
    number = -(-BUCKET_BYTES // size)
    every = [(str(i), 0, size, 0) for i in range(number + 1)]
    launched, rest = units(every)
    assert (list(map(len, launched)), rest) == ([number], [[str(number)]])
    short = number * size - BUCKET_BYTES + 1
    launched, rest = units([("short", 0, size - short, 0), *every[1:]])
    assert list(map(len, launched)) == [number + 1]
    assert rest == []


def test_gradients_that_go_other_ways_have_buckets_of_their_own() -> None:
    assert units((name, name, 1, 0) for name in "aba") == ([], [["a", "a"], ["b"]])


def test_a_fold_fills_a_bucket_but_does_not_close_it() -> None:
    fold = ("fold", 0, 1, BUCKET_BYTES)
    assert units([fold, fold]) == ([], [["fold", "fold"]])
    assert units([fold, ("last", 0, 1, 0)]) == ([["fold", "last"]], [])


def test_filling_a_bucket_adds_each_gradient_once() -> None:
    """A sum over all that is in it, for each that comes, grew with the square of their number."""
    added = list[float]()

    class Size(float):
        def __radd__(self, other: float) -> float:
            added.append(float(self))
            return other + float(self)

        def __rmul__(self, other: float) -> Size:
            return Size(other * float(self))

    buckets = Buckets[int]()
    assert all(buckets.add(i, "a", Size(8)) is None for i in range(100))
    assert len(added) == 100
    assert buckets.rest() == [list(range(100))]
