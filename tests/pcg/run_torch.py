"""A serial graph run by the torch expressions of its rows: what lowered programs compute, with gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.lowering.runtime import kernels
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.optable import ROWS


def run_torch(graph: Graph, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The value of every node of a serial graph, by name."""
    values: dict[str, Tensor] = {}
    for node in graph.nodes:
        values[node.name] = leaves[node.name] if node.is_leaf else apply(node, [values[i] for i in node.inputs])
    return values


def apply(node: Node, operands: list[Tensor]) -> Tensor:
    attrs = dict(node.attrs)
    if node.op == OPAQUE:
        return call_opaque(attrs, operands)
    text = [f"operands[{i}]" for i in range(len(operands))]
    joined = {"*": ", ".join(text), "*1": ", ".join(text[1:]), "offset": None, "draw": "rt.Draw()", "shard": None}
    finite = {k: f'float("{v}")' if isinstance(v, float) and not np.isfinite(v) else v for k, v in attrs.items()}
    expression = ROWS[node.op].torch.replace("rt.device()", "'cpu'").format(*text, **{**joined, **finite})
    return eval(expression, {"torch": torch, "F": F, "rt": kernels, "operands": operands})


def call_opaque(attrs: Mapping[str, Any], operands: list[Tensor]) -> Tensor:
    namespace, name, overload = attrs["target"].split(".")

    def fill(value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == 2 and value[0] == "$":
            return operands[value[1]]
        if isinstance(value, tuple) and len(value) == 2 and value[0] == "torch":
            return getattr(torch, value[1].removeprefix("torch.")) if value[1].startswith("torch.") else value[1]
        return [fill(v) for v in value] if isinstance(value, tuple) else value

    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    result = operator(*fill(attrs["args"]), **{k: fill(v) for k, v in attrs["kwargs"]})
    return result if isinstance(result, Tensor) else result[attrs["result"]]
