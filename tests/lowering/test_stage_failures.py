"""When a rank fails in pipeline stages, all others end with an error that says what they waited for, and in time."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from shardwright.lowering.inputs import CheckInputs
from shardwright.lowering.launch import run_ranks
from shardwright.lowering.module import ParallelModule, lower
from shardwright.lowering.pipeline import Pipeline
from shardwright.pcg.errors import DistributedError, ShardwrightError
from tests.lowering.pipelines import evenly, of_one_stage
from tests.lowering.runs import Case
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
    time.sleep(2 * TIMEOUT_S)


def in_item(fault: Callable[..., Any], direction: str, microbatch: int) -> Fault:
    """The fault, where a rank begins an item."""

    def put_in(parallel: ParallelModule) -> None:
        pipeline = parallel._pipeline
        assert pipeline is not None
        begin = pipeline._begin

        def failing(runner: Any, item: Any, *, frees: bool) -> None:
            if (item.direction, item.microbatch) == (direction, microbatch):
                fault()
            begin(runner, item, frees=frees)

        pipeline._begin = failing

    return put_in


def instead_of(name: str, fault: Callable[..., Any]) -> Fault:
    """The fault before a method of the pipeline."""

    def put_in(parallel: ParallelModule) -> None:
        pipeline = parallel._pipeline
        assert pipeline is not None
        method = getattr(pipeline, name)

        def failing(*args: Any) -> Any:
            fault()
            return method(*args)

        setattr(pipeline, name, failing)

    return put_in


def in_sums(parallel: ParallelModule) -> None:
    pipeline = parallel._pipeline
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
        (tmp_path / f"{dist.get_rank()}").write_text(json.dumps([*first, again[1]]))
        if first[0]:
            raise ShardwrightError(first[1])

    with pytest.raises(DistributedError):
        run_ranks(body, WORLD, 60, grace_s=TIMEOUT_S)
    return {int(file.name): tuple(json.loads(file.read_text())) for file in tmp_path.iterdir()}


def assert_told(found: Seen, others: list[int], words: str, stages: int = WORLD) -> None:
    """The others raise in time; what they waited for; that nothing goes on."""
    assert set(others) <= found.keys()
    for rank in others:
        kind, text, seconds, again = found[rank]
        assert kind == "DistributedError", (rank, found[rank])
        assert seconds < 2.5 * TIMEOUT_S, (rank, seconds)
        assert re.search(words, text), (rank, text)
        assert f"pipeline stage {rank * stages // WORLD}" in text, (rank, text)
        assert "a step before failed" in again, (rank, again)


WAITED = r"(forward|backward) of microbatch \d of 4|the loss, which comes from|the sum of gradients|the end of the step"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(in_item(kill, "backward", 1), id="killed"),
        pytest.param(in_item(refuse, "forward", 2), id="raises"),
        pytest.param(in_item(overflow, "backward", 0), id="out of memory"),
        pytest.param(in_item(sleep, "forward", 1), id="stuck", marks=pytest.mark.slow),
        pytest.param(in_item(sleep, "backward", 3), id="stuck in the last backward", marks=pytest.mark.slow),
    ],
)
def test_others_are_told(fault: Fault, tmp_path: Path) -> None:
    found = seen(tmp_path, fault)
    assert_told(found, [0, 2, 3], WAITED)
    if 1 in found:
        assert found[1][0] in ("ValueError", "OutOfMemoryError", "DistributedError")


@pytest.mark.slow
def test_a_rank_that_is_stuck_at_the_end_of_a_step(tmp_path: Path) -> None:
    """The last stage has the loss; the first and the last one have the embedding."""
    (tmp_path / "loss").mkdir()
    found = seen(tmp_path / "loss", instead_of("_share", sleep), failing=3)
    assert_told(found, [0, 1, 2], "the loss, which comes from stage 3")
    (tmp_path / "sums").mkdir()
    found = seen(tmp_path / "sums", in_sums, failing=0)
    assert_told(found, [3], "the sum of gradients that several stages have")


@pytest.mark.slow
@pytest.mark.parametrize("role", ["tensor", "zero"])
def test_stages_of_several_ranks(role: str, tmp_path: Path) -> None:
    found = seen(tmp_path, in_item(sleep, "forward", 1), (role,))
    assert_told(found, [0, 2, 3], WAITED, stages=2)


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
