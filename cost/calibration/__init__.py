"""Calibration measures what the ranks of the local machine reach and writes it as a cluster file."""
