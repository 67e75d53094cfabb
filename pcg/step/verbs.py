"""The verbs of a step, in a table, and its actions: a verb and the number of what it acts on.

`VERBS` has a row for each kind of action. The list of actions consists of them; the timeline prices each by the method
and on the stream that its row names; reports and dry runs read what it sends, and lowering calls its executor. What is
received and sent between stages are `schedules.Transfer`s, which stand among the items of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

Verb = Literal[
    "gather", "await", "free", "run", "start", "wait", "again", "backward", "weights", "accumulate", "scatter",
    "deliver", "reduce", "spread", "offload", "release", "fetch", "arrive", "share", "update", "regather", "draw",
    "total", "receive", "send", "tell",
]  # fmt: skip
Counted = Literal["block", "operation", "use", "unit", "allocation", "axis", "stage", "boundary"]
Stream = Literal["compute", "own", "axis", "stages", "copy", ""]
SentKind = Literal["weights", "gradients", "activations", "copies", ""]


class VerbRow(NamedTuple):
    """The facts of one kind of action.

    counts       the things that its number counts, in a chunk, its actions, the mesh, or between virtual stages
    reads        the states that the numbered thing must have; `writes`: states that begin with it; `ends`: that end
    stream       where it runs: "compute", "copy", "stages", "axis" (that of what is sent), "own" (compute, or the axis
                 of what the operation sends); "": it takes no time
    collective   the collective it launches, if the operation does not name it; "": none
    sends        the kind of data that it sends; reports and dry runs tell messages apart by it
    price        what prices it: a method in `cost.timeline.pricing`, or of `cost.timeline.ending` at the end of a step;
                 a function of `cost.timeline.program` between stages; "": it takes no time, or another row has it
    executor     the function that does it in a program's text or in `lowering.runtime`; "": autograd does it, or
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
    "spread": VerbRow("unit", ("sum",), ("spread",), (), "", "all_gather", "gradients", "", "spread"),
    "offload": VerbRow("allocation", (), ("leaving",), (), "copy", "", "copies", "copy", "offload"),
    "release": VerbRow("allocation", ("leaving",), ("host",), ("leaving",), price="release", executor="release"),
    "fetch": VerbRow("allocation", ("host",), ("fetching",), (), "copy", "", "copies", "copy", "fetch"),
    "arrive": VerbRow("allocation", ("fetching",), (), ("host", "fetching"), price="await_copy", executor="arrive"),
    "total": VerbRow(
        "operation", (), ("value",), (), "axis", "all_reduce", "activations", "run_operation", "start_total"
    ),
    "receive": VerbRow("boundary", (), ("received",), (), "", "receive", "activations", "", "receive"),
    "send": VerbRow("boundary", (), (), (), "stages", "send", "activations", "crossing_s", "send"),
    "tell": VerbRow("stage", (), (), (), "", "broadcast", "activations", "", "tell"),
    "share": VerbRow("stage", (), (), (), "stages", "all_reduce", "gradients", "sum_over_stages", "share"),
    "update": VerbRow("stage", (), (), (), "compute", price="update"),
    "regather": VerbRow("axis", (), (), (), "axis", "all_gather", "weights", "gather_updated", None),
}
"""The rows by verb."""

Microbatch = Literal["every", "first", "later", "last", "opening", "closing"]
"""The microbatches of a step in which something happens; "opening" and "closing": first and last of several."""


def happens(when: Microbatch, *, first: bool, last: bool) -> bool:
    """Return whether `when` includes a microbatch that is the first or the last of its step, or neither."""
    several = {"later": not first, "opening": first and not last, "closing": last and not first}
    return {"every": True, "first": first, "last": last, **several}[when]


@lru_cache(maxsize=4)
def happening(*, first: bool, last: bool) -> frozenset[Microbatch]:
    """Return all values of `when` that include a microbatch, by whether it is its step's first or last."""
    return frozenset(when for when in get_args(Microbatch) if happens(when, first=first, last=last))


class Action(NamedTuple):
    """An action of a rank.

    gather, await, free    block `number`: launch its all-gather, wait for it, give its memory back
    run                    operation `number`, forward; start, wait: the same in two halves, of a sum over ranks
    total                  operation `number`, a sum of the loss over ranks, which nothing in the step waits for
    draw                   the mask of dropout `number`, ahead of its turn
    again                  operation `number`, forward, in the backward
    backward               backward of operation `number`, or its part that gives gradients to activations
    weights                the other part of backward, which gives gradients to parameters
    accumulate             the gradient of use `number` is complete
    scatter, deliver       block `number`: launch the reduce-scatter of its gradients, wait for it
    reduce                 sum the gradients of unit `number` over devices
    spread                 of unit `number`, whose gradients are sent encoded: add up the own piece, and gather the sums
    offload, release       launch the copy of allocation `number` to the host; wait for it, and give the memory back
    fetch, arrive          launch the copy of allocation `number` from the host, wait for it
    tell                   at the end of a step, send the loss from the last stage to all others
    share                  sum gradients that several stages have
    update                 the optimizer
    regather               gather over axis `number` the weights that the optimizer has updated in shards (ZeRO-1)
    """

    verb: Verb
    number: int
    microbatch: Microbatch = "every"
