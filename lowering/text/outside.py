"""The work of the runtime around the program of a graph: parameters, the batch, the sums that make the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME
from shardwright.pcg.parallel import PARTITION, REDUCE, REPLICATE
from shardwright.pcg.step.actions import Actions, actions
from shardwright.pcg.step.chunk import Chunk, whole_chunk
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.late import LOSS, summand_of_loss
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.schedules import in_two
from shardwright.pcg.types import TensorType


@dataclass(frozen=True)
class Input:
    """A tensor of the batch: its key, and its type with the layouts in which the program reads it."""

    key: str
    type: TensorType


def find_inputs(graph: Graph) -> tuple[dict[str, Input], dict[str, str]]:
    """Return the inputs by leaf name, and the partitions that are applied to the batch itself, as aliases of leaves.

    If an input is read through one chain of partitions only, a rank may pass just its own shard of it.
    """
    inputs: dict[str, Input] = {}
    aliases: dict[str, str] = {}
    results = {name for _, name in graph.outputs}
    for leaf in graph.leaves("input"):
        name = leaf.name
        while len(users := graph.users[name]) == 1 and name not in results:
            if graph.by_name[users[0]].op != PARTITION:
                break
            name = users[0]
            aliases[name] = leaf.name
        inputs[leaf.name] = Input(str(leaf.attr("target")), graph.types[name])
    return inputs, aliases


@dataclass(frozen=True)
class Outside:
    """The division of labour between program and runtime.

    `inputs` maps each partition that is applied to the batch to its leaf. `loss_sums` names the reductions at the very
    end, and `loss` the node that they sum.
    """

    graph: Graph
    execution: Execution
    inputs: Mapping[str, str]
    loss_sums: tuple[str, ...] = ()
    loss: str = ""

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Parallel operators that the runtime carries out, or that do nothing -> the nodes whose values readers see."""
        aliases = {**self.inputs, **self.operations.aliases}
        for node in self.graph.nodes:
            if node.op in (REPLICATE, REDUCE) and node.attr("axis") == TIME and node.name not in self.loss_sums:
                aliases.setdefault(node.name, aliases.get(node.inputs[0], node.inputs[0]))
        return aliases

    @cached_property
    def operations(self) -> Operations:
        """The operations of a step."""
        return Operations(self.graph, self.execution, elsewhere=self.inputs)

    @cached_property
    def chunk(self) -> Chunk:
        """The operations of a step, with the memory of their values and the blocks of their parameters."""
        return whole_chunk(self.operations)

    @cached_property
    def actions(self) -> Actions:
        """The actions of a step in order: the program contains those of forward, the runtime runs those of backward."""
        return actions(self.chunk, hold=self.execution.schedule.num_virtual_stages == 1, two=self.in_two)

    @cached_property
    def away(self) -> frozenset[str]:
        """The values that wait for backward on the host."""
        return frozenset(self.chunk.allocations[number].name for number in self.actions.of("offload"))

    @cached_property
    def arriving(self) -> frozenset[int]:
        """The operations before whose backward values arrive from the host, or are fetched."""
        backward = zip(reversed(self.chunk.occurrences), self.actions.backward, strict=False)
        copies = ("fetch", "arrive")
        return frozenset(o.number for o, actions in backward if any(action.verb in copies for action in actions))

    @property
    def in_two(self) -> bool:
        """True if the schedule runs backward in two parts."""
        return in_two(
            self.execution.schedule.name, (self.graph.types[node.name] for node in self.graph.leaves("received"))
        )

    @cached_property
    def apart(self) -> frozenset[str]:
        """Operators that give gradients to weights in a second part of backward."""
        numbers = self.actions.of("weights") if self.in_two else []
        return frozenset(self.chunk.occurrences[number].operation.name for number in numbers)


def find_outside(graph: Graph, execution: Execution = DEFAULT, whole: Graph | None = None) -> Outside:
    """Return the work of the runtime around the program of a graph.

    A program computes in the dtypes of its graph, which already contains the casts of mixed precision. `whole` is the
    graph of all stages, which decides the partitions of the batch.
    """
    execution = replace(execution, precision=None)
    inputs = find_inputs(whole or graph)[1]
    inputs = {name: leaf for name, leaf in inputs.items() if name in graph.by_name}
    if LOSS not in dict(graph.outputs):
        return Outside(graph, execution, inputs)
    name, sums = summand_of_loss(graph)
    return Outside(graph, execution, inputs, tuple(node.name for node in sums), name)
