"""How commands end: 1 for a finding, 2 for what cannot be used, 3 where nothing fits, 4 for the machine; doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from shardwright.cli import examining
from shardwright.cli.examining import Check, DoctorReport, examined
from shardwright.cli.main import cli
from shardwright.cli.status import ENVIRONMENT, FINDING, INFEASIBLE, USAGE, status_for
from shardwright.lowering.ranks import launch
from shardwright.pcg import versions
from shardwright.pcg.errors import DistributedError, InfeasibleError, MachineError, PlanError
from tests.shardwright.command import Run

ROOT = Path(__file__).parents[2]


def every_command() -> list[tuple[str, ...]]:
    found = list[tuple[str, ...]]()
    for name, command in cli.commands.items():
        inner = command.commands if isinstance(command, click.Group) else {}
        found += [(name, other) for other in inner] if inner else [(name,)]
    return found


def test_every_command_ends_with_2_for_a_wrong_option_and_is_documented(run: Run) -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert len(every_command()) > 12
    for command in every_command():
        status, out, err = run(*command, "--nope")
        assert (status, out) == (USAGE, ""), command
        assert f"try: shardwright {' '.join(command)} --help" in err
        assert f"`{' '.join(command)}`" in page, command


def test_what_is_no_finite_number_is_a_wrong_option(run: Run) -> None:
    """A comparison with `nan` is false, so that it would say anything of a plan."""
    commands = [("compare", "plan.json", "--fail-if-slower"), ("doctor", "--timeout"), ("calibrate", "--timeout"),
                ("rules", "verify", "--limit"), ("verify", "plan.json", "--timeout")]  # fmt: skip
    for command in commands:
        for given in ("nan", "inf"):
            status, out, err = run(*command, given)
            assert (status, out) == (USAGE, ""), command
            assert f"'{given}' is not a finite number" in err


def test_a_reader_that_stops_early_is_no_finding() -> None:
    """`shardwright explain plan.json | head` ends with 0."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "shardwright", "rules", "list", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_error_has_its_status() -> None:
    errors: dict[int, list[BaseException]] = {
        USAGE: [PlanError("x"), ValueError("x"), click.UsageError("x")],
        INFEASIBLE: [InfeasibleError("x", None)],
        ENVIRONMENT: [MachineError("x"), DistributedError("x"), OSError(28, "No space left on device"), MemoryError(),
                      ModuleNotFoundError("No module named 'z3'")],
    }  # fmt: skip
    for status, raised in errors.items():
        assert [status_for(error) for error in raised] == [status] * len(raised)


def test_what_the_machine_lacks_is_4(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "this machine only, and dgx-h100 has 2 machines": ["run", "models.py:net", "--cluster", "preset:dgx-h100:2"],
        "which has 0 GPUs": ["run", "models.py:net", "--cluster", "preset:dgx-h100:1"],
        "cannot write the page": ["view", "no/where.json"],
        "cannot write the profile": ["profile", "no/where.json", "models.py:net"],
    }
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for message, command in cases.items():
        status, _, err = run(*command)
        assert (status, message in err) == (ENVIRONMENT, True), (command, err)


def test_a_plan_file_is_not_written_over_and_is_no_folder(run: Run) -> None:
    Path("plan.json").write_text("{}")
    Path("folder").mkdir()
    for command, *rest in (["view"], ["profile", "models.py:net"]):
        for name, message in (("plan.json", "this is the plan file"), ("folder/../plan.json", "this is the plan file")):
            status, _, err = run(command, "plan.json", *rest, "-o", name)
            assert (status, message in err) == (USAGE, True), err
        for name in (".", "folder"):
            status, _, err = run(command, name, *rest)
            assert (status, "is a directory" in err) == (USAGE, True), err
    assert Path("plan.json").read_text() == "{}"
    assert "this is the plan file" in run("view", Path("plan.json").rename("plan.html").name)[2]
    status, _, err = run("timeline", "plan.json", "--trace", ".")
    assert (status, "cannot write the result: Is a directory" in err) == (ENVIRONMENT, True), err


# ---- doctor ----


def test_doctor_tells_what_is_here(run: Run) -> None:
    status, out, err = run("doctor", "--format", "json")
    found = json.loads(out)
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert (status, found["verdict"]) == (0, "everything works"), err
    assert {"python", "torch", "processors", "backends", "solver", "cache folder", "two ranks"} <= {
        name for name, outcome in outcomes.items() if outcome == "ok"
    }
    assert outcomes["calibrations"] == "note"


def test_doctor_ends_by_the_worst_that_it_finds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*given: object) -> None:
        raise DistributedError("2 ranks did not answer in 30 s")

    def mute(*given: object) -> None:
        raise TimeoutError

    def damaged() -> Check:
        raise RuntimeError("no such symbol")

    def tested_with(release: str) -> None:
        monkeypatch.setattr(versions, "TESTED", (release,))

    monkeypatch.setattr(launch, "run_ranks", lambda *given: [3.0, 3.0])
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    changes: list[tuple[int, str, Callable[[], object]]] = [
        (FINDING, "set XDG_CACHE_HOME to a folder that can be written", lambda: None),
        (FINDING, "is newer than Shardwright is tested with (1.0)", lambda: tested_with("1.0")),
        (FINDING, "Shardwright is tested with torch 9.0; install one", lambda: tested_with("9.0")),
        (ENVIRONMENT, "2 ranks did not answer in 30 s", lambda: monkeypatch.setattr(launch, "run_ranks", silent)),
        (ENVIRONMENT, "TimeoutError ", lambda: monkeypatch.setattr(launch, "run_ranks", mute)),
        (ENVIRONMENT, "gave [3.0, 2.0], not 3",
         lambda: monkeypatch.setattr(launch, "run_ranks", lambda *given: [3.0, 2.0])),
        (ENVIRONMENT, "RuntimeError: no such symbol", lambda: monkeypatch.setattr(examining, "_backends", damaged)),
    ]  # fmt: skip
    for expected, message, change in changes:
        change()
        status, out, _ = run("doctor")
        assert (status, message in out) == (expected, True), out
    assert len(examined(1.0)) == 9
    assert DoctorReport([Check("a", "note", "x", "y")]).verdict == "everything works"
