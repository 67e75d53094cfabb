"""Pipeline stages of a parallel graph: the places of operators, the values sent between, each stage as a graph.

    stage of            a node that depends on the batch and on parameters lies in the virtual stage of its section,
                        and never before its operands
    everywhere          other nodes are computed in every stage that reads them: masks, positions, counts, views of
                        parameters; so are values that they write into a buffer, in every stage that reads the buffer,
                        and draws of torch's generator, in every stage
    moves               moves that make a value smaller on a device run before it is sent, other moves after it

A value that a later stage reads goes from stage to stage. To a stage it is a leaf, `received`, in the layouts that it
has where it was made: `send` is the identity on the logical tensor, from the devices of one stage to those of the next,
and adjoint to itself, so that the gradient comes back in the dual layouts. Hence a graph means the same with and
without `send`, and a stage is a graph like any other. Its mesh is its own: stages may differ in size, and a
rank then gets its part of a value from the ranks that have it (`pcg.pieces`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from shardwright.pcg.analysis import drawn_everywhere
from shardwright.pcg.errors import GraphError, PlanError
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.node import RECEIVED, is_result, leaf
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE, REPLICATE, SEND
from shardwright.pcg.pieces import Piece, Tensor, received, sent
from shardwright.pcg.step.actions import end_of_step
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.late import LOSS
from shardwright.pcg.step.meshes import first_ranks, stage_meshes, stage_of
from shardwright.pcg.step.messages import Message
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.pipelining import Schedule
from shardwright.pcg.step.precisions import DTYPES, Precision, in_bf16
from shardwright.pcg.step.schedules import Item, Transfer, orders, with_transfers
from shardwright.pcg.step.sections import sections, spread, units
from shardwright.pcg.step.verbs import VERBS, Action, Verb
from shardwright.pcg.types import ITEM_BYTES

_LATE, _EARLY = (COMBINE, REPLICATE), (REDUCE, PARTITION)
FORWARD, BACKWARD = "forward", "backward"
"""The directions of transfers: of values, and of their gradients."""
STAGES = "stages"
"""The name, as an axis to sum over, of the ranks at one place of several stages' meshes."""
GroupName = tuple[str, ...]
"""Which ranks run a collective together: those that differ along these axes of a mesh only; or `ALL_RANKS`, of all
stages; or `of_stages`."""
ALL_RANKS: GroupName = ()
_GIVEN = "to the next stage: "


def of_stages(stages: Iterable[int]) -> GroupName:
    """Return the name of the groups of ranks at one place of these stages' meshes."""
    return (STAGES, *map(str, stages))


class SharedResult(NamedTuple):
    """A value that the ranks of one stage tell those of the others: its key among the outputs, its node, its stage."""

    key: str
    name: str
    stage: int


