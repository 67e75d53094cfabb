"""The memory of gathered parameters: a pool of buffer sets, one for each block that is gathered at a time.

A set fits only blocks with the same shapes of parameters, and the pool keeps every set once it is made: from the second
step on all sets are always there. A block takes one when its gather is launched and gives it back after its last
reader. It takes one again for the reduce-scatter of its gradients, until that of the next block is launched.

Sources: lowering/runtime/buffers.py, lowering/runtime/blocks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.step.actions import Actions
from shardwright.pcg.step.buckets import PLACED_BYTES
from shardwright.pcg.step.chunk import Block, Chunk
from shardwright.pcg.step.parameters import Parameter, Slices
from shardwright.pcg.types import TensorType

_OfParameter = tuple[tuple[int, ...], str, float, Slices | None, bool]
BufferKind = tuple[_OfParameter, ...]
"""The key by which blocks share a set: of each parameter, its slices' shape, dtype and bytes, how they are cut, and
whether they are sent encoded."""

_Known = dict[tuple[TensorType, Slices | None, str, float, bool], tuple[_OfParameter, float]]
"""A parameter's part of the kind and of the bytes of a set, by everything that they depend on."""


def pool_bytes(steps: Steps, chunk: Chunk, actions: Actions) -> dict[BufferKind, float]:
    """Return the bytes of all the sets that a step's forward and backward through a chunk need, by kind.

    The first and the last of several microbatches show all sets, since sets stay once they are made.
    """
    if not chunk.blocks:
        return {}
    known: _Known = {}
    sets = {
        verb: [_buffer_set(steps, block, known, gradients=verb == "scatter") for block in chunk.blocks]
        for verb in ("gather", "scatter")
    }
    began = {"free": "gather", "deliver": "scatter"}
    numbers = {kind: number for number, (kind, _) in enumerate(chain(*sets.values()))}
    of = {verb: [numbers[kind] for kind, _ in buffers] for verb, buffers in sets.items()}
    now, most = ([0] * (2 * len(chunk.blocks)) for _ in range(2))
    verbs = {*sets, *began}
    listed = [a for group in chain(actions.forward, actions.backward) for a in group if a.verb in verbs]
    several = [a for a in listed if a.microbatch != "last"] + [a for a in listed if a.microbatch != "first"]
    for action in several if steps.graph.mesh.num_microbatches > 1 else listed:
        if action.verb in sets:
            number = of[action.verb][action.number]
            now[number] += _times(chunk.blocks[action.number], action.verb)
            most[number] = max(most[number], now[number])
        else:
            verb = began[action.verb]
            now[of[verb][action.number]] -= _times(chunk.blocks[action.number], verb)
    return {kind: most[numbers[kind]] * num_bytes for kind, num_bytes in chain(*sets.values())}


def _times(block: Block, verb: str) -> int:
    """Return how many blocks need their own set: all that a folded block stands for, if gathered weights stay."""
    stays = verb == "gather" and block.slices.lifetime != "pass"
    return 1 + stays * block.uses[0].more


def _buffer_set(steps: Steps, block: Block, known: _Known, *, gradients: bool) -> tuple[BufferKind, float]:
    """Return the kind and bytes of the set for a block's parameters, or for their gradients."""
    types, kind, size = steps.graph.types, list[_OfParameter](), 0.0
    sent = steps.execution.reduce_dtype if gradients else None
    for p in block.parameters:
        num_bytes = p.summed_bytes if gradients else p.used_bytes
        is_encoded = (p.summed_as if gradients else p.gathered_as) is not None
        key = types[p.leaf], p.slices, sent or p.used_dtype, num_bytes, is_encoded
        if key not in known:
            slices = p.slices and p.slices._replace(lifetime="pass", summed=False)
            shape = types[p.leaf].local_shape(steps.graph.mesh)
            known[key] = (
                (shape, sent or p.used_dtype, num_bytes, slices, is_encoded),
                _buffers(steps, p, num_bytes) * num_bytes,
            )
        buffer, own_bytes = known[key]
        kind.append(buffer)
        size += own_bytes
    return tuple(kind), size


def joined(pools: Mapping[BufferKind, float], others: Mapping[BufferKind, float]) -> dict[BufferKind, float]:
    """Return the sets that two chunks of a device need, which run one after the other."""
    return {kind: max(pools.get(kind, 0.0), others.get(kind, 0.0)) for kind in {**pools, **others}}


def _buffers(steps: Steps, parameter: Parameter, num_bytes: float) -> int:
    """Return how many copies of a parameter a set has: in its place only, or in send and receive buffers too."""
    return 1 if is_direct(steps, parameter, num_bytes) else 3


def is_direct(steps: Steps, parameter: Parameter, num_bytes: float) -> bool:
    """Return whether a parameter's slices are sent straight from and into place, in a message of their own."""
    slices, mesh = parameter.slices, steps.graph.mesh
    assert slices is not None
    in_place = (slices.dim, slices.blocks) == (0, 1)
    return in_place and num_bytes / mesh.sizes[mesh.index(slices.axis)] >= PLACED_BYTES
