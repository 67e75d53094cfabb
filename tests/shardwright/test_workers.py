"""Worker processes: reports, results, deaths, and that nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.pcg.errors import ShardwrightError
from shardwright.workers import Call, num_cpus, workers

HERE = "tests.shardwright.fakes"
ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_task_reports_and_ends() -> None:
    with workers(2) as pool:
        pool.submit(Call(f"{HERE}:square", (x,), x) for x in range(5))
        events = [(e.kind, e.task.label, e.value) for e in pool.events()]
    assert sorted(e for e in events if e[0] == "done") == [("done", x, x * x) for x in range(5)]
    assert sorted(e for e in events if e[0] == "report") == [("report", x, f"on {x}") for x in range(5)]


def test_tasks_may_be_added_on_the_way_and_go_first() -> None:
    with workers(1) as pool:
        pool.submit([Call(f"{HERE}:square", (1,), "a"), Call(f"{HERE}:square", (2,), "b")])
        order = []
        for event in pool.events():
            if event.kind == "done":
                order.append(event.task.label)
                if event.task.label == "a":
                    pool.submit([Call(f"{HERE}:square", (x,), f"c{x}") for x in (3, 4)], first=True)
    assert order == ["a", "c3", "c4", "b"]


def test_a_worker_that_dies_takes_one_task_with_it() -> None:
    with workers(1) as pool:
        pool.submit([Call(f"{HERE}:die", ()), Call(f"{HERE}:square", (3,))])
        events = [(e.kind, e.value) for e in pool.events() if e.kind != "report"]
    assert events == [("died", "signal SIGKILL"), ("done", 9)]


@pytest.mark.parametrize(("max_bytes", "num_processes"), [(1, 3), (1 << 40, 1)])
def test_a_worker_that_grew_is_replaced(max_bytes: int, num_processes: int) -> None:
    with workers(1, max_bytes) as pool:
        pool.submit([Call(f"{HERE}:pid", ())] * 3)
        pids = [e.value for e in pool.events() if e.kind == "done"]
    assert len(pids) == 3
    assert len(set(pids)) == num_processes


def test_a_task_that_raises_ends_the_run_with_its_traceback() -> None:
    with workers(1) as pool:
        pool.submit([Call(f"{HERE}:fail", ("no",))])
        with pytest.raises(ShardwrightError, match=r"(?s)a worker failed in .*:fail:.*ValueError: no"):
            list(pool.events())


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_workers_are_gone_when_the_block_is_left() -> None:
    with workers(2) as pool:
        pool.submit([Call(f"{HERE}:sleep", (60,)), Call(f"{HERE}:sleep", (60,))])
        pids = [event.value for _, event in zip(range(2), pool.events(), strict=False)]
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_workers_do_not_outlive_their_parent(ended_by: signal.Signals) -> None:
    code = (
        "import signal\n"
        "from shardwright.workers import Call, workers\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job inherits that it is ignored
        "with workers(1) as pool:\n"
        f"    pool.submit([Call('{HERE}:sleep', (60,))])\n"
        "    for event in pool.events(): print(event.value, flush=True)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    with parent:
        parent.send_signal(ended_by)
        parent.wait(timeout=20)
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_the_number_of_cores_is_positive() -> None:
    assert num_cpus() >= 1
