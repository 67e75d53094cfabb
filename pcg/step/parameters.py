"""Parameters on the way to their readers, and the part of that way which a step takes around its operators.

`replicate` on a stored parameter is no operation: every reader lies behind it, so the gradient may be summed once, when
it is complete. `combine` of a sharded parameter (ZeRO), alone or with `replicate` along the same axis, is done for
a whole block of the model at a time. Any other change of a parameter's layout is an operator of the program, as if
the parameter were an activation.

The order of the operators and the `combine`'s attribute `keep` determine how often a block is gathered and its
gradients are scattered:

    combine, then replicate over time        gathered once a step, whole gradients scattered once        ZeRO-1
    replicate over time, combine keep=step   gathered once a step, gradients scattered per microbatch    ZeRO-2
    ..., combine keep=microbatch             gathered per microbatch, for forward and backward
    ..., combine                             gathered per microbatch, again for backward                 ZeRO-3

In mixed precision there is a `cast` on the way. Before a `combine` it is part of the gathering: shards are cast, and
16 bits gathered. Otherwise it is an operator of the program, once in each forward, and readers see an activation;
the gradient that comes back through it, and that of a gathered block, is accumulated in the parameter's own dtype, and
sent in `Parameter.reduced_dtype`: the execution's `reduce_dtype`, or the parameter's own.

What is gathered and summed may be sent encoded: the execution's `encodings`, for floats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple

from shardwright.pcg.analysis import is_timeless
from shardwright.pcg.encodings import Encoding
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import local_blocks
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.parallel import COMBINE, REPLICATE
from shardwright.pcg.precision import HALVES
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.types import ITEM_BYTES, TensorType

KEEP = "keep"
"""The attribute of a parameter's `combine` that names how long the gathered whole stays."""
Lifetime = Literal["pass", "microbatch", "step"]
LIFETIMES: tuple[Lifetime, ...] = ("pass", "microbatch", "step")


class Slices(NamedTuple):
    """The slices along `axis` in which a parameter is stored; they are gathered before use.

    dim, blocks   the slices, in blocks of what the other axes leave
    copied        whether ranks use it differently, so that its gradient is reduce-scattered; otherwise every rank has
                  the whole gradient and keeps its slice
    lifetime      how long the gathered whole stays: for forward and again for backward, for a microbatch, or a step
    summed        whether the whole gradient is accumulated over a step, and scattered once; else in each microbatch
    """

    axis: str
    dim: int
    blocks: int
    copied: bool = False
    lifetime: Lifetime = "pass"
    summed: bool = False


class Parameter(NamedTuple):
    """A parameter on one rank: its storage, its readers' view, and the sums of its gradient.

    leaf            the node that stores it; `result`: the node whose value readers see
    module          the repeated block of the model that it belongs to, or ""
    slices          the slices that are gathered before use; None: nothing is gathered
    sums            axes, in mesh order, that its gradient is summed over when the backward has made it
    num_elements    the number of elements of one rank's part, as stored
    used_bytes      the size, on one rank, of what readers see; `gradient_bytes`: of the accumulated gradient
    used_dtype      the dtype in which it is gathered; `dtype`: in which it is stored
    reduced_dtype   the dtype in which its gradient is sent, to be summed over devices
    reduced_bytes   the size of the accumulated gradient in that dtype
    gathered_as     the encoding in which its slices are gathered; None: as they are
    summed_as       the encoding in which its gradient is sent, to be summed over devices; None: as it is
    whole_bytes     the size of a gathered parameter's whole gradient, where that is accumulated; `summed_bytes`: as it
                    is reduce-scattered
    """

    leaf: str
    result: str
    module: str
    grad: bool
    dtype: str
    slices: Slices | None
    sums: tuple[str, ...]
    num_elements: int
    used_bytes: float
    gradient_bytes: float
    used_dtype: str
    reduced_dtype: str
    reduced_bytes: float
    whole_bytes: float
    summed_bytes: float
    gathered_as: Encoding | None = None
    summed_as: Encoding | None = None

    def gathered_sent(self, size: int) -> float:
        """Return the bytes of the whole as it is gathered from `size` slices."""
        return _sent(self.used_bytes, self.used_dtype, self.gathered_as, size)

    def scattered_sent(self, size: int) -> float:
        """Return the bytes of one rank's whole gradient as it is reduce-scattered into `size` slices."""
        return _sent(self.summed_bytes, self.reduced_dtype, self.summed_as, size)

    @property
    def reduced_sent(self) -> float:
        """The bytes of one rank's gradient as it is sent, to be summed."""
        return _sent(self.reduced_bytes, self.reduced_dtype, self.summed_as, 1)

    @property
    def gathered_bound(self) -> float:
        """The largest error of a gathered element, as a share of the largest magnitude in its tensor."""
        if self.slices is None or self.gathered_as is None:
            return 0.0
        return self.gathered_as.bound_of(1, self.used_dtype)

    @property
    def summed_bound(self) -> float:
        """The largest error of an element of the summed gradient that encoding makes.

        As a share of the largest magnitudes of all that is sent of it, added up over ranks and microbatches. An element
        is encoded once to be scattered, once to be summed, and once as a sum.
        """
        if self.summed_as is None:
            return 0.0
        often = (self.slices is not None and self.slices.copied) + 2 * bool(self.sums)
        return self.summed_as.bound_of(often, self.reduced_dtype)

    @property
    def home(self) -> str:
        """The name shown to people: the parameter's block, or itself."""
        return self.module or self.leaf


