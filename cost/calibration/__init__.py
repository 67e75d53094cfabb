"""Calibration measures what the ranks of the local machine reach and writes it as a cluster file.

    calibrate     the whole of it: starts ranks, collects points, writes the cluster
    measure       what one rank runs
    workload      what is measured, and the points so far, as files
    samples       one small application of each operator
    probes        the operators that one rank runs
    fit           lines of latency and bandwidth
    calibrated    the cluster that the points describe

`calibrate` imports the rest.
"""
