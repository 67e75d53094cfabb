"""The description of an entry, and the key by which a store's entries differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.lowering.ranks.picked import ByGroup
from shardwright.lowering.ranks.waits import TIMEOUT_S
from shardwright.lowering.runtime.inputs import CheckInputs
from shardwright.pcg.capture.returned import Returned
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.results import gives_results
from shardwright.pcg.stages import cut, not_run
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.precisions import DTYPES, Precision, in_bf16
from shardwright.search.plan import CaptureCheck


@dataclass(frozen=True)
class EntrySpec:
    """The description of an entry: a parallel graph, and the way to run it.

    constants, options  as in `pcg.capture.capture.Captured`
    execution           recomputation, stages, schedule
    precision           precision of the capture; casts are in the graph, so it only decides the format of products
    check_inputs        as in `shardwright.compile`
    training            the mode in which the model was captured
    returned            the form of the model's results, where the program gives these and no loss
    schedules           of each stage, by group and collective, the schedules that are run; (): the library's alone
    """

    graph: Graph
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    execution: Execution = DEFAULT
    precision: Precision | None = None
    check_inputs: CheckInputs = "first"
    timeout_s: float = TIMEOUT_S
    training: bool = True
    capture_check: CaptureCheck | None = None
    returned: Returned | None = None
    schedules: Sequence[ByGroup] = ()


Make = Callable[[Any, Mapping[str, Any]], None]
"""A function that enters a program for a batch of global tensors into a `ParallelModule`. Every rank calls it."""


class Maker(NamedTuple):
    """The maker of a module's programs: for steps in the module's mode, and for what the model returns in eval mode.

    predicted   the predicted seconds of a training step with each of these batches, for which no program is made
    model       the user's model, or None where nothing holds it any more
    """

    for_batch: Make
    for_evaluation: Make
    predicted: Callable[[Sequence[Mapping[str, Any]]], list[float]]
    model: Callable[[], nn.Module | None]


class Key(NamedTuple):
    """The key by which a store's entries differ: the mode, and the shapes of the batch, by name."""

    training: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


def check_stages(graph: Graph, execution: Execution, precision: Precision | None) -> None:
    """Raise a `PlanError` if a graph cannot be run in pipeline stages."""
    if execution.schedule.num_virtual_stages == 1:
        return
    if (problem := not_run(graph, precision)) is not None:
        raise PlanError(problem)
    has_gradients = not gives_results(graph)
    if has_gradients and precision is not None and DTYPES[precision].is_scaled:  # each stage searches for overflows
        parts = cut(graph, execution).graphs
        for stage in range(execution.schedule.num_stages):
            own = parts[stage :: execution.schedule.num_stages]
            if not any(part.types[leaf.name].grad for part in own for leaf in part.leaves("parameter")):
                other = in_bf16(precision)
                raise PlanError(f"{precision}: nothing is trained in stage {stage}; use {other}, or no stages")
