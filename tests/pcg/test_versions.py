"""A torch that is newer than those that are tested is named where something fails."""

from __future__ import annotations

import importlib.metadata
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.pcg import versions
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from shardwright.pcg.versions import newer_than_tested, release
from tests.each import each


@each("installed, expected", [("2.13.0+cpu", (2, 13)), ("2.14.1", (2, 14)), ("2.15.0.dev20261101+cu130", (2, 15))])
def test_releases_are_read(installed: str, expected: tuple[int, ...]) -> None:
    assert release(installed) == expected


@each("tested, is_newer", [(("1.0", "1.9"), True), (("2.13", "9.0"), False), (("9.0",), False)])
def test_newer_ones_are_named(tested: tuple[str, ...], is_newer: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "TESTED", tested)
        said = newer_than_tested()
    assert bool(said) == is_newer
    if is_newer:
        assert f"torch {importlib.metadata.version('torch')} is newer" in said
        assert said.endswith("tested with (1.0 and 1.9), which may be the cause: pip install 'torch<1.10'")


def test_without_torch_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert newer_than_tested() == ""


def test_what_cannot_be_captured_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.no_such_method()  # pyright: ignore[reportAttributeAccessIssue]

    for tested, expected in ((versions.TESTED, False), (("1.0",), True)):
        monkeypatch.setattr(versions, "TESTED", tested)
        with pytest.raises(CaptureError) as error:
            capture(Missing(), {"x": torch.ones(2)})
        assert ("is newer than Shardwright is tested with" in str(error.value)) == expected


def test_what_cannot_be_imported_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shardwright._EXPORTS, "broken", "shardwright.no_such_module")
    monkeypatch.setattr(versions, "TESTED", ("1.0",))
    with pytest.raises(ImportError, match="no_such_module") as error:
        getattr(shardwright, "broken")  # noqa: B009
    assert "is newer than Shardwright is tested with" in error.value.__notes__[0]
