"""The mutation test of the prover: wrong twins of rules and lemmas, and what becomes of them."""
