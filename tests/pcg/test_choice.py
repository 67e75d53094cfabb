"""Choices: their text, what they divide, and that they are values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

import numpy as np
import pytest

from shardwright.pcg.choice import (
    COPIED,
    WHOLE,
    Choice,
    Exchange,
    Partial,
    Running,
    Split,
    Transfers,
    axes_along,
    degrees,
    indivisible,
    sends,
)
from shardwright.pcg.dispatch import Sent
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.factors import Signature, resolve
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.interpret import denote, run_devices
from shardwright.pcg.layout import C, Layout, Layouts, P, R, S
from shardwright.pcg.offers import KINDS, alone, parse_choice, parse_choices, sending
from shardwright.pcg.optable import ROWS
from shardwright.pcg.ring import Ring
from shardwright.pcg.row import Row
from tests.each import each
from tests.pcg.typed import leaf_node, make_mesh
from tests.samples import SAMPLES

VALUES: dict[str, Choice] = {
    "R": WHOLE, "C": COPIED, "P0": Partial([0]), "P0,11": Partial([0, 11]), "o": Split("o"), "o/3": Split("o", 3),
    "_0": Split("_0"), "e>_0": Sent("e", "_0"), "q@k": Ring("q", "k"), "q@k/8": Ring("q", "k", 8),
    "Pq": Split("Pq"), "P": Split("P"),
}  # fmt: skip


@each(("text", "choice"), list(VALUES.items()))
def test_a_choice_is_what_its_text_says(text: str, choice: Choice) -> None:
    """It prints, compares and hashes as its text, and survives copies and pickles."""
    for same in (parse_choice(text), copy.deepcopy(choice), pickle.loads(pickle.dumps(choice))):
        assert (type(same), same, str(same), repr(same), hash(same)) == (
            type(choice),
            choice,
            text,
            repr(text),
            hash(text),
        )
        assert (same.factors, same.blocks, same.partial) == (choice.factors, choice.blocks, choice.partial)


@each("text", ["", "o/1", "o/03", "o/x", "o/", "P00", "P0,", "P,", "R/2/3", "a>b>c", "a@b@c", "P²", "o/²"])
def test_any_text_is_a_choice_that_prints_as_it(text: str) -> None:
    choice, signature = parse_choice(text), resolve("... i, o i -> ... o", [(4, 6), (8, 6)])
    assert choice == text
    with pytest.raises(LayoutError, match=r"linear cannot be split (along|by)"):
        choice.layouts(signature, ROWS["linear"])


def test_what_choices_divide() -> None:
    split = parse_choices(["R", "P0,1", "o/3", "e>t", "t", "q@k"])
    assert [choice.blocks for choice in split] == [1, 1, 3, 1, 1, 1]
    assert [choice.senders(5) for choice in split] == [1, 1, 1, 5, 1, 5]
    assert [choice.sends for choice in split] == [False, False, False, True, False, True]
    assert (sends(split), sends(split[:3])) == (True, False)
    assert [choice.factors for choice in split] == [(), (), ("o",), ("e", "t"), ("t",), ("q", "k")]
    assert [choice.partial for choice in split] == [(), (0, 1), (), (), (), ()]
    assert [choice.single for choice in split] == [(), (), (), (), (), ("k",)]
    assert degrees(split, (2, 3, 4, 5, 7, 9)) == {"o": 4, "e": 5, "t": 35, "q": 9, "k": 9}
    assert (list(axes_along(split, "t")), list(axes_along(split, "x"))) == ([3, 4], [])


def test_what_a_choice_is_from_outside_and_on_a_device() -> None:
    for choice in map(parse_choice, ("R", "C", "P0", "o")):
        assert (choice.inner, choice.outward, choice.unblocked, choice.moves) == (choice, choice, choice, ())
        assert choice.renamed({"x": "y"}) is choice or choice.renamed({"x": "y"}) == choice
    assert (Split("o", 3).unblocked, Split("o", 3).renamed({"o": "b"})) == ("o", "b/3")


def test_operands_in_which_an_operator_is_not_linear_are_not_partial() -> None:
    linear = ROWS["linear"]
    signature = linear.signature([(4, 6), (8, 6)], {})
    assert Partial([1]).layouts(signature, linear) == ((C, P), P)
    with pytest.raises(LayoutError, match=r"linear is not jointly linear in operands \(0, 1\); choose from \(\(0,\)"):
        Partial([0, 1]).layouts(signature, linear)


def test_what_a_row_needs_whole_is_not_split() -> None:
    row, attrs = ROWS["softmax"], {"dim": 1}
    signature = row.signature([(4, 6)], attrs)
    assert Split("d0").layouts(signature, row) == ((S(0),), S(0))
    for choice in (Split("d1"), Split("d1", 2)):
        with pytest.raises(LayoutError) as caught:
            choice.layouts(signature, row)
        assert str(caught.value) == f"softmax cannot be split along {choice!r}; choose R, C or one of ['d0']"


def test_a_choice_does_not_change() -> None:
    with pytest.raises(AttributeError, match=r"a choice does not change: 'blocks' of o/3"):
        Split("o", 3).blocks = 2


def test_every_choice_of_every_row_is_of_one_kind() -> None:
    """Each is read from its text by one kind, that which offers it; and each kind is offered by some row."""
    seen = set[type[Choice]]()
    for name, row in ROWS.items():
        for sample in SAMPLES[name]:
            signature = row.signature(sample.shapes, sample.attrs)
            factors = [f.name for f in signature.factors if f.role != "fixed"]
            for choice in (*alone(row, factors), *sending(row, signature)):
                assert type(parse_choice(choice)) is type(choice) in KINDS, (name, choice)
                seen.add(type(choice))
                operands, result = choice.layouts(signature, row)
                assert len(operands) == len(sample.shapes), (name, choice)
                assert choice.factors or choice.partial or {*operands, result} in ({R}, {C}), (name, choice)
    assert seen == set(KINDS)


# ---- a kind that is not in the tree ----


@dataclass(frozen=True, slots=True)
class Gather(Exchange):
    """Rows that all devices of an axis have in the end."""

    row_bytes: int

    def sent(self, *, backward: bool) -> Transfers[int]:
        return Transfers((self.size * self.row_bytes,))


class Gathered(Choice):
    """A linear layer whose rows are slices outside, and are gathered for its part of the output features."""

    __slots__ = ()
    exchange: ClassVar[type[Exchange] | None] = Gather
    moves: ClassVar[tuple[str, ...]] = ("gather_copy",)

    def __new__(cls) -> Self:
        return super().__new__(cls, "o<_0", ("o", "_0"))

    def layouts(self, signature: Signature, row: Row) -> tuple[Layouts, Layout]:
        (rows, _), ((_, features), result) = (Split(name).layouts(signature, row) for name in ("_0", "o"))
        return (rows[0], features), result

    @property
    def inner(self) -> Choice:
        return Split("o")

    @classmethod
    def exchanges(cls, running: Running) -> Iterator[Exchange]:
        num_bytes = 4 * prod(running.shapes.local_operands[0])
        return (Gather(a, n, num_bytes) for a, n in enumerate(running.sizes) if isinstance(running.split[a], cls))


def test_a_new_kind_is_inferred_run_and_asked_what_it_sends() -> None:
    """Nothing but the class says what it is: types, the interpreter and what is sent follow from it."""
    x, w = leaf_node("x", (8, 6), layouts=(S(0), S(0))), leaf_node("w", (4, 6), layouts=(R, S(0)))
    node = Node("y", "linear", ("x", "w"), (), (Split("_0"), Gathered()))
    copied = Node("c", "replicate", ("w",), make_attrs(axis="dp"))
    graph = Graph((x, w, copied, replace(node, inputs=("x", "c"))), (), make_mesh(2, 2))
    assert graph.types["y"].layouts == (S(0), S(1))
    leaves = {name: np.random.default_rng(0).standard_normal(shape) for name, shape in (("x", (8, 6)), ("w", (4, 6)))}
    held = run_devices(graph, leaves)["y"]
    assert np.allclose(denote(held, graph.types["y"], graph.mesh), leaves["x"] @ leaves["w"].T)
    (sent,) = graph.exchanges(graph.by_name["y"])
    assert (sent.axis, sent.size, sent.sent(backward=False)) == (1, 2, Transfers((2 * 4 * 2 * 6,)))


def test_transfers_are_listed_in_the_order_of_time() -> None:
    """Those of an exchange around another's begin before them and end after them."""
    outer, inner = Transfers((1, 2), (), (3,)), Transfers((4,), ((5, 6), ()), (7,))
    both = outer.around(inner)
    assert both == Transfers((1, 2, 4), ((5, 6), ()), (7, 3))
    assert (both.listed, Transfers().listed) == ((1, 2, 4, 5, 6, 7, 3), ())
    assert both.each(str) == Transfers(("1", "2", "4"), (("5", "6"), ()), ("7", "3"))


def test_indivisible() -> None:
    """Blocks hide what a factor's size is: 3 groups of 4 channels are 12 channels, but 2 devices cannot share them."""
    conv = resolve("b (g c) -> b (g c)", [(8, 12)], {"g": 3})
    assert indivisible(conv, parse_choices("bg"), (8, 3)) is None
    assert indivisible(conv, parse_choices(["R", "P0"]), (5, 7)) is None
    problem = indivisible(conv, parse_choices("bg"), (8, 2))
    assert problem is not None
    assert problem.name == "g"
    together = indivisible(conv, parse_choices("bb"), (4, 4))
    assert together is not None
    assert (together.name, together.size) == ("b", 8)
