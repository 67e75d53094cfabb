"""Mixtures of experts: an index names experts, and every token has their product or passes through their networks.

A row's meaning is that of each token by itself, however a kernel sorts tokens in between, so tokens can be split.
Experts can be split too: a token's expert is one term of a sum over all experts, and the index picks the term. A device
adds the results of its own experts and gives zeros to tokens of other experts (as `pcg.rows.indexing` does for tables).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import numpy as np

from shardwright.pcg.row import LocalShapes, Product, Row
from shardwright.pcg.rows import pointwise

IMBALANCE = 1.1
"""The rows of the busiest device over those of an average one where experts are split; assumed."""

_UNARY = {row.name: row.numpy for row in pointwise.ROWS}
ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    **{name: _UNARY[name] for name in ("gelu", "relu", "sigmoid", "silu", "tanh")},
    "gelu_tanh": lambda x: _UNARY["gelu"](x, approximate="tanh"),
}
"""The activations between the two products of an expert; `gelu_tanh` is GELU by the approximation with tanh."""


def _np_expert_linear(x: np.ndarray, w: np.ndarray, index: np.ndarray, offset: int = 0) -> np.ndarray:
    """Return x[…, :] · w[index[…] - offset], and zeros for experts that another device has."""
    lead = np.broadcast_shapes(x.shape[:-1], index.shape)
    out = np.zeros((*lead, w.shape[2]), np.result_type(x, w))
    for expert, matrix in enumerate(w):
        out += np.where((index == expert + offset)[..., None], x @ matrix, 0)
    return out


def _np_experts(
    x: np.ndarray, index: np.ndarray, weights: np.ndarray, up: np.ndarray, down: np.ndarray, activation: str,
    offset: int = 0,
) -> np.ndarray:  # fmt: skip
    lead = np.broadcast_shapes(x.shape[:-1], index.shape[:-1], weights.shape[:-1])
    out, width = np.zeros((*lead, down.shape[2]), np.result_type(x, up, down, weights)), down.shape[1]
    for expert, (first, second) in enumerate(zip(up, down, strict=True)):
        hidden = x @ first
        hidden = ACTIVATIONS[activation](hidden[..., :width]) * (hidden[..., width:] if first.shape[1] > width else 1)
        share = np.where(index == expert + offset, weights, 0).sum(-1)
        out += share[..., None] * (hidden @ second)
    return out


def _rows(shapes: LocalShapes, index: int, experts: int) -> float:
    """Return how many rows a device's experts get, of all tokens that it has or that other devices send it.

    All experts get equally many. Where experts are split, the busiest device gets `IMBALANCE` times the average.
    """
    lead = np.broadcast_shapes(shapes.local_operands[0][:-1], shapes.local_operands[index][: len(shapes.result) - 1])
    slots = prod(lead) * prod(shapes.local_operands[index][len(shapes.result) - 1 :])
    mine, every = shapes.local_operands[experts][0], shapes.operands[experts][0]
    return slots * (1.0 if mine == every else IMBALANCE * shapes.senders * mine / every)


def _linear_products(shapes: LocalShapes) -> Iterator[Product]:
    experts, inner, outer = shapes.local_operands[1]
    yield Product(1, experts, _rows(shapes, 2, 1) / experts, outer, inner)


def _expert_products(shapes: LocalShapes) -> Iterator[Product]:
    (experts, inner, wide), (_, hidden, outer) = shapes.local_operands[3:]
    rows = _rows(shapes, 1, 3) / experts
    yield Product(3, experts, rows, wide, inner)
    yield Product(4, experts, rows, outer, hidden)


def _linear_inside(shapes: LocalShapes) -> float:
    """Return the number of elements in the multiplied rows, which are sorted by expert."""
    return _rows(shapes, 2, 1) * shapes.local_operands[0][-1]


def _experts_inside(shapes: LocalShapes) -> float:
    """Return the number of elements inside: the sorted rows, both products, and the activations between them."""
    (_, inner, wide), (_, hidden, outer) = shapes.local_operands[3:]
    activated = hidden * (wide // hidden)  # the activation and, of a gated one, its product with the other half
    return _rows(shapes, 1, 3) * (inner + wide + activated + outer)


ROWS = [
    Row("expert_linear", "... i, e i o, ... -> ... o", _np_expert_linear,
        "rt.expert_linear({0}, {1}, {2}, {offset})", indexes={2: (1, 0)}, linear_in=((0,), (1,)), fresh=True,
        offset="e", sends=(0, 2), saves=(1, "inside"), contraction=True, autocast="low", products=_linear_products,
        inside=_linear_inside, doc="every row of x times the matrix that its index names"),
    Row("experts", "... i!, ... k, ... k, e i! (b! f), e f o -> ... o", _np_experts,
        "rt.experts({0}, {1}, {2}, {3}, {4}, {activation!r}, {offset})",
        free={"activation": "silu"}, indexes={1: (3, 0)}, linear_in=((2,), (4,)), fresh=True, offset="e",
        sends=(0, 1, 2), saves=(3, 4, "inside"), contraction=True, products=_expert_products,
        inside=_experts_inside, rounds=True,
        doc="for every token, the sum of what its experts say, each by its weight; an expert is activation(x up) down, "
            "or, where `up` is twice as wide as `down`, activation(first half) · second half"),
]  # fmt: skip
