"""What a step does: the table of verbs, and an action, which is a verb and what it is about.

`VERBS` has a row for each kind of action. The list of actions is made of them, the timeline prices each by the method
that its row names, on the stream that it names; reports read what it sends, and lowering calls its executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

Verb = Literal[
    "gather", "await", "free", "run", "start", "wait", "again", "backward", "weights", "accumulate", "scatter",
    "deliver", "reduce", "offload", "fetch", "arrive", "share", "update", "regather", "draw",
]  # fmt: skip
Counted = Literal["block", "operation", "use", "unit", "allocation", "axis", "stage"]
Stream = Literal["compute", "own", "axis", "stages", "copy", ""]
SentKind = Literal["weights", "gradients", "activations", "copies", ""]


class VerbRow(NamedTuple):
    """One kind of action.

    counts       what its number counts, in a chunk, its actions, or the mesh
    reads        what has to be there of that, by name; `writes`: what is there from then on; `ends`: what no longer is
    stream       where it runs: "compute", "copy", "stages", "axis" (that of what is sent), "own" (compute, or the axis
                 of what the operation sends); "": it takes no time
    collective   what it sends, where the operation does not say; "": nothing
    sends        what that is, for people
    price        what prices it: a method of `cost.timeline.pricing`, or of `cost.timeline.maker` at the end of a step
    executor     what does it in a program's text or in `lowering.runtime`; "": what autograd does, or
                 the user's optimizer; None: it is priced, and nothing runs it
    """

    counts: Counted
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    stream: Stream = ""
    collective: str = ""
    sends: SentKind = ""
    price: str = ""
    executor: str | None = ""


VERBS: Mapping[Verb, VerbRow] = {
    "gather": VerbRow("block", (), ("arriving",), (), "axis", "all_gather", "weights", "launch_gather", "start"),
    "await": VerbRow("block", ("arriving",), ("gathered",), price="await_gather", executor="gather"),
    "free": VerbRow("block", ("gathered",), (), ("arriving", "gathered"), executor="free"),
    "run": VerbRow("operation", (), ("value",), (), "own", "", "activations", "run_operation"),
    "start": VerbRow("operation", (), ("value", "sum"), (), "axis", "", "activations", "start_sum", "start_sum"),
    "wait": VerbRow("operation", ("sum",), (), ("sum",), price="wait_for_sum", executor="finish_sum"),
    "draw": VerbRow("operation", (), ("mask",), executor="ahead"),
    "again": VerbRow("operation", ("value",), (), (), "own", "", "activations", "run_again"),
    "backward": VerbRow("operation", ("value",), (), (), "own", "", "activations", "run_backward"),
    "weights": VerbRow("operation", ("value",), (), (), "compute", price="run_weights", executor="give_to_weights"),
    "accumulate": VerbRow("use", (), ("gradient",), price="accumulate"),
    "scatter": VerbRow(
        "block", (), ("scattering",), (), "axis", "reduce_scatter", "gradients", "launch_scatter", "take_gradients"
    ),
    "deliver": VerbRow("block", ("scattering",), (), ("scattering",), price="deliver", executor="finish_gradients"),
    "reduce": VerbRow("unit", (), ("sum",), (), "axis", "all_reduce", "gradients", "launch_reduce", "launch"),
    "offload": VerbRow("allocation", (), ("host",), (), "copy", "", "copies", "launch_offload", None),
    "fetch": VerbRow("allocation", ("host",), ("fetching",), (), "copy", "", "copies", "launch_fetch", None),
    "arrive": VerbRow("allocation", ("fetching",), (), ("host", "fetching"), price="await_fetch", executor=None),
    "share": VerbRow("stage", (), (), (), "stages", "", "gradients", "sum_over_stages", "summed"),
    "update": VerbRow("stage", (), (), (), "compute", price="update"),
    "regather": VerbRow("axis", (), (), (), "axis", "all_gather", "weights", "gather_updated", None),
}
"""By verb."""

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
    draw                   the mask of dropout `number`, ahead of its turn
    again                  operation `number`, forward, in the backward
    backward               of operation `number`, or where that is in two parts, what gives gradients to activations
    weights                the other part, which gives gradients to parameters
    accumulate             the gradient of use `number` is complete
    scatter, deliver       block `number`: launch the reduce-scatter of its gradients, wait for it
    reduce                 sum the gradients of unit `number` over devices
    offload                copy the memory of allocation `number` to the host, and give it back here
    fetch, arrive          launch the copy of allocation `number` from the host, wait for it
    share                  at the end of a step, sum gradients that several stages have
    update                 the optimizer
    regather               gather over axis `number` what the optimizer has updated in shards (ZeRO-1)
    """

    verb: Verb
    number: int
    microbatch: Microbatch = "every"
