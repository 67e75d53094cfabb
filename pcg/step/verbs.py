"""What an action of a step is: a verb, what it is about, and in which microbatches it happens."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, get_args

Verb = Literal[
    "gather", "await", "free", "run", "start", "wait", "again", "backward", "weights", "accumulate", "scatter",
    "deliver", "reduce", "offload", "fetch", "arrive",
]  # fmt: skip
Microbatch = Literal["every", "first", "later", "last", "opening", "closing"]
"""In which of a step's microbatches something happens; "opening" and "closing": the first and last of several."""


def happens(when: Microbatch, *, first: bool, last: bool) -> bool:
    """Whether this is one of those microbatches, being the first or the last of its step."""
    several = {"later": not first, "opening": first and not last, "closing": last and not first}
    return {"every": True, "first": first, "last": last, **several}[when]


@lru_cache(maxsize=4)
def happening(*, first: bool, last: bool) -> frozenset[Microbatch]:
    """All that a microbatch is which is the first or the last of its step."""
    return frozenset(when for when in get_args(Microbatch) if happens(when, first=first, last=last))


class Action(NamedTuple):
    """One thing that a rank does.

    gather, await, free    block `number`: launch its all-gather, wait for it, give its memory back
    run                    operation `number`, forward; start, wait: the same in two halves, of a sum over ranks
    again                  operation `number`, forward, in the backward
    backward               of operation `number`, or where that is in two parts, what gives gradients to activations
    weights                the other part, which gives gradients to parameters
    accumulate             the gradient of use `number` is complete
    scatter, deliver       block `number`: launch the reduce-scatter of its gradients, wait for it
    reduce                 sum the gradients of unit `number` over devices
    offload                copy the memory of allocation `number` to the host, and give it back here
    fetch, arrive          launch the copy of allocation `number` from the host, wait for it
    """

    verb: Verb
    number: int
    microbatch: Microbatch = "every"
