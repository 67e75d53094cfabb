"""Regions of operations that backward recomputes together: blocks of the model, attention, gathered activations.

The operations of one block lie side by side, and so do those of one region; other operations between them go before or
after them. Operations also learn here where their results wait for backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby

from shardwright.pcg.choice import sends
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.order import postorder
from shardwright.pcg.step.asked import Wish, check_fits, check_used, wishes
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operation import Operation, Region
from shardwright.pcg.step.places import places
from shardwright.pcg.step.recompute import OFFLOAD, RECOMPUTE, Field


class Arrangement:
    """The operations of a graph block by block, ready for any recomputation.

    Args:
        graph: the typed graph of the operations.
        listed: the operations, in an order in which they can run.
        gathers: the operations that gather an activation.
        stored: the nodes whose value is a parameter.
    """

    def __init__(
        self, graph: Graph, listed: Sequence[Operation], gathers: Collection[str], stored: Collection[str]
    ) -> None:
        self.graph, self.gathers, self.stored = graph, gathers, stored
        self.draws = Draws(graph)
        self.operations = _by_block(_with_readers(listed, gathers), self.draws)

    @cached_property
    def _places(self) -> Mapping[str, str]:
        return places(self.graph, {o.name: o.block for o in self.operations})

    @cached_property
    def _attentions(self) -> Sequence[tuple[str, frozenset[str]]]:
        return tuple(attentions(self.graph, self.stored))

    @cached_property
    def _rings(self) -> frozenset[str]:
        """The operators that send while they run and whose backward reads their result.

        Where a whole block is made again, these results are kept, so that devices send once less.
        """
        rows = ((node.name, node.row) for node in self.graph.nodes if sends(node.split))
        return frozenset(name for name, row in rows if row is not None and "result" in row.saves)

    def run(self, execution: Execution) -> list[Operation]:
        """Return the operations, each with its region and the place where its result waits, as the execution asks.

        Raises:
            PlanError: a pattern fits no block of a whole graph, or there is nothing to make again for it.
        """
        return self._stored(self._in_regions(execution), execution)

    def _wishes(self, execution: Execution, field: Field) -> dict[str, Wish]:
        where = self._places if execution.kind_of_all(field) is None else {}
        return wishes(self.graph, self.operations, execution, where, field)

    def _stored(self, operations: list[Operation], execution: Execution) -> list[Operation]:
        if not execution.asks(OFFLOAD):
            return operations
        wished = self._wishes(execution, OFFLOAD)
        for pattern, kind in () if self.graph.is_part else execution.by_pattern(OFFLOAD):
            if isinstance(kind, str) and kind != "none":
                check_fits(operations, wished, OFFLOAD, pattern, kind)
        return [o._replace(stored=wished[o.name].fate) if o.verb == "run" else o for o in operations]

    def _in_regions(self, execution: Execution) -> list[Operation]:
        graph, gathers, arranged = self.graph, self.gathers, self.operations
        if not execution.asks(RECOMPUTE):
            return arranged
        wished = self._wishes(execution, RECOMPUTE)
        recomputed = {name for name, wish in wished.items() if wish.fate is Fate.AGAIN}
        selective = {name for name in recomputed if wished[name].attention}
        rings = {name for name in self._rings & recomputed - selective if not wished[name].alone}
        recomputed -= rings
        if selective:
            for name, members in self._attentions:
                candidates = {member for member in members if member in wished}
                if candidates and candidates <= selective:
                    arranged = _made_again(arranged, candidates, Region(name, Fate.AGAIN), self.draws)
        alone = {o.block for o in arranged if wished[o.name].alone or o.name in rings}
        arranged = _whole_blocks(
            arranged, {o.block for o in arranged if o.block and o.name in recomputed - selective} - alone
        )
        if alone:
            members = self.draws.whole_calls(_members(graph, arranged, wished, recomputed - selective))
            arranged = _one_by_one(arranged, alone, members, self.draws)
        arranged = _gathered_again(arranged, {o.name for o in arranged if o.name in gathers and o.name in recomputed})
        if not graph.is_part:
            check_used(arranged, execution, wished)
        return arranged


class Draws:
    """The nodes that draw random numbers, which must keep the order of the graph.

    Dropout masks are drawn ahead where necessary (`lowering.text.statements`), so dropouts may change places
    with each other, but with nothing else that draws.
    """

    def __init__(self, graph: Graph) -> None:
        nodes = [node for node in graph.nodes if node.may_draw]
        self.masks = frozenset(node.name for node in nodes if node.is_random)
        self.calls = {n.name: n.name if n.draw is None else n.draw for n in nodes if not n.is_random}

    def are_kept(self, before: Sequence[Operation], after: Sequence[Operation]) -> bool:
        """Return whether operations draw in the same order before and after a change."""
        return not self.calls or self._order(before) == self._order(after)

    def _order(self, operations: Sequence[Operation]) -> list[str | set[str]]:
        order, masks = list[str | set[str]](), set[str]()
        for o in operations:
            if o.name in self.masks:
                masks.add(o.name)
            elif o.name in self.calls:
                order += [masks, o.name]
                masks = set()
        return [*order, masks]

    def whole_calls(self, members: set[str]) -> set[str]:
        """Return the members without calls of which other results are no members: a call is made again as a whole."""
        torn = {call for name, call in self.calls.items() if name not in members}
        return {name for name in members if name not in self.calls or self.calls[name] not in torn}


# ---- side by side ----


def _with_readers(operations: Sequence[Operation], gathers: Collection[str]) -> list[Operation]:
    """Move each gather to the block that reads it, so that blocks hand on values that are not gathered yet."""
    arranged, readers = list[Operation](), dict[str, set[str]]()
    for o in reversed(operations):
        blocks = readers.get(o.name, set())
        placed = o._replace(block=next(iter(blocks))) if o.name in gathers and len(blocks) == 1 else o
        arranged.append(placed)
        for name in placed.reads:
            readers.setdefault(name, set()).add(placed.block)
    return arranged[::-1]


def _together(operations: Sequence[Operation], members: Collection[str]) -> tuple[list[Operation], list[Operation]]:
    """Return the operations with the members side by side, and the operations that have to stay between them."""
    places = [i for i, o in enumerate(operations) if o.name in members]
    start, end = places[0], places[-1] + 1
    before, together, after, made = list[Operation](), list[Operation](), list[Operation](), set[str]()
    for o in operations[start:end]:
        kind = together if o.name in members else after if made.intersection(o.reads) else before
        kind.append(o)
        if kind is not before:
            made.add(o.name)
    needed, torn = {name for o in together for name in o.reads}, list[Operation]()
    for o in reversed(after):
        if o.name in needed:
            torn.append(o)
            needed.update(o.reads)
    return [*operations[:start], *before, *together, *after, *operations[end:]], torn


def _by_block(operations: Sequence[Operation], draws: Draws) -> list[Operation]:
    """Assign operations of no block that lie between two operations of one block to that block.

    A block stays in pieces where something between them needs one and is needed by another, or draws.
    """
    arranged = list(operations)
    runs = Counter(block for block, _ in groupby(o.block for o in arranged))
    for block in (block for block, times in runs.items() if block and times > 1):
        order, torn = _together(arranged, {o.name for o in arranged if o.block == block})
        while torn and not any(o.block for o in torn):
            names = {o.name for o in torn}
            arranged = [o._replace(block=block) if o.name in names else o for o in arranged]
            order, torn = _together(arranged, {o.name for o in arranged if o.block == block})
        arranged = order if not torn and draws.are_kept(arranged, order) else arranged
    return arranged


def _made_again(
    operations: Sequence[Operation], members: Collection[str], region: Region, draws: Draws
) -> list[Operation]:
    """Return the operations with the members side by side as one region, if that is possible."""
    order, torn = _together(operations, members)
    if torn or not draws.are_kept(operations, order):
        return list(operations)
    return [o._replace(region=region) if o.name in members else o for o in order]


def _whole_blocks(operations: Iterable[Operation], blocks: Collection[str]) -> list[Operation]:
    arranged, seen = list[Operation](), dict[str, int]()
    for block, in_block in groupby(operations, key=lambda o: o.block):
        if block not in blocks:
            arranged += in_block
            continue
        seen[block] = seen.get(block, 0) + 1
        name = block if seen[block] == 1 else f"{block}, part {seen[block]}"
        arranged += [o._replace(region=Region(name, Fate.KEPT)) for o in in_block]
    return arranged


def _members(
    graph: Graph, operations: Sequence[Operation], wished: Mapping[str, Wish], recomputed: Iterable[str]
) -> set[str]:
    """Return the operations to be made again, without those whose values leave a block that is wholly recomputed."""
    block, leaves = {o.name: o.block for o in operations}, {name for _, name in graph.outputs}
    for o in operations:
        leaves.update(name for name in o.reads if block.get(name, o.block) != o.block)
    return {name for name in recomputed if wished[name].alone or name not in leaves}


def _one_by_one(
    operations: Iterable[Operation], blocks: Collection[str], members: Collection[str], draws: Draws
) -> list[Operation]:
    """Return the operations, where the members in these blocks have regions of their own."""
    arranged, number = list[Operation](), 0
    for block, in_block in groupby(operations, key=lambda o: o.block):
        part = list(in_block)
        for region in _regions(part, members, draws) if block in blocks else ():
            number += 1
            part = _made_again(part, region, Region(f"{block}, part {number}", Fate.AGAIN), draws)
        arranged += part
    return arranged


def _regions(operations: Sequence[Operation], members: Collection[str], draws: Draws) -> Iterable[set[str]]:
    """Return regions as large as possible, with no other operation on a way from one member to another.

    The results of one call that draws read the same, so they are of one level, and of one region.

    Regions that others depend on come first, so that none tears another when its members are put side by side.
    """
    level, home, calls = dict[str, int](), dict[str, str](), dict[int | str, str]()

    def root(name: str) -> str:
        while home[name] != name:
            name = home[name]
        return name

    for o in operations:
        is_recomputed = o.name in members
        before = [name for name in o.reads if name in level]
        level[o.name] = max((level[n] + (n in members and not is_recomputed) for n in before), default=0)
        if is_recomputed:
            home[o.name] = o.name
            for name in before:
                if name in members and level[name] == level[o.name]:
                    home[root(name)] = o.name
            if (call := draws.calls.get(o.name)) is not None:
                home[root(calls.setdefault(call, o.name))] = o.name
    regions = dict[str, set[str]]()
    for name in sorted(home, key=level.__getitem__):
        regions.setdefault(root(name), set()).add(name)
    return regions.values()


def _gathered_again(operations: Sequence[Operation], gathers: Collection[str]) -> list[Operation]:
    """Make each gather a region of its own, if backward needs its result and no larger region has it."""
    alias = {o.name: o.alias for o in operations if o.alias}

    def memory(name: str) -> str:
        while name in alias:
            name = alias[name]
        return name

    saved = {memory(name) for o in operations for name in (*o.keeps, *(o.reads if o.region is not None else ()))}
    return [
        o._replace(region=Region(o.name, Fate.AGAIN))
        if o.name in gathers and o.grad and o.region is None and o.name in saved
        else o
        for o in operations
    ]


# ---- attention ----


def attentions(graph: Graph, stored: Collection[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield every attention, a name and its nodes: one operator, or two products of activations around a softmax.

    Between the products, all operators that pass elements on belong to it, and so do views of the products' operands,
    if nothing else reads these.
    """
    for node in graph.nodes:
        members = set[str]()
        if node.row is not None and node.row.passes > 1:
            members = {node.name}
        elif _normalizes(graph, node):
            ends = lambda n: _is_product(n, stored)  # noqa: E731
            above = _ways(graph, node.inputs, lambda n: n.inputs, ends)
            below = _ways(graph, graph.users[node.name], lambda n: graph.users[n.name], ends)
            members = {node.name, *above, *below} if above and below else set()
        if members:
            yield node.name, frozenset(members | _own_views(graph, members))


