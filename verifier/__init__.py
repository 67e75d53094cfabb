"""The verifier: why a substitution may be used.

Here belong the index semantics, the axioms and their proofs, the encodings for Z3, the falsifier with its
counterexamples, and the store of certificates.

Imports `substitutions` and `pcg`; imported by `search` and `shardwright`.
"""
