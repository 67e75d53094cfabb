"""The options of a search: what callers say becomes one value, and what a plan file records of it comes back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.mesh import Mesh
from shardwright.search.request.options import NOTHING, SearchOptions, SearchWords

WORDS: list[dict[str, Any]] = [
    {},
    {"mesh": {"dp": 2, "tp": 4}, "roles": {"tp": "tensor"}},
    {"mesh": Mesh.of(mb=4, dp=2), "roles": "data"},
    {"microbatches": 4, "recompute": "full", "pieces": 4, "pins": "no context"},
    {"recompute": {"model.layers.0-7": ["mlp", ":add"]}, "pins": {"tensor": "<=8", "lm_head.weight": {"tp": "S(0)"}}},
    {"recompute": "full", "offload": {"model.layers.0-7": ["mlp", ":add"], "*": "full"}},
    {"stages": [4, 2], "schedule": "1f1b"},
    {"encodings": "auto"},
    {"encodings": ["int8"], "pieces": 1},
    {"encodings": {"weights": "fp8", "gradients": ["exact", "int4"]}},
    {"stages": "auto", "schedule": "zero-bubble"},
]


def test_words_and_values_have_the_same_options() -> None:
    assert list(SearchWords.__annotations__) == [field.name for field in fields(SearchOptions)]


@pytest.mark.parametrize("words", WORDS)
def test_what_was_asked_for_comes_back(words: dict[str, Any]) -> None:
    options = SearchOptions.of(**words)
    assert SearchOptions.of(**options.words) == options
    assert SearchOptions.from_json(options.to_json()) == options
    assert hash(options) == hash(SearchOptions.of(**options.words))
    assert (options == NOTHING) == (not words)


def test_roles_are_of_the_axes_of_devices_in_their_order() -> None:
    options = SearchOptions.of(mesh={"mb": 2, "dp": 2, "tp": 4}, roles={"tp": "tensor"})
    assert options.mesh == Mesh(("mb", "dp", "tp"), (2, 2, 4))
    assert options.roles == ("free", "tensor")


def test_the_time_limit_is_no_part_of_the_request() -> None:
    options = SearchOptions.of(time_limit_s=3.0)
    assert options.time_limit_s == 3.0
    assert str(options) == ""
    assert options.to_json() == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"mesh": 4}, "expected the size of each axis by its name"),
        ({"roles": "data"}, "without a mesh"),
        ({"mesh": {"x": 2}, "roles": {"y": "data"}}, "axis 'y' is not in the mesh"),
        ({"stages": [4]}, "give two or more"),
        ({"stages": "auto", "mesh": {"x": 2}}, "say how many stages have it"),
        ({"schedule": "1f1b"}, "without stages="),
        ({"stages": 2, "schedule": "2f2b"}, "schedule"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"recompute": "half"}, "recompute"),
        ({"pieces": 0}, "pieces: expected a positive integer"),
        ({"encodings": "int2"}, "encodings: expected one of 'int8', 'fp8', 'int4', got 'int2'"),
        ({"encodings": []}, "encodings: expected 'auto', names, or encodings of weights and of gradients"),
        ({"encodings": {"weights": "int4"}}, r"encodings\['weights'\]: expected one of 'int8', 'fp8', got 'int4'"),
        ({"encodings": {"weights": []}}, "encodings: expected an encoding of weights, or several"),
        ({"encodings": {"activations": "int8"}}, "encodings: expected one of 'weights', 'gradients'"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardwrightError, match=message):
        SearchOptions.of(**words)


def test_a_plan_file_with_a_pin_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match="is not understood"):
        SearchOptions.from_json({"pins": ["tensor:8"]})
