"""The order in which ways to run a step are tried, and when one is dropped.

    planner      the whole search: baselines, meshes, stages, rewrites; the best plan and the report
    tuning       one mesh after the other: microbatches, recomputation, lifetimes of gathered weights
    counts       the numbers of microbatches that are tried on one mesh
    fitting      the values that are kept and the weights that are gathered again, until a plan fits
    descent      from known plans to their neighbours
    staging      pipelines: the number of stages, the mesh of each, microbatches and their order
    spreading    each stage's blocks, recomputation, and lifetimes of gathered weights
    reshaped     the plan of another batch or mode, over parameters as they are stored
    idle         fewer devices than the cluster has, where the batch does not divide among all
    blame        the part of a request that leaves no plan
    remedies     the changes that would make a plan fit

Imports every other folder of the search.
"""
