"""A step without a cluster.

    dryrun       one rank's program on tensors without data, among ranks that are not there
    tape         records what the rank sends, and which storages are alive
    steps        one step of a model in one process, eagerly and by its captured graph
    differences  the differences between these two, beyond rounding
    collectives  a schedule of a collective on ranks of this machine
    putback      undoes the changes of a step of the user's model

Imports all other folders of lowering.
"""
