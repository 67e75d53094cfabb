"""The verifier: why a substitution may be used.

Here belong the semantics that rules are proven against, the proofs, the falsifiers with their counterexamples, and the
store of proofs. docs/proofs.md says what is claimed and trusted. Where a line belongs:

    rows/          row rules and steps of the parallel operators: semantics, claims ▶ rowproof; stepproof
    algebra/       serial rules, first proof: elements*, normal forms, laws (stated in lawbook) ▶ serialproof; shapes is
                   what both proofs share
    reals/         serial rules, second proof ▶ realproof
    placement/     placement rules ▶ typing; second proof: denotation
    falsifiers/    of row, serial and placement rules and steps, exactness; they print a mismatch
    lemmas         what every proof stands on: integers, digits, finite sums, laws
    judgement      proof (what comes of one), certificates (take all proofs there are), judge (never fails), fit (rules
                   of no tensors), guards (what mends a rule), describe
    files          rulefile (from outside), catalogue (rules with certificates), store (proofs that are kept), choices
                   (what the search may use)

z3 is behind `solver` and `logic`; `limits` ends what takes too long.

Imports `substitutions` and `pcg`; imported by `shardwright`, which hands the search what is certified.
"""
