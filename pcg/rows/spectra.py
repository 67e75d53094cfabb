"""Fourier transforms. Complex numbers are real pairs: a last dimension of size 2, the real and the imaginary part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from shardwright.pcg.attrs import Attrs, dimensions, integer
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.row import FactorRule, Row
from shardwright.pcg.rows.structural import FactorText, names

_Norm = Literal["backward", "ortho", "forward"]
_NORMS: Mapping[bool, tuple[_Norm, _Norm, _Norm]] = {
    True: ("backward", "ortho", "forward"),
    False: ("forward", "ortho", "backward"),
}
"""NumPy's words for torch's numbers of what a transform is divided by (1, √n, n): of one forward, and of one back."""


def _transform(*, pairs: bool, pairs_after: bool, last: str = "") -> FactorRule:
    """Return the factor rule of a transform: what it runs along is needed whole, all other dimensions are free."""

    def rule(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
        rank = len(shapes[0]) - pairs
        dims = dimensions(attrs, "dims", rank)
        if not dims or (pairs and shapes[0][-1] != 2) or not 0 <= integer(attrs, "norm") <= 2:
            raise GraphError(f"a transform of {list(shapes[0])} along {dims}; complex numbers have 2 parts")
        left = [f"x{i}!" if i in dims else n for i, n in enumerate(names(rank))]
        right, sizes = list(left), dict[str, int]()
        if last:
            right[dims[-1]] = "y!"
            sizes["y"] = shapes[0][dims[-1]] // 2 + 1 if last == "half" else integer(attrs, last)
        sizes |= {} if pairs or not pairs_after else {"p": 2}
        return f"{' '.join([*left, *['p!'] * pairs])} -> {' '.join([*right, *['p!'] * pairs_after])}", sizes

    return rule


def _complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] + 1j * x[..., 1]


def _pairs(x: np.ndarray) -> np.ndarray:
    return np.stack([np.real(x), np.imag(x)], -1)


def _np_rfft(x: np.ndarray, dims: Sequence[int], norm: int) -> np.ndarray:
    return _pairs(np.fft.rfftn(x, axes=dims, norm=_NORMS[True][norm]))


def _np_fft(x: np.ndarray, dims: Sequence[int], norm: int, forward: bool) -> np.ndarray:
    run = np.fft.fftn if forward else np.fft.ifftn
    return _pairs(run(_complex(x), axes=dims, norm=_NORMS[forward][norm]))


def _np_irfft(x: np.ndarray, dims: Sequence[int], norm: int, last: int) -> np.ndarray:
    sizes = [x.shape[d] for d in dims[:-1]]
    return np.fft.irfftn(_complex(x), [*sizes, last], dims, norm=_NORMS[False][norm])


ROWS = [
    Row("rfft", _transform(pairs=False, pairs_after=True, last="half"), _np_rfft, "rt.rfft({0}, {dims}, {norm})",
        linear_in=((0,),), fresh=True, rounds=True, autocast="wide", flops_per_element=20,
        doc="the transform of real numbers, of which the last dimension has the first half"),
    Row("fft", _transform(pairs=True, pairs_after=True), _np_fft, "rt.fft({0}, {dims}, {norm}, {forward})",
        linear_in=((0,),), fresh=True, rounds=True, autocast="wide", flops_per_element=20),
    Row("irfft", _transform(pairs=True, pairs_after=False, last="last"), _np_irfft,
        "rt.irfft({0}, {dims}, {norm}, {last})", linear_in=((0,),), fresh=True, rounds=True, autocast="wide",
        flops_per_element=20, doc="the inverse of `rfft`: real numbers"),
]  # fmt: skip
