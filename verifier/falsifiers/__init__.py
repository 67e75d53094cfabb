"""Falsifiers: rules run on small tensors, in search of a counterexample."""
