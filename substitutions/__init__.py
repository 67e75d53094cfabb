"""Substitutions: rewrite rules as data.

A search needs:

    equations     two terms that are equal, with guards
    terms         the sides of an equation
    expressions   attributes and guards over sizes
    placement     layouts in terms
    match, apply  the places where an equation applies in a graph; the graph after that
    fields        checks of the JSON form of rules

Provers also need:

    rules/        every kind of rule, and the rules that are written by hand
    generator/    finds candidate rules

No rule is trusted for being here: `verifier` certifies each before a search loads it.

Imports `pcg`; imported by `verifier`, `search` and `shardwright`.
"""
