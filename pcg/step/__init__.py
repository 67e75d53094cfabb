"""A rank's step as data: the ordered actions that follow from a parallel graph and its execution.

graph, execution ─▶ parameters ─▶ operations ─▶ chunk (unrolled; blocks) ─▶ actions (forward, backward, units)
                                                        ├── buckets: what goes together ──┤
                                                        └── offload: copies to the host ──┘

How a step is run:

    execution, recompute, pipelining, precisions, assumed, optimizers
                              what layouts do not say: what is made again, stages, precision; what is only priced
    muon                      which rank of a stage orthogonalizes which matrix
    asked, places             what that asks of each operation; names of operations that are equal in equal blocks
    meshes, messages          the mesh of each stage; what ranks send

What a step runs:

    parameters, lifetimes     how parameters reach their readers; how long the whole of them stays
    operation, operations     one thing that runs; all of them in order
    pairs                     moves and products that run in pieces, one beside the other
    fates, regions, again     what becomes of a value until backward; what is made again together
    late, additive, time      sums that nobody waits for; buffers that add up; microbatches
    sections                  a graph in sections that repeat
    chunk                     the operations of a stage, unrolled, with the memory of every value

The list:

    verbs, actions            what an action can be; all of them in order
    buckets, masks, offload   what is gathered or summed together; masks drawn ahead; copies to the host
    schedules                 the order of microbatches in pipeline stages

The lowering prints forward from the list, and compiles its hooks from it (`lowering.runtime.schedule`). When to free in
backward is autograd's decision; a test compares it with the list. The cost model prices it all.
"""
