"""The four parallel operators: typed steps of a layout along one mesh axis.

    operator                 step        forward on a device      adjoint (its backward)
    partition(dim, axis)     R → S(dim)  take my slice            combine
    combine(axis)            S(dim) → R  all-gather               partition
    replicate(axis)          R → C       nothing                  reduce
    reduce(axis)             P → R       all-reduce               replicate

All four denote the identity on the logical tensor. Everything else is a composition: `partition∘reduce` is a
reduce-scatter, `replicate∘combine` the all-gather of ZeRO-3, `partition(e)∘combine(d)` an all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.pcg.errors import LayoutError
from shardwright.pcg.layout import C, Layout, Layouts, R, S, innermost, shard_order

PARTITION, COMBINE, REPLICATE, REDUCE = "partition", "combine", "replicate", "reduce"
SEND = "send"
"""The fifth, between the devices of two pipeline stages (`pcg.stages`): the identity, in equal layouts on each."""
PARALLEL_OPS = (PARTITION, COMBINE, REPLICATE, REDUCE)
ADJOINT = {PARTITION: COMBINE, COMBINE: PARTITION, REPLICATE: REDUCE, REDUCE: REPLICATE}


@dataclass(frozen=True, slots=True)
class Step:
    """A parallel operator on mesh axis number `axis`; `before` and `after` are that axis's layouts."""

    op: str
    axis: int
    before: Layout
    after: Layout

    @property
    def adjoint(self) -> Step:
        """The step that the gradient takes, in the other direction and in dual layouts."""
        return Step(ADJOINT[self.op], self.axis, self.after.dual, self.before.dual)


def step(op: str, axis: int, before: Layout, dim: int = -1, blocks: int = 1) -> Step:
    """Return the step that `op` takes from `before`; raise a `LayoutError` if it is not defined there."""
    after = {
        (PARTITION, "R"): S(dim, blocks),
        (COMBINE, "S"): R,
        (REPLICATE, "R"): C,
        (REDUCE, "P"): R,
    }.get((op, before.kind))
    if after is None:
        expected = {PARTITION: "R", COMBINE: "S(d)", REPLICATE: "R", REDUCE: "P"}[op]
        raise LayoutError(f"{op} steps from {expected} along its axis, got {before}; insert the step that leads there")
    return Step(op, axis, before, after)


def applicable(shape: tuple[int, ...], layouts: Layouts, sizes: tuple[int, ...], move: Step) -> bool:
    """Return whether a tensor of `shape` in `layouts` can take the step: sizes divide, only innermost shards move."""
    after = (*layouts[: move.axis], move.after, *layouts[move.axis + 1 :])
    if isinstance(shard_order(shape, after, sizes), str):
        return False
    if move.op == COMBINE:
        return innermost(layouts, move.axis)
    return move.op != PARTITION or innermost(after, move.axis)
