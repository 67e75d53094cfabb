"""The end of a step: the memory of parameters until then, the optimizer's update, and the tasks around it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwright.cost.timeline.memory import Stored, in_flight_bytes, state_bytes, update_s
from shardwright.cost.timeline.muon import Orthogonalized, orthogonalized
from shardwright.cost.timeline.steps import Steps
from shardwright.cost.timeline.sums import is_bucketed
from shardwright.cost.timeline.tasks import Recorder, Segment
from shardwright.pcg.stages import STAGES
from shardwright.pcg.step.actions import end_of_step
from shardwright.pcg.step.verbs import VERBS, Action


class Held(NamedTuple):
    """The memory that a stage's parameters keep, and the cost of their update.

    held       bytes that are there all the time, by category and leaf
    freed      gradients that the update frees, by leaf
    updated    under ZeRO-1, bytes of weights that are gathered again, by the number of the axis
    update_s   seconds of the update
    in_flight  bytes of states that come from the host for the update
    """

    held: Mapping[tuple[str, str], float]
    freed: Sequence[tuple[str, float]]
    updated: Mapping[int, float]
    update_s: float
    in_flight: float


def what_is_stored(steps: Steps, leaves: Mapping[str, int]) -> Held:
    """Return the memory and update of parameters; `leaves` says how many of each."""
    execution, device, mesh = steps.execution, steps.cluster.device, steps.graph.mesh
    held, seconds, freed = dict[tuple[str, str], float](), 0.0, list[tuple[str, float]]()
    updated = defaultdict[int, float](float)
    overhead_s = device.step_overhead_s + steps.first_uses_s
    known, counts = dict[tuple[Stored, int], tuple[Mapping[str, float], float]](), Counter[tuple[Stored, int]]()
    for leaf, times in leaves.items():
        parameter = steps.parameters[leaf]
        dtype, is_gathered = parameter.dtype, parameter.slices is not None
        shape = steps.graph.types[leaf].shape
        stored = Stored(parameter.num_elements, dtype, parameter.grad, is_gathered, steps.dtype(dtype), shape)
        shards = 1
        if execution.assumed.shard_optimizer and parameter.grad and not stored.gathered:
            for axis in map(mesh.index, parameter.sums):
                shards *= mesh.sizes[axis]
                updated[axis] += times * parameter.used_bytes
        if (facts := known.get((stored, shards))) is None:
            facts = state_bytes(stored, execution, shards), update_s(stored, execution, device, shards)
            known[stored, shards] = facts
        counts[stored, shards] += times
        by_category, to_update = facts
        for category, num_bytes in by_category.items():
            held[category, leaf] = times * num_bytes
        if parameter.grad:
            overhead_s += times * device.update_overhead_s
            seconds += times * to_update
            if is_bucketed(parameter):
                held["gradients", leaf] = times * parameter.gradient_bytes
            else:
                freed.append((leaf, times * parameter.gradient_bytes))
    in_flight = in_flight_bytes(counts, execution)
    return Held(held, freed, updated, seconds + overhead_s, in_flight)


def price_end(steps: Steps, stored: Held, leaves: Mapping[str, int], sum_s: float) -> Segment:
    """Return the segment after a stage's last backward. `sum_s`: to sum gradients that other stages share."""
    end = _End(steps, stored, orthogonalized(steps, leaves), sum_s)
    for action in end_of_step(tuple(stored.updated), shared=sum_s > 0):
        end.recorder.verb = action.verb
        getattr(end, VERBS[action.verb].price)(action)
    return end.recorder.segment()


class _End:
    def __init__(self, steps: Steps, stored: Held, shared: Orthogonalized, sum_s: float) -> None:
        self.steps, self.stored, self.shared, self.sum_s = steps, stored, shared, sum_s
        self.recorder = Recorder(steps.execution.assumed.overlap)

    def sum_over_stages(self, action: Action) -> None:
        self.recorder.launch("gradients of several stages", STAGES, self.sum_s, blocks=True)

    def update(self, action: Action) -> None:
        for axis, seconds in self.shared.gather_s.items():
            self.recorder.launch("gather whole matrices", axis, seconds, blocks=True)
        if self.shared.compute_s:
            self.recorder.compute("orthogonalize", self.shared.compute_s)
        for axis, seconds in self.shared.return_s.items():
            self.recorder.launch("return updates", axis, seconds, blocks=True)
        task = self.recorder.compute("optimizer", self.stored.update_s)
        self.recorder.take("temporary", self.stored.in_flight, task, (task,), name="optimizer states from the host")
        for leaf, num_bytes in self.stored.freed:
            self.recorder.take("gradients", num_bytes, None, (task,), name=leaf)

    def gather_updated(self, action: Action) -> None:
        axis = self.steps.graph.mesh.names[action.number]
        seconds = self.steps.collective_s(VERBS[action.verb].collective, axis, self.stored.updated[action.number])
        self.recorder.launch("gather updated weights", axis, seconds, blocks=True)
