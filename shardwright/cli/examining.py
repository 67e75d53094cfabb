"""Checks of this machine, each by itself, so that one that fails hides no other."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

from shardwright.cost.clusters.local import cache_path, device_name, saved_cluster
from shardwright.pcg import versions
from shardwright.pcg.errors import MachineError
from shardwright.pcg.files import cache_folder, require_writable
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.units import size
from shardwright.workers import num_cpus

LEAST_PYTHON = (3, 11)
MOST_RANKS = 64
"""The numbers of ranks whose calibrations are looked for."""
Outcome = Literal["ok", "note", "finding", "failure"]


class Check(NamedTuple):
    """The result of a check. "finding": should be mended; "failure": no program runs here; "note": nothing is wrong."""

    name: str
    outcome: Outcome
    text: str
    to_do: str = ""


def examined(timeout_s: float) -> list[Check]:
    """Run all checks. Two ranks are forked, and ended after `timeout_s`."""
    checks: dict[str, Callable[[], Check]] = {
        "python": _python, "torch": _torch, "processors": _processors, "GPUs": _gpus, "backends": _backends,
        "solver": _solver, "cache folder": _cache, "calibrations": _calibrations,
        "two ranks": lambda: _ranks(timeout_s),
    }  # fmt: skip
    return [_tried(name, check) for name, check in checks.items()]


def _tried(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this check's finding
        return Check(name, "failure", f"{type(error).__name__}: {error}")


def _python() -> Check:
    good = sys.version_info >= LEAST_PYTHON
    least = ".".join(map(str, LEAST_PYTHON))
    return Check("python", "ok" if good else "failure", f"{platform.python_version()} on {platform.platform()}",
                 "" if good else f"use Python {least} or later")  # fmt: skip


def _torch() -> Check:
    try:
        import_module("torch")  # one that is installed may fail to load
        installed = version("torch")
    except (PackageNotFoundError, ImportError, OSError) as error:
        return Check("torch", "failure", f"cannot be imported: {error}", f"pip install 'torch>={versions.TESTED[0]}'")
    if newer := versions.newer_than_tested():
        return Check("torch", "finding", installed, newer)
    if any(versions.release(installed) == versions.release(tested) for tested in versions.TESTED):
        return Check("torch", "ok", installed)
    tested = " and ".join(versions.TESTED)
    return Check("torch", "finding", installed, f"Shardwright is tested with torch {tested}; install one of them")


def _processors() -> Check:
    return Check("processors", "ok", f"{num_cpus()} of {os.cpu_count()} may be used")


def _gpus() -> Check:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return Check("GPUs", "note", f"none that torch {'(CUDA ' + built + ')' if built else 'for CPUs'} sees")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    each = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return Check("GPUs", "ok", f"{each}, {size(torch.cuda.get_device_properties(0).total_memory)} each")


def _backends() -> Check:
    import torch
    import torch.distributed as dist

    there = [name for name, has in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if has]
    wanted = {"gloo", *(["nccl"] if torch.cuda.is_available() else [])} - {*there}
    names = f"{', '.join(there) or 'none'}"
    if not dist.is_available() or "gloo" in wanted:
        return Check("backends", "failure", names, "install a torch that is built with gloo")
    return Check("backends", "finding" if wanted else "ok", names, "GPUs need a torch with NCCL" if wanted else "")


def _solver() -> Check:
    try:
        import z3

        return Check("solver", "ok", f"z3 {z3.get_version_string()}")
    except ImportError as error:
        return Check("solver", "finding", f"z3 cannot be imported: {error}", "pip install z3-solver, to prove rules")


def _cache() -> Check:
    folder = cache_folder()
    try:
        require_writable(folder / "doctor", "anything", MachineError, make_folder=True)
    except MachineError as error:
        return Check("cache folder", "finding", str(error), "set XDG_CACHE_HOME to a folder that can be written")
    return Check("cache folder", "ok", str(folder))


def _calibrations() -> Check:
    here, numbers = device_name(), range(1, MOST_RANKS + 1)
    calibrated = [n for n in numbers if saved_cluster(n, here) or cache_path(n, kind="cuda").exists()]
    if not calibrated:
        return Check("calibrations", "note", "none of this machine: its clusters have built-in figures",
                     "shardwright calibrate 2 measures two ranks")  # fmt: skip
    return Check("calibrations", "ok", f"of {', '.join(map(str, calibrated))} ranks")


def _ranks(timeout_s: float) -> Check:
    import torch
    import torch.distributed as dist

    from shardwright.lowering.ranks.launch import run_ranks

    def add_up() -> float:
        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value)
        return value.item()

    try:
        sums = run_ranks(add_up, 2, timeout_s)
    except Exception as error:  # noqa: BLE001 - sockets, forks, limits: it is told, whatever it is
        text = str(error).strip() or type(error).__name__
        return Check("two ranks", "failure", text.splitlines()[-1],
                     "a firewall, or a limit of processes or shared memory, may be in the way")  # fmt: skip
    good = sums == [3.0, 3.0]
    text = "an all-reduce over gloo gives the sum" if good else f"an all-reduce over gloo gave {sums}, not 3"
    return Check("two ranks", "ok" if good else "failure", text)


class DoctorReport(Report):
    """The results of all checks, with remedies."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self.checks = checks

    def has(self, outcome: Outcome) -> bool:
        """Return whether some check had this result."""
        return any(check.outcome == outcome for check in self.checks)

    @property
    def verdict(self) -> str:
        """The verdict in a line."""
        if self.has("failure"):
            return "no program runs on this machine as it is"
        return "something should be mended" if self.has("finding") else "everything works"

    def paragraphs(self) -> list[Paragraph]:
        rows = [(check.name, check.outcome, check.text, check.to_do) for check in self.checks]
        shown = (
            ("check", "is", "found", "to do") if any(check.to_do for check in self.checks) else ("check", "is", "found")
        )
        return [Paragraph(f"This machine: {self.verdict}", [], shown, [row[: len(shown)] for row in rows])]

    def data(self) -> dict[str, object]:
        return {"verdict": self.verdict, "checks": [check._asdict() for check in self.checks]}
