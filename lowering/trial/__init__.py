"""A step without a cluster.

    dryrun       one rank's program on tensors without data, among ranks that are not there
    tape         notes what it sends, and which storages are alive
    steps        one step of a model in one process, eagerly and by its captured graph
    differences  what differs between the two, beyond rounding
    putback      what a step of the user's model changes, put back

Imports all other folders of lowering.
"""
