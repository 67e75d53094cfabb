"""Small programs that are right: of schedules, and by hand with fused steps."""

from __future__ import annotations

from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.program import NO_PEER, Block, Place, Program, RankProgram, Step
from shardwright.pcg.collectives.threads import program_of


def at(text: str) -> Place:
    """`i3` -> input[3]."""
    return Place({"i": "input", "o": "output", "s": "scratch"}[text[0]], int(text[1:]))  # pyright: ignore[reportArgumentType]


def step(
    op: str, source: str, target: str, count: int = 1, after: tuple[int, int] | None = None, awaited: bool = False
) -> Step:
    return Step(op, at(source), at(target), count, after, awaited)


def fused_ring_all_reduce() -> Program:
    """Three ranks, one chunk each: rank 0 starts, 1 and 2 add and pass on, and the sum goes round once more."""
    ranks = (
        RankProgram(1, 0, 0, (Block(1, 2, 0, (step("s", "i0", "i0"), step("rcs", "i0", "i0"))),)),
        RankProgram(1, 0, 0, (Block(2, 0, 0, (step("rrs", "i0", "i0"), step("rcs", "i0", "i0"))),)),
        RankProgram(1, 0, 0, (Block(0, 1, 0, (step("rrcs", "i0", "i0"), step("r", "i0", "i0"))),)),
    )
    return Program("fused ring", "all_reduce", 1, ranks, in_place=True, out_of_place=False)


def scratch_all_reduce() -> Program:
    """Two ranks exchange two chunks through scratch; a nop waits for one of several steps, and `re` adds."""

    def rank(peer: int) -> RankProgram:
        sends = (step("s", "i0", "s0", awaited=True), step("s", "i1", "s1", awaited=True))
        receives = (step("r", "i0", "s0"), step("r", "i1", "s1", awaited=True))
        adds = (
            Step("nop", Place("input", -1), Place("input", -1), 0, (0, 0)),
            step("re", "s0", "i0", after=(1, 1)),
            step("re", "s1", "i1", after=(0, 1)),
        )
        ends = ((peer, NO_PEER, sends), (NO_PEER, peer, receives), (NO_PEER, NO_PEER, adds))
        return RankProgram(2, 0, 2, tuple(Block(to, of, 0, steps) for to, of, steps in ends))

    return Program("scratch", "all_reduce", 2, (rank(1), rank(0)), in_place=True, out_of_place=False)


def gather_of_old() -> Program:
    """The older dialect: both chunk counts in place, and a copy for where it does not alias."""
    ranks = tuple(
        RankProgram(
            1, 2, 0, (Block(1 - r, 1 - r, 0, (step("s", "i0", f"o{r}"), step("r", "i0", f"o{1 - r}"))),), ((0, r),)
        )
        for r in range(2)
    )
    return Program("older", "all_gather", 2, ranks, in_place=True, out_of_place=True)


def eager_gather(chunks: int) -> Program:
    """Two ranks send all that they have before they receive anything: a queue has to hold all of it."""
    both = 2 * chunks

    def rank(r: int) -> RankProgram:
        sends = (step("s", f"o{r * chunks + j}", f"o{r * chunks + j}") for j in range(chunks))
        receives = (step("r", f"o{(1 - r) * chunks + j}", f"o{(1 - r) * chunks + j}") for j in range(chunks))
        return RankProgram(0, both, 0, (Block(1 - r, 1 - r, 0, (*sends, *receives)),))

    return Program("eager", "all_gather", both, (rank(0), rank(1)), in_place=True, out_of_place=False)


PROGRAMS: list[Program] = [
    eager_gather(2),
    fused_ring_all_reduce(),
    scratch_all_reduce(),
    gather_of_old(),
    *(
        program_of(build(name, kind, (n,), pieces), in_place=in_place, channels=channels)
        for name, kind, n, pieces, in_place, channels in [
            ("ring", "all_gather", 3, 1, False, 1),
            ("ring", "all_gather", 3, 1, True, 1),
            ("ring", "reduce_scatter", 3, 1, False, 1),
            ("ring", "reduce_scatter", 3, 1, True, 1),
            ("ring", "all_reduce", 2, 1, True, 1),
            ("ring", "all_reduce", 2, 2, False, 2),
            ("ring", "broadcast", 3, 2, False, 1),
            ("direct", "all_to_all", 3, 1, False, 1),
            ("direct", "all_gather", 3, 2, True, 1),
            ("doubling", "all_reduce", 2, 1, True, 1),
            ("doubling", "all_reduce", 2, 2, False, 1),
            ("bruck", "all_to_all", 3, 1, False, 1),
            ("tree", "broadcast", 4, 1, True, 1),
            ("one-shot", "all_reduce", 3, 1, False, 1),
        ]
    ),
]
