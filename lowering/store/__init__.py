"""A model's parameters and buffers on one rank, apart from the programs that read and write them.

    sources          the origin of values: a model, or what makes them later
    deferred         values that a model does not have yet: from files, or as its constructor makes them
    weights          which tensor in files is which of the model's
    opening          which files a path means
    files, spans     formats of files; the boxes of a whole tensor that a rank's part consists of
    shards           the format of torch.distributed.checkpoint, in shards; `slice_reader`: slices of these
    storage          one parameter or buffer: a DTensor outside, this rank's part inside
    places           how a graph reads each of them
    parameter_store  all of them, with their names, gradients and checkpoints
    loading          a state dict is loaded by all ranks alike, or not at all
    checkpoint_folder
                     the folder of a run's checkpoints, whole and checked by sums
    chunks           the chunks of a weight that stages share and split in several ways
    dcp_folder       folders by plain FSDP2 and torchtitan: which of their tensors is which
    moments, staging an optimizer's states by name; copies that are written beside further steps
    foreign          parts of the model that programs call as they are; `lent`: tensors in them during a call
    original         the user's own model, which keeps its untrained weights
    shown            masks in buffers show no more than the plan was made for
    clipping         gradients clipped by their global norm
    parts, members   the compiled model's modules, which hold tensors by name and have no code

Imports `ranks` and `dtensors`.
"""
