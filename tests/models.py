"""The models that many tests run."""

from __future__ import annotations

from typing import Any

import pytest

from examples.zoo import ZOO


def zoo() -> list[Any]:
    """The models of the zoo, as cases of `parametrize`. The tests of one run in one worker, which prepares it once."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ZOO]
