"""The order in which ways to run a step are tried, and when one is dropped.

    planner      the search as a caller asks for it; fewer devices where that is better
    searching    one search on one cluster: queues, rewrites and the whole graph in turn; the report
    phases       their names and times
    attempts     the queue: the likeliest attempt is refined, and names its neighbours
    ways         the ways to run one graph: floors, crowding, layouts, bounds
    byhand       the queue of a strategy that people choose by hand
    meshes       the queue of ways without stages
    staging      the queues of ways with stages, and the orders of their microbatches
    fitting      the values that are kept and the weights that are gathered again, until a plan fits
    spreading    each stage's blocks, recomputation, and lifetimes of gathered weights
    whole        the best plans with all blocks; mixtures of what blocks keep
    pieces       the number of pieces in which moves run beside products
    encodings    what gathers of weights and sums of gradients send
    reshaped     the plan of another batch or mode, over parameters as they are stored
    idle         fewer devices than the cluster has, where the batch does not divide among all
    blame        the part of a request that leaves no plan
    remedies     the changes that would make a plan fit

Imports every other folder of the search.
"""