def _sent(num_bytes: float, dtype: str, encoding: Encoding | None, size: int) -> float:
    if encoding is None:
        return num_bytes
    return float(size * encoding.num_bytes(round(num_bytes / ITEM_BYTES[dtype] / size), dtype))


@dataclass(frozen=True)
class Parameters:
    """The parameters by leaf.

    `aliases`: parallel operators done around the program -> the node whose value readers see.
    """

    by_leaf: dict[str, Parameter]
    aliases: dict[str, str]

    @cached_property
    def names(self) -> dict[str, str]:
        """The leaf behind every name under which an operator may read a parameter."""
        seen = {p.result: leaf for leaf, p in self.by_leaf.items()}
        stored = {leaf: leaf for leaf in self.by_leaf}
        return {**seen, **stored, **{name: seen.get(base, base) for name, base in self.aliases.items()}}


def find_parameters(graph: Graph, execution: Execution = DEFAULT) -> Parameters:
    """Follow every parameter from its storage to its readers."""
    parameters, results = Parameters({}, {}), {name for _, name in graph.outputs}
    narrow, sizes = bool(narrow_dtypes(graph)), dict(zip(graph.mesh.names, graph.mesh.sizes, strict=True))
    known = dict[tuple[TensorType, TensorType], Parameter]()
    for leaf in graph.leaves("parameter"):
        walk = _Walk(graph, sizes, leaf, results)
        kinds = graph.types[leaf.name], graph.types[walk.result]
        if (alike := known.get(kinds)) is None:
            alike = known[kinds] = _of_types(*kinds, graph.mesh, execution, narrow)
        parameters.aliases.update(walk.aliases)
        parameters.by_leaf[leaf.name] = alike._replace(
            leaf=leaf.name,
            result=walk.result,
            module=module_block(str(leaf.attr("target"))),
            slices=walk.slices,
            sums=tuple([axis for axis in graph.mesh.names if axis in walk.summed]) if walk.summed else (),
        )
    return parameters


def _of_types(kind: TensorType, seen: TensorType, mesh: Mesh, execution: Execution, narrow: bool) -> Parameter:
    """Return a parameter without a name or a way to its readers, from its own type and the type that they see."""
    num_elements, num_whole = prod(kind.local_shape(mesh)), prod(seen.local_shape(mesh))
    used = seen.dtype if narrow else execution.compute_dtype(seen.dtype)
    state, whole = execution.state_dtype(kind.dtype), kind.dtype if narrow else used
    return Parameter(
        leaf="",
        result="",
        module="",
        grad=kind.grad,
        dtype=kind.dtype,
        slices=None,
        sums=(),
        num_elements=num_elements,
        used_bytes=float(num_whole * ITEM_BYTES[used]),
        gradient_bytes=num_elements * ITEM_BYTES[state],
        used_dtype=used,
        reduced_dtype=execution.reduced_dtype(kind.dtype),
        reduced_bytes=float(num_elements * ITEM_BYTES[execution.reduced_dtype(state)]),
        whole_bytes=float(num_whole * ITEM_BYTES[whole]),
        summed_bytes=float(num_whole * ITEM_BYTES[execution.reduced_dtype(whole)]),
        gathered_as=execution.encoding("weights", used),
        summed_as=execution.encoding("gradients", kind.dtype),
    )


