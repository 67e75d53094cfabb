"""Corrections of torch's tools for DTensors that are laid in blocks, such as a fused QKV weight split by heads.

A strided shard cuts what earlier axes leave into several blocks, and a rank holds its slice of each. torch respects
this when it slices or gathers a whole tensor (2.13, 2.14), but not elsewhere. Tools that save, load or broadcast take
a local part for one contiguous piece, and a redistribution may slice axes in another order or not at all. Both are
corrected here, for DTensors on meshes of ours: parameters, gradients, moments, averages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import groupby, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardwright.lowering import private, private_dtensors
from shardwright.lowering.private import DTensorSpec
from shardwright.pcg.errors import ShardwrightError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

Whole = dict[str, Any]
"""By name, a DTensor with the whole tensor to copy into it, or a finished entry."""


class Piece(NamedTuple):
    """A contiguous piece of a rank's part: its offsets in the logical tensor, its start in the part, its sizes."""

    offsets: torch.Size
    start: tuple[int, ...]
    sizes: torch.Size

    def of(self, local: Tensor) -> Tensor:
        """Return the piece as a view of the rank's part."""
        return local[tuple(slice(at, at + size) for at, size in zip(self.start, self.sizes, strict=True))]

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return the piece as a view of the logical tensor."""
        return whole[tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))]


def honour_blocks() -> None:
    """Make torch's tools treat DTensors of ours in blocks correctly; other DTensors are treated as before.

    Checkpoints (`torch.distributed.checkpoint`) list pieces, `broadcast_from_rank0` copies them, and `redistribute`,
    called or implied by an operator, gathers from the inside out and slices from the outside in.
    """
    for method in (__create_write_items__, __create_chunk_list__, __get_tensor_shard__):
        setattr(DTensor, method.__name__, _where_in_blocks(method))
    private_dtensors.distribute_whole_tensors(_distribute)
    private_dtensors.plan_strided_redistributions(plan)
    private_dtensors.check_views(_check_view)


def pieces(tensor: DTensor) -> tuple[Piece, ...]:
    """Return the pieces of a DTensor that this rank holds."""
    return _pieces(tuple(tensor.shape), tensor.placements, *_place(tensor.device_mesh))


@lru_cache(maxsize=4096)
def _pieces(
    shape: tuple[int, ...], placements: Sequence[Placement], sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Piece, ...]:
    by_dim = list[list[tuple[int, int, int]]]()
    for dim in range(len(shape)):
        held = _held(shape, dim, placements, sizes, coordinate)
        offsets = enumerate((held - np.arange(len(held))).tolist())
        runs = [[start for start, _ in run] for _, run in groupby(offsets, key=lambda pair: pair[1])]
        by_dim.append([(int(held[run[0]]), run[0], len(run)) for run in runs])
    chosen_runs = (tuple(zip(*choice, strict=True)) or ((), (), ()) for choice in product(*by_dim))
    return tuple(Piece(torch.Size(offsets), start, torch.Size(sizes)) for offsets, start, sizes in chosen_runs)


def _held(
    shape: Sequence[int], dim: int, placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> NDArray[np.int64]:
    """Return the indices of a dimension that a rank holds under the placements of the first axes, in local order."""
    held = np.arange(shape[dim])
    for placement, size, place in zip(placements, sizes, coordinate, strict=False):
        if private.shard_dim(placement) == dim:
            blocks = private.num_blocks(placement)
            held = np.concatenate([_chunk(_chunk(held, blocks, block), size, place) for block in range(blocks)])
    return held


def _chunk(values: NDArray[np.int64], number: int, place: int) -> NDArray[np.int64]:
    """Return a chunk as `torch.chunk` cuts it, except that chunks may be empty."""
    size = -(-len(values) // number)
    return values[place * size : (place + 1) * size]


def _place(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a mesh and this rank's coordinate in it."""
    return tuple(mesh.shape), tuple(mesh.get_coordinate() or ())


def is_in_blocks(tensor: object) -> bool:
    """Return whether a tensor is a DTensor of ours with a strided shard."""
    if not isinstance(tensor, DTensor) or not private_dtensors.is_ours(tensor.device_mesh):
        return False
    return any(private.is_strided(placement) for placement in tensor.placements)


# ---- the three methods by which torch.distributed.checkpoint sees a DTensor; it is imported when it calls them ----


def __create_write_items__(tensor: DTensor, name: str, value: object) -> list[WriteItem]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    _refuse_several_pieces()
    local = private.unwrap(tensor)
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, piece.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(piece.offsets, piece.sizes), properties, tensor.size()),
        )
        for piece in pieces(tensor)
    ]


def __create_chunk_list__(tensor: DTensor) -> list[ChunkStorageMetadata]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(piece.offsets, piece.sizes) for piece in pieces(tensor)]


def __get_tensor_shard__(tensor: DTensor, index: MetadataIndex) -> Tensor:
    piece = next(piece for piece in pieces(tensor) if piece.offsets == index.offset)
    return piece.of(private.unwrap(tensor).detach())


