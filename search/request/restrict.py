"""Plans that people choose by hand, as restrictions of the search space.

Data parallel, ZeRO-3 and Megatron-style tensor parallel plans are what is left of the space when each axis may do
only what its *role* allows; the same exact search then tunes them. They are the baselines that a plan is compared
with, and the forced layouts that the tests run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from math import gcd

from shardwright.pcg.analysis import constant_nodes, following
from shardwright.pcg.choice import COPIED, Choice, indivisible
from shardwright.pcg.dispatch import Sent
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.layout import Layout, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.offers import offered
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step.regions import attentions
from shardwright.search.choices.problem import Restrict
from shardwright.search.request.rings import check_rings, num_rings, rings

DATA, ZERO, EXPERT, TENSOR, FREE = "data", "zero", "expert", "tensor", "free"
CONTEXT, ULYSSES, RING = "context", "ulysses", "ring"
ROLES = (DATA, ZERO, EXPERT, CONTEXT, ULYSSES, RING, TENSOR, FREE)
SEQUENCE = (CONTEXT, ULYSSES, RING)
"""The roles that split the sequence."""


@lru_cache(maxsize=16)
def batch_factors(graph: Graph, dim: int = 0, *, integers_only: bool = False) -> Mapping[str, Choice]:
    """Return, for every node that carries the batch dimension, the choice that splits it.

    The batch is dimension 0 of the inputs, the sequence their dimension 1. `dim` says which of them is followed through
    factor strings, so that `(b s)` after a reshape and the sum over it in a loss are found too. An operator that needs
    the batch whole is gathered around: a result with as many elements in the same dimension is taken to carry the batch
    again, as is one of picked rows, which only says what may be split there. With `integers_only`, only inputs of
    integers, such as tokens, are followed.
    """
    inputs = [(n.name, graph.types[n.name]) for n in graph.leaves("input")]
    where: dict[str, Layout] = {
        name: S(dim) for name, kind in inputs
        if len(kind.shape) > dim and (kind.dtype.startswith("int") or not integers_only)
    }  # fmt: skip
    factors: dict[str, Choice] = {}
    ways: dict[Hashable, tuple[Choice, Layout] | None] = {}
    for node in graph.nodes:
        if node.is_leaf:
            continue
        way = None
        if node.op != OPAQUE:  # equal blocks have equal ways
            signature = graph.signature(node)
            key = node.op, signature, tuple(map(where.get, node.inputs))
            if key not in ways:
                ways[key] = following(node, signature, where, ROWS[node.op])
            way = ways[key]
        if way is not None:
            factors[node.name] = way[0]
        if (layout := _gathered_around(graph, node, where) if way is None else way[1]) is not None and layout.is_shard:
            where[node.name] = layout
    return factors


def _gathered_around(graph: Graph, node: Node, where: Mapping[str, Layout]) -> Layout | None:
    """Return the layout in which the result of an operator without a split along the batch may be split again."""
    shape = graph.types[node.name].shape
    for name in node.inputs:
        layout, before = where.get(name), graph.types[name].shape
        if layout is not None and (shape[: layout.dim + 1] == before[: layout.dim + 1] or _picks(node, name, layout)):
            return layout
    return None


def _picks(node: Node, name: str, layout: Layout) -> bool:
    """Return whether an operator picks rows of a value by their numbers, along a dimension split like this."""
    is_index = node.op == "index" and node.inputs[0] == name and len(node.inputs) == 2
    return is_index and (node.attr("dim"), 1) == (layout.dim, layout.blocks)


def role_restriction(graph: Graph, roles: Sequence[str], sizes: Sequence[int]) -> Restrict:
    """Return the restriction that gives each axis its role.

    data      splits the batch wherever an operator has it, and nothing else; parameters are stored whole
    zero      as data, but every parameter that can be is stored sharded, and penalties on them are computed there
    expert    as data, but experts are split too: tokens are sent to them and back
    context   splits dimension 1 of the inputs, the sequence, and nothing else; parameters are whole or in slices;
              repeated values, such as keys that several query heads share, may be gathered before
    ulysses   as context, but attention is split by heads, where their number allows it
    ring      as context, but keys and values travel around the axis; no rewrite takes such attention apart
              (`keeps_rings`). A request is refused if some attention cannot be in a ring (`check_roles`)
    tensor    splits anything but the batch; an operator that multiplies or looks up a weight is split along the weight
              where it can be
    free      anything
    """
    unknown = [r for r in roles if r not in ROLES]
    if unknown:
        raise PlanError(f"unknown axis role {unknown[0]!r}; choose one of {list(ROLES)}")
    batch = batch_factors(graph)
    context = batch_factors(graph, 1) if not set(SEQUENCE).isdisjoint(roles) else {}
    ways = {ULYSSES: head_factors(graph, batch) if ULYSSES in roles else {}, RING: rings(graph, context)}
    repeated = _repeated(graph) if context else frozenset[str]()
    extents = {
        (n, choice): _extent(graph, graph.by_name[n], choice) for d in (batch, context) for n, choice in d.items()
    }
    free = penalties(graph)
    sent = _sent(graph, batch) if EXPERT in roles else {}
    named = _named(graph, sent)
    sending = {name: _sending(graph, name, choice, roles, sizes) for name, choice in sent.items()}
    weights = _weights(graph)

    def allowed(node: Node, axis: int, choice: Choice | Layout) -> bool:
        role = roles[axis]
        if role == FREE:
            return True
        if isinstance(choice, Layout):
            return (role == EXPERT and node.name in named) or _storage_allowed(graph, node, role, choice, sizes[axis])
        if role == EXPERT and (node.name in named or axis in sending.get(node.name, ())):
            return node.name in named or choice == sent[node.name]
        if role == ZERO and node.name in free:
            return True
        if role == ZERO and node.op == "cast" and is_weight(graph, node.name):
            return _cast_allowed(graph, node, choice, sizes[axis])
        if along := {c for c, n in ways.get(role, {}).get(node.name, ()) if n % sizes[axis] == 0}:
            return choice in along
        if role in SEQUENCE and node.name in repeated and choice == COPIED:
            return True
        mine = (context if role in SEQUENCE else batch).get(node.name)
        if role == TENSOR:
            along_weight = {f for f, size in weights[node.name] if size % sizes[axis] == 0}
            return choice.unblocked in along_weight if along_weight else choice != mine
        if mine is None or extents[node.name, mine] % sizes[axis]:
            return not choice.factors
        return choice == mine

    return allowed


def _repeated(graph: Graph) -> frozenset[str]:
    """Return the values that an `expand` has made larger, also after reshapes and permutations."""
    names, types = set[str](), graph.types
    for node in graph.nodes:
        grows = node.op == "expand" and types[node.name].num_elements > types[node.inputs[0]].num_elements
        if grows or (node.op in ("reshape", "permute") and node.inputs[0] in names):
            names.add(node.name)
    return frozenset(names)


def head_factors(graph: Graph, batch: Mapping[str, Choice]) -> Mapping[str, list[tuple[Choice, int]]]:
    """Return, by operator of attention, the choices that split its heads, dimension -3 of its result, with their sizes.

    The views before and after attention are not among the operators.
    """
    stored = {node.name for node in graph.nodes if is_weight(graph, node.name)}
    factors = dict[str, list[tuple[Choice, int]]]()
    for node in (graph.by_name[name] for _, members in attentions(graph, stored) for name in members):
        if node.row is None or node.row.view:
            continue
        heads, signature = len(graph.types[node.name].shape) - 3, graph.signature(node)
        factors[node.name] = [
            (choice, _extent(graph, node, choice))
            for choice, _, made in offered(node.row, signature, lambda size: ())
            if made.is_shard and made.dim == heads and choice != batch.get(node.name)
        ]
    return factors


def keeps_rings(before: Graph, after: Graph, roles: Sequence[str]) -> bool:
    """Return whether a rewrite leaves the operators that a role wants in a ring: parts of attention are in none."""
    return RING not in roles or num_rings(after) >= num_rings(before)


def check_roles(graph: Graph, mesh: Mesh, roles: Sequence[str]) -> None:
    """Raise a `PlanError` where attention cannot be in a ring that a role asks for."""
    axes = [(name, size) for name, size, role in zip(mesh.names, mesh.sizes, roles, strict=True) if role == RING]
    if axes := [(name, size) for name, size in axes if size > 1]:
        stored = {node.name for node in graph.nodes if is_weight(graph, node.name)}
        check_rings(graph, batch_factors(graph, 1), stored, axes)


def _sent(graph: Graph, batch: Mapping[str, Choice]) -> dict[str, Choice]:
    """Return the operators whose rows of the batch can be sent to what they name, with the choice that sends them."""
    sent = dict[str, Choice]()
    for node in graph.nodes:
        if node.row is not None and node.row.sends and node.name in batch:
            offered = Sent.offered(node.row, graph.signature(node))
            sent.update((node.name, choice) for choice in offered if choice.outward == batch[node.name])
    return sent


def _named(graph: Graph, sent: Mapping[str, Choice]) -> set[str]:
    """Return the values that rows name, such as experts' weights, and leaves, views and casts that lead only there."""
    names = set[str]()
    for node in reversed(graph.nodes):
        readers = [graph.by_name[name] for name in graph.users[node.name]]
        leads = node.op in ("parameter", "cast") or (node.row is not None and node.row.aliases)
        if leads and readers and all(r.name in names or _reads_as_named(r, node.name, sent) for r in readers):
            names.add(node.name)
    return names


