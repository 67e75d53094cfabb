"""Row rules and rules of the parallel operators: index semantics with symbolic sizes and degrees, decided by Z3.

    semantics                 what every row computes, as a sum over digits
    claims                    what a rule says of layouts, as formulas
    attributes                the attributes of an operator on one device
    rowproof                  row rules, forward and gradients
    stepproof                 rules of the parallel operators
    dispatchproof             what a dispatch claims beside its split

Asked by `verifier.certificates`.
"""
