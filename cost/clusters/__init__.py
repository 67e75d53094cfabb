"""Clusters: devices, the levels of links between them, machines that are known, and what a process runs on."""
