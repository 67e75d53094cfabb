"""What all tests share: nothing that this machine keeps for its user is read or written, and no GPU of it is seen."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

LOADED_BY_RANKS = (
    "shardwright.lowering.runtime.dispatch",
    "shardwright.lowering.runtime.kernels",
    "sympy.tensor.tensor",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.utils.serialization.config",
)
"""What every forked rank would load by itself, thousands of times."""


def pytest_sessionstart() -> None:
    """Let this process fork ranks that run a backward, whatever it captured and ran before.

    A process's first backward starts a thread for each GPU it finds, and no fork of a process with such threads can run
    a backward. CUDA builds of torch find one where there is none, once a `FakeTensorMode` was entered, as
    `torch.export` does. So the first backward comes now, before any test's module is loaded, and with no GPU in sight;
    `make cuda`, whose tests fork no ranks, wants one.
    """
    if "SHARDWRIGHT_CUDA" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # pytest listens to loggers that do not propagate, and torch writes long traces of each export for whom listens
    logging.getLogger("torch.__trace").propagate = True
    torch.ones((), requires_grad=True).backward()
    with torch.device("cpu"):  # its first use fixes what it covers, and transformers replaces `linspace` meanwhile
        torch.empty(())
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a group run in one worker.

    pytest-xdist 3.8 appends a group to an item's `_nodeid`, which pytest 9.2 does not read: it has `_id` in its place.
    """
    for item in items:
        if grouped := vars(item).get("_nodeid"):
            path, _, name = grouped.partition("::")
            item._id = type(item.id)(path=path, names=(name,))


def pytest_collection_finish() -> None:
    """What was loaded so far stays, and is not searched for garbage again and again: a million objects.

    Nor are captured models and plans, which tests keep, after every 700 new objects: that takes an eighth of the time.
    """
    for name in LOADED_BY_RANKS:
        importlib.import_module(name)
    importlib.import_module("shardwright.lowering.private_dtensors").writing_operators()  # 50 ms of each rank
    importlib.import_module("tests.exporting").look_up_once()
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen  # counted one by one, as after every search, they take 50 ms
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Every test draws the same numbers in every run, whatever ran before it."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats the stack, for GPUs that are used later


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for this process."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "shardwright"


@pytest.fixture(autouse=True)
def nothing_kept(own_cache: Path) -> None:
    """No test begins with programs that another one kept: it would capture or not, by the order of tests."""
    shutil.rmtree(own_cache / "programs", ignore_errors=True)
