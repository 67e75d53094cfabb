"""Communication: what NCCL and gloo run, over which links, and how long it takes; moves between layouts and stages.

    groups         the links that the groups of a mesh axis use
    algorithms     closed forms of each algorithm
    nccl, gloo     which algorithm each library runs
    curve          time over size, in straight pieces
    communication  seconds of a collective along axes of a mesh
    moves          seconds of a change of layout
    resharding     seconds from the mesh of one stage to that of another
    buffers        device memory that NCCL keeps for its connections

`moves` and `resharding` are what the rest of the cost model asks.
"""
