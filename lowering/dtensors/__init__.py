"""Torch's own tools on DTensors of a compiled model, mended where they would differ from one process's tensors.

    mending      puts the rest in the place of torch's own
    draws        `nn.init`, `randn_like`, `F.dropout`
    reductions   `.item()`, norms, extremes
    updates      in-place updates for which torch has no rule
    optimizers   torch's optimizers update each rank's parts as plain tensors
    states       states that an optimizer would make as plain tensors
    strided      tensors that are laid out in blocks, such as a fused QKV weight
    copies       writes into a copy, which would be lost, are refused
    wholes       reads that need the whole tensor are refused, with the remedy

Imports no other folder of lowering.
"""
