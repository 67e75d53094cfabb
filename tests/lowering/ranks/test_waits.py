"""While ranks start up: where one fails and lives on, the others wait for no longer than `timeout_s`."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright import api, programs
from shardwright.cost.clusters.cluster import Cluster
from shardwright.exporting import export
from shardwright.lowering import module, private
from shardwright.lowering.ranks import rollcall, waits
from shardwright.lowering.ranks.launch import join, leave, run_ranks
from shardwright.lowering.ranks.waits import meet, start_up, waiting
from shardwright.lowering.store import sources
from shardwright.pcg.errors import DistributedError
from shardwright.saving import load, save
from shardwright.search.plan import Plan
from shardwright.stopping import StopSignals
from tests.each import each
from tests.lowering.runs import beside_each_other, hang

TIMEOUT_S = 1.5
BATCH = {"x": torch.ones(4, 4)}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


def fails(*args: Any, **kwargs: Any) -> NoReturn:
    raise KeyError("this rank")


def started(where: tuple[Any, str], failing: int, plan: Plan, done: Path) -> str:
    """What ends the start-up of this rank, if `where` fails on one rank, which lives until the other has ended."""
    is_failing = dist.get_rank() == failing
    with ExitStack() as stack:
        if is_failing:
            stack.enter_context(mock.patch.object(*where, fails))
        raised = stack.enter_context(pytest.raises((DistributedError, KeyError)))
        api.compile(Small(), None, kwargs=BATCH, plan=plan, timeout_s=TIMEOUT_S, check_capture="never")
    if is_failing:
        hang(done, 5 * TIMEOUT_S)
    done.touch()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return api.plan(Small(), Cluster.local(2), kwargs=BATCH, mesh={"x": 2})


FAILING: dict[str, tuple[Any, int]] = {
    "_target": (api, 0),
    "model_facts": (programs, 1),
    "share_values": (sources, 0),
    "Entry": (module, 1),
}
"""What fails, of which module, and on which rank."""


def test_the_others_end_within_the_timeout(plan: Plan, tmp_path: Path) -> None:
    def run(name: str) -> list[str]:
        owner, failing = FAILING[name]
        return run_ranks(started, 2, args=((owner, name), failing, plan, tmp_path / name), timeout_s=60)

    for name, found in beside_each_other({name: partial(run, name) for name in FAILING}).items():
        failing = FAILING[name][1]
        assert found[failing] == "KeyError: 'this rank'", name
        other = found[1 - failing]
        what = "waited 1.5 s for ranks" if name == "Entry" else "of 2: a collective failed in "
        assert other.startswith(f"DistributedError: rank {1 - failing} {what}"), (name, other)
        place = "does not answer: killed, " if name == "_target" else r"is at \S+runs.py:\d+ in hang"
        assert re.search(f"; rank {failing} {place}", other), (name, other)  # the first has not joined yet
        assert "Connection closed" not in other, (name, other)


def waits_for_a_plan(plan: Plan, done: Path) -> str:
    def slow(*args: Any, **kwargs: Any) -> NoReturn:
        hang(done, 60)
        raise KeyError("late")

    slow_on_rank_0 = mock.patch.object(programs, "captured_for", slow if dist.get_rank() == 0 else fails)
    with slow_on_rank_0, pytest.raises((KeyError, DistributedError)) as raised:
        api.compile(Small(), None, kwargs=BATCH, plan=plan, timeout_s=TIMEOUT_S)
    done.touch()
    return str(raised.value)


def test_the_wait_for_the_plan_says_so(plan: Plan, tmp_path: Path) -> None:
    found = run_ranks(waits_for_a_plan, 2, args=(plan, tmp_path / "done"))
    assert "rank 1 of 2: a collective failed in the wait for the plan of rank 0" in found[1]


def test_a_run_whose_first_rank_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match=r"a collective failed in start-up \(timeout_s=1\): .* another rank has"):
        join(1.0)
    assert not dist.is_initialized()


def timeouts() -> list[timedelta]:
    assert dist.group.WORLD is not None
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    found = [options._timeout]
    with start_up(3.0):
        found.append(options._timeout)
    return [*found, options._timeout]


def test_the_users_group_has_its_own_timeout_afterwards() -> None:
    assert run_ranks(timeouts, 1, timeout_s=50)[0] == [timedelta(seconds=s) for s in (50, 3, 50)]


WORLDS = ("all_reduce", "all_gather_object", "broadcast", "broadcast_object_list")
"""The collectives that the runtime calls on the group of all ranks."""


def limits_of_waits(plan: Plan, place: Path) -> dict[str, set[tuple[str, float]]]:
    """Return, by part of a run, which collectives waited for all ranks in it, and for how long at most."""
    world, seen = dist.group.WORLD, dict[str, set[tuple[str, float]]]()
    assert world is not None
    options = world._get_backend(torch.device("cpu")).options

    def watched(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            of_world = kwargs.get("group", args[2] if len(args) > 2 else None) in (None, world)
            if of_world and not kwargs.get("async_op"):  # these are waited for, with a limit
                now.add((name, options._timeout.total_seconds()))
            return own(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in WORLDS:
            stack.enter_context(mock.patch.object(dist, name, watched(name, getattr(dist, name))))
        now = seen.setdefault("compile", set())
        model = Small()
        parallel = api.compile(model, None, kwargs=BATCH, plan=plan, timeout_s=30.0, check_capture="never")
        optimizer = torch.optim.AdamW(parallel.parameters())
        parallel.forward_backward(**BATCH)
        parts: dict[str, Callable[[], object]] = {
            "clip": lambda: parallel.clip_grad_norm_(1.0),
            "clip by the largest": lambda: parallel.clip_grad_norm_(1.0, float("inf"), error_if_nonfinite=True),
            "evaluate": lambda: parallel.evaluate(**BATCH),
            "signals": lambda: StopSignals([]).asked(parallel),
            "save": lambda: save(place / "saved", parallel, optimizer, step=1),
            "load": lambda: load(place / "saved", parallel, optimizer),
            "load_state_dict": lambda: parallel.load_state_dict(dict(parallel.state_dict())),
            "export": lambda: export(parallel, place / "exported"),
        }
        for name, part in parts.items():
            now = seen.setdefault(name, set())
            part()
    return seen


def test_every_wait_for_all_ranks_has_the_timeout_of_the_module(plan: Plan, tmp_path: Path) -> None:
    for seen in run_ranks(limits_of_waits, 2, args=(plan, tmp_path), timeout_s=60):
        for part, calls in seen.items():
            assert calls, f"{part}: it waits for no rank, or by another collective: name that in WORLDS"
            assert {limit for _, limit in calls} == {30.0}, part


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="a shape"), start_up(1.0):
        raise RuntimeError("a shape")
    with private.world_timeout(1.0):
        assert not dist.is_initialized()


class WrongError(Exception):
    """An error that nothing catches."""


@each("num_ended", [0, 1])
def test_a_rank_that_ended_says_why(num_ended: int) -> None:
    """Others say it at once, whether they wait in a collective, or in a meeting for which there is none.

    Rank 0 may hold the store, which ends with it.
    """

    def body() -> str:
        rollcall.listen()
        if dist.get_rank() == num_ended:
            sys.last_value = WrongError("the batch has no 'x'")  # as Python does as it ends with an error
            leave()
            return ""
        with pytest.raises(DistributedError) as error, mock.patch.object(waits, "CALLS_S", 0.2):
            (dances if dist.get_rank() == 2 else bakes)()
        return str(error.value)

    def bakes() -> None:
        meet("a pie", 30.0)

    def dances() -> None:
        with waiting("a dance"):
            dist.all_reduce(torch.ones(1))

    words = [text for text in run_ranks(body, 3, 60) if text]
    assert len(words) == 2
    for text in words:
        assert f"rank {num_ended} ended with WrongError: the batch has no 'x'" in text


def test_a_meeting_ends_where_nobody_can_come() -> None:
    """Three roll calls find the others in one place; while one of them computes, the meeting waits."""

    def body() -> str:
        rollcall.listen()
        begin = time.monotonic()
        try:
            if dist.get_rank() == 1:
                with mock.patch.object(waits, "CALLS_S", 0.15):
                    meet("a pie", 30.0)
            computes_for(0.6)
            with waiting("a dance", 30.0):
                dist.all_reduce(torch.ones(1))
        except DistributedError as error:
            return f"{time.monotonic() - begin > 0.85} {error}"
        return ""

    dances, waits_in_vain = run_ranks(body, 2, 60)
    assert re.match(r"True rank 1 waited \S+ s for ranks \[0\] to make a pie; rank 0 waits in a dance", waits_in_vain)
    assert "; rank 1 waits in the meeting to make a pie; start all ranks anew" in dances


def computes_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_rank_that_others_do_not_meet_names_them() -> None:
    """No collective waits for them; a later meeting is another one. Each says in which phase the other waits."""

    def parted() -> None:
        if dist.get_rank() == 1:
            meet("a pie", 0.3)
        with waiting(lambda: "a dance", 0.6):
            dist.all_reduce(torch.ones(1))

    def body() -> str:
        meet("a cake", 30.0)
        rollcall.listen()
        with pytest.raises(DistributedError) as error:
            parted()
        return str(error.value)

    dances, bakes, _ = run_ranks(body, 3, 60)
    assert bakes == (
        "rank 1 waited 0.3 s for ranks [0, 2] to make a pie; rank 0 waits in a dance; rank 2 waits in a dance; all "
        "ranks need batches of one shape, in one mode"
    )
    assert "a collective failed in a dance: " in dances
    assert "; rank 1 waits in the meeting to make a pie; start all ranks anew" in dances
