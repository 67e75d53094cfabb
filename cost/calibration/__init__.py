"""Calibration measures what the ranks of the local machine reach and writes it as a cluster file.

    calibrate     the whole calibration: starts ranks, collects points, writes the cluster
    measure       the program of one rank
    workload      the points to measure, and the points so far, as files
    samples       one small application of each operator
    probes        the operators that one rank runs
    fit           lines of latency and bandwidth
    calibrated    the cluster that the points describe

`calibrate` imports the rest.
"""