def _reads_as_named(reader: Node, name: str, sent: Mapping[str, Choice]) -> bool:
    rows = reader.row.sends if reader.row is not None else ()
    return reader.name in sent and all(i not in rows for i, read in enumerate(reader.inputs) if read == name)


def _sending(graph: Graph, name: str, choice: Choice, roles: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """Return the axes along which an operator's rows are sent: the first expert axes that together divide it."""
    signature, axes = graph.signature(graph.by_name[name]), list[int]()
    for axis, role in enumerate(roles):
        longer = [*axes, axis]
        if role == EXPERT and indivisible(signature, [choice] * len(longer), [sizes[a] for a in longer]) is None:
            axes = longer
    return axes


@lru_cache(maxsize=16)
def penalties(graph: Graph) -> frozenset[str]:
    """Return the operators that make single numbers of parameters without examples; they may run where slices lie."""
    names, constant = set[str](), constant_nodes(graph)
    of_examples = {leaf.name for leaf in graph.leaves("input") if graph.types[leaf.name].shape}
    for node in graph.nodes:
        if not of_examples.isdisjoint(node.inputs):
            of_examples.add(node.name)
    for node in reversed(graph.nodes):
        users = graph.users[node.name]
        single = graph.types[node.name].num_elements == 1
        if not (node.is_leaf or node.name in of_examples or node.name in constant) and (
            single or names.issuperset(users)
        ):
            names.add(node.name)
    return frozenset(names)


def weight_factors(graph: Graph, node: Node, batch: Choice | None) -> list[tuple[str, int]]:
    """Return the factors, with their sizes, that a contraction or a lookup shares with a parameter it reads."""
    if node.row is None or not (node.row.contraction or node.row.lookup):
        return []
    signature = graph.signature(node)
    held = [dims for name, dims in zip(node.inputs, signature.operands, strict=True) if is_weight(graph, name)]
    members = {f for dims in held for dim in dims for f in dim}
    return [
        (f.name, f.size)
        for i, f in enumerate(signature.factors)
        if i in members and f.role != "fixed" and f.name != batch
    ]


@lru_cache(maxsize=16)
def _weights(graph: Graph) -> Mapping[str, list[tuple[str, int]]]:
    """Return `weight_factors` of every node, without the choice that splits the batch."""
    batch = batch_factors(graph)
    return {node.name: weight_factors(graph, node, batch.get(node.name)) for node in graph.nodes}


def is_weight(graph: Graph, name: str) -> bool:
    """Return whether a value is a parameter, possibly transposed, reshaped or cast."""
    node = graph.by_name[name]
    while node.row is not None and node.row.aliases:
        node = graph.by_name[node.inputs[0]]
    return node.op == "parameter"


def _extent(graph: Graph, node: Node, choice: Choice) -> int:
    """Return the size that an axis divides to split the node this way; 1, which nothing divides, if it cannot."""
    sizes = [f.size // choice.blocks for f in graph.signature(node).factors if f.name in choice.factors]
    return gcd(*sizes) or 1


def _storage_allowed(graph: Graph, node: Node, role: str, layout: Layout, size: int) -> bool:
    if role in (DATA, EXPERT):
        return layout == R
    return role != ZERO or (layout != R) == _shardable(graph, node, size)


def _cast_allowed(graph: Graph, node: Node, choice: Choice, size: int) -> bool:
    """Return whether a cast of a weight may take a choice: shards are cast once, before they are gathered.

    Where others read the weight uncast as well, any choice is allowed.
    """
    if _is_cast(graph, node.inputs[0]):
        return not choice.factors
    alone = graph.users[node.inputs[0]] == (node.name,)
    return not alone or bool(choice.factors) == _shardable(graph, node, size)


def _is_cast(graph: Graph, name: str) -> bool:
    node = graph.by_name[name]
    while node.op != "cast" and node.row is not None and node.row.aliases:
        node = graph.by_name[node.inputs[0]]
    return node.op == "cast"


def _shardable(graph: Graph, node: Node, size: int) -> bool:
    return size > 1 and any(extent % size == 0 for extent in graph.types[node.name].shape)
