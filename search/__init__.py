"""The search for the best plan.

A captured graph, a cluster and a request come in; a `Plan` goes out. Each folder builds on those below it:

    tree/        which meshes, microbatches, stages and recomputation are tried, and in what order
    rewrites/    other graphs that compute the same, by certified rules
    exact/       the best layouts of one graph on one mesh
    request/     what the user asks for, and what that leaves of the search space
    choices/     what each operator and tensor can choose, as a problem of pairs
    collectives/ schedules of collectives for a network, and what the planner may pick

    plan         the plan, and its versioned file
    picked       the schedules that a plan's collectives run by
    admission    what a plan file may say beyond its schema
    checked      whether one eager step was compared with the captured graph
    check        the proof before a plan runs: its graph denotes the captured one
    effort       how much is tried, and the factors by which something is left out
    collector    pauses Python's cyclic garbage collector

Imports `pcg`, `cost` and of `substitutions` what matches and applies equations; which rules and choices are certified
it is told. Imported by `shardwright`. `lowering` imports `search.plan` and nothing else from here.
"""
