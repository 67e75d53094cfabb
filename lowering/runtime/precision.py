"""Requirements of a precision on the device and on torch's settings. Casts are in the program itself.

Torch has one setting per process for tf32 in products of float32, which forward and backward read in every thread. A
precision sets it when a program is made. It stays set, and every step checks it. If it were reset after each step, a
backward that the user starts would run in another format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.pcg import checks
from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.precisions import DTYPES, PRECISIONS, Precision, in_bf16

PRODUCTS: Mapping[Precision | None, str] = {"tf32": "tf32", "fp32": "ieee"}
"""The format of float32 products on GPUs, by precision; under other precisions the user's setting applies."""


def check_device(precision: Precision | None, device: str) -> None:
    """Raise a `PlanError` if a program of this precision cannot be trained on a kind of device, "cpu" or "cuda".

    Raises a `FieldError` if there is no such precision.
    """
    if precision is None:
        return
    checks.choice(precision, "", "precision", PRECISIONS)
    if precision == "fp8":
        raise PlanError("precision 'fp8': it can be planned and costed, but not run; plan with 'amp_bf16' to train")
    if DTYPES[precision].compute == "float16" and device != "cuda":
        raise PlanError(
            f"precision {precision!r}: training in float16 needs a GPU, and this would run on {device}; plan with "
            f"{in_bf16(precision)!r}, which runs everywhere, or plan for a cluster of GPUs, which needs none here, and "
            "check that plan with `shardwright verify --dry-run`"
        )


def set_products(precision: Precision | None) -> None:
    """Set the precision's format of float32 products for this process.

    This uses torch's older setting, which also updates the newer one; after a change of only the newer one, reading the
    older one is an error.
    """
    if (wanted := PRODUCTS.get(precision)) is None:
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted == "tf32"
    for setting in _settings().values():
        if (setting.fp32_precision == "tf32") != (wanted == "tf32"):  # by one for all backends
            setting.fp32_precision = wanted


def check_products(precision: Precision | None) -> None:
    """Raise a `PlanError` if products of float32 no longer run in the precision's format."""
    if (wanted := PRODUCTS.get(precision)) is None:
        return
    for name, setting in _settings().items():
        if (setting.fp32_precision == "tf32") != (wanted == "tf32"):
            raise PlanError(
                f"precision {precision!r}: compile set torch.backends.{name}.fp32_precision to {wanted!r} for this "
                f"process, and now it is {setting.fp32_precision!r}; set it back, or plan without a precision"
            )


def _settings() -> dict[str, Any]:
    cudnn: Any = torch.backends.cudnn
    return {"cuda.matmul": torch.backends.cuda.matmul, "cudnn.conv": cudnn.conv, "cudnn.rnn": cudnn.rnn}
