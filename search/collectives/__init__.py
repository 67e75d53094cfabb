"""Synthesis of collectives: schedules for a network, with the bound that they are judged by.

    symmetry    ranks that a network cannot tell apart
    exact       one question: is there a schedule of so many chunks, steps and rounds; by Z3
    paced       what no schedule of so many steps can beat; by flows over time
    frontier    the best schedules for each number of steps, until one meets a bound

Imports `pcg.collectives`. Whether a schedule is right is for `verifier.collectives` to say.
"""
