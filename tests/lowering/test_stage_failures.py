"""When a rank fails in pipeline stages, all others end with an error that says what they waited for, and in time."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from shardwright.lowering.module import ParallelModule, lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime.inputs import CheckInputs
from shardwright.lowering.runtime.pipeline import Pipeline
from shardwright.pcg.errors import DistributedError, ShardwrightError
from tests.lowering.pipelines import evenly, of_one_stage
from tests.lowering.runs import Case, beside_each_other, entry_of
from tests.lowering.test_stage_training import case

TIMEOUT_S, WORLD, FAILING = 3.0, 4, 1
Fault = Callable[[ParallelModule], None]
Seen = dict[int, tuple[str, str, float, str]]
"""By rank: the kind of the error of a step, its words, how long it took, the words of another step."""


def kill(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def refuse(*_: Any) -> NoReturn:
    raise ValueError("no such thing")


def overflow(*_: Any) -> NoReturn:
    raise torch.OutOfMemoryError("out of memory")


def sleep(*_: Any) -> None:
    time.sleep(1.5 * TIMEOUT_S)


def in_item(fault: Callable[..., Any], direction: str, microbatch: int) -> Fault:
    """The fault, where a rank begins an item."""

    def put_in(parallel: ParallelModule) -> None:
        pipeline = entry_of(parallel).pipeline
        assert pipeline is not None
        run = getattr(pipeline, direction)

        def failing(item: Any, *args: Any, **kwargs: Any) -> None:
            if item.microbatch == microbatch:
                fault()
            run(item, *args, **kwargs)

        setattr(pipeline, direction, failing)

    return put_in


def instead_of(name: str, fault: Callable[..., Any]) -> Fault:
    """The fault before a method of the pipeline."""

    def put_in(parallel: ParallelModule) -> None:
        pipeline = entry_of(parallel).pipeline
        assert pipeline is not None
        method = getattr(pipeline, name)

        def failing(*args: Any) -> Any:
            fault()
            return method(*args)

        setattr(pipeline, name, failing)

    return put_in


def in_sums(parallel: ParallelModule) -> None:
    pipeline = entry_of(parallel).pipeline
    assert isinstance(pipeline, Pipeline)
    summed = pipeline.shared.summed

    def failing(like: Any) -> Any:
        sleep()
        return summed(like)

    pipeline.shared.summed = failing


def outcome(step: Callable[[], Any]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        step()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def seen(
    tmp_path: Path,
    fault: Fault,
    roles: tuple[str, ...] = (),
    *,
    failing: int = FAILING,
    check: CheckInputs = "first",
    batch: Callable[[Case], dict[str, Any]] | None = None,
) -> Seen:
    """A step that is good, one with the fault on a rank, another one."""
    found = case()
    graph = of_one_stage(found, roles, 4)
    execution = evenly(graph, WORLD // 2 ** len(roles))

    def body() -> None:
        own: dict[str, Any] = {"constants": found.captured.constants, "options": found.captured.options}
        parallel = lower(graph, found.model, **own, timeout_s=TIMEOUT_S, execution=execution, check_inputs=check)
        parallel.forward_backward(**found.batch)
        used = found.batch
        if dist.get_rank() == failing:
            fault(parallel)
            used = used if batch is None else batch(found)
        first = outcome(lambda: parallel.forward_backward(**used))
        again = outcome(lambda: parallel.forward_backward(**found.batch)) if "Batch" not in first[0] else ("", "", 0)
        half = tmp_path / f"{dist.get_rank()} half"  # the first that fails ends the others, wherever they are
        half.write_text(json.dumps([*first, again[1]]))
        half.rename(tmp_path / f"{dist.get_rank()}.json")
        if first[0]:
            raise ShardwrightError(first[1])

    with pytest.raises(DistributedError):
        run_ranks(body, WORLD, 60, grace_s=2 * TIMEOUT_S)
    return {int(file.stem): tuple(json.loads(file.read_text())) for file in tmp_path.glob("*.json")}


def assert_told(found: Seen, others: list[int], words: str, stages: int = WORLD, of: str = "") -> None:
    """The others raise in time; what they waited for; that nothing goes on."""
    assert set(others) <= found.keys(), of
    for rank in others:
        kind, text, seconds, again = found[rank]
        assert kind == "DistributedError", (of, rank, found[rank])
        assert seconds < 2.5 * TIMEOUT_S, (of, rank, seconds)
        assert re.search(words, text), (of, rank, text)
        assert f"pipeline stage {rank * stages // WORLD}" in text, (of, rank, text)
        assert "a step before failed" in again, (of, rank, again)


WAITED = r"(forward|backward) of microbatch \d of 4|loss, which comes from|the sum of gradients|the end of the step"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(in_item(kill, "backward", 1), id="killed"),
        pytest.param(in_item(refuse, "forward", 2), id="raises"),
        pytest.param(in_item(overflow, "backward", 0), id="out of memory"),
    ],
)
def test_others_are_told(fault: Fault, tmp_path: Path) -> None:
    found = seen(tmp_path, fault)
    assert_told(found, [0, 2, 3], WAITED)
    if 1 in found:
        assert found[1][0] in ("ValueError", "OutOfMemoryError", "DistributedError")


@dataclass(frozen=True)
class Stuck:
    """A rank that goes on after the others' patience has ended, and who of them is told what."""

    name: str
    fault: Fault
    others: list[int]
    words: str
    failing: int = FAILING
    roles: tuple[str, ...] = ()


STUCK = [
    Stuck("forward", in_item(sleep, "forward", 1), [0, 2, 3], WAITED),
    Stuck("last backward", in_item(sleep, "backward", 3), [0, 2, 3], WAITED),
    # the last stage has the loss; the first and the last one have the embedding
    Stuck("loss", instead_of("tell", sleep), [0, 1, 2], "loss, which comes from stage 3", 3),
    Stuck("sums", in_sums, [3], "the sum of gradients that several stages have", 0),
    Stuck("tensor", in_item(sleep, "forward", 1), [0, 2, 3], WAITED, roles=("tensor",)),
    Stuck("zero", in_item(sleep, "forward", 1), [0, 2, 3], WAITED, roles=("zero",)),
]


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [STUCK[:3], STUCK[3:]], ids=lambda stuck: ", ".join(s.name for s in stuck))
def test_a_rank_is_stuck(stuck: list[Stuck], tmp_path: Path) -> None:
    """In an item, at the end of a step, in a stage of several ranks. Three beside each other, as they mostly wait."""
    runs = dict[str, Callable[[], Seen]]()
    for one in stuck:
        (folder := tmp_path / one.name).mkdir()
        runs[one.name] = partial(seen, folder, one.fault, one.roles, failing=one.failing)
    case()  # captured once
    found = beside_each_other(runs)
    for one in stuck:
        assert_told(found[one.name], one.others, one.words, WORLD // 2 ** len(one.roles), of=one.name)


@pytest.mark.parametrize("check", ["first", "never"])
def test_another_batch_on_one_rank(check: CheckInputs, tmp_path: Path) -> None:
    found = seen(
        tmp_path, lambda _: None, check=check, batch=lambda c: {key: value[:4] for key, value in c.batch.items()}
    )
    assert found[1][0] == "BatchError"
    if check == "first":
        assert {kind for kind, *_ in found.values()} == {"BatchError"}
        assert "rank 1 cannot take what was passed there in step 2" in found[0][1]
    else:
        assert_told(found, [0, 2, 3], WAITED)
