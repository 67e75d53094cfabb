"""Kernels of layers as a whole, of rows that go to places, and of Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.lowering.private_kernels import fourier
from shardwright.lowering.store.storage import as_complex

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


def _here(index: Tensor, places: int, offset: int | None) -> tuple[Tensor, int]:
    """Return the index from `offset` on, and the number of places; one more is for all that go elsewhere."""
    if offset is None:
        return index, places
    local = index - offset
    return local.masked_fill_((local < 0) | (local >= places), places), places + 1


def _added(out: Tensor, index: Tensor, rows: Tensor, dim: int) -> Tensor:
    if index.numel() == index.shape[dim]:
        return out.index_add_(dim, index.flatten(), rows)
    return out.scatter_add_(dim, index.expand(rows.shape), rows)


def scatter_sum(index: Tensor, rows: Tensor, dim: int, places: int, offset: int | None) -> Tensor:
    """Return, for each of the places from `offset` on, the sum of the rows that name it along `dim`."""
    index, count = _here(index, places, offset)
    out = rows.new_zeros((*rows.shape[:dim], count, *rows.shape[dim + 1 :]))
    return _added(out, index, rows, dim).narrow(dim, 0, places).contiguous()


def scatter_max(index: Tensor, rows: Tensor, dim: int, places: int, offset: int | None) -> Tensor:
    """Return, for each of the places from `offset` on, the largest of the rows that name it; 0 where none does."""
    index, count = _here(index, places, offset)
    out = rows.new_zeros((*rows.shape[:dim], count, *rows.shape[dim + 1 :]))
    out = out.scatter_reduce(dim, index.expand(rows.shape), rows, "amax", include_self=False)
    return out.narrow(dim, 0, places).contiguous()


def scatter_put(x: Tensor, index: Tensor, rows: Tensor, dim: int, offset: int | None) -> Tensor:
    """Return `x`, which has the places from `offset` on, with the rows in the places that they name."""
    if offset is None:
        return x.scatter(dim, index.expand(rows.shape), rows)
    index, count = _here(index, x.shape[dim], offset)
    wider = x.new_empty((*rows.shape[:dim], count, *rows.shape[dim + 1 :])).slice_scatter(x, dim, 0, x.shape[dim])
    return wider.scatter(dim, index.expand(rows.shape), rows).narrow(dim, 0, x.shape[dim]).contiguous()


def rfft(x: Tensor, dims: Sequence[int], norm: int) -> Tensor:
    """Transform real numbers along `dims`; complex numbers are pairs in a last dimension."""
    return torch.view_as_real(fourier("r2c")(x, dims, norm, True))


def fft(x: Tensor, dims: Sequence[int], norm: int, forward: bool) -> Tensor:
    """Transform pairs along `dims`."""
    return torch.view_as_real(fourier("c2c")(as_complex(x.contiguous()), dims, norm, forward))


def irfft(x: Tensor, dims: Sequence[int], norm: int, last: int) -> Tensor:
    """Transform pairs along `dims` to real numbers, of which the last dimension has `last`."""
    return fourier("c2r")(as_complex(x.contiguous()), dims, norm, last)
