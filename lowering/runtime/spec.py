"""What an entry is made of, and what tells entries of a store apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.lowering.ranks.launch import TIMEOUT_S
from shardwright.lowering.runtime.inputs import CheckInputs
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.stages import cut, not_run
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.precisions import DTYPES, Precision, in_bf16
from shardwright.search.plan import CaptureCheck


@dataclass(frozen=True)
class EntrySpec:
    """What an entry is made of: a parallel graph, and how it is to be run.

    constants, options  those of `pcg.capture.capture.Captured`
    execution           what backward makes again, the stages, the schedule
    precision           in which it was captured: casts are in the graph, so it only says how matrix products run
    check_inputs        as `shardwright.compile` has it
    training            the mode in which the model was captured
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


class Key(NamedTuple):
    """What tells entries of a store apart: the mode, and the shapes of the batch, by name."""

    training: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


def check_stages(graph: Graph, execution: Execution, precision: Precision | None) -> None:
    """Raise a `PlanError` for what cannot be run in pipeline stages."""
    if execution.schedule.num_virtual_stages == 1:
        return
    if (problem := not_run(graph, precision)) is not None:
        raise PlanError(problem)
    if precision is not None and DTYPES[precision].is_scaled:  # every stage looks for overflows, in its gradients
        parts = cut(graph, execution).graphs
        for stage in range(execution.schedule.num_stages):
            own = parts[stage :: execution.schedule.num_stages]
            if not any(part.types[leaf.name].grad for part in own for leaf in part.leaves("parameter")):
                other = in_bf16(precision)
                raise PlanError(f"{precision}: nothing is trained in stage {stage}; use {other}, or no stages")
