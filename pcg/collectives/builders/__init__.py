"""Schedules that are known by name. Each is a list of transfers; whether it is right is for the judge to say.

    direct      everyone to everyone in one step; Bruck's few steps
    exchange    pairs of ranks that exchange all they have: recursive doubling, halving-doubling, Swing
    lines       rings and lines, one way or both; chains
    trees       binary trees, two at a time; the binomial gather
    nested      one dimension after the other: hierarchies, meshes, tori, all pieces in turn
    table       all of them by name, with the sizes that each claims

All-gather is built; a reduce-scatter is one run backwards, and an all-reduce is both.
"""
