"""The search for the best plan.

Here belong splits, the dynamic programs, backtracking over certified rules, the baselines, and the `Plan` with its
versioned file form (`search.plan`).

Imports `pcg`, `substitutions`, `verifier` and `cost`; imported by `shardwright`. `lowering` imports `search.plan`
and nothing else from here.
"""
