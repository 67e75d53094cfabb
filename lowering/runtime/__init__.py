"""The runtime: it runs a rank's steps.

A program calls:

    kernels, attention, ring, layers, dispatch   functions beyond torch's that expressions need, on one rank's part
    ring_places                    where a rank's queries lie, which keys they see, and how far keys are sent
    partial_attention              attention to some of the keys, and what merges it: of a ring's rounds
    collectives                    the parallel operators as autograd functions with their adjoints
    pieces                         a parallel operator and products in pieces, one beside the other

Around a program work:

    schedule       hooks compiled from the list of actions
    blocks         gathers sharded parameters for one block of the model at a time
    buffers        the memory that parameters are gathered into
    reducer        sums gradients while backward still runs
    saved          what autograd keeps: values, or handles that recompute them
    views          how a saved tensor lies in memory that comes and goes
    ahead          batches that are copied to the device beside the step before
    host           values that wait for backward in the host's memory
    host_states    an optimizer's states that lie there between updates
    foreign        calls of foreign parts, which are not made again
    apart          backward in two parts: activations, then weights
    precision      requirements of a precision on the device and on torch's settings

A step:

    batch, inputs  this rank's part of the batch, and checks that the ranks pass the same
    spec           the description of an entry
    runner         one program with everything that works around it
    handover       a loss whose gradients have been computed already
    pipeline       the actions of a pipeline stage; `shared`: parameters that several stages have
    entry          all programs of this rank for one shape of batch and one mode
    entries        the choice of the entry for a batch
    measures       values that a function makes of a model's results, row by row
"""
