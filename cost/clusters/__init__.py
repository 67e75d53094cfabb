"""Clusters: devices, the levels of links between them, known machines, and the machine of this process.

    device        one accelerator, or one CPU rank: speeds and memory
    topology      one level of a network: its units, its links, and their speed
    wiring        the GPUs of one machine, pair by pair
    schedules     schedules that collectives may run by, as a part of a cluster
    cluster       devices and levels together, and the source of each figure
    cluster_json  cluster files, read and checked
    presets       common machines, from published figures
    local         the local machine
    detect        the cluster that this process runs on
    imported      clusters from the output of `nvidia-smi`, NCCL and Slurm
    shapes        networks link by link: rings, grids, switches, trees, and the levels of a cluster
    networks      known machines link by link, and the table of topologies with a name
    wired         networks from `nvidia-smi topo -m` and NCCL's topology file
    taccl         topologies of TACCL's files
    changes       a cluster with other machines, links or devices
    smaller       fewer devices of a cluster

Imports `pcg`.
"""

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.cluster_json import load_cluster, read_cluster
from shardwright.cost.clusters.detect import detect_cluster
from shardwright.cost.clusters.local import local_cluster
from shardwright.cost.clusters.presets import preset_cluster, preset_mix

# Constructors that need more than this type, as the methods that users know.
Cluster.preset = preset_cluster
Cluster.mixed = preset_mix
Cluster.local = local_cluster
Cluster.detect = detect_cluster
Cluster.load = load_cluster
Cluster.from_json = read_cluster
