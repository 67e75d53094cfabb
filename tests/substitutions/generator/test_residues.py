from itertools import pairwise

import numpy as np
import pytest

from shardwright.pcg.errors import GraphError
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.generator.modular import Array
from shardwright.substitutions.generator.residues import CHAINS, OPERATORS, Constant, Field, Parts
from tests.each import each

FIELD = Field()
PARTS = 3


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[Parts]:
    rng = np.random.default_rng(seed)
    return [FIELD.random(rng, shape, PARTS) for shape in shapes]


def residues(values: Array) -> Parts:
    return tuple(ring.reduce(values) for ring in FIELD.rings)


def run(op: str, *operands: Parts, **attrs: object) -> Parts:
    return FIELD.evaluate(op, operands, attrs)


def equal(a: Parts, b: Parts, parts: tuple[int, ...] = (0,)) -> bool:
    return all(bool((a[i] == b[i]).all()) for i in parts)


def test_primes_are_chains_in_which_minus_one_is_no_square_and_two_is_one() -> None:
    for chain in CHAINS:
        assert all(p == 2 * q + 1 for p, q in pairwise(chain))
        for p in chain:
            assert all(p % d for d in range(2, int(p**0.5) + 1))
            assert pow(p - 1, (p - 1) // 2, p) == p - 1
            assert pow(2, (p - 1) // 2, p) == 1


# ---- exactly what the rows compute, on integers ----

EXACT = [
    ("add", [(2, 3), (3,)], {}),
    ("sub", [(2, 3), ()], {}),
    ("mul", [(2, 3), (2, 1)], {}),
    ("neg", [(2, 3)], {}),
    ("linear", [(2, 3, 4), (5, 4)], {}),
    ("matmul", [(2, 3, 4), (4, 5)], {}),
    ("matmul", [(2, 3, 4), (2, 4, 5)], {}),
    ("sum", [(2, 3, 4)], {"dims": (1,), "keepdim": False}),
    ("sum", [(2, 3, 4)], {"dims": (2,), "keepdim": True}),
    ("permute", [(2, 3, 4)], {"dims": (1, 2, 0)}),
    ("reshape", [(2, 3, 4)], {"shape": (6, 4)}),
    ("slice", [(2, 7)], {"dim": 1, "start": 2, "stop": 5, "step": 1}),
    ("concat", [(2, 3), (4, 3)], {"dim": 0}),
    ("conv2d", [(2, 4, 5, 6), (6, 2, 2, 3)], {"stride": (1, 2), "padding": (1, 0), "dilation": (2, 1), "groups": 2}),
]


@each(("op", "shapes", "attrs"), EXACT, ids=[op for op, _, _ in EXACT])
def test_integers_agree_with_the_rows(op: str, shapes: list[tuple[int, ...]], attrs: dict[str, object]) -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.integers(-9, 10, shape) for shape in shapes]
    batch = [residues(np.stack([array, array])) for array in arrays]
    expected = np.asarray(ROWS[op].numpy(*arrays, **attrs))
    got = run(op, *batch, **attrs)
    for ring, part in zip(FIELD.rings, got, strict=True):
        assert np.array_equal(part[1], expected % ring.p)


def test_lookups_agree_with_the_rows() -> None:
    table, index = np.arange(12).reshape(4, 3), np.array([[3, 0], [1, 1]])
    got = run("embedding", residues(table[None]), (index[None],), padding_idx=None)
    assert np.array_equal(got[0][0], ROWS["embedding"].numpy(table, index))
    got = run("embedding", residues(table[None, 1:3]), (index[None],), padding_idx=None, offset=1)
    assert np.array_equal(got[0][0], ROWS["embedding"].numpy(table[1:3], index, offset=1))


# ---- laws ----


def test_laws_of_signs() -> None:
    (x,) = tensors((4, 5))
    relu, negative = run("relu", x), run("relu", run("neg", x))
    everywhere = tuple(range(PARTS))
    assert equal(run("relu", relu), relu, everywhere)
    assert equal(run("sub", relu, negative), x, everywhere)
    assert equal(run("relu", run("add", x, x)), run("add", relu, relu), everywhere)
    root = run("sqrt", x)
    assert equal(run("mul", root, root), run("abs", x), everywhere)
    assert equal(run("abs", root), root, everywhere)
    assert equal(run("mul", run("rsqrt", x), root), residues(np.ones((1, 4, 5), np.int64)), everywhere)
    assert not equal(relu, x)


def test_laws_of_exponentials() -> None:
    x, y = tensors((4, 5), (4, 5))
    exp = run("exp", run("add", x, y))
    assert equal(exp, run("mul", run("exp", x), run("exp", y)), (0, 1))
    assert equal(run("exp", run("neg", x)), run("reciprocal", run("exp", x)), (0, 1))
    assert equal(run("relu", exp), exp, (0, 1))
    assert equal(run("log", run("exp", x)), x, (1, 2))
    assert equal(run("exp", exp), run("exp", run("mul", run("exp", x), run("exp", y))))
    assert not equal(run("exp", x), run("exp", y))


def test_laws_of_activations() -> None:
    (x,) = tensors((3, 4))
    assert equal(run("silu", x), run("mul", x, run("sigmoid", x)))
    assert equal(run("tanh", run("neg", x)), run("neg", run("tanh", x)))
    assert equal(run("sub", run("gelu", x, approximate="none"), run("gelu", run("neg", x), approximate="none")), x)
    assert not equal(run("gelu", x, approximate="none"), run("gelu", x, approximate="tanh"))


def test_laws_of_softmax_and_norms() -> None:
    x, c, w = tensors((3, 4), (3, 1), (4,))
    shifted = run("add", x, c)
    assert equal(run("softmax", shifted, dim=1), run("softmax", x, dim=1))
    assert equal(run("log_softmax", shifted, dim=1), run("log_softmax", x, dim=1), (1,))
    e = run("exp", x)
    total = run("sum", e, dims=(1,), keepdim=True)
    assert equal(run("softmax", x, dim=1), run("div", e, total))
    eps = Constant((7, 11, 13))
    norm = run("layer_norm", x, normalized_dims=1, eps=eps)
    assert equal(run("layer_norm", shifted, normalized_dims=1, eps=eps), norm)
    assert equal(run("layer_norm", x, w, normalized_dims=1, eps=eps), run("mul", norm, w))
    assert not equal(
        run("rms_norm", shifted, normalized_dims=1, eps=eps), run("rms_norm", x, normalized_dims=1, eps=eps)
    )
    assert not equal(run("softmax", run("mul", x, c), dim=1), run("softmax", x, dim=1))


def test_attention_is_what_it_is_made_of() -> None:
    q, k, v = tensors((2, 3, 4), (2, 5, 4), (2, 5, 6))
    scale = Constant((3, 5, 7))
    scores = run(
        "mul", run("matmul", q, run("permute", k, dims=(0, 2, 1))), tuple(np.full((1,), s) for s in scale.parts)
    )
    whole = run("matmul", run("softmax", scores, dim=2), v)
    assert equal(run("sdpa", q, k, v, causal=False, scale=scale), whole)
    assert not equal(run("sdpa", q, k, v, causal=True, scale=scale), whole)
    with pytest.raises(GraphError, match="needs a dimension of heads"):
        run("sdpa", *tensors((3, 4), (5, 4), (5, 6)), causal=False, scale=scale)
    with pytest.raises(GraphError, match="matmul of ranks 1 and 2"):
        run("matmul", *tensors((4,), (4, 3)))


def test_cross_entropy_is_what_it_is_made_of() -> None:
    (x,) = tensors((3, 5))
    target = (np.array([[4, 0, 2]]),)
    logp = run("log_softmax", x, dim=1)
    picked = run("gather", logp, (target[0][..., None],), dim=1)
    plain = run("cross_entropy_sum", x, target, ignore_index=-100, label_smoothing=0.0)
    assert equal(plain, run("neg", run("sum", picked, dims=(0, 1), keepdim=False)), (1,))
    smooth = run("cross_entropy_sum", x, target, ignore_index=-100, label_smoothing=0.25)
    assert not equal(plain, smooth, (1,))


def test_every_operator_has_a_row() -> None:
    assert set(OPERATORS) <= set(ROWS)
