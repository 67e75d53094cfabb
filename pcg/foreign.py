"""Foreign calls: parts of a model that a program calls as they are, because capture cannot see through them.

A call is data, so that a plan file can carry it: what is called, with which arguments, and what it gave when capture
ran it once. Its nodes are opaque operators, one for each result; `Call.of` reads the call back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from shardwright.pcg.errors import GraphError, PlanError
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.node import FOREIGN
from shardwright.pcg.precision import HALVES
from shardwright.pcg.rows.declared import ROW_BY_ROW
from shardwright.pcg.schema import Schema, problem
from shardwright.pcg.types import COMPLEX, ITEM_BYTES

Way = Literal["whole", "batch"]
"""How a part runs: whole on every device, or along the batch, each row of its results from its own row alone."""


Foreign = str | Sequence[str] | Mapping[str, Way]
"""Parts that a user names; each runs whole, unless it is given a way: by a mapping, or as "name=batch"."""


def ways(foreign: Foreign | None) -> dict[str, Way]:
    """Return how each part runs that a user names. Raises `PlanError` for a way that there is not."""
    texts = [foreign] if isinstance(foreign, str) else foreign or ()
    pairs = texts.items() if isinstance(texts, Mapping) else (text.partition("=")[::2] for text in texts)
    way_of: dict[str, Way] = {}
    for name, way in pairs:
        if way and way not in get_args(Way):
            raise PlanError(f"foreign: {name!r} is to run {way!r}; expected {' or '.join(map(repr, get_args(Way)))}")
        way_of[name] = "batch" if way == "batch" else "whole"
    return way_of


class Result(NamedTuple):
    """The type of a result; `grad`: whether autograd follows it."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool

    @property
    def held(self) -> tuple[tuple[int, ...], str]:
        """The shape and dtype in a program, which holds complex numbers as pairs of real ones."""
        return ((*self.shape, 2), COMPLEX[self.dtype]) if self.dtype in COMPLEX else (self.shape, self.dtype)


@dataclass(frozen=True)
class Call:
    """A call of a foreign part.

    name        the path of a module, or the full name of an `autograd.Function` or of a function of torch
    number      how many calls of the same part come before it in a step
    inputs      positional and named arguments; `{"$": i}` stands for operand i (`Template`)
    num_inputs  operands that are arguments; those after it are parameters and buffers of the module
    state       the names, in the module, of each of these
    results     the types of what it returns, and then of the buffers `written`
    written     the buffers of the module whose new values follow its results
    grad        whether gradients are enabled around it
    draws       whether it draws from torch's generator
    autocast    the 16-bit dtype of `torch.autocast` around it; "": none
    batched     the operands that have the batch as their first dimension, if it runs along the batch
    way         how it runs
    why         the reason why capture cannot see through it; "": the user names it
    flops       floating-point operations of its forward, as torch counts them
    seconds     of its forward, when capture ran it
    device      the kind of device that it ran on
    pairs       the operands of complex numbers, which a program holds as pairs of real ones
    """

    name: str
    number: int
    inputs: Any
    num_inputs: int
    state: tuple[tuple[str, ...], ...]
    results: tuple[Result, ...]
    written: tuple[str, ...]
    grad: bool
    draws: bool
    autocast: str
    batched: tuple[int, ...] = ()
    way: Way = "whole"
    why: str = ""
    flops: float = 0.0
    seconds: float = 0.0
    device: str = ""
    pairs: tuple[int, ...] = ()

    def to_text(self) -> str:
        """Return it as JSON, without `pairs` if there are none: plan files of older versions have no such field."""
        return json.dumps({key: value for key, value in asdict(self).items() if key != "pairs" or value})

    @staticmethod
    def of(node: Node) -> Call:
        """Return the call that an opaque node stands for. Raises `GraphError` if a file has another thing there."""
        return parsed(str(node.attr("call")))

    @property
    def num_returned(self) -> int:
        """The number of tensors that the part itself returns."""
        return len(self.results) - len(self.written)


