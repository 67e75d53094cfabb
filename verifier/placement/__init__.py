"""Placement rules, proven in two ways.

    typing                    both sides have one type, and are equal without parallel operators
    denotation                both sides denote the same, as uninterpreted functions

Used by `verifier.certificates`.
"""
