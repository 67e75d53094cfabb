"""The timeline of a plan: who computes, sends and waits when, and what lies in memory meanwhile.

graph ─▶ steps ─▶ sections ─▶ chunk, actions (pcg.step) ─▶ pricing, pool: segments ─▶ program ─▶ timeline ─▶ trace
                                        ending: update ─────────┘ │ clock: streams     schedules ──┘

    steps              what each operation of a graph costs, alone
    tasks              what one device does between two barriers
    pricing            a chunk's actions as tasks
    pool, scratch      memory of gathered parameters; memory of an operation while it runs
    segments           what stages do, one microbatch at a time
    ending             the end of a step, with the optimizer's update
    maker, program     the stages of a graph; a typed graph as a program
    chain              units of a graph spread over stages
    streams, clock     when tasks run side by side and slow each other; the simulation of one segment
    timeline           every stage and microbatch in the order of the schedule
    memory             memory by category
    trace              the timeline for chrome://tracing
"""
