"""The judge's verdict on what was synthesized."""

from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.collectives.topology import Topology
from shardwright.verifier.collectives import verify_schedule


def assert_right(schedule: Schedule, topology: Topology) -> None:
    assert verify_schedule(schedule, topology).refusals == ()
