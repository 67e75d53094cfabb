"""The operation, the unit of work that a step runs."""

from __future__ import annotations

from typing import NamedTuple

from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.verbs import Verb


class Region(NamedTuple):
    """Operations that run again together in backward, under a common name.

    results    the fate of values that leave it: kept for their readers' backward, or made again for them too; values
               inside are made again in any case
    """

    name: str
    results: Fate


class Operation(NamedTuple):
    """An operator, or a change of an activation's layout.

    reads        activations, by name; `weights`: parameters, by leaf
    views        parameters whose memory it reads by way of views; `saved`: those whose memory its backward reads
    alias        the operand whose memory the result shares, or ""; `sums_in_place`: by overwriting it
    keeps        the activations that backward needs; `mask_bytes`: the size of the mask that it needs
    gradients    the activations among `reads` that get one; none and no weights: there is no backward
    grad         whether its result gets one; `split_backward`: whether the gradients of its weights are made apart from
                 those of its activations
    verb         of its forward: "run"; "start", a sum over ranks that is started before anything else runs; or "total"
    module       where it lies in the model
    block        the repeated module that it belongs to, or ""
    region       the region that it is made again with in backward, if any
    stored       where its result waits for backward, if it does and is not made again: KEPT or HOST
    seed         for a dropout, the number of its mask in the order in which one process draws masks
    """

    name: str
    reads: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    alias: str = ""
    sums_in_place: bool = False
    num_bytes: float = 0.0
    keeps: tuple[str, ...] = ()
    mask_bytes: float = 0.0
    gradients: tuple[str, ...] = ()
    grad: bool = False
    split_backward: bool = False
    verb: Verb = "run"
    module: str = ""
    block: str = ""
    region: Region | None = None
    stored: Fate = Fate.KEPT
    seed: int | None = None

    @property
    def is_differentiated(self) -> bool:
        return self.grad and bool(self.gradients or self.weights)
