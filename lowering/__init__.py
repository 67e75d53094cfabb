"""Lowering: from a plan to the program that each rank runs on torch.distributed.

Here belong the adjoint pairs of the parallel operators, parameter storage, collectives, the per-rank module and its
readable Python file, and launching. Private APIs of torch are used in `private*.py` here and nowhere else.

Imports `pcg` and the plan type (`search.plan`); imported by `shardwright` alone.
"""
