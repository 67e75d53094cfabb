"""Every kind of rule in one JSON form, and the rules that are written by hand.

    rules           all kinds, and their JSON form
    rowrules        ways to run one operator along one axis, derived from the op table
    pattern         factor strings without sizes and names
    steps           chains of parallel operators that may replace each other
    wellformed      checks of equations that come from outside
    attributes      types of attributes, and values that stand for those that a rule leaves open
    primes          numbers that stand for symbolic sizes
    catalogue       equations by hand, by topic
    decompositions  equations by hand that split operators which need more than a sum

Nothing that searches, prices or runs a plan imports this.
"""