def _where_in_blocks(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args: (method if is_in_blocks(tensor) else _TORCHS[method.__name__])(tensor, *args)


_TORCHS = {
    method.__name__: getattr(DTensor, method.__name__)
    for method in (__create_write_items__, __create_chunk_list__, __get_tensor_shard__)
}


@cache
def _refuse_several_pieces() -> None:
    """Make torch's writer of safetensors refuse parts in several pieces: it has one slot for a rank's part of a tensor.

    A rank calls it as it lists such pieces, before any writer sees them.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    prepare = HuggingFaceStorageWriter.prepare_local_plan

    def checked(writer: HuggingFaceStorageWriter, plan: SavePlan) -> SavePlan:
        names = Counter(item.index.fqn for item in plan.items)
        if several := [name for name, number in names.items() if number > 1]:
            raise ShardwrightError(
                f"{several[0]}: this rank holds it in {names[several[0]]} pieces (its layout has blocks), of which "
                "HuggingFaceStorageWriter would write one; save get_model_state_dict(..., "
                "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) with safetensors on rank 0"
            )
        return prepare(writer, plan)

    setattr(HuggingFaceStorageWriter, prepare.__name__, checked)


# ---- views ----


def _check_view(before: DTensorSpec, after: DTensorSpec | None, given: Sequence[int]) -> None:
    """Raise unless this rank holds the same elements before and after a view; torch may place them on other ranks."""
    shape = torch.empty(before.shape, device="meta").reshape(list(given)).shape
    where = _place(before.mesh)
    elements = _elements(before.shape, before.placements, *where)
    if after is None or elements != _elements(shape, after.placements, *where):
        raise ShardwrightError(
            f"a tensor {list(before.shape)} with placements {before.placements} lies in blocks, whose parts of it as "
            f"{list(shape)} no placement of torch says; gather it first (x.full_tensor()), "
            'or plan without such blocks (roles="zero")'
        )


def _elements(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (begin, end) in the flat logical tensor of each contiguous run of elements that a rank holds."""
    sharded = [dim for dim in map(private.shard_dim, placements) if dim is not None]
    last = max(sharded, default=0)
    starts, inner = np.zeros(1, dtype=np.int64), prod(shape[last + 1 :])
    for dim in range(last):
        starts = (starts[:, None] * shape[dim] + _held(shape, dim, placements, sizes, coordinate)).reshape(-1)
    held = _held(shape, last, placements, sizes, coordinate) if shape else np.zeros(1, dtype=np.int64)
    cuts = np.flatnonzero(np.diff(held) != 1) + 1
    runs = np.array([(run[0], run[-1] + 1) for run in np.split(held, cuts) if len(run)], dtype=np.int64).reshape(-1, 2)
    ends = ((starts[:, None, None] * (shape[last] if shape else 1) + runs) * inner).reshape(-1, 2)
    breaks = np.flatnonzero(ends[1:, 0] != ends[:-1, 1]) + 1
    joined = [(part[0, 0], part[-1, 1]) for part in np.split(ends, breaks) if len(part)]
    return [(int(first), int(end)) for first, end in joined]


# ---- loading a whole tensor, and redistribution ----


def _distribute(states: Whole, names: Sequence[str], device: torch.device) -> None:
    """Copy whole tensors into the DTensors in blocks among these names, in place; meta DTensors are replaced."""
    for name in names:
        pair = states.get(name)
        if not isinstance(pair, tuple) or not is_in_blocks(pair[0]):
            continue
        held, whole = pair
        local = private.unwrap(held)
        if local.is_meta:
            local = torch.empty_like(local, device=device)
            held = private.wrap(local, private.spec_of(held))
        for piece in pieces(held):
            piece.of(local.detach()).copy_(piece.of_whole(whole))
        states[name] = held


def plan(source: DTensorSpec, target: DTensorSpec) -> list[private_dtensors.ReshardStep]:
    """Plan a redistribution: gather from the inside out, then slice from the outside in.

    An axis is left alone if neither its placement nor that of any earlier axis on its dim changes.
    """
    old, new, dims = source.placements, target.placements, set[int | None]()
    axes, whole, steps = list[int](), Replicate(), list[private_dtensors.ReshardStep]()
    for axis, both in enumerate(zip(old, new, strict=True)):
        if both[0] != both[1]:
            dims |= {private.shard_dim(placement) for placement in both} - {None}
        if both[0] != both[1] or private.shard_dim(both[0]) in dims:
            axes.append(axis)
    steps += [(axis, (old[axis], whole), _left(source, old[:axis])) for axis in reversed(axes) if old[axis] != whole]
    steps += [(axis, (whole, new[axis]), _left(source, new[:axis])) for axis in axes if new[axis] != whole]
    return steps


def _left(spec: DTensorSpec, placements: Sequence[Placement]) -> list[int]:
    """Return the local shape of a logical tensor after the first axes have cut it."""
    return [len(_held(spec.shape, dim, placements, *_place(spec.mesh))) for dim in range(len(spec.shape))]
