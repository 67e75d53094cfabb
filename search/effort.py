"""The effort of a search, and the factors by which it leaves something out: one table, each with its reason.

An attempt takes time in proportion to the nodes of the folded graph. So the effort follows from their number. What is
bounded by an effort is a number of tries; what is bounded by a factor below is left out as it would not win.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MANY_NODES = 2**12
"""The number of nodes of a folded graph from which a try takes seconds."""


@dataclass(frozen=True)
class Effort:
    """The most tries of each kind.

    Attributes:
        meshes: that are solved; of the same axes in two orders, only the first where not all are.
        fits: plans of one mesh that fit, after which no other way is tried there.
        layouts: shares of communication beside compute for which layouts are chosen.
        walks: plans by mesh and number of stages whose kept values are decided.
        prices: of a byte, on the way to what is kept.
        orders: of stages, other than the best one, in which each stage is improved by itself.
        remedies: plans that do not fit for which a remedy is sought.
        unasked: whether stages are tried where a plan without them fits.
    """

    meshes: int
    fits: int
    layouts: int
    walks: int
    prices: int
    orders: int
    remedies: int
    unasked: bool

    @property
    def is_least(self) -> bool:
        """Return whether one way is tried where several may pay."""
        return self.fits == 1

    @classmethod
    def of(cls, num_nodes: int) -> Effort:
        """Return the effort for a folded graph of so many nodes."""
        return ONCE if num_nodes >= MANY_NODES else WHOLE


WHOLE: Final = Effort(2**20, 2**20, 2, 2**20, 8, 3, 3, unasked=True)
"""Nothing that may win is left out by its number. On a walk, the eighth price gained less than 0.1 % of a step."""
ONCE: Final = Effort(2, 1, 1, 1, 1, 0, 0, unasked=False)
"""Each way once: Llama-8B on 64 H100, treated so, is slower by 0.4 %, and Llama-70B on 256 H100 by 6 %."""

# ---- shares of a step that are not worth a try ----

LITTLE: Final = 1e-3
"""The share of a step below which no try is worth its time; plans of folded and whole graphs differ by no more."""
WORTH_ENCODING: Final = 0.01
"""The share of a step that a less exact way to send has to save."""
MUCH_SENT: Final = 0.2
"""The share of a step from which communication may be worth memory, even where compute hides it now."""

HIDDEN_COPIES: Final = (0.0, 1.0)
"""The shares of copies to the host that count where values may wait there: none, as compute hides what a link can copy
meanwhile; and all, where that is more than compute takes.
"""

# ---- floors: about the least that a step takes ----

UNTRIED: Final = 0.95
"""The factor on its floor that a step may take while no step of the kind is known: the largest error seen is 4.5 %."""
EXCESS: Final = 0.25
"""The part of what steps of a kind took above their floors that another plan with stages takes too: a plan on another
mesh was seen to take 0.98 of its floor where the first took 1.08.
"""
SLACK: Final = 1.5
"""The factor on its floor with which an attempt that beats the best plan is followed, however slow it is itself: where
memory is short, steps take up to about so much of their floors. With 1.3, DeepSeek-V3 is planned five times as long.
"""
FLOORS: Final = 0.99
"""The factor on its floor that a step may take where steps of the kind are known: 0.4 % below was seen."""
HIDDEN: Final = 0.5
"""The share of its floor that a step with all roles given may take: the floor may have what is sent beside compute."""
MADE_AGAIN: Final = 0.04
"""The part of a step that is added, at least, by making again what there is no room for, if that is nearly all: half
of the values of Llama-8B took 4.2 %.
"""
AGAIN: Final = 4 / 3
"""The factor on a step, about, where there is no room for values: forward is a third of its work."""
WITHOUT: Final = {"none": 1.0, "selective": 0.9, "full": 0.75}
"""The part of a step that is left where nothing is recomputed."""
ALIKE: Final = 0.98
"""The part that is taken of what one order of stages loses to its estimate, for other orders of the same layouts."""
SAVES: Final = 0.9
"""The part of a floor or a step that is left, at least, in fewer microbatches or on another mesh. It only says whether
a floor is computed.
"""
UNSPREAD: Final = 0.7
"""The part of a step that is left, at least, once stages that have room for it recompute nothing."""

# ---- how near the best plan an attempt has to come, to be ... ----

PROMISING: Final = 1.1
"""... tried in the way of the best plan, or to have it decided what it keeps."""
NEAR: Final = 1.05
"""... followed to its neighbours."""
CLOSE: Final = 1.02
"""... followed to another kind of recomputation, or another number of stages."""
OTHER_LAYOUTS: Final = 1.15
"""... tried with other layouts for the same way to run; or, with stages, followed to other meshes."""
BEHIND: Final = 1.25
"""... followed, of a plan by hand, to other degrees; or cut to three axes."""
ORDERS: Final = 1.03
"""... improved by stage in its own order: that saved 2.4 % at most."""
FAR: Final = 1.03
"""The factor on an equal share of all work from which stages are tried unasked, by the best plan's step. Below it they
hardly ever gain, as they idle and exchange messages themselves.
"""

# ---- memory ----

CROWDED: Final = 3.0
"""The most times the room for values that kept ones may take, for layouts of their recomputation to be tried."""

SHRINKS: Final = 0.8
"""The part of its share that a microbatch with fewer examples keeps at least."""

# ---- where to begin ----

DEEP: Final = 4
"""The microbatches per stage that are tried first: the bubble is a fifth of the step."""
MANY_DEVICES: Final = 1024
"""The devices from which two axes are too coarse, and a mesh of three is tried; on fewer, none was found to gain."""
MOST_NESTED: Final = 4
"""The most meshes of three axes that are cut from others: each is followed as they are."""

# ---- the whole graph ----

MOST_WHOLE: Final = 4
"""The most plans that are laid out and judged on the whole graph, because an estimate says that they are faster. Each
takes as long as ten tries.
"""
MIXTURES: Final = 3
"""The most numbers of blocks that keep more which are judged: each block takes about the same."""
WORTH: Final = 2 * LITTLE
"""The share of a step below which no further plan of the whole graph is judged, once some fit."""
MOST_SPREADS: Final = 4
"""The most spreads of a plan's blocks: each is judged, and says what the next one may use."""
MOST_BY_HAND: Final = 4
"""The most meshes by hand with a number of microbatches, over all numbers of stages."""
