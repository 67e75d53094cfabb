"""The ways in which the sweep runs a model: layouts, lifetimes, microbatches, what is made again, in what numbers.

`ways` lists them for a model in the order in which they are taken. Another way is a line in `layouts` or in `first`.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, product

from bench.accuracy import Kind
from bench.plans import MIXTURE, Case, Lifetimes, RandomSubset
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.lifetimes import ZEROS
from shardwright.pcg.step.recompute import RECOMPUTES, Recompute, RecomputeByBlock
from shardwright.search.request.restrict import CONTEXT, DATA, FREE, TENSOR, ZERO

Layout = tuple[str, dict[str, int], tuple[str, ...]]
"""A name, the axes of devices, and the role of each."""
MICROBATCHES = (1, 2, 4)
SHARES = (0.75, 0.55, 0.4)
"""Of the memory that the fastest plan takes: what searched plans have to do with."""
NUM_RANDOM = 40
RANDOM_SHARE = 0.4


def layouts(num_ranks: int) -> Iterator[Layout]:
    """Yield layouts on one axis and, from four ranks on, on two."""
    half = num_ranks // 2
    yield "zero", {"dp": num_ranks}, (ZERO,)
    yield "data", {"dp": num_ranks}, (DATA,)
    yield "tensor", {"tp": num_ranks}, (TENSOR,)
    yield "sequence", {"cp": num_ranks}, (CONTEXT,)
    if half > 1:
        yield "hybrid", {"replica": 2, "shard": half}, (DATA, ZERO)
        yield "data × tensor", {"dp": half, "tp": 2}, (DATA, TENSOR)
        yield "zero × tensor", {"dp": 2, "tp": half}, (ZERO, TENSOR)
        yield "zero × sequence", {"dp": half, "cp": 2}, (ZERO, CONTEXT)


def first(num_ranks: int) -> Iterator[Case]:
    """Yield the cases of every model: searched plans under tight memory and on fast links, fp32, bf16 autocast."""
    for share in SHARES:
        yield Case(f"searched, {share:.0%} of memory", num_ranks, share=share, kind="fp64")
    axes = {"x": 2, "y": num_ranks // 2} if num_ranks > 2 else {"x": num_ranks}
    free = "free", axes, (FREE,) * len(axes)
    for many in MICROBATCHES:
        yield replace(_case(free, many, None, "none"), fast_links=True)
    zero, data, tensor, sequence, *_ = layouts(num_ranks)
    kinds: tuple[Kind, ...] = ("fp32", "amp_bf16")
    for kind in kinds:
        chosen: tuple[tuple[Layout, int, Lifetimes | None, Recompute], ...] = (
            (zero, 2, "zero-3", "full"),
            (zero, 4, "zero-1", "selective"),
            (tensor, 1, None, "none"),
            (zero, 1, "zero-3", "none"),
            (data, 4, None, "none"),
            (sequence, 1, None, "none"),
        )
        for layout, many, lifetime, mode in chosen:
            yield _in(_case(layout, many, lifetime, mode), kind)


def every(num_ranks: int) -> Iterator[Case]:
    """All lifetimes, microbatches and recomputations of all layouts, in fp64."""
    modes: Sequence[Recompute | RecomputeByBlock] = (*RECOMPUTES, MIXTURE)
    for layout, many, mode in product(layouts(num_ranks), MICROBATCHES, modes):
        for lifetime in _lifetimes(many) if ZERO in layout[2] else (None,):
            yield _case(layout, many, lifetime, mode)


def _lifetimes(many: int) -> Sequence[Lifetimes]:
    """Return the lifetimes to try. With one microbatch, three of them are the same."""
    return (*ZEROS, "mixed") if many > 1 else ("kept", "zero-3")


def at_random(num_ranks: int) -> Iterator[Case]:
    """The best of a random part of the certified choices: for models of which there is little else."""
    for seed in range(NUM_RANDOM):
        mesh, subset = Mesh.of(x=num_ranks), RandomSubset(seed, RANDOM_SHARE)
        yield Case(f"random {seed}", num_ranks, mesh, (FREE,), fast_links=True, kind="fp64", subset=subset)


def ways(model: str, num_ranks: int, kinds: Sequence[Kind] = ("fp64",)) -> Iterator[Case]:
    """All of them; those behind the first spread evenly, in an order of the model's own.

    `kinds`: what those in fp64 are in, by turns.
    """
    spread = _spread(list(every(num_ranks)), random.Random(zlib.crc32(f"{model} {num_ranks}".encode())))
    seen, turns = set[str](), cycle(kinds)
    for case in chain(first(num_ranks), spread, at_random(num_ranks)):
        own = _in(case, next(turns)) if case.kind == "fp64" else case
        if own.name not in seen:
            yield own
        seen.add(own.name)


def _in(case: Case, kind: Kind) -> Case:
    return case if case.kind == kind else replace(case, name=f"{case.name}, {kind}", kind=kind)


def _case(layout: Layout, many: int, lifetime: Lifetimes | None, mode: Recompute | RecomputeByBlock) -> Case:
    name, axes, roles = layout
    text = mode if isinstance(mode, str) else "mixture"
    parts = [name, *([str(lifetime)] if lifetime else []), f"{many} microbatches", text]
    mesh = Mesh.of(**{TIME: many}, **axes) if many > 1 else Mesh.of(**axes)
    return Case(", ".join(parts), mesh.num_devices, mesh, roles, zero=lifetime, recompute=mode, kind="fp64")


def _spread(cases: list[Case], draw: random.Random) -> Iterator[Case]:
    """Yield the cases; the next one always has least in common with those before."""
    draw.shuffle(cases)
    seen = Counter[object]()
    while cases:
        case = min(cases, key=lambda c: sum(seen[part] for part in c.name.split(", ")))
        seen.update(case.name.split(", "))
        cases.remove(case)
        yield case
