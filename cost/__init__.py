"""The cost model: predicted time, bytes and communication of a typed graph on a cluster.

    clusters/      devices, levels of links, presets, cluster files, detection
    collectives/   what NCCL and gloo run and how long it takes; moves between layouts and between stages
    compute/       kernels of an operator and how long they take
    timeline/      a plan run: streams, schedules, memory over time
    calibration/   the local machine, measured
    predict        all of it, of one plan

Imports `pcg`; imported by `search` and `shardwright`.
"""
