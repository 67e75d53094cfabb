"""A rank's step as data: which actions follow from a parallel graph and the way it is run, in order.

graph, execution ─▶ parameters ─▶ operations ─▶ chunk (unrolled; blocks) ─▶ actions (forward, backward, units)
                                                        ├── buckets: what goes together ──┤
                                                        └── offload: copies to the host ──┘

The lowering prints forward from the list, and compiles its hooks from it (`lowering.runtime.schedule`). When to free in
backward is autograd's to say; a test compares that with the list. The cost model prices it all.
"""
