"""A model's parameters and buffers on one rank, apart from the programs that read and write them.

    sources          where values come from: a model, a file, an initializer
    storage          one parameter or buffer: a DTensor outside, this rank's part inside
    parameter_store  all of them, with their names, gradients and checkpoints
    loading          a state dict is loaded by all ranks alike, or not at all
    original         the user's own model, which keeps the weights of before
    clipping         gradients clipped by their global norm
    parts, members   the compiled model's modules: names without code, and what they hold

Imports `ranks` and `dtensors`.
"""
