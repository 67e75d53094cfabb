"""What the user asks of a search, and what that leaves of the search space.

    asked        the texts of pins, read and written
    pins         those texts checked against the model and the cluster
    spaces       meshes, numbers of microbatches and plans by hand: what is searched
    restrict     plans by hand as restrictions: what each role of an axis allows
    limits       what pins leave of choices, storage and moves
    limited      the same for one graph on one mesh, and why a parameter cannot be as it is pinned
    anytime      when a search ends early: at a time, or with Ctrl-C

Imports `choices`.
"""
