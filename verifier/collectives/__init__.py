"""The judge of collectives: whether a schedule or a program does what it claims, for every order of its events.

    rounds     schedules: steps that read and then write; links within their rates
    blocks     programs of blocks, as MSCCL's files have them, become events
    plans      plans of one-sided operations, as MSCCL++'s files have them, become events; `reaches`: their memory
    events     events, what orders them, and their memory: no circle, no race, the right result
    families   all-gathers that are right for any number of ranks: proven by induction over the steps
    ways       all-to-alls of that kind: the ways of their chunks
    queues     the least room of queues with which nothing blocks
    values     what a cell holds: contributions, each once
    verdict    certificates and refusals

A certificate is not kept anywhere: judging takes less time than looking for it would.
"""

from shardwright.verifier.collectives.blocks import verify_program
from shardwright.verifier.collectives.plans import verify_plan
from shardwright.verifier.collectives.rounds import verify_schedule

__all__ = ["verify_plan", "verify_program", "verify_schedule"]
