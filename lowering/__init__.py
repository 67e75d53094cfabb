"""Lowering: from a plan to the program that each rank runs on torch.distributed.

A plan comes in; `module.ParallelModule` goes out, an `nn.Module` that trains. Each folder builds on those below it:

    trial/       a step without a cluster: dry runs, and the captured graph against the eager model
    runtime/     runs a rank's steps: kernels, gathered blocks, summed gradients, pipeline stages
    text/        the readable Python program of one rank
    store/       parameters and buffers on one rank, apart from programs
    random/      the same draws on every number of ranks
    ranks/       process groups, the mesh as one rank sees it, what ranks send each other
    dtensors/    torch's own tools on DTensors, mended

    private, private_dtensors, private_kernels    all private APIs of torch that are used here

Imports `pcg` and the plan type (`search.plan`); imported by `shardwright` alone.
"""
