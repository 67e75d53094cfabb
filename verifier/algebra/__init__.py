"""Serial rules, first proof: elements of both sides as normal forms.

terms ─▶ shapes ─▶ elements ─▶ normal forms ─▶ equal, or not

    serialproof               the proof: equal dims, equal normal forms
    shapes, symbols           shared by both proofs: dims of terms; sizes, and what the guard says about them
    elements                  symbolic elements of terms; by kind of row:
    elements_moves, elements_pointwise, elements_sums, elements_lookups
    polys                     integer polynomials: sizes and positions
    monomials, powers         sums of monomials; rational powers
    families, normal          sums and maxima over indices; equal elements are equal objects
    laws, lawbook             the laws that normal forms apply; each one's statement and proof

Used by `verifier.certificates` and `verifier.guards`.
"""
