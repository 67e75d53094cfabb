"""The cost model: predicted time, bytes and communication of a typed graph on a cluster.

Here belong the cluster and its links, compute, communication and memory models, the timeline and calibration.

Imports `pcg`; imported by `search` and `shardwright`.
"""
