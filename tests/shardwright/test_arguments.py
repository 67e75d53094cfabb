"""Every public function refuses arguments of other kinds by an error of ours, which names the argument."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.arguments import NUMBER, Argument, checked
from shardwright.pcg.errors import BatchError, CheckpointError, ClusterError, PlanError
from tests.each import each

SW: Any = sw  # whose types say the same as the test
WITHOUT = {"fake", "Cluster", "Level", "Plan", "Saving", "ShardwrightError"}
"""Public names that take no arguments, and values that others make or check field by field."""
LEFT_TO_TORCH = {*inspect.signature(torch.utils.data.DataLoader).parameters} - {"dataset", "shuffle", "drop_last"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def _odd_arguments(function: Callable[..., Any], good: dict[str, Any]) -> list[str]:
    """Return the arguments for which an object of no kind, or None, does not end in an error of ours."""
    found = list[str]()
    for name, parameter in inspect.signature(function).parameters.items():
        is_open = parameter.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        if is_open or (function is sw.Loader and name in LEFT_TO_TORCH):
            continue
        for odd in (object(), None):
            if odd is None and parameter.default in (None, False, ()):
                continue
            try:
                function(**{**good, name: odd})
            except sw.ShardwrightError:
                continue
            except Exception as error:  # noqa: BLE001 - any other is what the test looks for
                found.append(f"{function.__name__}({name}={odd}): {type(error).__name__}: {error}")
            else:
                found.append(f"{function.__name__}({name}={odd}): taken")
    return found


def _all_of_them(folder: Path) -> tuple[list[str], set[str]]:
    model, batch, cluster = Net(), {"x": torch.ones(4, 4)}, sw.Cluster.local(1)
    os.chdir(folder)
    words: dict[str, Any] = {"cluster": cluster, "kwargs": batch, "timeout_s": 60, "check_capture": "never"}
    parallel = sw.compile(model, **words)
    optimizer = torch.optim.SGD(parallel.parameters())
    plan = sw.plan(model, cluster, kwargs=batch)
    sw.save("saved", parallel, optimizer, step=1)
    good: dict[str, dict[str, Any]] = {
        "plan": {"model": model, "cluster": cluster, "kwargs": batch},
        "compile": {"model": model, **words},
        "why_not": {"plan": plan, "name": "ddp"},
        "what_if": {"plan": plan, "memory": "2x"},
        "bucket": {"lengths": [1, 2]},
        "export": {"parallel": parallel, "folder": "exported"},
        "save": {"folder": "others", "parallel": parallel, "optimizer": optimizer, "step": 1},
        "load": {"folder": "saved", "parallel": parallel, "optimizer": optimizer},
        "seed_exactly": {"seed": 0},
        "Loader": {"parallel": parallel, "dataset": [{"x": torch.ones(4)}] * 8},
        "Muon": {"params": [parallel.get_parameter("inner.weight")], "parallel": parallel},
        "StopSignals": {},
        "WeightFiles": {"path": "weights"},
        "on_host": {"optimizer": torch.optim.SGD(parallel.parameters(), momentum=0.9)},
    }
    odd = [line for name, words in good.items() for line in _odd_arguments(getattr(sw, name), words)]
    return odd, set(good)


def test_every_argument_of_every_public_function(tmp_path: Path) -> None:
    ((odd, known),) = run_ranks(_all_of_them, 1, args=(tmp_path,))
    assert odd == []
    assert known | WITHOUT | {"__version__"} == set(sw.__all__)


@each(
    ("call", "error", "message"),
    [
        (lambda: SW.why_not("plan.json", 3), PlanError,
         r"^why_not\(name=...\): expected the name of a strategy, such as 'fsdp', got 3$"),
        (lambda: SW.why_not("plan.json", "ddp", model=3), PlanError, r"why_not\(model=...\): expected a module"),
        (lambda: SW.what_if(3, memory="2x"), PlanError, r"what_if\(plan=...\): expected a plan, or the path of one"),
        (lambda: SW.what_if("plan.json", memroy="2x"), TypeError, "what_if.. has no option 'memroy'; did you mean"),
        (lambda: SW.bucket("1, 2"), BatchError, "expected the numbers of tokens of sequences, got '1, 2'$"),
        (lambda: SW.bucket([1], True), BatchError, r"bucket\(most=...\): expected a whole number, got True$"),
        (lambda: SW.WeightFiles(3), PlanError, r"WeightFiles\(path=...\): expected a path, got 3$"),
        (lambda: SW.Plan.load(None), PlanError, r"Plan.load\(path=...\): expected a path, got None$"),
        (lambda: SW.Cluster.load(3), ClusterError, r"Cluster.load\(path=...\): expected a path, got 3$"),
        (lambda: SW.save("here", None, stpe=3), TypeError, "save.. has no option 'stpe'; did you mean 'step'"),
        (lambda: SW.save(3, None, step=1), CheckpointError, r"save\(folder=...\): expected a path, got 3$"),
        (lambda: SW.Loader(None, [1], shuffel=True), TypeError, "Loader.. has no option 'shuffel'; did you mean 'shuf"),
        (lambda: SW.Loader(None, [1], num_wokers=2), TypeError, "did you mean 'num_workers'"),
        (lambda: SW.StopSignals("SIGTERM"), sw.ShardwrightError, r"expected signals, .*, got 'SIGTERM'$"),
    ],
)  # fmt: skip
def test_messages(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_functions_stay_what_they_are() -> None:
    @checked(BatchError, many=NUMBER, of=Argument((list,), "a list of numbers", (str,)))
    def counted(many: int, of: list[int] | None = None, **others: int) -> tuple[Any, ...]:
        return many, of, others

    loose: Any = counted
    assert counted(1, [2], other=3) == (1, [2], {"other": 3})
    assert counted(many=1, of=None) == (1, None, {})
    assert str(inspect.signature(counted)).startswith("(many: 'int'")
    with pytest.raises(BatchError, match="expected a list of numbers, got 'x'"):
        loose(1, [1, "x"])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'many'"):
        loose()
