"""Compute: the kernels of an operator, forward and backward, and how long a device takes for them."""
