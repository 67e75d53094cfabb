"""The messages that a rank sends: the cost model prices one entry for each, and a dry run sees the same."""

from __future__ import annotations

from typing import NamedTuple

from shardwright.pcg.step.verbs import SentKind


class Message(NamedTuple):
    """A collective, or a transfer between pipeline stages.

    collective   "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "broadcast"; "send" or "receive"
    axis         the mesh axis that it runs along, several as one joined by "_"; or a `pcg.stages.channel`
    num_bytes    the size of the tensor that the ranks of one group have together; for an all-reduce, of one rank's
    kind         of what it sends, by the row of the verb that sends it
    """

    collective: str
    axis: str
    num_bytes: int
    kind: SentKind = ""