_NAMES: Schema = {"type": "array", "items": {"type": "string"}}
_NESTED: Schema = {"$ref": "#/$defs/inputs"}
_SCHEMA: Schema = {
    "type": "object",
    "required": [field.name for field in fields(Call) if field.default is MISSING],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "number": {"type": "integer", "minimum": 0},
        "inputs": _NESTED,
        "num_inputs": {"type": "integer", "minimum": 0},
        "state": {"type": "array", "items": {**_NAMES, "minItems": 1}},
        "results": {"type": "array", "items": {"type": "array", "minItems": 3, "maxItems": 3, "prefixItems": [
            {"type": "array", "items": {"type": "integer", "minimum": 0}}, {"enum": [*ITEM_BYTES, *COMPLEX]},
            {"type": "boolean"},
        ]}},
        "written": _NAMES,
        "grad": {"type": "boolean"},
        "draws": {"type": "boolean"},
        "autocast": {"enum": ["", *HALVES]},
        "batched": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "way": {"enum": [*get_args(Way)]},
        "why": {"type": "string"},
        "flops": {"type": "number", "minimum": 0},
        "seconds": {"type": "number", "minimum": 0},
        "device": {"enum": ["", "cpu", "cuda"]},
        "pairs": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
    "$defs": {"inputs": {"type": "object", "minProperties": 1, "additionalProperties": False, "properties": {
        "$": {"type": "integer", "minimum": 0},
        "value": {"type": ["null", "boolean", "number", "string"]},
        "list": {"type": "array", "items": _NESTED},
        "tuple": {"type": "array", "items": _NESTED},
        "dict": {"type": "object", "additionalProperties": _NESTED},
        "dtype": {"type": "string"},
        "device": {"type": "string"},
    }}},
}  # fmt: skip


@lru_cache(maxsize=256)
def parsed(text: str) -> Call:
    """Return the call that a text describes."""
    try:
        data: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise GraphError(f"a foreign call is no JSON ({error}); make the plan again") from None
    if wrong := problem(data, _SCHEMA):
        raise GraphError(f"a foreign call: {wrong}; make the plan again")
    data["results"] = tuple(Result(tuple(shape), dtype, grad) for shape, dtype, grad in data["results"])
    data["state"] = tuple(map(tuple, data["state"]))
    data.update({key: tuple(data.get(key, ())) for key in ("written", "batched", "pairs")})
    return Call(**data)


def problem_of(node: Node) -> str:
    """Return what does not fit between a node and its call, or ""."""
    call, attrs = Call.of(node), dict(node.attrs)
    if len(node.inputs) != call.num_inputs + len(call.state):
        return f"the call of {call.name} has {call.num_inputs + len(call.state)} operands, the node {len(node.inputs)}"
    if any(number >= len(node.inputs) for number in call.pairs):
        return f"the call of {call.name} has complex numbers in operands {list(call.pairs)} of {len(node.inputs)}"
    if call.draws != (node.draw is not None):
        return f"the call of {call.name} draws, or the node, and not both"
    if (node.op == ROW_BY_ROW) != (call.way == "batch") or attrs.get("batched", ()) != call.batched:
        return f"the call of {call.name} runs along the batch, or the node, and not both"
    number = attrs["result"]
    result = call.results[number] if isinstance(number, int) and 0 <= number < len(call.results) else None
    if result is None or result.held != (attrs["shape"], attrs["dtype"]):
        return f"the call of {call.name} has no result {number} of this type"
    return ""


def is_foreign(node: Node) -> bool:
    """Return whether a node stands for a foreign call."""
    return node.op == ROW_BY_ROW or (node.op == OPAQUE and node.attr("target") == FOREIGN)


def calls(graph: Graph) -> tuple[Call, ...]:
    """Return the foreign calls of a graph, each once, in order."""
    by_name = {(call.name, call.number): call for call in (Call.of(node) for node in graph.nodes if is_foreign(node))}
    return tuple(by_name.values())


# ---- arguments as data ----


def packed(value: Any, operand: Callable[[Any], int | None]) -> Any:  # noqa: ANN401
    """Return arguments as plain data. `operand` gives the number of a tensor, None for all else.

    Raises `TypeError` for an object that is none of tensors, numbers, texts, None, dtypes, and lists, tuples and
    dictionaries of these.
    """
    if (number := operand(value)) is not None:
        return {"$": number}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if type(value) in (list, tuple):
        return {type(value).__name__: [packed(part, operand) for part in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: packed(part, operand) for key, part in value.items()}}
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise TypeError(f"a {type(value).__name__}")


def unpacked(data: Any, operand: Callable[[int], Any]) -> Any:  # noqa: ANN401
    """Return the arguments that `packed` has made data of."""
    import torch

    (kind, value), *_ = data.items()
    match kind:
        case "$":
            return operand(value)
        case "list":
            return [unpacked(part, operand) for part in value]
        case "tuple":
            return tuple(unpacked(part, operand) for part in value)
        case "dict":
            return {key: unpacked(part, operand) for key, part in value.items()}
        case "dtype" if isinstance(dtype := getattr(torch, str(value), None), torch.dtype):
            return dtype
        case "device":
            return torch.device(value)
        case _:
            return value
