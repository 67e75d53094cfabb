"""Recurrent layers, whole: each sequence of the batch by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from shardwright.pcg.attrs import Attrs, get, integer
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.row import LocalShapes, Product, Row, first_dtype
from shardwright.pcg.rows.pointwise import ROWS as POINTWISE
from shardwright.pcg.rows.structural import FactorText

STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
"""The cells of layers, and how many states each cell carries."""
_SIGMOID = next(row.numpy for row in POINTWISE if row.name == "sigmoid")


def _recurrent(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    """Return the factors of one result: 0 all outputs, 1 and 2 the last states."""
    cell, result = str(get(attrs, "cell")), integer(attrs, "result")
    states = STATES.get(cell, 0)
    if not states or len(shapes) < 1 + states or any(len(s) != 3 for s in shapes[: 1 + states]):
        raise GraphError(f"a recurrent layer {cell!r} of {[list(s) for s in shapes]}; give a batch, states and weights")
    if not 0 <= result <= states:
        raise GraphError(f"attribute 'result' is {result}, and {cell} gives {1 + states} values")
    order = "b t! i!" if get(attrs, "batch_first") else "t! b i!"
    weights = (" ".join(f"w{n}_{i}!" for i in range(len(shape))) for n, shape in enumerate(shapes[1 + states :]))
    text = ", ".join([order, *["l! b h!"] * states, *weights])
    if result:
        return f"{text} -> l! b h!", {}
    wide = shapes[1][2] * (2 if get(attrs, "bidirectional") else 1)
    return f"{text} -> {order.replace('i', 'o')}", {"o": wide}


def _step(cell: str, x: np.ndarray, state: list[np.ndarray], weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the next state of a cell; `weights`: its weights for input and state, and a bias for each or none."""
    into, recurrent, *biases = weights
    one, other = x @ into.T + (biases[0] if biases else 0), state[0] @ recurrent.T + (biases[1] if biases else 0)
    if cell == "lstm":
        i, f, g, o = np.split(one + other, 4, -1)
        c = _SIGMOID(f) * state[1] + _SIGMOID(i) * np.tanh(g)
        return [_SIGMOID(o) * np.tanh(c), c]
    if cell == "gru":
        (r, z, n), (again_r, again_z, again_n) = np.split(one, 3, -1), np.split(other, 3, -1)
        keep, new = _SIGMOID(z + again_z), np.tanh(n + _SIGMOID(r + again_r) * again_n)
        return [(1 - keep) * new + keep * state[0]]
    return [np.tanh(one + other) if cell == "rnn_tanh" else np.maximum(one + other, 0)]


def _np_recurrent(
    x: np.ndarray, *more: np.ndarray, cell: str, result: int, biases: bool, layers: int, bidirectional: bool,
    batch_first: bool,
) -> np.ndarray:  # fmt: skip
    states, width = STATES[cell], 4 if biases else 2
    begin, weights = more[:states], more[states:]
    x, last = x.swapaxes(0, 1) if batch_first else x, []
    for _ in range(layers):
        sides = []
        for side in range(2 if bidirectional else 1):
            number = len(last)
            parameters, state = weights[number * width : (number + 1) * width], [s[number] for s in begin]
            outputs = []
            for step in x[::-1] if side else x:
                state = _step(cell, step, state, parameters)
                outputs.append(state[0])
            sides.append(np.stack(outputs[::-1] if side else outputs))
            last.append(state)
        x = np.concatenate(sides, -1)
    if result:
        return np.stack([state[result - 1] for state in last])
    return x.swapaxes(0, 1) if batch_first else x


def _weights(shapes: LocalShapes) -> tuple[int, list[int]]:
    """Return how many rows of input all weights see, and where the weights that are matrices stand."""
    first = next(n for n, shape in enumerate(shapes.local_operands) if n and len(shape) == 2)
    matrices = [n for n, shape in enumerate(shapes.local_operands) if n >= first and len(shape) == 2]
    return prod(shapes.local_operands[0][:2]), matrices


def _products(shapes: LocalShapes) -> Iterator[Product]:
    rows, matrices = _weights(shapes)
    for n in matrices:
        outer, inner = shapes.local_operands[n]
        yield Product(n, 1, rows, outer, inner)


def _inside(shapes: LocalShapes) -> float:
    """Return the number of elements that cells keep: their gates and states, at every step."""
    rows, matrices = _weights(shapes)
    return rows * sum(1.5 * shapes.local_operands[n][0] for n in matrices[1::2])


ROWS = [
    Row("recurrent", _recurrent, _np_recurrent,
        "rt.recurrent({cell!r}, {biases}, {layers}, {bidirectional}, {batch_first}, {*})[{result}]", dtype=first_dtype,
        rounds=True, saves=(0, "result", "inside"), joint=True, contraction=True, autocast="low", products=_products,
        inside=_inside, doc="an LSTM, GRU or RNN: 0 its outputs at all steps, 1 and 2 the states after the last one"),
]  # fmt: skip
