"""The generator of candidate rules.

context ─▶ terms, grouped by fingerprint ─▶ pairs ─▶ pruned ─▶ rules in one form ─▶ certified ─▶ reduced

    contexts/, context     a few typed variables and operators, of which terms are made
    sources                every context as a unit of work
    vocabulary             the operators that are enumerated
    symbolicdims           dimensions as text that is equal where they are
    instances              contexts at certain sizes, with random tensors
    modular, residues      arithmetic in which equal terms have equal fingerprints
    nodes, termpool        enumerated terms, one for each class
    serialterms            terms of one device
    serialrules            rules from pairs of these
    primesizes, typetable  symbolic sizes as primes; types as small integers
    placedterms            terms with layouts
    placedrules            rules from pairs of these
    floatlaws              a test of which rules are exact bit for bit
    pruning                drops pairs that say less than another pair
    canonical              one form for each rule
    groundterms, reduction drops rules that smaller ones imply

`shardwright.generation` alone imports this.
"""
