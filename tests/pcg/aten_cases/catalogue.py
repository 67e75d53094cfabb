"""Calls that make torch.export produce every ATen operator that has a handler, in many variants of its arguments.

`CASES[handler]` is a list of `Case`s; floating-point operands become parameters, so that gradients are compared too.
`UNCOVERED[operator]` are calls whose arguments no row expresses.
"""

from __future__ import annotations

from tests.pcg.aten_cases.case import Case
from tests.pcg.aten_cases.constants import CONSTANTS
from tests.pcg.aten_cases.contractions import CONTRACTIONS
from tests.pcg.aten_cases.images import IMAGES
from tests.pcg.aten_cases.lookups import LOOKUPS
from tests.pcg.aten_cases.losses import LOSSES
from tests.pcg.aten_cases.networks import NETWORKS
from tests.pcg.aten_cases.pointwise import POINTWISE
from tests.pcg.aten_cases.reductions import REDUCTIONS
from tests.pcg.aten_cases.structure import STRUCTURE
from tests.pcg.aten_cases.uncovered import UNCOVERED

TOPICS = (POINTWISE, STRUCTURE, CONSTANTS, REDUCTIONS, CONTRACTIONS, LOOKUPS, NETWORKS, IMAGES, LOSSES)
CASES: dict[str, list[Case]] = {name: cases for topic in TOPICS for name, cases in topic.items()}

__all__ = ["CASES", "TOPICS", "UNCOVERED", "Case"]
