"""The verifier: why a substitution may be used.

docs/proofs.md says what is claimed and trusted. Used from outside:

    collectives/   judges schedules of collectives and programs of blocks, whoever wrote them
    choices        the choices and rules that a search may use, each certified
    judge          certifies or refutes one rule, and never fails
    certificates   certificates, which need all proofs of a rule's kind, and name their axioms
    rulefile       rules from a file of the user's
    catalogue      rules with certificates, as a file
    store          proofs that are kept
    describe       types of a rule's terms in words

Folders of proofs, used only inside the verifier:

    rows/          row rules, and rules of the parallel operators
    algebra/       serial rules, first proof
    reals/         serial rules, second proof
    placement/     placement rules
    falsifiers/    counterexamples

Shared by these folders:

    proof          the result of a proof
    lemmas         the lemmas under every proof: integers, digits, finite sums, laws
    routing        equations of mixtures of experts
    fit            rules that no tensors fit, which claim nothing
    guards         a guard under which a refuted rule is true
    solver, logic  Z3, and formulas
    limits         time limits

Imports `substitutions` and `pcg`; imported by `shardwright`, which gives the search the certified rules.
"""
