"""The timeline of a plan: the compute, messages and waits of each device, and its memory over time.

graph ─▶ steps ─▶ sections ─▶ chunk, actions (pcg.step) ─▶ pricing, pool: segments ─▶ program ─▶ timeline ─▶ trace
                                        ending: update ─────────┘ │ clock: streams     schedules ──┘

    steps              the cost of each operation of a graph, alone
    muon               what sharing out Muon's matrices takes
    tasks              the work of one device between two barriers
    pricing            a chunk's actions as tasks: forward, and backward
    passes             what both have in common; `pieces`: moves and products in pieces
    gathers, sums      of weights; of their gradients
    codes              what encoded gathers and sums take beside the transfer
    pool, scratch      memory of gathered parameters; memory of an operation while it runs
    segments           the work of stages, one microbatch at a time
    ending             the end of a step, with the optimizer's update
    maker, program     the stages of a graph; a typed graph as a program
    chain              units of a graph spread over stages
    streams, clock     the simulation of one segment, in which streams slow each other
    timeline           every stage and microbatch in the order of the schedule
    memory             memory by category
    trace              the timeline for chrome://tracing
"""
