"""What a rank sends: one entry for each collective, as the cost model prices it and as a dry run sees it."""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """One collective.

    collective   "all_reduce", "all_gather", "reduce_scatter" or "all_to_all"
    axis         the mesh axis that it runs along; several that run as one are joined by "_"
    num_bytes    of the tensor that the ranks of one group have, put together: of an all-reduce, one rank's
    """

    collective: str
    axis: str
    num_bytes: int
