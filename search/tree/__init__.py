"""Which ways to run a step are tried, in what order, and when one is dropped.

    planner      the whole search: baselines, meshes, stages, rewrites; the best plan and the report
    tuning       one mesh after the other: microbatches, recomputation, lifetimes of gathered weights
    counts       the numbers of microbatches that are tried on one mesh
    fitting      what is kept and what is gathered again, until a plan fits
    descent      from known plans to their neighbours
    staging      pipelines: how many stages, the mesh of each, microbatches and their order
    spreading    what each stage does: its blocks, what it makes again, how long it keeps gathered weights
    idle         fewer devices than the cluster has, where the batch does not divide among all
    blame        which one request leaves no plan
    remedies     what would make a plan fit that does not

Imports every other folder of the search.
"""
