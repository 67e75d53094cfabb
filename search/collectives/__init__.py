"""Synthesis of collectives: schedules for a network, with the bound that they are judged by.

    synthesis   schedules for a size, better and better: all that follows, compared by simulated time
    candidates  what the planner may pick for a group: builders that suit its network, and synthesis
    frontier    small networks: the best schedules for each number of steps, until one meets a bound
    exact       one question: is there a schedule of so many chunks, steps and rounds; by Z3
    paced       what no schedule of so many steps can beat; by flows over time
    routes      chunks with one source and one target: paths that even out the load
    greedy      large networks: whenever links are free, they carry the rarest chunk
    splitting   relays that only pass data on: their links paired, into links from rank to rank
    trees       all-reduce over trees that use links both ways
    timing      steps by the moments at which transfers start
    channels    what limits transfers
    sketch      a user's hints as JSON
    limited     a time limit that holds
    symmetry    ranks that a network cannot tell apart

Imports `pcg.collectives` and `cost`. Whether a schedule is right is for `verifier.collectives`
to say.
"""
