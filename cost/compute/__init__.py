"""Compute: the kernels of an operator, forward and backward, and how long a device takes for them.

    work           the kernels of an operator, by what they read, write and multiply
    kernels        measured kernels, and what they say about others
    compute        seconds of a kernel: measured, or by a roofline
    operators      seconds and kept bytes of an operator, however it is split
    fusion         what `torch.compile` makes one kernel

`operators` is what the rest of the cost model asks.
"""
