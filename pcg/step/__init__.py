"""A rank's step as data: which actions follow from a parallel graph and the way it is run, in order.

graph, execution ─▶ parameters ─▶ operations ─▶ chunk (unrolled; blocks) ─▶ actions (forward, backward, units)
                                                        └── buckets: what goes together ──┘

The lowering prints and runs the list, the cost model prices it.
"""
