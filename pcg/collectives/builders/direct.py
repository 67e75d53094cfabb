"""Everyone sends to everyone who needs it, in one step; and Bruck's algorithms, in as few steps as any."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.pcg.collectives.collective import Chunk, Collective, collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.errors import ScheduleError


def direct(whole: Collective) -> Schedule:
    """Return any collective in one step: all-pairs. Sums are made where they are needed, from every source.

    Raises:
        ScheduleError: a rank needs the sum of several others and has no summand of its own to begin with.
    """
    transfers = (t for index, chunk in enumerate(whole.chunks) for t in _direct(whole, index, chunk))
    return Schedule(f"direct {whole.kind} {whole.num_ranks}", whole, tuple(transfers))


def _direct(whole: Collective, index: int, chunk: Chunk) -> Iterator[Transfer]:
    for target in chunk.targets:
        if whole.reduces and target in chunk.sources:
            yield from (Transfer(0, source, target, index, "reduce") for source in chunk.sources if source != target)
        elif whole.reduces and len(chunk.sources) > 1:
            problem = f"rank {target} has no summand of its own, so that one step cannot begin its sum"
            raise ScheduleError(f"direct {whole.kind}: chunk {index}: {problem}; use a tree")
        elif target not in chunk.sources:
            yield Transfer(0, min(chunk.sources), target, index)


def bruck_all_gather(num_ranks: int, pieces: int = 1) -> Schedule:
    """Return an all-gather of any number of ranks in ⌈log₂ n⌉ steps, each rank sending to one other.

    In step s, a rank has the chunks of the 2ˢ ranks from itself on, and gets those of the next ones. Bruck et al.,
    "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems" (TPDS 1997).
    """
    transfers, step, held = list[Transfer](), 0, 1
    while held < num_ranks:
        for rank in range(num_ranks):
            source = (rank + held) % num_ranks
            for k in range(min(held, num_ranks - held)):
                owner = (source + k) % num_ranks
                transfers += (Transfer(step, source, rank, owner * pieces + j) for j in range(pieces))
        step, held = step + 1, held * 2
    return Schedule(f"bruck all_gather {num_ranks}", collective("all_gather", num_ranks, pieces), tuple(transfers))


def bruck_all_to_all(num_ranks: int, pieces: int = 1) -> Schedule:
    """Return an all-to-all of any number of ranks in ⌈log₂ n⌉ steps: a chunk moves by 2ˢ if its distance has bit s."""
    transfers, bits = list[Transfer](), range((num_ranks - 1).bit_length())
    for source in range(num_ranks):
        for distance in range(num_ranks):
            chunk = (source * num_ranks + (source + distance) % num_ranks) * pieces
            for bit in bits:
                if distance >> bit & 1:
                    here = (source + distance % (1 << bit)) % num_ranks
                    there = (here + (1 << bit)) % num_ranks
                    transfers += (Transfer(bit, here, there, chunk + j) for j in range(pieces))
    return Schedule(f"bruck all_to_all {num_ranks}", collective("all_to_all", num_ranks, pieces), tuple(transfers))