def _normalizes(graph: Graph, node: Node) -> bool:
    """Return whether each element of the result needs its whole row, and backward needs the result alone."""
    row, shape = node.row, graph.types[node.name].shape
    alone = row is not None and row.saves == ("result",) and not row.pointwise and len(node.inputs) == 1
    return alone and graph.types[node.inputs[0]].shape == shape


def _is_product(node: Node, stored: Collection[str]) -> bool:
    return node.row is not None and node.row.contraction and not any(name in stored for name in node.inputs)


def _passes_on(node: Node) -> bool:
    row = node.row
    return node.is_parallel or (row is not None and bool(node.inputs) and (row.pointwise or row.view or row.random))


def _ways(
    graph: Graph, start: Iterable[str], follow: Callable[[Node], Iterable[str]], ends: Callable[[Node], bool]
) -> set[str]:
    """Return the nodes on ways from `start` to an end, through operators that pass elements on."""
    way: set[str] = set()

    def further(name: str) -> Iterable[str]:
        node = graph.by_name[name]
        return follow(node) if _passes_on(node) and not ends(node) else ()

    for name in postorder(start, further):
        if ends(graph.by_name[name]) or any(n in way for n in further(name)):
            way.add(name)
    return way


def _own_views(graph: Graph, members: Collection[str]) -> set[str]:
    """Return the views behind the members' operands that nothing else reads."""
    results, views = {name for _, name in graph.outputs}, set[str]()
    pending = [name for member in members for name in graph.by_name[member].inputs]
    while pending:
        node = graph.by_name[pending.pop()]
        readers = set(graph.users[node.name])
        alone = readers <= views.union(members) and node.name not in results
        if node.row is not None and node.row.view and node.inputs and alone and node.name not in members:
            views.add(node.name)
            pending += node.inputs
    return views
