"""What a rank sends: one entry for each message, as the cost model prices it and as a dry run sees it."""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """One collective, or what goes from one pipeline stage to another.

    collective   "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "broadcast"; "send" or "receive"
    axis         the mesh axis that it runs along; several that run as one are joined by "_"; a `pcg.stages.channel`
    num_bytes    of the tensor that the ranks of one group have, put together: of an all-reduce, one rank's
    """

    collective: str
    axis: str
    num_bytes: int
