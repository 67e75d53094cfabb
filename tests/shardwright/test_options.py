"""The options of planning a model: shown by name, refused by the nearest name, one value."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.options import PlanOptions, PlanWords, Statistics, guiding
from shardwright.pcg.errors import PlanError


@pytest.mark.parametrize("function", [sw.plan, sw.compile])
def test_signatures_show_every_option(function: Any) -> None:
    shown = inspect.signature(function).parameters
    assert set(PlanWords.__annotations__) < set(shown)
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in shown.values())
    with pytest.raises(
        TypeError, match=rf"{function.__name__}\(\) has no option 'mircobatches'; did you mean 'microba"
    ):
        function(torch.nn.Linear(1, 1), mircobatches=2)
    with pytest.raises(TypeError, match="has no option 'xyzzy'; choose among model, cluster"):
        function(torch.nn.Linear(1, 1), xyzzy=2)


def test_words_become_one_value() -> None:
    options = PlanOptions.of(
        mesh={"mb": 4, "x": 2}, per_microbatch=True, precision=["amp_bf16", "fp32", "amp_bf16"],
        reduce_dtype=torch.bfloat16, optimizer=torch.optim.Adafactor,
    )  # fmt: skip
    assert options.statistics == Statistics(4, ("*",))
    assert options.precisions == ("amp_bf16", "fp32")
    assert (options.reduce_dtype, options.optimizer) == ("bfloat16", "adafactor")
    assert PlanOptions.of(optimizer=torch.optim.AdamW) == PlanOptions.of(optimizer="adam") == PlanOptions()
    assert PlanOptions.of() == PlanOptions()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"per_microbatch": "norm"}, "say how many"),
        ({"precision": []}, "names none"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer: expected one of 'adam', .*, got 'LBFGS'"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError if message[0] in "sn" else sw.ShardwrightError, match=message):
        PlanOptions.of(**words)


def test_what_a_plan_has_decided_is_named() -> None:
    assert guiding({"microbatches": 1, "pins": None, "reduce_dtype": "float32", "strict": True, "rules": "r"}) == [
        "microbatches", "reduce_dtype",
    ]  # fmt: skip


NET = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.AdamW(NET.parameters())


@pytest.mark.parametrize(
    ("function", "words", "message"),
    [
        (sw.plan, {"optimizer": OPTIMIZER},
         r"plan\(optimizer=...\): expected its name or its class, .*, got an object of type AdamW$"),
        (sw.plan, {"model": torch.nn.Linear}, r"expected a module, such as Net\(\), got the class Linear$"),
        (sw.plan, {"cluster": "local:2"}, r"Cluster\.local\(2\), got 'local:2'$"),
        (sw.plan, {"kwargs": torch.ones(2)}, r"by name, as \{'x': x\}, got an object of type Tensor$"),
        (sw.plan, {"args": torch.ones(2)}, r"positional inputs of one batch, as \(x, y\), got"),
        (sw.plan, {"rules": OPTIMIZER}, "the path of a rule file, got"),
        (sw.plan, {"strict": "yes"}, "True or False, got 'yes'$"),
        (sw.compile, {"plan": OPTIMIZER}, "a plan, or the path of one, got"),
        (sw.compile, {"weights": NET.state_dict()}, "load a state_dict into the model, got an object of type"),
        (sw.compile, {"loss_fn": torch.ones(2)}, "a function of the model's result and the batch, got"),
        (sw.compile, {"timeout_s": "long"}, "a number of seconds, got 'long'"),
        *((sw.plan, {name: odd}, rf"plan\({name}=...\): expected {kind}, got an object of type")
          for kind, options in {
              "what docs/planning.md says": [("mesh", torch.ones(2)), ("roles", OPTIMIZER), ("pad", OPTIMIZER),
                                             ("stages", NET)],
              "names, as docs/planning.md says": [("pins", NET), ("pins", [NET]), ("foreign", NET)],
              "a whole number": [("microbatches", torch.ones(2))],
          }.items() for name, odd in options),
    ],
)  # fmt: skip
def test_objects_that_are_no_options_are_refused_in_a_line(function: Any, words: Any, message: str) -> None:
    given = {"model": NET, "cluster": sw.Cluster.local(2), "kwargs": {"input": torch.ones(2, 2)}, **words}
    with pytest.raises(PlanError, match=message) as caught:
        function(**given)
    assert "\n" not in str(caught.value)
