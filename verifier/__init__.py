"""The verifier: why a substitution may be used.

Here belong the semantics that rules are proven against, the proofs, the falsifiers with their counterexamples, and the
store of certificates. docs/proofs.md says what is claimed and trusted. Where a line belongs:

    row rules      semantics, claims, attributes, lemmas          ▶ rowproof
    steps          sums                                           ▶ stepproof
    equations      polys, monomials, normal, families, powers,
                   laws (stated in lawbook), symbols, elements*   ▶ serialproof      second proof:  realproof (numbers*,
                                                                                  reals*); third: derivation
    placements     row rules and serialproof                      ▶ typing           second proof:  denotation
    falsifiers     falsify (rows), falsify_serial, falsify_placement, falsify_steps, exactness; they print a mismatch
    mutation       twins, termtwins, lemmatwins                   ▶ mutation
    judgement      certificates (prove one), judge (never fails), guards (what mends a rule), describe
    files          rulefile (from outside), catalogue (rules with certificates), choices (what the search may use)

z3 is behind `solver` and `logic`.

Imports `substitutions` and `pcg`; imported by `search` and `shardwright`.
"""
