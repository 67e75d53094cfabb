"""Memory that an operation needs while it runs, beside its operands and its result.

Along a dimension that is not the first, slices are not neighbours in memory: gathered slices are put together in a
second tensor, and a tensor is cut up into one before it is scattered. A cross-entropy's backward writes the gradient of
the log-probabilities before the gradient of the logits.

Sources: lowering/ranks/movement.py; torch's F.cross_entropy, which is log_softmax and nll_loss.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts, local_blocks
from shardwright.pcg.moves import Move


class Scratch(NamedTuple):
    """Bytes of memory in forward and in backward."""

    forward: float = 0.0
    backward: float = 0.0


def move_scratch(graph: Graph, start: str, move: Move, end: str, whole_bytes: float) -> Scratch:
    """Return the scratch of a move from the value `start` to `end`; `whole_bytes`: of a group's whole tensor."""
    sizes, part = graph.mesh.sizes, 1 / graph.mesh.sizes[move.axis]

    def copies(layouts: Layouts) -> bool:
        layout = layouts[move.axis]
        return layout.is_shard and (layout.dim, local_blocks(layouts, move.axis, sizes)) != (0, 1)

    before, after = (copies(graph.types[name].layouts) for name in (start, end))
    if "all_to_all" in move.collectives():
        both = whole_bytes * part * (before + after)
        return Scratch(both, both)
    return Scratch(*(whole_bytes * (before or after) * (c in _MOVED) for c in move.collectives()))


_MOVED = ("all_gather", "reduce_scatter")


def operator_scratch(op: str, operand_bytes: float) -> Scratch:
    """Return the scratch of an operator whose first operand has `operand_bytes`."""
    return Scratch(0.0, operand_bytes) if op == "cross_entropy_sum" else Scratch()
