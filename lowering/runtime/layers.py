"""Kernels for which torch has one function: our attributes as its arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_GRIDS = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic")}


def resample(
    x: Tensor, interpolation: str, size: Sequence[int], align: bool, scales: Sequence[float] | None, antialias: bool
) -> Tensor:
    """Interpolate between the elements of a grid. `scales`: what torch finds places by, if not by `size`."""
    kind, wanted, factors = (
        _GRIDS[interpolation][len(size) - 1],
        None if scales else list(size),
        scales and list(scales),
    )
    return F.interpolate(x, wanted, factors, kind, align, antialias=antialias)


def recurrent(
    cell: str, biases: bool, layers: int, bidirectional: bool, batch_first: bool, x: Tensor, *more: Tensor
) -> tuple[Tensor, ...]:
    """Run a recurrent layer on `x`; `more` are its states and weights. Returns its outputs and its last states."""
    states = more[:2] if cell == "lstm" else more[0]
    weights = more[2:] if cell == "lstm" else more[1:]
    return getattr(torch, cell)(x, states, weights, biases, layers, 0.0, True, bidirectional, batch_first)
