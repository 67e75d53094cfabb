"""The best layouts of one graph on one mesh.

    chains       blocks that follow each other, their kinds, and a walk over the kinds
    folding      chains cut down to such a walk, and its solution given to all blocks
    building     the problem of a graph: its choices, and the tables between them
    model        a problem at given prices, as tables that are summed
    eliminate    the least sum, by variable elimination
    pruning      bounds, by which choices are dropped before that
    within       the least sum under a limit of memory, by branch and bound
    least        the least that a step takes by the timeline, whatever its layouts
    keeping      which values a step keeps and which it makes again, at a price of a byte
    materialize  a solution as a parallel graph
    striping     the positions that devices in a causal ring have
    solving      all of this for one way to run a step: a graph goes in, a candidate comes out

Imports `plan`, `request` and `choices`.
"""
