"""Calibration: what the local machine reaches, measured by its ranks, as a cluster file."""
