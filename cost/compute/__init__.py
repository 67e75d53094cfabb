"""Compute: the kernels of an operator, forward and backward, and the time that a device takes for them.

    work           the kernels of an operator: their bytes and FLOPs
    kernels        measured kernels, and predictions for others from them
    compute        seconds of a kernel: measured, or by a roofline
    operators      seconds and kept bytes of an operator, however it is split
    fusion         the operators that `torch.compile` makes one kernel

The rest of the cost model calls `operators`.
"""
