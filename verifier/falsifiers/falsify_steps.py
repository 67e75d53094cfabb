"""The falsifier of rules of the parallel operators: chains run on lists of arrays, one per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from shardwright.pcg.errors import RuleError
from shardwright.pcg.interpret import Array, scatter
from shardwright.pcg.layout import Layout, Layouts, S
from shardwright.pcg.mesh import Mesh
from shardwright.substitutions.rules.steps import StepRule, SymbolicLayout, SymbolicStep
from shardwright.verifier.falsifiers.mismatch import Mismatch


def falsify_steps(rule: StepRule, degrees: Sequence[int] = (2, 3), seed: int = 0) -> Mismatch | None:
    """Return a counterexample to a rule of the parallel operators at these degrees, or None."""
    rng = np.random.default_rng(seed)
    for degree, other in product(degrees, degrees):
        run = _Run(rule, {"a": degree, "b": other})
        logical = rng.integers(-9, 10, run.shape).astype(float)
        start = run.scattered(logical)
        try:
            ends = [rule.end(moves) for moves in (rule.left, rule.right)]
            left, right = (run.chain(start, moves) for moves in (rule.left, rule.right))
        except RuleError as error:
            return Mismatch(rule.name, run.degrees, {"x": logical}, logical, f"not defined: {error}")
        if ends[0] != ends[1]:
            types = [{axis: str(place) for axis, place in end.items()} for end in ends]
            return Mismatch(
                rule.name, run.degrees, {"x": logical}, left[0], f"{types[1]}, a type other than {types[0]}"
            )
        for device, (a, b) in enumerate(zip(left, right, strict=True)):
            if a.shape != b.shape or not np.allclose(a, b, rtol=1e-9, atol=1e-9):
                return Mismatch(rule.name, {**run.degrees, "device": device}, {"x": logical}, a, b)
    return None


@dataclass(frozen=True)
class _Run:
    """A rule at concrete degrees, with dimension sizes that every chain of it can hold."""

    rule: StepRule
    degrees: Mapping[str, int]

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(**{axis: self.degrees[axis] for axis, _ in self.rule.start})

    @property
    def dims(self) -> list[str]:
        """The dimensions that are sharded anywhere."""
        return list(dict.fromkeys(dim for _, dim, _ in self.rule.shards)) or ["d"]

    @property
    def blocks(self) -> dict[str, int]:
        """A different number of blocks for every name."""
        return {name: 1 + i for i, name in enumerate(dict.fromkeys(blocks for _, _, blocks in self.rule.shards))}

    @property
    def shape(self) -> tuple[int, ...]:
        extents = {dim: prod({self.blocks[n] for _, d, n in self.rule.shards if d == dim}) for dim in self.dims}
        return tuple(extents[dim] * prod(self.degrees.values()) * (2 + i) for i, dim in enumerate(self.dims))

    def shard(self, place: SymbolicLayout | SymbolicStep) -> tuple[int, int]:
        """Return dimension and number of blocks."""
        return self.dims.index(place.dim), self.blocks[place.blocks]

    def layout(self, place: SymbolicLayout) -> Layout:
        return S(*self.shard(place)) if place.kind == "S" else Layout.parse(place.kind)

    def scattered(self, logical: Array) -> list[Array]:
        layouts: Layouts = tuple(self.layout(place) for _, place in self.rule.start)
        return scatter(logical, layouts, self.mesh, seed=3)

    def chain(self, arrays: list[Array], moves: Sequence[SymbolicStep]) -> list[Array]:
        places = dict(self.rule.start)
        for move in moves:
            before = places[move.axis]
            places[move.axis] = move.after(before)
            arrays = self.step(arrays, move, before)
        return arrays

    def step(self, arrays: list[Array], move: SymbolicStep, before: SymbolicLayout) -> list[Array]:
        axis, size = self.mesh.names.index(move.axis), self.degrees[move.axis]
        grid = dict(zip(self.mesh.coordinates(), arrays, strict=True))
        groups = ([grid[*at[:axis], p, *at[axis + 1 :]] for p in range(size)] for at in grid)
        return [self.received(held, move, before, at[axis]) for at, held in zip(grid, groups, strict=True)]

    def received(self, held: list[Array], move: SymbolicStep, before: SymbolicLayout, device: int) -> Array:
        """Return one device's part after a step of its group, defined for each operator by itself."""
        size = len(held)
        match move.op:
            case "reduce" | "reduce_copy":
                return sum(held[1:], held[0])
            case "combine" | "gather_copy":
                return self.join(held, before)
            case "partition":
                return self.cut(held[device], move, device, size)
            case "reduce_scatter":
                return self.cut(sum(held[1:], held[0]), move, device, size)
            case "all_to_all":
                return self.join([self.cut(array, move, device, size) for array in held], before)
            case _:
                return held[device]

    def cut(self, array: Array, move: SymbolicStep, device: int, size: int) -> Array:
        dim, blocks = self.shard(move)
        pieces = np.split(array, blocks, axis=dim)
        return np.concatenate([np.split(piece, size, axis=dim)[device] for piece in pieces], axis=dim)

    def join(self, held: Sequence[Array], place: SymbolicLayout) -> Array:
        dim, blocks = self.shard(place)
        pieces = [np.split(array, blocks, axis=dim) for array in held]
        return np.concatenate([piece[block] for block in range(blocks) for piece in pieces], axis=dim)