def narrow_dtypes(graph: Graph) -> set[str]:
    """Return the 16-bit formats in a graph. A graph that has any determines by itself which dtype is used where."""
    return {kind.dtype for kind in graph.types.values()}.intersection(HALVES)


class _Walk:
    """The parallel operators and the cast between a leaf and its readers.

    `visible`: the node whose value readers see; `line`: a cast that the program does, or "".
    """

    def __init__(self, graph: Graph, sizes: Mapping[str, int], leaf: Node, results: set[str]) -> None:
        self.graph, self.sizes = graph, sizes
        self.aliases: dict[str, str] = {}
        self.summed: set[str] = set()
        self.slices: Slices | None = None
        self.visible = self.leaf = leaf.name
        self.line = ""
        name: str | None = leaf.name
        while name is not None and name not in results:
            name = self._pass(name)

    def _pass(self, name: str) -> str | None:
        """Follow the operators that read `name`, if all are alike. Return the next name, or None at the end."""
        by_name, readers = self.graph.by_name, self.graph.users[name]
        node = by_name[readers[0]] if readers else None
        if node is None or node.op not in (REPLICATE, COMBINE, "cast"):
            return None
        if len(readers) > 1:
            readers = tuple(dict.fromkeys(readers))
        if node.op == REPLICATE:
            axis, others = node.attr("axis"), [by_name[reader] for reader in readers[1:]]
            if any(other.op != REPLICATE or other.attr("axis") != axis for other in others):
                return None
            self._replicate(readers, str(axis))
        elif len(readers) > 1 or self.slices is not None:
            return None
        elif node.op == COMBINE:
            self._combine(node, str(node.attr("axis")))
        elif not self.line:
            self.line = self.visible = node.name
        else:
            return None
        return node.name if len(readers) == 1 else None

    def _replicate(self, readers: Sequence[str], axis: str) -> None:
        if self.slices is not None and self.slices.axis == axis:
            self.slices = self.slices._replace(copied=True)
        elif axis != TIME and self.sizes[axis] > 1:
            self.summed.add(axis)
        self.aliases.update(dict.fromkeys(readers, self.visible))

    def _combine(self, node: Node, axis: str) -> None:
        if self.sizes[axis] == 1:
            self.aliases[node.name] = self.visible
            return
        mesh, layouts = self.graph.mesh, self.graph.types[node.inputs[0]].layouts
        number = mesh.index(axis)
        dim, blocks = layouts[number].dim, local_blocks(layouts, number, mesh.sizes)
        once = mesh.num_microbatches > 1 and is_timeless(self.graph, node.name)
        keep = _lifetime(node)
        self.slices = Slices(axis, dim, blocks, lifetime="step" if once else keep, summed=once)
        self.visible = node.name
        if self.line:
            self.aliases[self.line], self.line = self.leaf, ""

    @property
    def result(self) -> str:
        """The node whose value is the parameter's; after a cast in the program the value is an activation."""
        return self.leaf if self.line else self.visible


def _lifetime(node: Node) -> Lifetime:
    keep = dict(node.attrs).get(KEEP, LIFETIMES[0])
    if keep not in LIFETIMES:
        raise GraphError(f"{node}: {KEEP} is {keep!r}; expected one of {list(LIFETIMES)}")
    return keep


@lru_cache(maxsize=1 << 14)
def module_block(name: str) -> str:
    """Return the repeated part of the model that a name lies in: `h.3` for `h.3.attn.weight`, else ""."""
    match = re.match(r"((?:[^.]+\.)*?\d+)\.", name)
    return match[1] if match else ""


def block_of(node: Node) -> str:
    """Return the repeated block of the model that an operator or a parameter lies in, or ""."""
    return module_block(str(node.attr("target")) if node.op == "parameter" else f"{node.source.module}.")


def blocks_of(graph: Graph) -> list[str]:
    """Return the blocks of the model that operators lie in."""
    modules = (f"{node.source.module}." for node in graph.nodes if not node.is_leaf)
    return [name for name in dict.fromkeys(map(module_block, modules)) if name]
