"""Runs a rank's steps.

What a program calls:

    kernels, attention, dispatch   what torch expressions need beyond torch, on one rank's part
    collectives                    the parallel operators as autograd functions with their adjoints

What goes on around a program:

    schedule       hooks compiled from the list of actions
    blocks         gathers sharded parameters for one block of the model at a time
    buffers        the memory that they are gathered into
    reducer        sums gradients while backward still runs
    saved          what autograd keeps: values, or how to make them again
    apart          backward in two parts: activations, then weights
    precision      what a precision asks of the device and of torch's settings

A step:

    batch, inputs  this rank's part of the batch, and checks that the ranks pass the same
    spec           what an entry is made of
    runner         one program with all that runs around it
    pipeline       the actions of a pipeline stage; `shared`: parameters that several stages have
    entry          all programs of this rank for one shape of batch and one mode
    entries        which entry takes a batch
"""
