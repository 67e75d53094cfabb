"""The choices of each operator and tensor of a graph on a mesh, and their costs.

    domain       the choices of one operator or parameter, with the cost of each on its own
    blocks       which operators are worth splitting in blocks
    reshard      the cheapest moves from each layout to each other one
    problem      the pairwise problem: variables, tables between them, prices, solutions
    interning    equal tables are made once

Imports nothing else of the search.
"""
