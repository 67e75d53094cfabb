"""Views of memory that has come back hold the same numbers as views that were never away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwright.lowering.runtime.views import View

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "a slice": lambda x: x[1::2],
    "transposed": lambda x: x.view(3, 4).T[1:],
    "complex": lambda x: torch.view_as_complex(x.view(3, 2, 2)),
    "a part of complex numbers": lambda x: torch.view_as_complex(x.view(3, 2, 2))[1:, 1],
    "a conjugate": lambda x: torch.view_as_complex(x.view(6, 2)).conj()[2:],
    "a negated imaginary part": lambda x: torch.view_as_complex(x.view(6, 2)).conj().imag[1:],
    "a real part": lambda x: torch.view_as_complex(x.view(6, 2)).conj().real,
    "other numbers": lambda x: x.view(torch.int64).view(4, 3)[:, 1],
}


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_memory_that_came_back(name: str, as_bytes: bool) -> None:
    memory = torch.randn(12, dtype=torch.float64)
    view, back = View.of(VIEWS[name](memory)), memory.clone()
    found = view.on(back.view(torch.uint8) if as_bytes else back)
    want = VIEWS[name](back)
    assert found.dtype == want.dtype
    assert torch.equal(found, want)
