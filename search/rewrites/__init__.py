"""Other graphs that compute the same: certified rules applied to parts of the captured graph.

    splits       any convex part of a graph, and what takes its place
    leaves       the graphs that rules make of one part, each with its problem
    promise      a test of whether a rewrite can pay, before layouts are chosen for it
    rewriting    the search through parts and rules
    replay       the rewrites of a plan done again, which proves its graph

Imports `exact` and what is below it.
"""
