"""Falsifiers: rules run on small tensors, in search of a counterexample.

    falsify                   row rules, device by device
    falsify_serial            serial rules, in exact arithmetic where there is any
    falsify_placement         placement rules, at degrees 2 and 3; `devices` has both sides as graphs
    falsify_steps             rules of the parallel operators
    exactness                 rules that say that they are exact bit for bit
    instances                 numbers for what a rule leaves open
    tangents                  derivatives, by differences
    mismatch                  counterexamples, as they are printed

Asked by `verifier.judge`, where a rule is not proven.
"""
