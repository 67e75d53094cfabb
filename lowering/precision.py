"""What a precision asks of the device that a program runs on. Casts are in the program itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.execution import DTYPES, Precision


def check_device(precision: Precision | None, device: torch.device) -> None:
    """Raise a `PlanError` where a program of this precision cannot be trained on the device."""
    if precision is None:
        return
    if precision == "fp8":
        raise PlanError("precision 'fp8': it can be costed, but not run; plan with 'amp_bf16' to train")
    if DTYPES[precision].compute == "float16" and device.type != "cuda":
        raise PlanError(
            f"precision {precision!r}: training in float16 needs a GPU, and this rank is on {device.type}; plan with "
            "'amp_bf16', which runs everywhere"
        )


@contextmanager
def tf32(wanted: bool) -> Generator[None]:
    """Matrix products and convolutions in tf32 in here, if that is wanted; the user's own settings outside."""
    if not wanted:
        yield
        return
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = True
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value
