"""Serial contexts at certain sizes, with random tensors for their variables."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.generator.context import SerialContext
from shardwright.substitutions.generator.residues import Field, Parts
from shardwright.substitutions.generator.symbolicdims import size
from shardwright.substitutions.generator.vocabulary import SymbolicType

TRIES = 100
REALS = ("eps", "scale", "smoothing")
"""The names of free real attributes."""


@dataclass(frozen=True)
class Instance:
    """A context at certain sizes: the value of every name, and a batch of one tensor for every variable."""

    sizes: Mapping[str, Any]
    tensors: Mapping[str, Parts]


def instances(
    context: SerialContext, field: Field, seed: int, ranks: Sequence[int] = (1, 1), spare: int = 1
) -> Iterator[Instance]:
    """Yield an instance for each rank of the splices, at pairwise distinct sizes of at least 2, different each time."""
    before: list[Mapping[str, Any]] = []
    for number, rank in enumerate(ranks):
        rng = random.Random(f"{seed} {number} {context.name}")
        before.append(chosen(context, rng, rank, spare, before))
        yield instance(context, field, before[-1], rng.randrange(2**32))


def chosen(
    context: SerialContext, rng: random.Random, rank: int, spare: int = 1, before: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return small sizes for every name, pairwise distinct where possible, also among sums, products and differences.

    Sizes differ from those chosen `before`, and stand in another order.
    """
    dims = [*context.dimensions, *(f"*{s}{i}" for s in context.splices for i in range(rank))]
    bounds = [name for name in context.names if name not in dims]
    pool, best = range(2, 3 + len(dims) + spare), None
    left = TRIES
    for _ in range(20 * TRIES):
        sizes = dict(zip(dims, rng.sample(pool, len(dims)), strict=True))
        sizes |= {name: rng.choice(pool) - 1 for name in bounds}
        if not _bounded(context, sizes):
            continue
        left -= 1
        extents = {d: size(d, sizes) for d in context.reach.extents if not d.startswith("*") and d != "1"}
        extents |= {name: value for name, value in sizes.items() if name.startswith("*")}
        values: dict[str, Any] = {name: value for name, value in sizes.items() if not name.startswith("*")}
        values |= {s: tuple(sizes[f"*{s}{i}"] for i in range(rank)) for s in context.splices}
        volume = sum(prod(shape_of(kind, values)) for kind in context.types.values())
        cost = (len(extents) - len(set(extents.values())), _alike(context.names, values, before), volume)
        if best is None or cost < best[0]:
            best = (cost, values)
        if not left:
            break
    if best is None:
        raise RuleError(f"context {context.name!r}: no small sizes satisfy its slices")
    stride = rng.sample((1, 2), 2)
    return best[1] | {"stride": (stride[0], stride[1]), "padding": (rng.randint(0, 1),) * 2, "dilation": (1, 1)}


def _alike(names: Sequence[str], sizes: Mapping[str, int], before: Sequence[Mapping[str, Any]]) -> int:
    """Return a measure of likeness: sizes that an earlier choice has, and pairs in the order of all earlier choices."""
    same = sum(any(old[name] == sizes[name] for old in before) for name in names)
    pairs = [(a, b) for a in names for b in names if a < b] if before else []
    return 2 * same + sum(all((old[a] < old[b]) == (sizes[a] < sizes[b]) for old in before) for a, b in pairs)


def _bounded(context: SerialContext, sizes: Mapping[str, int]) -> bool:
    """Return whether slices are not empty and kernels fit."""
    cuts = [(size(a, sizes), size(b, sizes), size(d, sizes)) for d, pairs in context.cuts.items() for a, b in pairs]
    kernels = [(sizes[k], sizes[n]) for k, n in (("p", "h"), ("q", "w")) if "conv2d" in context.operators]
    return all(0 <= a < b <= n for a, b, n in cuts) and all(k < n for k, n in kernels)


def instance(context: SerialContext, field: Field, sizes: Mapping[str, Any], seed: int) -> Instance:
    """Return random tensors and random real attributes at these sizes."""
    rng = np.random.default_rng(seed)
    env = {**sizes, **{name: field.constant(rng) for name in REALS}, "ignore": -100}
    if "embedding" in context.operators:
        env["padding"] = None
    tensors: dict[str, Parts] = {}
    for name, kind in context.types.items():
        shape = shape_of(kind, sizes)
        if kind.into:
            tensors[name] = (rng.integers(0, size(kind.into, sizes), (1, *shape), np.int64),)
        else:
            tensors[name] = field.random(rng, shape, context.parts)
    return Instance(env, tensors)


def shape_of(kind: SymbolicType, sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the concrete shape of a tensor of this type."""
    shape: list[int] = []
    for dim in kind.dims:
        shape += sizes[dim[1:]] if dim.startswith("*") else [size(dim, sizes)]
    return tuple(shape)
