"""The harness of `bench.models`: a wrong result, a refusal and a process that dies are outcomes, and others go on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import models
from bench.accuracy import Errors
from bench.model_rows import Row, made, real
from bench.model_store import load, tidy
from bench.models import WAYS, coverage
from bench.models_page import page

DATA = WAYS[0]


class Good(nn.Module):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Wrong(Good):
    """Computes something else among ranks than where it is captured."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2.0 if dist.is_initialized() else 1.0)


class Scaled(Good):
    """By numbers that torch makes in its default dtype, where no line of the model names one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (torch.arange(8) * 1.001)


class Refused(Good):
    """Fails on any batch."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no such batch")


class Dying(Good):
    """Ends its process."""

    def __init__(self) -> None:
        os._exit(7)


def test_a_buffer_that_is_rounding_alone() -> None:
    """The mean of what is normalized is as far off in one process whose weights are rounded otherwise."""
    rounding = Errors(0.0, 0.0, "", 1e-3, "norm.running_mean", same_random_state=True)
    off = replace(rounding, buffer=1.9e-3)
    assert not off.within_tolerance
    assert off.but_for_rounded(rounding).within_tolerance
    assert not replace(off, buffer=2.1e-3).but_for_rounded(rounding).within_tolerance
    assert not replace(off, buffer_name="norm.running_var").but_for_rounded(rounding).within_tolerance


def row(kind: type[nn.Module]) -> Row:
    return Row("here", kind.__name__, made(f"{__name__}:{kind.__name__}"), (real(6),))


def test_what_goes_wrong_is_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, path = [row(kind) for kind in (Dying, Refused, Wrong, Scaled, Good)], tmp_path / "models.jsonl"
    monkeypatch.setattr(models, "ways", lambda _: [DATA])
    found = list(coverage(rows, path, lambda: False))
    assert [o.verdict for o in found] == ["failed", "refused", "differs", "equal", "equal"]
    died, refused, wrong, scaled, good = found
    assert "status 7" in died.note
    assert "no such batch" in refused.note
    assert wrong.note.startswith("gradient ")
    assert good.split == 1.0
    assert scaled.kind == "fp64"
    assert list(load(path).values()) == found
    assert not list(coverage(rows, path, lambda: False)), "it goes on where it was ended"
    assert not list(coverage(rows, path, lambda: False, ["zero"], ["equal"])), "only in that way"
    again = list(coverage(rows, path, lambda: False, ["data"], ["refused"]))
    assert [o.model for o in again] == ["Refused"], "what had that verdict runs again"

    num_lines = path.read_text().count("\n")
    tidy(path, ["Good", "Dying", "Scaled", "Refused", "Wrong"], ["data"])
    assert (num_lines, path.read_text().count("\n")) == (6, 5)
    assert [o.model for o in load(path).values()] == ["Good", "Dying", "Scaled", "Refused", "Wrong"]
    assert set(load(path).values()) == set(found)

    text = page(found, rows, [DATA])
    assert "| data | 5 | 2 | 1 | 0 | 1 | 1 | 100% |" in text
    assert "5 were tried: 3 run in at least one way, and\n2 of these are equal" in text
