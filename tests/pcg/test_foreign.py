"""Foreign calls as data: arguments there and back, and what a plan file may not say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwright.pcg.errors import GraphError, PlanError
from shardwright.pcg.foreign import Call, Result, packed, parsed, problem_of, unpacked, ways
from shardwright.pcg.graph import OPAQUE, Node, make_attrs
from shardwright.pcg.node import FOREIGN
from shardwright.pcg.optable import ROWS
from shardwright.pcg.rows.declared import ROW_BY_ROW

CALL = Call(
    "part", 0, {"tuple": []}, 1, (("w", "tied"),), (Result((2,), "float32", True),), (), True, False, "", why="why"
)


def test_arguments_there_and_back() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    given = ((x, [1, None, "a"], {"y": (y, 2.5)}, torch.float16), {"flag": True})
    tensors: list[torch.Tensor] = []

    def operand(value: object) -> int | None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return len(tensors) - 1
        return None

    data = json.loads(json.dumps(packed(given, operand)))
    assert [t is u for t, u in zip(tensors, (x, y), strict=True)] == [True, True]
    back = unpacked(data, tensors.__getitem__)
    assert back[0][0] is x
    assert back[0][2]["y"] == (y, 2.5)
    assert (back[0][1], back[0][3], back[1]) == ([1, None, "a"], torch.float16, {"flag": True})


def test_an_object_is_no_argument() -> None:
    with pytest.raises(TypeError, match="a Generator"):
        packed([torch.Generator()], lambda value: None)


def test_a_call_there_and_back() -> None:
    assert parsed(CALL.to_text()) == CALL
    assert "pairs" not in json.loads(CALL.to_text())  # as older plan files have it
    assert parsed((paired := replace(CALL, pairs=(0,))).to_text()) == paired


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"way": "sideways"}, "way: expected one of 'whole', 'batch'"),
        ({"inputs": {"tuple": [{"call": "os.remove"}]}}, "field 'call' is not known"),
        ({"results": [[[2], "complex32", True]]}, "results"),
        ({"pairs": ["x"]}, "pairs"),
        ({"flops": -1}, "flops: expected at least 0"),
    ],
)
def test_a_malformed_call_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(GraphError, match=told):
        parsed(json.dumps(json.loads(CALL.to_text()) | change))


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(GraphError, match="no JSON"):
        parsed("{")


def test_a_dtype_is_torchs() -> None:
    assert unpacked({"dtype": "os"}, lambda number: None) == "os"


def node(**attrs: Any) -> Node:
    own = {"target": FOREIGN, "args": (), "kwargs": (), "call": CALL.to_text(), "result": 0, "shape": (2,)}
    return Node("n", OPAQUE, ("x", "w"), make_attrs(**{**own, "dtype": "float32", **attrs}))


def test_a_node_fits_its_call() -> None:
    assert problem_of(node()) == ""
    assert "has no result 1" in problem_of(node(result=1))
    assert "has no result 0 of this type" in problem_of(node(shape=(3,)))
    assert "draws, or the node" in problem_of(node(seed=0))
    assert "has complex numbers in operands [2] of 2" in problem_of(node(call=replace(CALL, pairs=(2,)).to_text()))
    one = node()
    assert "has 2 operands, the node 1" in problem_of(Node("n", OPAQUE, ("x",), one.attrs))


def test_rows_of_a_call_along_the_batch() -> None:
    row, attrs = ROWS[ROW_BY_ROW], {"batched": (0,), "shape": (4, 3)}
    assert ROW_BY_ROW not in list(ROWS)
    signature = row.signature([(4, 2), (5,), ()], attrs)
    assert signature.result_shape == (4, 3)
    assert [f.name for f in signature.factors if f.role != "fixed"] == ["b"]
    with pytest.raises(GraphError, match="have the batch"):
        row.signature([(4, 2)], {**attrs, "batched": (1,)})
    with pytest.raises(GraphError, match="runs in Python alone"):
        row.numpy()
    one = node()
    told = problem_of(Node("n", ROW_BY_ROW, one.inputs, make_attrs(**{**dict(one.attrs), "batched": (0,)})))
    assert "along the batch, or the node" in told


def test_ways() -> None:
    assert ways(None) == {}
    assert ways("a") == {"a": "whole"}
    assert ways(["a", "b=batch"]) == {"a": "whole", "b": "batch"}
    assert ways({"a": "batch"}) == {"a": "batch"}
    with pytest.raises(PlanError, match="'a' is to run 'rows'; expected 'whole' or 'batch'"):
        ways(["a=rows"])
