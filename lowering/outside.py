"""What the runtime does around the program of a graph: parameters, the batch, the sums that make the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.lowering.batch import find_inputs
from shardwright.lowering.late import LOSS, summand_of_loss
from shardwright.pcg.analysis import computed_once
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.actions import Actions, actions
from shardwright.pcg.step.chunk import Chunk, Stretch
from shardwright.pcg.step.operations import plain_operations
from shardwright.pcg.step.parameters import Parameters, find_parameters


@dataclass(frozen=True)
class Outside:
    """The division of labour between program and runtime.

    `inputs`: partitions that are done on the batch; `loss_sums`: reductions at the very end, of what is called `loss`.
    """

    graph: Graph
    parameters: Parameters
    inputs: Mapping[str, str]
    loss_sums: tuple[str, ...] = ()
    loss: str = ""

    @property
    def aliases(self) -> dict[str, str]:
        """Every parallel operator that is done outside -> the node whose value its readers see."""
        return {**self.inputs, **self.parameters.aliases}

    @cached_property
    def constant(self) -> frozenset[str]:
        """What is computed before the first step."""
        return computed_once(self.graph)

    @cached_property
    def chunk(self) -> Chunk:
        """Everything that a step runs."""
        run = plain_operations(self.graph, self.parameters, self.constant, {*self.inputs, *self.loss_sums})
        leaves = frozenset(self.parameters.by_leaf)
        return Chunk([(Stretch(tuple(run), leaves), 1)], self.parameters.by_leaf)

    @cached_property
    def actions(self) -> Actions:
        """What is done when: the program has those of forward, the runtime those of backward."""
        return actions(self.chunk)


def find_outside(graph: Graph) -> Outside:
    """What the runtime does around the program of a graph."""
    inputs, parameters = find_inputs(graph)[1], find_parameters(graph)
    if LOSS not in dict(graph.outputs):
        return Outside(graph, parameters, inputs)
    name, sums = summand_of_loss(graph)
    return Outside(graph, parameters, inputs, tuple(node.name for node in sums), name)
