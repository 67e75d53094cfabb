"""The contexts that are enumerated, by topic. The serial ones together hold every operator of the vocabulary.

Each is an independent unit of work.
"""

from __future__ import annotations

from shardwright.substitutions.generator.contexts.attention import ATTENTION
from shardwright.substitutions.generator.contexts.contractions import CONTRACTIONS
from shardwright.substitutions.generator.contexts.fusion import FUSION
from shardwright.substitutions.generator.contexts.lookups import LOOKUPS
from shardwright.substitutions.generator.contexts.movement import MOVEMENT
from shardwright.substitutions.generator.contexts.placement import ONE_AXIS, TWO_AXES
from shardwright.substitutions.generator.contexts.pointwise import POINTWISE
from shardwright.substitutions.generator.contexts.reductions import NORMS, REDUCTIONS

SERIAL_CONTEXTS = (
    *POINTWISE, *CONTRACTIONS, *FUSION, *MOVEMENT, *REDUCTIONS, *NORMS, *LOOKUPS, *ATTENTION,
)  # fmt: skip
PLACEMENT_CONTEXTS = (*ONE_AXIS, *TWO_AXES)