@dataclass(frozen=True)
class Stages:
    """A graph cut into virtual stages.

    where     the virtual stage of every operator that lies in one
    sent      the values that each virtual stage gives the next one, in order
    meshes    the meshes of the stages; the graph's mesh is the largest of them
    schedule  the order of microbatches
    """

    graph: Graph
    where: Mapping[str, int]
    sent: tuple[tuple[str, ...], ...]
    meshes: tuple[Mesh, ...]
    schedule: Schedule

    def __len__(self) -> int:
        return len(self.sent) + 1

    @property
    def num_stages(self) -> int:
        return len(self.meshes)

    def mesh(self, stage: int) -> Mesh:
        """Return the mesh of a virtual stage."""
        return self.meshes[stage % self.num_stages]

    @cached_property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs of virtual stages: received values are leaves, sent values are outputs (`given`)."""
        return tuple(self._graph(stage) for stage in range(len(self))) if self.sent else (self.graph,)

    def received(self, stage: int) -> tuple[str, ...]:
        return self.sent[stage - 1] if stage else ()

    def given(self, stage: int) -> tuple[str, ...]:
        return self.sent[stage] if 0 <= stage < len(self.sent) else ()

    def pieces(self, transfer: Transfer, name: str, place: int) -> tuple[Piece, ...]:
        """Return the pieces of a value that a rank sends or receives. `place`: the rank's, in its stage."""
        kind, number = self.graph.types[name], transfer.boundary
        tensor, ends = Tensor(kind.shape, kind.layouts), (self.mesh(number), self.mesh(number + 1))
        if transfer.item.direction == BACKWARD:
            tensor, ends = tensor.dual, (ends[1], ends[0])
        return (sent if transfer.verb == "send" else received)(tensor, *ends, place)

    def crossing(self, transfer: Transfer) -> list[str]:
        """Return the names of what is sent, in order: values, or those of them that have gradients."""
        forward, types = transfer.item.direction == FORWARD, self.graph.types
        return [name for name in self.sent[transfer.boundary] if forward or types[name].grad]

    @cached_property
    def items(self) -> list[list[Item]]:
        """The items of every stage, in order."""
        return orders(self.schedule, self.graph.mesh.num_microbatches)

    def listed(self, stage: int, items: Iterable[Item]) -> Iterator[Item | Transfer]:
        """Yield a stage's items with the transfers between them, but for those that would send nothing."""
        items_and_transfers = with_transfers(items, stage, self.schedule)
        return (each for each in items_and_transfers if isinstance(each, Item) or self.crossing(each))

    def end(self, stage: int, *, trains: bool = True) -> tuple[Action, ...]:
        """Return the actions at the end of a stage's step."""
        shared = any(stage in holders for holders in self.shared.values())
        return end_of_step(tell=self.num_stages > 1, shared=trains and shared)

    @cached_property
    def drawn(self) -> frozenset[str]:
        """The draws that every virtual stage makes."""
        return drawn_everywhere(self.graph)

    @cached_property
    def shared_results(self) -> tuple[SharedResult, ...]:
        """The values that all stages learn at the end of a step: the loss, or the model's results."""
        of_model = [(key, name) for key, name in self.graph.outputs if key == LOSS or is_result(key)]
        return tuple(SharedResult(key, name, self._home(name) % self.num_stages) for key, name in of_model)

    def _home(self, name: str) -> int:
        """Return the virtual stage of a value that leaves the graph; of one that is everywhere, its first reader's."""
        if name in self.where:
            return self.where[name]
        node = self.graph.by_name[name]
        while node.is_parallel:
            node = self.graph.by_name[node.inputs[0]]
        return min(self._readers(node.name), default=0)

    def _readers(self, name: str) -> Iterator[int]:
        for user in self.graph.users[name]:
            yield from (self.where[user],) if user in self.where else self._readers(user)

    def messages(self, rank: int) -> Counter[Message]:
        """Return the messages of a rank to and from other stages in a step, and its sums with them."""
        stage, sent = stage_of(self.meshes, rank), Counter[Message]()
        place = rank - first_ranks(self.meshes)[stage]
        for each in self.listed(stage, self.items[stage]):
            if isinstance(each, Transfer):
                sent.update(self._sent(each, place))
        for verb, _, _ in self.end(stage):
            match verb:
                case "tell":
                    types, mesh = self.graph.types, self.meshes[stage]
                    sent.update(
                        _message(verb, STAGES, types[name].local_bytes(mesh)) for _, name, _ in self.shared_results
                    )
                case "share":
                    sent.update(self._summed(stage, place))
                case _:
                    pass  # within the stage
        return sent

    def _sent(self, transfer: Transfer, place: int) -> Iterator[Message]:
        """Yield the messages of a transfer, as a rank sends or receives them."""
        for name in self.crossing(transfer):
            for piece in self.pieces(transfer, name, place):
                num_bytes = prod(piece.shape) * ITEM_BYTES[self.graph.types[name].dtype]
                yield _message(transfer.verb, channel(*transfer.channel), num_bytes)

    def _summed(self, stage: int, place: int) -> Iterator[Message]:
        """Yield the messages of a rank that sum gradients over the stages that hold a parameter."""
        mesh, row = self.meshes[stage], VERBS["share"]
        for name, holders in self.shared.items():
            kind = self.graph.types[name]
            if stage not in holders:
                continue
            if len({self.meshes[other] for other in holders}) == 1:
                yield _message("share", STAGES, kind.local_bytes(mesh))
                continue
            tensor, size = Tensor(kind.shape, kind.layouts), ITEM_BYTES[kind.dtype]
            for other in (self.meshes[other] for other in holders if other != stage):
                for piece in sent(tensor, mesh, other, place):
                    yield Message("send", STAGES, prod(piece.shape) * size, row.sends)
                for piece in received(tensor, other, mesh, place):
                    yield Message("receive", STAGES, prod(piece.shape) * size, row.sends)

    @cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """The stages that hold each trained parameter of several stages, by leaf."""
        types = self.graph.types
        return {name: stages for name, stages in self.holders.items() if len(stages) > 1 and types[name].grad}

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The stages that hold each parameter, because they read it, by leaf."""
        stages_of = defaultdict[str, set[int]](set)
        for number, graph in enumerate(self.graphs):
            for node in graph.leaves("parameter"):
                stages_of[node.name].add(number % self.num_stages)
        return {name: tuple(sorted(stages)) for name, stages in stages_of.items()}

    def _graph(self, stage: int) -> Graph:
        whole = self.graph
        keys = {key for key, name in whole.outputs if self._home(name) == stage}
        while True:
            outputs = [(key, name) for key, name in whole.outputs if key in keys]
            outputs += [(given(name), name) for name in self.given(stage)]
            nodes = self._nodes(stage, {name for _, name in outputs})
            read = {str(node.attr("target")) for node in nodes if node.op == "buffer"}
            further = {key for key, name in whole.outputs if key in read and name not in self.where} - keys
            if not further:
                return Graph(nodes, tuple(outputs), self.mesh(stage))
            keys |= further

    def _nodes(self, stage: int, needed: set[str]) -> tuple[Node, ...]:
        """Return the nodes that a virtual stage runs to give its results, and the leaves that it reads."""
        whole, names, nodes = self.graph, set(self.received(stage)), list[Node]()
        needed |= self.drawn
        for node in reversed(whole.nodes):
            if node.name in names:
                nodes.append(self._leaf(node))
            elif node.name in needed or self.where.get(node.name) == stage or node.op == "input":
                nodes.append(node)
                needed.update(node.inputs)
        return tuple(reversed(nodes))

    def _leaf(self, node: Node) -> Node:
        kind = self.graph.types[node.name]
        return leaf(
            node.name, RECEIVED, kind.shape, kind.dtype, node.name, grad=kind.grad, layouts=kind.layouts,
            source=node.source,
        )  # fmt: skip

    def with_sends(self) -> Graph:
        """Return the graph with a `send` for each value and each boundary that it crosses, typed and printable."""
        here: dict[tuple[str, int], str] = {}
        made: dict[str, Node] = {}

        def at(name: str, stage: int) -> str:
            start = self.where.get(name, stage)
            for number in range(start + 1, stage + 1):
                if (name, number) not in here:
                    send = here[name, number] = f"{name}.to_{number}"
                    before = here.get((name, number - 1), name)
                    made[send] = Node(send, SEND, (before,), make_attrs(stage=number), (), whole.by_name[name].source)
            return here.get((name, stage), name)

        whole, nodes = self.graph, list[Node]()
        for node in whole.nodes:
            stage = self.where.get(node.name)
            inputs = node.inputs if stage is None else tuple(at(name, stage) for name in node.inputs)
            nodes += made.values()
            made.clear()
            nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
        return replace(whole, nodes=tuple(nodes)).typed_beside(whole)


def _message(verb: Verb, axis: str, num_bytes: int) -> Message:
    return Message(VERBS[verb].collective, axis, num_bytes, VERBS[verb].sends)


def channel(way: str, source: int, target: int) -> str:
    """Return the name of the transfers from a stage to another one, in the forward or the backward pass."""
    return f"{way} {source} > {target}"


def given(name: str) -> str:
    """Return the key of an output that is sent on."""
    return _GIVEN + name


def not_run(graph: Graph, precision: Precision | None) -> str | None:
    """Return why a graph captured in this precision does not run in pipeline stages; None if it does."""
    dtypes = {graph.types[leaf.name].dtype for leaf in graph.leaves("parameter") if graph.types[leaf.name].grad}
    if precision is not None and DTYPES[precision].is_scaled and len(dtypes) > 1:
        return (
            f"{precision} in pipeline stages: parameters are in {' and '.join(sorted(dtypes))}; "
            f"use {in_bf16(precision)}, or no stages"
        )
    everywhere = drawn_everywhere(graph)
    drawn = next((n for n in graph.nodes if n.may_draw and not n.is_random and n.name not in everywhere), None)
    if drawn is not None:
        target = drawn.attr("target")
        may = "draws" if str(target).startswith("aten.") else "may draw"
        return f"{target} at {drawn.source}: it {may} from torch's generator for a value of one stage; use no stages"
    return None


def cut(graph: Graph, execution: Execution) -> Stages:
    """Spread a validated graph over the virtual stages of an execution, whose `split` spreads the sections.

    One stage has all of it, and needs no split.

    Raises:
        PlanError: there is no split, or it does not fit the graph.
    """
    if execution.schedule.num_virtual_stages == 1:
        return Stages(graph, {}, (), stage_meshes(graph.mesh, execution), execution.schedule)
    if not execution.schedule.split:
        raise PlanError(
            f"{execution.schedule.num_virtual_stages} virtual stages without a split; say how blocks are spread"
        )
    where = _where(Operations(graph, execution))
    last: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in where:
            for name in node.inputs:
                last[name] = max(last.get(name, 0), where[node.name])
    order = [name for name in last if name in where]
    sent = tuple(
        tuple(name for name in order if where[name] <= stage < last[name])
        for stage in range(execution.schedule.num_virtual_stages - 1)
    )
    stages = Stages(graph, where, sent, stage_meshes(graph.mesh, execution), execution.schedule)
    _check_buffers(stages, execution)
    _check_sizes(stages)
    return stages


def _check_buffers(stages: Stages, execution: Execution) -> None:
    """Raise a `PlanError` if a stage's devices would write a buffer twice, or unlike those of another stage."""
    for key, _ in stages.graph.outputs:
        if key == LOSS:
            continue
        pairs = [(number, graph) for number, graph in enumerate(stages.graphs)]
        read = {k for k, graph in pairs if any(node.attr("target") == key for node in graph.leaves("buffer"))}
        write = {k for k, graph in pairs if key in dict(graph.outputs)}
        if read - write:
            raise PlanError(
                f"buffer {key!r} is read in virtual stages {sorted(read)}, and written in {sorted(write)} from what "
                "depends on parameters, so that the others would not see it; spread the blocks so that one has it all"
            )
        if len({k % execution.schedule.num_stages for k in write}) < len(write):
            raise PlanError(
                f"buffer {key!r} is written in virtual stages {sorted(write)}, of which the same devices have several; "
                "use another schedule than 'interleaved'"
            )


