"""The checks of arguments in `torch.distributions` are left out: they branch on values, which no graph holds.

By default each distribution checks its parameters and the values that it is asked about, and raises a `ValueError`. The
checks compute nothing else, so a capture leaves them out. An eager step still makes them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from torch.distributions import Distribution


def arguments_unchecked() -> AbstractContextManager[object]:
    """Let distributions make no checks for a while, but for those that are asked for by `validate_args=True`."""
    return mock.patch.object(Distribution, "_validate_args", new=False)
