"""Communication: the algorithms of NCCL and gloo, their links and their times; moves between layouts and stages.

    groups         the links that the groups of a mesh axis use
    algorithms     closed forms of each algorithm
    nccl, gloo     the algorithms that each library runs
    curve          time over size, in straight pieces
    communication  seconds of a collective along axes of a mesh
    moves          seconds of a change of layout
    resharding     seconds from the mesh of one stage to that of another
    simulation     seconds of a schedule on a network of links
    scheduled      which schedule is worth running for a group and a size
    together       the groups of ranks that run collectives together, each as an axis with a network
    buffers        device memory that NCCL keeps for its connections

The rest of the cost model calls `moves` and `resharding`.
"""
