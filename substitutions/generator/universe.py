"""What terms are made of: a context is a small pool of typed variables and the operators enumerated over it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.generator.extents import monomials, size, times
from shardwright.substitutions.generator.field import Field, Parts
from shardwright.substitutions.generator.vocabulary import VOCABULARY, Operator, Reach, SymbolicType
from shardwright.substitutions.terms import Dims

TRIES = 100
REALS = ("eps", "scale", "smoothing")
"""Free real attributes."""
RING = ("add", "sub", "mul", "neg")
Cuts = Mapping[str, tuple[tuple[str, str], ...]]
"""dimension -> the (start, stop) of slices"""


def cut(dim: str, *pairs: str) -> Cuts:
    """`cut("n", "s:t")`: slices of dimension n from s to t."""
    return {dim: tuple((a.strip(), b.strip()) for a, b in (pair.split(":") for pair in pairs))}


@dataclass(frozen=True)
class SerialContext:
    """A pool of variables and the operators over it.

    name       what progress calls it
    variables  name -> dims, as in rules; `m -> v` is an index tensor of dims m whose values are below v
    operators  names in the vocabulary
    about      operators of which a rule has to have one; empty: any (other contexts hold the rules without)
    cuts       dimension -> the (start, stop) that slices take
    extents    dimensions of results besides those of variables
    parts      how many parts a number has: one, and one more for every exponential inside another
    part       the part that fingerprints read: 0, or 1 where logarithms matter
    samples    how many assignments of sizes fingerprints read
    max_rank   the most dimensions that a reshape may make
    """

    name: str
    variables: Mapping[str, str]
    operators: tuple[str, ...]
    cuts: Cuts = field(default_factory=dict)
    extents: tuple[str, ...] = ()
    parts: int = 1
    part: int = 0
    samples: int = 2
    max_rank: int = 4
    about: tuple[str, ...] = ()

    @cached_property
    def dims(self) -> Mapping[str, Dims]:
        """The dims of every variable."""
        return {name: Dims.parse(text.partition("->")[0]) for name, text in self.variables.items()}

    @cached_property
    def types(self) -> Mapping[str, SymbolicType]:
        """The type of every variable."""
        return {
            name: SymbolicType(tuple(map(_extent, self.dims[name].entries)), text.partition("->")[2].strip())
            for name, text in self.variables.items()
        }

    @cached_property
    def ways(self) -> tuple[Operator, ...]:
        return tuple(VOCABULARY[name] for name in self.operators)

    @cached_property
    def reach(self) -> Reach:
        """What structural operators may do here: products among the dims of variables may be split."""
        used = {d for t in self.types.values() for d in t.dims}
        splits: dict[str, tuple[tuple[str, str], ...]] = {}
        for dims in self.dims.values():
            for entry in dims.entries:
                if len(entry) == 2:
                    splits[_extent(entry)] = ((entry[0], entry[1]),)
        return Reach(self.cuts, splits, frozenset(used | set(self.extents)), self.max_rank)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sizes, and the bounds of slices, that an instance fixes."""
        texts = [d for d in self.reach.extents if not d.startswith("*")]
        texts += [t.into for t in self.types.values() if t.into] + [b for c in self.cuts.values() for p in c for b in p]
        return tuple(sorted({name for text in texts for names, _ in monomials(text) for name in names}))

    @cached_property
    def dimensions(self) -> tuple[str, ...]:
        """The sizes that variables have."""
        names = (name for dims in self.dims.values() for name in dims.names if name[0] != "*")
        limits = (
            name for kind in self.types.values() if kind.into for names, _ in monomials(kind.into) for name in names
        )
        return tuple(sorted({*names, *limits}))

    @cached_property
    def splices(self) -> tuple[str, ...]:
        return tuple(sorted({d[1:] for t in self.types.values() for d in t.dims if d.startswith("*")}))


def _extent(entry: Sequence[str]) -> str:
    """The dimension that an entry of dims is."""
    if len(entry) == 1:
        return entry[0]
    text = "1"
    for name in entry:
        text = times(text, name)
    return text


@dataclass(frozen=True)
class Instance:
    """A context at certain sizes: what every name is, and a batch of one tensor for every variable."""

    sizes: Mapping[str, Any]
    tensors: Mapping[str, Parts]


def instances(
    context: SerialContext, field: Field, seed: int, ranks: Sequence[int] = (1, 1), spare: int = 1
) -> Iterator[Instance]:
    """One instance for each rank of the splices, at pairwise distinct sizes of at least 2, different each time."""
    before: list[Mapping[str, Any]] = []
    for number, rank in enumerate(ranks):
        rng = random.Random(f"{seed} {number} {context.name}")
        before.append(chosen(context, rng, rank, spare, before))
        yield instance(context, field, before[-1], rng.randrange(2**32))


def chosen(
    context: SerialContext, rng: random.Random, rank: int, spare: int = 1, before: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Sizes for every name: small, and pairwise distinct where possible, also among sums, products and differences.

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
        found: dict[str, Any] = {name: value for name, value in sizes.items() if not name.startswith("*")}
        found |= {s: tuple(sizes[f"*{s}{i}"] for i in range(rank)) for s in context.splices}
        volume = sum(prod(shape_of(kind, found)) for kind in context.types.values())
        cost = (len(extents) - len(set(extents.values())), _alike(context.names, found, before), volume)
        if best is None or cost < best[0]:
            best = (cost, found)
        if not left:
            break
    if best is None:
        raise RuleError(f"context {context.name!r}: no small sizes satisfy its slices")
    stride = rng.sample((1, 2), 2)
    return best[1] | {"stride": (stride[0], stride[1]), "padding": (rng.randint(0, 1),) * 2, "dilation": (1, 1)}


def _alike(names: Sequence[str], sizes: Mapping[str, int], before: Sequence[Mapping[str, Any]]) -> int:
    """How many sizes are what they were in an earlier choice, and how many pairs stand in the order of all of them."""
    same = sum(any(old[name] == sizes[name] for old in before) for name in names)
    pairs = [(a, b) for a in names for b in names if a < b] if before else []
    return 2 * same + sum(all((old[a] < old[b]) == (sizes[a] < sizes[b]) for old in before) for a, b in pairs)


def _bounded(context: SerialContext, sizes: Mapping[str, int]) -> bool:
    """Whether slices are not empty and kernels fit."""
    cuts = [(size(a, sizes), size(b, sizes), size(d, sizes)) for d, pairs in context.cuts.items() for a, b in pairs]
    kernels = [(sizes[k], sizes[n]) for k, n in (("p", "h"), ("q", "w")) if "conv2d" in context.operators]
    return all(0 <= a < b <= n for a, b, n in cuts) and all(k < n for k, n in kernels)


def instance(context: SerialContext, field: Field, sizes: Mapping[str, Any], seed: int) -> Instance:
    """Random tensors, and random real attributes, at these sizes."""
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
    """The concrete shape of a tensor of this type."""
    shape: list[int] = []
    for dim in kind.dims:
        shape += sizes[dim[1:]] if dim.startswith("*") else [size(dim, sizes)]
    return tuple(shape)
