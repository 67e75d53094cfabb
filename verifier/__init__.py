"""The verifier: why a substitution may be used.

docs/proofs.md says what is claimed and trusted. What others ask:

    choices        the choices and rules that a search may use, each certified
    judge          certifies or refutes one rule, and never fails
    certificates   what a proof rests on; takes all proofs that there are for a rule
    rulefile       rules from a file of the user's
    catalogue      rules with certificates, as a file
    store          proofs that are kept
    describe       a proof in words

Rooms of proofs, which nobody else enters:

    rows/          row rules, and rules of the parallel operators
    algebra/       serial rules, first proof
    reals/         serial rules, second proof
    placement/     placement rules
    falsifiers/    counterexamples

What they share:

    proof          what comes of a proof
    lemmas         what every proof stands on: integers, digits, finite sums, laws
    routing        equations of mixtures of experts
    fit            rules that no tensors fit, which say nothing
    guards         a guard that would mend a refuted rule
    solver, logic  Z3, and formulas
    limits         ends what takes too long

Imports `substitutions` and `pcg`; imported by `shardwright`, which hands the search what is certified.
"""
