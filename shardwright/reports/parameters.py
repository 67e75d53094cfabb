"""Every parameter of a plan: its place, its layout, and each device's share."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from shardwright.pcg.graph import Node
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.meshes import first_ranks, stage_meshes
from shardwright.pcg.step.parameters import module_block
from shardwright.pcg.types import ITEM_BYTES, TensorType
from shardwright.reports.facts import PlanFacts, StoredAs
from shardwright.reports.lifetimes import lifetime_name
from shardwright.reports.units import ranges


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """The storage of a parameter.

    local_shape   of a device's part
    layouts       by mesh axis; `stored` in words
    lifetime      of a gathered parameter, as "ZeRO-3"
    num_bytes     of all of it; `local_bytes` on a device
    ranks         that have a part of it, and `copies` how many have the same part
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    layouts: tuple[str, ...]
    stored: tuple[StoredAs, ...]
    lifetime: str
    num_bytes: int
    local_bytes: int
    ranks: str
    copies: int


def stored_parameters(facts: PlanFacts) -> dict[str, StoredFacts]:
    """Return the storage by the parameter's name in the model, in the order of the graph."""
    return {str(leaf.attr("target")): _stored(facts, leaf) for leaf in facts.graph.leaves("parameter")}


def _stored(facts: PlanFacts, leaf: Node) -> StoredFacts:
    kind, mesh, stages = facts.graph.types[leaf.name], facts.mesh, facts.program.stages
    holders = [n for n, stage in enumerate(stages) if any(leaf.name in piece.leaves for piece in stage.pieces)]
    holders = holders or [*range(len(stages))]
    meshes = stage_meshes(mesh, facts.plan.execution)
    firsts, mesh = first_ranks(meshes), meshes[holders[0]]
    copies = sum(_copies(meshes[stage], kind) for stage in holders)
    return StoredFacts(
        kind.shape,
        kind.local_shape(mesh),
        kind.dtype,
        tuple(map(str, kind.layouts)),
        facts.storage[leaf.name],
        lifetime_name(facts.lifetimes[leaf.name], mesh) if leaf.name in facts.lifetimes else "",
        kind.num_elements * ITEM_BYTES[kind.dtype],
        kind.local_bytes(mesh),
        ranges([rank for stage in holders for rank in range(firsts[stage], firsts[stage + 1])]),
        copies,
    )


def _copies(mesh: Mesh, kind: TensorType) -> int:
    """Return the number of a stage's devices that have the same part."""
    parts = (n for n, layout in zip(mesh.device_sizes, kind.layouts, strict=True) if layout.is_shard)
    return mesh.num_devices // prod(parts)


def parameters_data(facts: PlanFacts) -> list[dict[str, Any]]:
    """Return the same for programs: parameters stored alike in numbered blocks together.

    `name`: in the block. `blocks`: the list that the blocks are in, and their numbers; "" and none outside blocks.
    """
    groups = defaultdict[tuple[StoredFacts, str, str], list[int]](list)
    for name, stored in stored_parameters(facts).items():
        block = module_block(name)
        stem, _, number = block.rpartition(".")
        numbers = groups[stored, stem, name.removeprefix(f"{block}.")]
        if block:
            numbers.append(int(number))
    return [
        {**asdict(stored), "name": name, "blocks": [stem, numbers]} for (stored, stem, name), numbers in groups.items()
    ]
