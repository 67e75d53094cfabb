"""The cost model: predicted time, bytes and communication of a typed graph on a cluster.

    clusters/      devices, levels of links, presets, cluster files, detection
    collectives/   the algorithms of NCCL and gloo and their times; moves between layouts and between stages
    compute/       kernels of an operator and their times
    timeline/      a plan run: streams, schedules, memory over time
    calibration/   the local machine, measured
    predict        the whole cost of one plan; `prediction`: what a plan's file has of it

Imports `pcg`; imported by `search` and `shardwright`.
"""
