"""Lookups by integer tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardwright.pcg.attrs import Attrs, dimension, integer
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.row import LocalShapes, Row, first_dtype
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


def _scatter(mark: str, *, put: bool = False) -> Callable[[Sequence[Shape], Attrs], FactorText]:
    """Return the factors of rows that go to the places that an index names along `dim`.

    Operands are the tensor that is written into if there is one, the index, the rows. The index is 1 wide where it is
    the same for a whole dimension of the rows. `mark` is "!" where rows may not be split.
    """

    def rule(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
        *into, index, rows = shapes
        dim, d = dimension(attrs, "dim", len(rows)), names(len(rows))
        if len(into) != put or any(len(shape) != len(rows) for shape in (*into, index)):
            raise GraphError(f"rows of {list(rows)} by an index of {list(index)}; give it as many dimensions")
        d[dim] = f"e{mark}"
        narrow = ["1" if i != dim and index[i] == 1 != rows[i] else n for i, n in enumerate(d)]
        result = " ".join([*d[:dim], "n", *d[dim + 1 :]])
        sides = [*[result] * put, " ".join(narrow), " ".join(d)]
        return f"{', '.join(sides)} -> {result}", {} if put else {"n": integer(attrs, "places")}

    return rule


def local_places(attrs: Attrs, shapes: LocalShapes) -> Attrs:
    """Return the attributes with the number of places that a device has."""
    return {**attrs, "places": shapes.local_result[integer(attrs, "dim")]}


def _places_of(places: int, index: np.ndarray, rows: np.ndarray, dim: int, offset: int) -> tuple[Any, np.ndarray]:
    """Return where the elements of the rows go that stay among the `places` from `offset` on, and which these are."""
    place = np.broadcast_to(index - offset, rows.shape)
    here = np.asarray((place >= 0) & (place < places))
    where: list[np.ndarray] = [*np.nonzero(here)]
    where[dim] = place[here]
    return tuple(where), here


def _np_scatter_sum(index: np.ndarray, rows: np.ndarray, dim: int, places: int, offset: int = 0) -> np.ndarray:
    at, here = _places_of(places, index, rows, dim, offset)
    out = np.zeros((*rows.shape[:dim], places, *rows.shape[dim + 1 :]), rows.dtype)
    np.add.at(out, at, rows[here])
    return out


def _np_scatter_max(index: np.ndarray, rows: np.ndarray, dim: int, places: int, offset: int = 0) -> np.ndarray:
    at, here = _places_of(places, index, rows, dim, offset)
    out = np.full((*rows.shape[:dim], places, *rows.shape[dim + 1 :]), -np.inf, rows.dtype)
    np.maximum.at(out, at, rows[here])
    return np.where(np.isneginf(out), 0, out)


def _np_scatter_put(x: np.ndarray, index: np.ndarray, rows: np.ndarray, dim: int, offset: int = 0) -> np.ndarray:
    at, here = _places_of(x.shape[dim], index, rows, dim, offset)
    out = x.copy()
    out[at] = rows[here]
    return out


def _last_dtype(dtypes: Sequence[str], attrs: Attrs) -> str:
    return dtypes[-1]


ROWS = [
    Row("embedding", "v h, ... -> ... h", _embedding, "rt.embedding({0}, {1}, {padding_idx}, {offset})",
        dtype=first_dtype, free={"padding_idx": None}, indexes={1: (0, 0)}, linear_in=((0,),),
        fresh=True, offset="v", saves=(1,), lookup=True),
    Row("pick", "... v, ... -> ...", _pick, "rt.pick({0}, {1}, {offset})", dtype=first_dtype,
        indexes={1: (0, -1)}, linear_in=((0,),), fresh=True, offset="v", saves=(0, "index"), joint=True,
        doc="one entry along the last dimension, zero for indices outside"),
    Row("index", _index, _np_index, "rt.index({0}, [{*1}], {dim})",
        dtype=first_dtype, indexes={1: (0, -1)}, linear_in=((0,),), fresh=True,
        saves=(1, 2), lookup=True),
    Row("gather", _gather, _np_gather, "{0}.gather({dim}, {1})",
        dtype=first_dtype, indexes={1: (0, -1)}, linear_in=((0,),), fresh=True,
        saves=(0, 1), joint=True, lookup=True),
    Row("index_put", _put_fixed, _np_index_put, "{0}.index_put(({1},), {2})", saves=(1,),
        dtype=first_dtype, autocast="widest"),
    Row("scatter_sum", _scatter(""), _np_scatter_sum, "rt.scatter_sum({0}, {1}, {dim}, {places}, {offset})",
        dtype=_last_dtype, linear_in=((1,),), localize=local_places, fresh=True, offset="n", saves=(0,),
        doc="for each place, the sum of the rows that name it"),
    Row("scatter_max", _scatter("!"), _np_scatter_max, "rt.scatter_max({0}, {1}, {dim}, {places}, {offset})",
        dtype=_last_dtype, localize=local_places, offset="n", saves=(0, 1, "result"),
        doc="for each place, the largest of the rows that name it; 0 if none does"),
    Row("scatter_put", _scatter("!", put=True), _np_scatter_put, "rt.scatter_put({0}, {1}, {2}, {dim}, {offset})",
        dtype=_last_dtype, linear_in=((0, 2),), fresh=True, offset="n", saves=(1,),
        doc="a tensor in which rows have taken the places that they name"),
    Row("embedding_bag", "v! h, n!, b! -> b! h", _np_embedding_bag, "F.embedding_bag({1}, {0}, {2}, mode={mode!r})",
        dtype=first_dtype, linear_in=((0,),), fresh=True,
        saves=(1,), lookup=True),
]  # fmt: skip
