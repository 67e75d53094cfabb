"""Clusters: devices, the levels of links between them, known machines, and the machine of this process."""

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
