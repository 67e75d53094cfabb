"""Stretches: where the padding of a dimension lies, and how it follows the factors of an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape, Signature


class Stretch(NamedTuple):
    """A dimension seen as `(outer size inner)`, in which `size` becomes `padded`: the end of each block is padding."""

    outer: int
    size: int
    padded: int
    inner: int

    @property
    def before(self) -> int:
        return self.outer * self.size * self.inner

    @property
    def after(self) -> int:
        return self.outer * self.padded * self.inner

    @property
    def is_suffix(self) -> bool:
        """Return whether the padding follows all else, so that positions stay as they are."""
        return self.outer == 1


@dataclass(frozen=True, slots=True)
class Padding:
    """A dimension of a parameter that is padded."""

    target: str
    dim: int
    stretch: Stretch

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Padding:
        """Read what `dataclasses.asdict` gave. Raises `GraphError` for sizes that are no padding."""
        stretch = Stretch(*data["stretch"])
        if stretch.padded < stretch.size:
            raise GraphError(f"padding of {data['target']}: {stretch.size} entries cannot become {stretch.padded}")
        return cls(data["target"], data["dim"], stretch)


def within(dim: Sequence[int], signature: Signature, stretch: Stretch) -> tuple[int, Stretch] | None:
    """Return the factor of a dimension in which a stretch lies, and the stretch as seen inside it."""
    sizes = [signature.factors[f].size for f in dim]
    for at, factor in enumerate(dim):
        before, after = prod(sizes[:at]), prod(sizes[at + 1 :])
        if stretch.outer % before == 0 and stretch.inner % after == 0:
            inner = stretch._replace(outer=stretch.outer // before, inner=stretch.inner // after)
            if inner.before == sizes[at]:
                return factor, inner
    return None


def around(dim: Sequence[int], signature: Signature, factor: int, stretch: Stretch) -> Stretch:
    """Return the stretch of a dimension, of which one factor is stretched."""
    at, sizes = dim.index(factor), [signature.factors[f].size for f in dim]
    return stretch._replace(outer=stretch.outer * prod(sizes[:at]), inner=stretch.inner * prod(sizes[at + 1 :]))


def of_dims(
    dims: Sequence[Sequence[int]], signature: Signature, stretched: Mapping[int, Stretch]
) -> dict[int, Stretch] | None:
    """Return the stretches of a tensor's dimensions; None where one dimension would have two."""
    by_dim = dict[int, Stretch]()
    for at, dim in enumerate(dims):
        stretched_factors = [f for f in dim if f in stretched]
        if len(stretched_factors) > 1:
            return None
        if stretched_factors:
            by_dim[at] = around(dim, signature, stretched_factors[0], stretched[stretched_factors[0]])
    return by_dim


def padded_shape(shape: Shape, stretches: Mapping[int, Stretch]) -> Shape:
    """Return a shape with padding."""
    return tuple(stretches[d].after if d in stretches else extent for d, extent in enumerate(shape))


def holders(signature: Signature, factor: int) -> list[int]:
    """Return the operands that have a factor."""
    return [i for i, dims in enumerate(signature.operands) if any(factor in dim for dim in dims)]
