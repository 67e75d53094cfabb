"""Falsifiers: rules run on small tensors, in search of a counterexample.

    falsify                   row rules, device by device
    falsify_serial            serial rules, in exact arithmetic where possible
    falsify_placement         placement rules, at degrees 2 and 3; `devices` has both sides as graphs
    falsify_steps             rules of the parallel operators
    exactness                 rules that claim to be exact bit for bit
    instances                 sizes, attributes and numbers that a rule leaves open
    tangents                  derivatives, by differences
    mismatch                  counterexamples and their text

Used by `verifier.judge` for rules that are not proven.
"""
