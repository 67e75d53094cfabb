"""Clusters: devices, the levels of links between them, known machines, and the machine of this process.

    device        one accelerator, or one CPU rank: speeds and memory
    topology      one level of a network: what it joins, how, and how fast
    wiring        the GPUs of one machine, pair by pair
    cluster       devices and levels together, and where each figure comes from
    cluster_json  cluster files, read and checked
    presets       common machines, from published figures
    local         the local machine
    detect        what this process runs on
    imported      clusters from what `nvidia-smi`, NCCL and Slurm print
    changes       a cluster with other machines, links or devices
    smaller       fewer devices of a cluster

Imports `pcg`.
"""

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.cluster_json import load_cluster, read_cluster
from shardwright.cost.clusters.detect import detect_cluster
from shardwright.cost.clusters.local import local_cluster
from shardwright.cost.clusters.presets import preset_cluster, preset_mix

# The ways to a cluster that need more than its type, under the name that users know.
Cluster.preset = preset_cluster
Cluster.mixed = preset_mix
Cluster.local = local_cluster
Cluster.detect = detect_cluster
Cluster.load = load_cluster
Cluster.from_json = read_cluster
