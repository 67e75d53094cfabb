"""Collectives as data: the network, what has to be moved, and who sends what when.

    topology     a network as a directed graph of links, with resources that links share and relays between ranks
    collective   what every rank holds before and after, chunk by chunk
    schedule     transfers in steps: chunk, from, to, copy or reduce; the rate and latency that a topology gives them
    sums         whether all ranks add in the same order
    timing       the time that a schedule took on ranks
    flows        maximum flows in networks with whole capacities
    bounds       the least steps, and the least seconds per byte, of a collective on a topology
    program      blocks of steps on each rank, as MSCCL's files have them
    plan         blocks of one-sided operations on each rank, as MSCCL++'s files have them
    threads      from a schedule to a program; `onesided`: to a plan; `places`: where its chunks are
    builders/    schedules that are known by name
    files/       files of other systems, read and written

A schedule says what happens, not that it is right: `verifier.collectives` proves that. docs/inside/collectives.md has
the whole map.
"""
