"""Lookups by integer tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.pcg.attrs import Attrs, dimension
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.row import Row, first_dtype
from shardwright.pcg.rows.structural import FactorText, names


def _embedding(w: np.ndarray, index: np.ndarray, padding_idx: int | None = None, offset: int = 0) -> np.ndarray:
    """Return rows of w; an index outside this table's rows [offset, offset + len(w)) gives zeros.

    Another device has the rows outside.
    """
    local = index - offset
    inside = (local >= 0) & (local < len(w))
    return np.where(inside[..., None], w[np.clip(local, 0, len(w) - 1)], 0)


def _pick(x: np.ndarray, index: np.ndarray, offset: int = 0) -> np.ndarray:
    """Return x[…, index] along the last dimension; indices outside [offset, offset + size) give zeros."""
    local = np.asarray(index - offset)
    inside = (local >= 0) & (local < x.shape[-1])
    at = np.clip(local, 0, x.shape[-1] - 1)[..., None]
    lead = np.broadcast_shapes(x.shape[:-1], local.shape)
    whole, at = np.broadcast_to(x, (*lead, x.shape[-1])), np.broadcast_to(at, (*lead, 1))
    return np.where(inside, np.take_along_axis(whole, at, -1)[..., 0], 0)


def _index(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    """Return the factors of x indexed by integer tensors on neighbouring dimensions from `dim`.

    The indices broadcast together.
    """
    x, indices, dim = shapes[0], shapes[1:], dimension(attrs, "dim", len(shapes[0]))
    if not 1 <= len(indices) <= len(x) - dim:
        raise GraphError(f"index of {list(x)} from dimension {dim} by {len(indices)} tensors")
    before, after = names(dim, "b"), names(len(x) - dim - len(indices), "a")
    looked_up = [f"z{i}!" for i in range(len(indices))]
    depth = max(len(s) for s in indices)
    common = np.broadcast_shapes(*indices)
    n = [f"n{i}" if common[i] != 1 else "1" for i in range(depth)]
    sides = [" ".join(n[depth - len(s) + i] if extent != 1 else "1" for i, extent in enumerate(s)) for s in indices]
    return f"{' '.join([*before, *looked_up, *after])}, {', '.join(sides)} -> {' '.join([*before, *n, *after])}", {}


def _np_index(x: np.ndarray, *indices: np.ndarray, dim: int) -> np.ndarray:
    return x[(slice(None),) * dim + tuple(indices)]


def _gather(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    x, index = shapes
    dim, left, right = dimension(attrs, "dim", len(x)), [], []
    if len(x) != len(index):
        raise GraphError(f"gather of {list(x)} by an index of another rank, {list(index)}")
    for i, n in enumerate(names(len(x))):
        whole = i == dim or x[i] != index[i]
        left.append(f"x{i}!" if whole else n)
        right.append(f"y{i}!" if whole else n)
    return f"{' '.join(left)}, {' '.join(right)} -> {' '.join(right)}", {}


def _np_gather(x: np.ndarray, index: np.ndarray, dim: int) -> np.ndarray:
    cut = tuple(slice(None) if i == dim else slice(n) for i, n in enumerate(index.shape))
    return np.take_along_axis(x[cut], index, dim)


def _put_fixed(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    sides = [" ".join(f"{p}{i}!" for i in range(len(s))) for p, s in zip("xiv", shapes, strict=True)]
    return f"{', '.join(sides)} -> {sides[0]}", {}


def _np_index_put(x: np.ndarray, index: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = x.copy()
    out[index] = values
    return out


def _np_embedding_bag(w: np.ndarray, index: np.ndarray, starts: np.ndarray, mode: str) -> np.ndarray:
    ends = [*starts[1:], len(index)]
    bags = [w[index[a:b]] for a, b in zip(starts, ends, strict=True)]
    return np.stack([bag.mean(0) if mode == "mean" and len(bag) else bag.sum(0) for bag in bags])


ROWS = [
    Row("embedding", "v h, ... -> ... h", _embedding, "rt.embedding({0}, {1}, {padding_idx}, {offset})",
        dtype=first_dtype, free={"padding_idx": None}, indexes={1: (0, 0)}, linear_in=((0,),),
        fresh=True, offset="v", saves=(1,), lookup=True),
    Row("pick", "... v, ... -> ...", _pick, "rt.pick({0}, {1}, {offset})", dtype=first_dtype,
        indexes={1: (0, -1)}, linear_in=((0,),), fresh=True, offset="v", saves=(1,),
        doc="one entry along the last dimension, zero for indices outside"),
    Row("index", _index, _np_index, "rt.index({0}, [{*1}], {dim})",
        dtype=first_dtype, indexes={1: (0, -1)}, linear_in=((0,),), fresh=True,
        saves=(1,), lookup=True),
    Row("gather", _gather, _np_gather, "{0}.gather({dim}, {1})",
        dtype=first_dtype, indexes={1: (0, -1)}, linear_in=((0,),), fresh=True,
        saves=(1,), lookup=True),
    Row("index_put", _put_fixed, _np_index_put, "{0}.index_put(({1},), {2})", saves=(1,),
        dtype=first_dtype, autocast="widest"),
    Row("embedding_bag", "v! h, n!, b! -> b! h", _np_embedding_bag, "F.embedding_bag({1}, {0}, {2}, mode={mode!r})",
        dtype=first_dtype, linear_in=((0,),), fresh=True,
        saves=(1,), lookup=True),
]  # fmt: skip
