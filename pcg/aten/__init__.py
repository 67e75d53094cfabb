"""The handlers that turn ATen operators into rows of the op table: one per operator, one file per topic.

    registry       the handlers, and small things that they share
    lift           one operator by its handler; an opaque one where there is none
    pointwise      arithmetic, comparisons, choices
    contractions   products of matrices, convolutions
    reductions     reductions, scans, sorts
    structure      reshapes, slices, concatenations
    lookups        lookups by integer tensors
    constants      tensors made from nothing
    networks       normalization, dropout, recurrent layers
    images         pooling, resampling, padding, patches
    attention      scaled dot-product attention
    complexes      operators on complex numbers; `pairs`: these as pairs of real ones
    losses         sums over the batch, divided by global counts

    lift(builder, "aten.addmm.default", args, …) ──HANDLERS["addmm"]──▶ matmul, add

`registry` says what a handler is and `lift` calls it; an operator without a handler, or with arguments that its handler
does not cover, becomes `opaque`.
"""

from shardwright.pcg.aten import (
    attention,
    constants,
    contractions,
    images,
    lookups,
    losses,
    networks,
    pointwise,
    reductions,
    structure,
)
from shardwright.pcg.aten.lift import find_handler, lift
from shardwright.pcg.aten.pairs import Pair, Value
from shardwright.pcg.aten.registry import HANDLERS, IGNORED, Ref, dtype_name

TOPICS = (pointwise, structure, constants, reductions, contractions, lookups, networks, images, attention, losses)

__all__ = ["HANDLERS", "IGNORED", "TOPICS", "Pair", "Ref", "Value", "dtype_name", "find_handler", "lift"]
