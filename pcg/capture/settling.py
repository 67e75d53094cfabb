"""A check that all steps are like the first, and the Python state that a graph carries from step to step.

`torch.export` runs forward once. A second capture starts from the state that it left, and decides about that state:
every tensor that the first forward left is an input s of the graph, as buffers are:

    same graph, no s written    s is a cache, which the first forward made of constants: it is made in every step
    same graph, s written       s is carried as a buffer; it begins as the value that the first forward read instead
    another graph               refused

A number is carried too, as a tensor of no dimensions, if forward only does arithmetic with it. Tensors that a
forward leaves and never reads are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.pcg.capture.places import is_same
from shardwright.pcg.capture.state import LEFT, Carrier, Kept
from shardwright.pcg.errors import CaptureError, GraphError
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import run_serial

Found = tuple[Graph, Mapping[str, Tensor]]
"""A graph, and by target its constants and the first values of what it carries beside the model's buffers."""
Capture = Callable[[Kept], Found]
_MUTATED = "is mutated in the forward method"
_SHAPES_LOG = "torch.fx.experimental.symbolic_shapes"
"""What a forward that asks about numbers is told in: its module is not imported for its name, as it imports sympy."""


def settled(kept: Kept, capture: Capture) -> Found:
    """Return the result of `capture`; raise a `CaptureError` if later steps would differ from the first.

    `kept` is the state around the model's first forward.
    """
    try:
        captured = capture(kept)
    except CaptureError as error:
        if _MUTATED not in str(error):
            raise
        kept = Kept(kept.model, kept.plain_tensors())  # tensors written in place become inputs
        captured = capture(kept)
    if not kept.changed:
        return _finished(captured, kept, {})
    refusal: CaptureError | None = None
    for carriers in _ways(kept):
        again = Kept(kept.model, carriers)
        with kept.as_left():
            later = _attempt(again, capture, refusal)
        if not again.changed and (carried := _carried(kept, captured, again, later, capture)) is not None:
            return carried
        refusal = refusal or (again if again.changed else kept).refusal()
    assert refusal is not None
    raise refusal


def _attempt(kept: Kept, capture: Capture, refusal: CaptureError | None) -> Found:
    try:
        with mock.patch.object(logging.getLogger(_SHAPES_LOG), "disabled", new=True):
            return capture(kept)
    except CaptureError as error:
        raise refusal or error from None


def _ways(kept: Kept) -> Iterator[dict[str, Carrier]]:
    """Yield the inputs of a second capture: tensors that the first one left, then numbers too."""
    tensors = {**kept.carriers, **kept.left_tensors()}
    yield tensors
    if numbers := kept.left_numbers():
        yield {**tensors, **numbers}


def _carried(kept: Kept, captured: Found, again: Kept, later: Found, capture: Capture) -> Found | None:
    """Return the graph of every step; None if two steps do not run the same."""
    same = _Same(kept, captured, again, later)
    if not same.holds():
        return None
    carried = {path for path in same.live if path in same.written or same.is_buffer(path)}
    if not carried:
        return _finished(captured, kept, {})
    if any(again.carriers[path].place.origin.is_shared for path in carried):  # others see what lies there
        return None
    if same.live - carried:  # caches beside them, which are to be made in every step
        again = Kept(kept.model, {p: c for p, c in again.carriers.items() if p in carried or p in kept.carriers})
        same = _Same(kept, captured, again, capture(again))
        if not again.changed.keys() <= kept.changed.keys() or not same.holds():
            return None
    first = {path: same.first_value(path) for path in carried}
    values = {path: value for path, value in first.items() if value is not None}
    return _finished(same.later, again, values) if len(values) == len(first) else None


def _finished(captured: Found, kept: Kept, carried: Mapping[str, Tensor]) -> Found:
    """Return the graph with outputs for the carried state only: `carried`, and what the first forward wrote in place.

    Other places become constants.
    """
    graph, constants = captured
    own = {path: carrier.value for path, carrier in kept.carriers.items() if carrier.is_first}
    outputs = tuple((key, name) for key, name in graph.outputs if _stays(key, kept, {*own, *carried}))
    carried = {**{key: own[key] for key, _ in outputs if key in own}, **carried}
    still = own.keys() - carried.keys()
    nodes = (replace(n, op="constant") if n.op == "buffer" and n.attr("target") in still else n for n in graph.nodes)
    graph = Graph(tuple(nodes), outputs).without_dead_nodes().validate()
    read = {str(node.attr("target")) for node in graph.nodes if node.is_leaf} | carried.keys()
    return graph, {name: value for name, value in {**constants, **own, **carried}.items() if name in read}


def _stays(key: str, kept: Kept, carried: Collection[str]) -> bool:
    return not key.startswith(LEFT) and (key not in kept.carriers or key in carried)


