"""Factor strings: reading, resolving for shapes, the layouts that a split asks for, and reshapes."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape, Signature, reshape_factors, resolve
from shardwright.pcg.interpret import denote, scatter
from shardwright.pcg.layout import C, P, S
from shardwright.pcg.types import TensorType
from tests.each import each
from tests.pcg.strategies import examples
from tests.pcg.typed import make_mesh


def described(signature: Signature) -> list[tuple[str, int, str]]:
    return [(f.name, f.size, f.role) for f in signature.factors]


def test_roles_and_sizes() -> None:
    signature = resolve("... i, o i -> ... o", [(4, 8, 12), (16, 12)])
    assert described(signature) == [("_0", 4, "map"), ("_1", 8, "map"), ("i", 12, "sum"), ("o", 16, "map")]
    assert signature.operands == (((0,), (1,), (2,)), ((3,), (2,)))
    assert (signature.result, signature.result_shape) == (((0,), (1,), (3,)), (4, 8, 16))
    assert (signature.index("o"), signature.index("z")) == (3, None)


def test_a_mark_anywhere_fixes_a_factor_everywhere() -> None:
    assert described(resolve("b h!, h -> b h", [(4, 8), (8,)])) == [("b", 4, "map"), ("h", 8, "fixed")]


@each(
    ("text", "shapes", "sizes", "result"),
    [
        ("... -> ...", [()], {}, ()),
        ("... -> ...", [(1, 4)], {}, (1, 4)),
        ("..., ... -> ...", [(4, 1, 12), (8, 1)], {}, (4, 8, 12)),
        ("..., ... -> ...", [(4,), ()], {}, (4,)),
        ("..., ... -> ...", [(0,), (1,)], {}, (0,)),
        ("(b s) h -> b s h", [(32, 12)], {"b": 4}, (4, 8, 12)),
        ("b s h -> (b s) h", [(4, 8, 12)], {}, (32, 12)),
        ("(g c), (g o) c -> (g o)", [(24,), (16, 3)], {}, (16,)),
        ("-> n m", [], {"n": 4, "m": 8}, (4, 8)),
        ("a! -> n!", [(40,)], {"n": 7}, (7,)),
        ("a b -> ", [(4, 8)], {}, ()),
        ("a, -> a", [(4,), ()], {}, (4,)),
    ],
)
def test_result_shapes(text: str, shapes: list[Shape], sizes: dict[str, int], result: Shape) -> None:
    assert resolve(text, shapes, sizes).result_shape == result


@each(
    ("text", "shapes", "message"),
    [
        ("a b", [(4, 8)], r"factor string 'a b': no '->'"),
        ("a b -> a + b", [(4, 8)], r"cannot read 'a \+ b'; expected names, 1, \(a b\), a! or ..."),
        ("a, b -> a b", [(4,)], r"'a, b -> a b': 2 operands, got 1 of shapes \[4\]"),
        ("a -> a", [], r"'a -> a': 1 operands, got 0 of shapes none"),
        ("a b -> a b", [(4,)], r"'a b -> a b': expected 2 dimensions, got shape \[4\]"),
        ("... a b -> ...", [(4,)], r"'... a b -> ...': shape \[4\] has too few dimensions"),
        ("a, a -> a", [(4,), (8,)], r"'a, a -> a': a should have size 4, got 8"),
        ("..., ... -> ...", [(4,), (8,)], r"'..., ... -> ...': _0 should have size 4, got 8"),
        ("a 1 -> a", [(4, 8)], r"'a 1 -> a': 1 should have size 1, got 8"),
        ("a, (a b) -> b", [(4,), (10,)], r"'a, \(a b\) -> b': \(a b\) should have size 4, got 10"),
        ("(a b) -> a b", [(8,)], r"'\(a b\) -> a b': the size of 'a' does not follow from shapes \[8\]"),
        ("a -> a b", [(8,)], r"'a -> a b': the size of 'b' does not follow from shapes \[8\]"),
    ],
)
def test_what_does_not_fit(text: str, shapes: list[Shape], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        resolve(text, shapes)


def test_split_layouts() -> None:
    linear = resolve("... i, o i -> ... o", [(4, 12), (16, 12)])
    assert [linear.split_layouts(f) for f in range(3)] == [
        ((S(0), C), S(0)),
        ((S(1), S(1)), P),
        ((C, S(0)), S(1)),
    ]
    merged = resolve("b s h -> (b s) h", [(4, 8, 12)])
    assert [merged.split_layouts(f)[1] for f in range(3)] == [S(0), S(0, 4), S(1)]


# ---- reshapes ----


@each(
    ("before", "after", "text"),
    [
        ((96, 64), (8, 12, 64), "(a b) c -> a b c"),
        ((8, 12, 64), (96, 64), "a b c -> (a b) c"),
        ((4, 6), (2, 2, 6), "(a b) c -> a b c"),
        ((2, 6), (4, 3), "a (b c) -> (a b) c"),
        ((4, 1, 6), (4, 6, 1), "a 1 b -> a b 1"),
        ((), (1, 1), " -> 1 1"),
        ((6,), (6,), "a -> a"),
        ((4, 6, 10), (4, 15, 4), "a x0! x1! -> a y0! y1!"),
        ((5, 4), (4, 5), "x0! x1! -> y0! y1!"),
        ((0, 4), (4, 0), "x0! x1! -> y0! y1!"),
    ],
)
def test_reshape_factors(before: Shape, after: Shape, text: str) -> None:
    found, sizes = reshape_factors(before, after)
    assert found == text
    assert resolve(found, [before], sizes).result_shape == after


def test_many_factors_have_many_names() -> None:
    shape = (2,) * 60
    text, sizes = reshape_factors((2**60,), shape)
    assert len(sizes) == 60
    assert resolve(text, [(2**60,)], sizes).result_shape == shape


def test_reshape_keeps_the_number_of_elements() -> None:
    with pytest.raises(GraphError, match=r"reshape of \[2, 6\], 12 elements, to \[5, 3\], 15 elements"):
        reshape_factors((2, 6), (5, 3))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two shapes of as many elements: the same primes, grouped in two ways, sometimes in another order."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3, 4]), max_size=6))
    other = list(draw(st.permutations(primes))) if draw(st.booleans()) else primes

    def grouped(items: list[int]) -> Shape:
        cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=4)))
        bounds = [0, *cuts, len(items)]
        return tuple(prod(items[a:b]) for a, b in pairwise(bounds))

    return grouped(primes), grouped(other)


@given(reshapes(), st.data())
@examples(200)
def test_reshaping_commutes_with_splitting_any_factor(pair: tuple[Shape, Shape], data: st.DataObject) -> None:
    before, after = pair
    text, sizes = reshape_factors(before, after)
    signature = resolve(text, [before], sizes)
    assert signature.result_shape == after
    array = np.arange(prod(before)).reshape(before)
    for index, factor in enumerate(signature.factors):
        assert factor.role != "sum"
        if factor.role == "fixed":
            continue
        degree = data.draw(st.sampled_from([d for d in (2, 3, 4) if factor.size % d == 0] or [1]))
        mesh = make_mesh(degree)
        (operand,), result = signature.split_layouts(index)
        value = TensorType(after, "int64", (result,))
        parts = [x.reshape(value.local_shape(mesh)) for x in scatter(array, (operand,), mesh)]
        np.testing.assert_array_equal(denote(parts, value, mesh), array.reshape(after))
