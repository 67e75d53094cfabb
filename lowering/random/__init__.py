"""Random numbers that do not depend on how many ranks draw them.

    philox       random bits as a function of a key and a place
    exact        dropout masks as a function of a seed and of how many were drawn before
    drawing      torch's generator, in the same state on every rank
    states       the states of all generators that a rank draws from, for checkpoints

Imports `ranks`.
"""
