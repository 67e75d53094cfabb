"""A rank's step as data: which actions follow from a parallel graph and the way it is run, in order."""