def _check_sizes(stages: Stages) -> None:
    """Raise a `PlanError` for layouts that stages of unlike sizes cannot have."""
    whole = stages.graph
    for number, mesh in enumerate(stages.meshes):
        if mesh == whole.mesh:
            continue
        try:
            replace(whole, mesh=mesh).validate()
        except GraphError as error:
            raise PlanError(f"stage {number} on mesh {mesh}, the largest on {whole.mesh}: {error}") from error


def _where(operations: Operations) -> dict[str, int]:
    graph, execution, lying = operations.graph, operations.execution, operations.in_one
    listed = dict(_listed(operations))
    stage_of_node: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in lying:
            least = 0 if node.op in (*_LATE, *_EARLY) else listed.get(node.name, 0)
            stage_of_node[node.name] = max([least, *(stage_of_node[i] for i in node.inputs if i in stage_of_node)])
    if dict(graph.outputs).get(LOSS) in stage_of_node:
        stage_of_node[graph.loss] = execution.schedule.num_virtual_stages - 1
    results = {name for _, name in graph.outputs}
    for node in reversed(graph.nodes):
        if node.op in _LATE and node.name in stage_of_node and node.name not in results:
            stage_of_node[node.name] = min(
                (stage_of_node[name] for name in graph.users[node.name]), default=stage_of_node[node.name]
            )
    return stage_of_node


def _listed(operations: Operations) -> Iterator[tuple[str, int]]:
    """Yield every operation with the virtual stage of its section."""
    parts = sections(operations, {}, by_block=True)
    number_of = iter(units(parts))
    for stage, share in enumerate(spread(parts, operations.execution.schedule.split)):
        for _ in range(sum(times for _, times in share)):
            yield from ((operation.name, stage) for operation in parts[next(number_of)].stretch.operations)
