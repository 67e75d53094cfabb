"""A user's request to a search, and what it leaves of the search space.

    options      the options of a search: a caller's words, and the value that the search keeps to
    asked        the texts of pins, read and written
    pins         those texts checked against the model and the cluster
    encodings    what may be sent encoded
    spaces       what is searched: meshes, numbers of microbatches and plans by hand
    restrict     plans by hand as restrictions: what each role of an axis allows
    rings        attention that can be in a ring, and why another cannot
    limits       what pins leave of choices, storage and moves
    limited      the same for one graph on one mesh, and why a parameter cannot be as it is pinned
    anytime      the early end of a search: at a time, or with Ctrl-C

Imports `choices`.
"""
