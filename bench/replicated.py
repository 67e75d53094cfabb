"""List a plan's operators that stay whole on a mesh axis, where each rank does all of their work, and say why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.plans import CERTIFIED
from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.mesh import TIME
from shardwright.pcg.optable import ROWS
from shardwright.search.request.restrict import DATA, FREE, TENSOR, ZERO, batch_factors

CHEAPER = "cheaper whole"


@dataclass(frozen=True)
class Whole:
    """`count` operators of one kind that an axis does not split, for one reason."""

    axis: str
    op: str
    reason: str
    count: int


def whole_operators(serial: Graph, parallel: Graph, roles: Sequence[str] | None) -> list[Whole]:
    """The operators that stay whole, by axis of devices."""
    batch, mesh = batch_factors(serial), parallel.mesh
    role_of = dict(zip((axis for axis in mesh.names if axis != TIME), roles or (FREE,) * len(mesh), strict=False))
    found: Counter[tuple[str, str, str]] = Counter()
    for node in _costly(serial):
        split = parallel.by_name[node.name].split
        for axis, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
            if name == TIME:
                continue
            if node.op == OPAQUE or not split[axis].factors:
                reason = _reason(serial, node, size, role_of[name], batch.get(node.name))
                found[name, node.op, reason] += 1
    return [Whole(*key, count) for key, count in found.items()]


def _costly(graph: Graph) -> list[Node]:
    """The operators whose work is worth splitting: no leaves, views or scalars, nothing that no parameter reaches."""
    constants = constant_nodes(graph)
    candidates = (n for n in graph.nodes if not n.is_leaf and n.name not in constants and graph.types[n.name].shape)
    return [n for n in candidates if n.op == OPAQUE or not ROWS[n.op].view]


def _reason(graph: Graph, node: Node, size: int, role: str, batch: str | None) -> str:
    if node.op == OPAQUE:
        return f"{node.attr('target')} has no row in the op table"
    factors = [f for f in graph.signature(node).factors if f.role != "fixed"]
    if role in (DATA, ZERO):
        if batch is None:
            return "has no batch dimension"
        factors = [f for f in factors if f.name == batch]
    if role == TENSOR:
        factors = [f for f in factors if f.name != batch]
    if not factors:
        return "only its batch could be split" if role == TENSOR and batch else "has no dimension that may be split"
    proven = CERTIFIED.of(graph, node)
    if not any(f.name in proven for f in factors):
        return f"splitting {' or '.join(f.name for f in factors)} is not certified"
    sizes = sorted({f.size for f in factors if f.name in proven})
    if all(s % size for s in sizes):
        return f"size {' and '.join(map(str, sizes))} not divisible by {size}"
    return CHEAPER


def describe(serial: Graph, parallel: Graph, roles: Sequence[str] | None) -> str:
    """List the whole operators in words: `tp: 5 layer_norm, 4 add (cheaper whole)`."""
    return "; ".join(_by_axis(whole_operators(serial, parallel, roles), len(_costly(serial)))) or "none"


def _by_axis(wholes: Sequence[Whole], num_operators: int) -> Iterator[str]:
    for axis in dict.fromkeys(w.axis for w in wholes):
        mine = [w for w in wholes if w.axis == axis]
        reasons = dict.fromkeys(w.reason for w in mine)
        if sum(w.count for w in mine) == num_operators and CHEAPER in reasons:
            yield f"{axis}: every operator ({CHEAPER})"
            continue
        parts = [", ".join(f"{w.count} {w.op}" for w in mine if w.reason == r) + f" ({r})" for r in reasons]
        yield f"{axis}: " + ", ".join(parts)
