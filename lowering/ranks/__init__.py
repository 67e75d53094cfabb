"""Ranks: process groups, the mesh as one rank sees it, and messages between ranks.

    launch       joins the launcher's processes, or forks local ranks
    groups       the process groups of mesh axes, each made once
    ranks        the mesh as one rank sees it: axes with their groups, place, device
    movement     collectives along one axis, without gradients
    rows         rows along one axis, as many for each rank as a step decides
    shifts       messages around the ring of an axis
    encodings    values as codes, and back
    scheduled    collectives by a schedule, with point-to-point messages
    picked       the schedules of an axis: which one for which size, in one order
    untraced     functions that torch.compile calls without tracing them
    channels     messages between pipeline stages, first in, first out
    telling      what one stage tells all others: the loss, and the model's results
    agreement    values that must be equal on all ranks, compared or taken from rank 0
    waits        waits for other ranks end with an error after a timeout
    rollcall     names the rank that was killed or is stuck

Imports no other folder of lowering.
"""
