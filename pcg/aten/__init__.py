"""The handlers that turn ATen operators into rows of the op table: one per operator, one file per topic.

    lift(builder, "aten.addmm.default", args, …) ──HANDLERS["addmm"]──▶ matmul, add

`registry` says what a handler is and `lift` calls it; an operator without a handler, or with arguments that its handler
does not cover, becomes `opaque`.
"""

from shardwright.pcg.aten import (
    attention,
    constants,
    contractions,
    lookups,
    losses,
    networks,
    pointwise,
    reductions,
    structure,
)
from shardwright.pcg.aten.lift import find_handler, lift
from shardwright.pcg.aten.registry import HANDLERS, IGNORED, Ref, dtype_name

TOPICS = (pointwise, structure, constants, reductions, contractions, lookups, networks, attention, losses)

__all__ = ["HANDLERS", "IGNORED", "TOPICS", "Ref", "dtype_name", "find_handler", "lift"]
