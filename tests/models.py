"""The models that many tests run."""

from __future__ import annotations

from typing import Any

import pytest

from examples.zoo import ZOO


def zoo(*names: str) -> list[Any]:
    """The models of the zoo, or these, as cases of `parametrize`. Each has one worker, which prepares it once."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names or ZOO]
