"""The memory that gathered parameters lie in: a pool of buffer sets, one for each block that is there at a time.

A set fits blocks of the same parameters' shapes only, and the pool keeps every set that it has once made: from the
second step on all of them are there all the time. A block takes one when its gather is launched, gives it back after
its last reader, and takes one again for the reduce-scatter of its gradients, until that of the next block is launched.

Sources: lowering/buffers.py, lowering/blocks.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.step.actions import Actions
from shardwright.pcg.step.buckets import PLACED_BYTES
from shardwright.pcg.step.chunk import Chunk
from shardwright.pcg.step.parameters import Parameter, Slices

BufferKind = tuple[tuple[tuple[int, ...], str, Slices | None], ...]
"""What decides whether two blocks can use the same set: of each parameter, its slices' shape and how they lie."""


def pool_bytes(steps: Steps, chunk: Chunk, actions: Actions) -> dict[BufferKind, float]:
    """Bytes of all the sets that a step's forward and backward through a chunk need, by kind."""
    mesh, types = steps.graph.mesh, steps.graph.types
    kinds = [
        tuple((types[p.leaf].local_shape(mesh), p.dtype, p.slices) for p in block.parameters) for block in chunk.blocks
    ]
    sizes = [sum(_buffers(steps, p) * p.used_bytes for p in block.parameters) for block in chunk.blocks]
    now, most = Counter[BufferKind](), Counter[BufferKind]()
    for action in chain(*actions.forward, *actions.backward):
        if action.verb in ("gather", "scatter"):
            kind = kinds[action.number]
            now[kind] += 1
            most[kind] = max(most[kind], now[kind])
        elif action.verb in ("free", "deliver"):
            now[kinds[action.number]] -= 1
    return {kind: most[kind] * num_bytes for kind, num_bytes in zip(kinds, sizes, strict=True)}


def joined(pools: Mapping[BufferKind, float], others: Mapping[BufferKind, float]) -> dict[BufferKind, float]:
    """What two chunks of one device need that run one after the other."""
    return {kind: max(pools.get(kind, 0.0), others.get(kind, 0.0)) for kind in {**pools, **others}}


def _buffers(steps: Steps, parameter: Parameter) -> int:
    """How often a parameter is in a set: in its place only, or in the buffers that are sent and received too."""
    return 1 if is_direct(steps, parameter) else 3


def is_direct(steps: Steps, parameter: Parameter) -> bool:
    """Whether its slices are sent straight from and into place, in a message of their own."""
    slices = parameter.slices
    assert slices is not None
    size = steps.graph.mesh.sizes[steps.graph.mesh.index(slices.axis)]
    return (slices.dim, slices.blocks) == (0, 1) and parameter.used_bytes / size >= PLACED_BYTES