class _Same:
    """A comparison of two graphs: the second reads inputs where the first computes values from constants.

    carriers  the inputs of the second graph that the first has not
    live      those of them on which anything depends, except what is left in the places of others
    meant     for each of them that the second graph reads, the node of the first graph in its place
    """

    def __init__(self, kept: Kept, found: Found, again: Kept, later: Found) -> None:
        self.found, self.later = found, later
        self.carriers = {path: c for path, c in again.carriers.items() if path not in kept.carriers}
        self.meant: dict[str, str] = {}
        self.written = {key for key, _ in later[0].outputs if key in self.carriers}
        self._left, self._after = dict(found[0].outputs), dict(later[0].outputs)
        self._fixed = _made_of(found[0], {"constant"})
        numbers = {path for path, carrier in self.carriers.items() if carrier.is_first}
        self._numbers = _made_of(later[0], {"constant"}, numbers) - _made_of(later[0], {"constant"})
        self._leaves = {str(n.attr("target")): n.name for n in later[0].leaves("buffer")}
        self.live = self._find_live()

    def _find_live(self) -> set[str]:
        graph = self.later[0]
        reads = dict[str, frozenset[str]]()
        for node in graph.nodes:
            own = {str(node.attr("target"))} if node.op == "buffer" else set[str]()
            reads[node.name] = frozenset(own & self.carriers.keys()).union(*(reads[i] for i in node.inputs))
        after = {path: reads[self._after[path]] for path in self.written}
        live = {path for key, name in graph.outputs if not self._is_left(key) for path in reads[name]}
        live |= {path for path, read in after.items() if path in read or self.is_buffer(path)}  # it counts, or averages
        while more := {path for one in live for path in after.get(one, ())} - live:
            live |= more
        return live

    def is_buffer(self, path: str) -> bool:
        """Return whether a place is registered as a buffer, so that users see it."""
        return self.carriers[path].place.kind == "_buffers"

    def _is_left(self, key: str) -> bool:
        return key.startswith(LEFT) or key in self.carriers

    def holds(self) -> bool:
        """Return whether every result, and everything live, is computed in the same way."""
        keys = [[key for key, _ in graph.outputs if not self._is_left(key)] for graph in (self.found[0], self.later[0])]
        if keys[0] != keys[1]:
            return False
        pending = [(self._left[key], self._after[key]) for key in keys[0]]
        tensors = [path for path in self.live if not self.carriers[path].is_first]
        pending += [(self._left[LEFT + path], self._after.get(path) or self._leaves[path]) for path in tensors]
        seen = set[tuple[str, str]]()
        while pending:
            pair = pending.pop()
            if pair not in seen:
                seen.add(pair)
                if (inputs := self._match(*pair)) is None:
                    return False
                pending += inputs
        return True

    def _match(self, mine: str, other: str) -> list[tuple[str, str]] | None:
        """Return the pairs of operands that have to be equal too; None if the nodes differ."""
        one, two = self.found[0].by_name[mine], self.later[0].by_name[other]
        path = str(two.attr("target")) if two.op == "buffer" else ""
        if mine in self._fixed and (other in self._numbers or path in self.carriers):
            is_same = not path or self.meant.setdefault(path, mine) == mine
            return [] if is_same else None
        if (one.op, one.attrs, len(one.inputs)) != (two.op, two.attrs, len(two.inputs)):
            return None
        if one.op == "constant" and not _equal(*(of[1][str(one.attr("target"))] for of in (self.found, self.later))):
            return None
        return list(zip(one.inputs, two.inputs, strict=True))

    def first_value(self, path: str) -> Tensor | None:
        """Return the value of a place when training begins; None if it is not known."""
        carrier = self.carriers[path]
        if carrier.is_first or path not in self.meant:  # in the latter case, nothing reads it
            return carrier.value if carrier.is_first else torch.zeros_like(carrier.value)
        graph, constants = self.found
        name, needed = self.meant[path], set[str]()
        if (node := graph.by_name[name]).op == "constant":
            return constants[str(node.attr("target"))]
        for node in reversed(graph.nodes):
            if node.name == name or node.name in needed:
                needed.update({node.name, *node.inputs})
        part = Graph(tuple(node for node in graph.nodes if node.name in needed), (("value", name),))
        leaves = {n.name: constants[str(n.attr("target"))].detach().cpu().numpy() for n in part.leaves("constant")}
        try:
            value = torch.from_numpy(run_serial(part, leaves)[name].copy())
        except (GraphError, TypeError):  # an operator without a row, a dtype that NumPy has not
            return None
        return value.to(getattr(torch, part.types[name].dtype))


def _made_of(graph: Graph, kinds: Collection[str], targets: Collection[str] = ()) -> set[str]:
    """Return the nodes computed only of leaves of some kinds and of buffers with these targets."""
    nodes = set[str]()
    for node in graph.nodes:
        if node.is_leaf:
            nodes.update([node.name] * (node.op in kinds or (node.op == "buffer" and node.attr("target") in targets)))
        elif not node.is_random and nodes.issuperset(node.inputs):
            nodes.add(node.name)
    return nodes


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or not (isinstance(one, FakeTensor) or isinstance(other, FakeTensor) or not is_same(one, other))
