"""Collectives: what each cell holds before and afterwards."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from shardwright.pcg.collectives.collective import DUALS, RULES, Chunk, Collective, collective
from shardwright.pcg.errors import ShardwrightError
from tests.each import each

ALL = frozenset(range(3))


@each(
    ("kind", "pre", "post"),
    [
        ("all_gather", {(r, r): {r} for r in range(3)}, {(q, c): {c} for q in range(3) for c in range(3)}),
        ("reduce_scatter", {(q, c): {q} for q in range(3) for c in range(3)}, {(r, r): ALL for r in range(3)}),
        ("all_reduce", {(r, 0): {r} for r in range(3)}, {(r, 0): ALL for r in range(3)}),
        ("broadcast", {(1, 0): {1}}, {(r, 0): {1} for r in range(3)}),
        ("reduce", {(r, 0): {r} for r in range(3)}, {(1, 0): ALL}),
        ("gather", {(r, r): {r} for r in range(3)}, {(1, r): {r} for r in range(3)}),
        ("scatter", {(1, r): {1} for r in range(3)}, {(r, r): {1} for r in range(3)}),
        ("all_to_all", {(a, 3 * a + b): {a} for a in range(3) for b in range(3)},
         {(b, 3 * a + b): {a} for a in range(3) for b in range(3)}),
    ],
)  # fmt: skip
def test_before_and_after(kind: str, pre: object, post: object) -> None:
    one = collective(kind, 3, root=1)
    assert (one.pre, one.post) == (pre, post)


def test_every_kind_is_checked_above() -> None:
    assert len(RULES) == 8


def test_inputs_and_outputs_in_order() -> None:
    exchange = collective("all_to_all", 2, 2)
    assert exchange.inputs == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert exchange.outputs == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_weights_make_uneven_chunks_that_are_all_of_it() -> None:
    uneven = collective("all_gather", 3, 2, weights=[3, 0, 1])
    assert [chunk.size for chunk in uneven.chunks] == [Fraction(n, 8) for n in (3, 3, 0, 0, 1, 1)]
    assert not uneven.is_even
    assert (uneven.unit, sum(chunk.size for chunk in uneven.chunks)) == (Fraction(3, 8), 1)
    assert (0, 2) not in uneven.post  # nothing is due of a unit without bytes


@each("kind", DUALS)
def test_dual_of_the_dual(kind: str) -> None:
    one = collective(kind, 4, 3, root=2)
    assert one.dual() == collective(DUALS[one.kind], 4, 3, root=2)
    assert one.dual().dual() == one


def test_what_is_needed_nowhere_is_needed_nowhere_in_the_dual() -> None:
    gather = collective("all_gather", 3, weights=[1, 0, 2])
    assert gather.dual() == collective("reduce_scatter", 3, weights=[1, 0, 2])
    assert gather.dual().dual().post == gather.post


@each(
    ("kind", "num_ranks", "options", "problem"),
    [
        ("all_sum", 2, {}, "expected one of all_gather, reduce_scatter"),
        ("broadcast", 2, {"root": 2}, "expected a root from 0 to 1, got 2"),
        ("all_gather", 2, {"weights": [1]}, "expected 2 weights of at least 0, not all of them 0, got 1"),
        ("all_gather", 2, {"weights": [0, 0]}, "not all of them 0"),
        ("all_gather", 2, {"weights": [2, -1]}, "expected 2 weights of at least 0"),
        ("all_gather", 0, {}, "expected a positive integer, got 0"),
        ("all_gather", 2, {"pieces": 1.5}, "expected a positive integer, got 1.5"),
        ("all_to_all", 2000, {}, "expected at most 1048576 chunks, got 4000000 × 1"),
    ],
)
def test_what_is_no_collective(kind: str, num_ranks: int, options: dict, problem: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ShardwrightError, match=problem):
        collective(kind, num_ranks, **options)


@each(
    ("chunk", "problem"),
    [
        (Chunk(Fraction(1), (0,), (2,)), r"chunk 0: .* got ranks \[2\]"),
        (Chunk(Fraction(1), (), (1,)), "got no source"),
        (Chunk(Fraction(1), (0, 0), (1,)), r"each once.* got ranks \(0, 0\)"),
        (Chunk(Fraction(-1), (0,), (1,)), "got size -1"),
    ],
)
def test_what_is_no_chunk(chunk: Chunk, problem: str) -> None:
    with pytest.raises(ShardwrightError, match=problem):
        Collective("custom", 2, (chunk,))


def test_no_dual_of_an_all_reduce() -> None:
    with pytest.raises(ShardwrightError, match="all_reduce: it has no dual; reverse one of all_gather"):
        collective("all_reduce", 2).dual()


def changed(kind: str, **fields: Any) -> Collective:
    """Return a collective of four ranks with other fields under its old name; `chunk` replaces the first."""
    whole = collective(kind, 4, 2)
    if "chunk" in fields:
        fields["chunks"] = (whole.chunks[0]._replace(**fields.pop("chunk")), *whole.chunks[1:])
    return replace(whole, **fields)


@each("kind", sorted(RULES))
def test_a_kind_is_its_chunks(kind: str) -> None:
    whole, rule = collective(kind, 4, 2), RULES[kind]
    one = Chunk(Fraction(1), (0,), (3,))
    wrong: list[dict[str, Any]] = [
        {"reduces": not rule.reduces}, {"chunks": (one,)}, {"chunks": whole.chunks[::-1]} if len(whole.chunks) > 2 else
        {"root": 4}, {"chunk": {"sources": (1, 2)}}, {"chunk": {"targets": (1, 2)}}, {"chunk": {"targets": ()}},
        {"chunk": {"size": Fraction(1)}}, {"root": -1},
    ]  # fmt: skip
    if kind in ("broadcast", "reduce", "gather", "scatter"):
        wrong.append({"root": 1})
    for fields in wrong:
        with pytest.raises(ShardwrightError, match=f"{kind} of 4 ranks: "):
            changed(kind, **fields)
    replace(whole, kind="custom", chunks=(one,))


@each("kind", sorted(DUALS))
def test_a_dual_of_uneven_units_has_the_chunks_of_its_kind(kind: str) -> None:
    units = RULES[kind].num_units(3)
    uneven = collective(kind, 3, 2, root=2, weights=[0, 1, 2][-units:])
    assert uneven.dual().dual() == uneven


def test_cells_are_counted_before_they_are_made() -> None:
    with pytest.raises(ShardwrightError, match="all_reduce of 32 ranks: expected at most 8388608 cells, got 67108864"):
        collective("all_reduce", 32, 1 << 20)
    with pytest.raises(ShardwrightError, match="custom: expected at most 8388608 cells, got 8390000"):
        Collective("custom", 1000, (Chunk(Fraction(1), (0,), tuple(range(999))),) * 8390)
