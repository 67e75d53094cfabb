"""Row rules and rules of the parallel operators: index semantics with symbolic sizes and degrees, decided by Z3.

    semantics                 the semantics of every row, as a sum over digits
    claims                    the claims of a rule about layouts, as formulas
    attributes                the attributes of an operator on one device
    rowproof                  row rules, forward and gradients
    stepproof                 rules of the parallel operators
    dispatchproof, ringproof  the claims of a dispatch, and of a ring, beyond their splits

Used by `verifier.certificates`.
"""
