"""What DTensor's sharding propagation says: an oracle for row rules that shares nothing with them.

Operands are DTensors on a one-dimensional mesh of a fake process group: nothing is communicated. DTensor has no `C`, a
replicated tensor is `Replicate`; a shard in blocks is a strided shard. The private names of torch that this needs are
imported here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.placement_types import Placement as Placed
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.pcg.graph import Node, make_attrs
from shardwright.pcg.interpret import scatter
from shardwright.pcg.layout import C, Layout, P, S
from shardwright.pcg.mesh import Mesh
from tests.pcg.run_torch import apply

DEGREE = 2
REDISTRIBUTES, REFUSES = "redistributes", "refuses"


@contextmanager
def fake_mesh() -> Generator[DeviceMesh]:
    """A mesh of two ranks, of which this process is the first and the other does not exist."""
    dist.init_process_group("fake", rank=0, world_size=DEGREE, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (DEGREE,))
    finally:
        dist.destroy_process_group()


def placed(layout: Layout) -> Placed:
    """The placement of a layout."""
    if layout.kind == "S":
        return Shard(layout.dim) if layout.blocks == 1 else _StridedShard(layout.dim, split_factor=layout.blocks)
    return Partial() if layout.kind == "P" else Replicate()


def layout_of(placement: Placed) -> Layout | None:
    """The layout of a placement, C for a replicated one; None for what has none, such as partial maxima."""
    if isinstance(placement, _StridedShard):
        return S(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return S(placement.dim)
    if isinstance(placement, Partial):
        return P if placement.reduce_op == "sum" else None
    return C


def tensor(mesh: DeviceMesh, array: np.ndarray[Any, Any], placement: Placed) -> DTensor:
    """This rank's part of an array; a partial one is a summand."""
    layout, whole = layout_of(placement), torch.from_numpy(np.ascontiguousarray(array))
    assert layout is not None
    local = torch.from_numpy(np.ascontiguousarray(scatter(array, (layout,), Mesh.of(a=DEGREE))[0]))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def propagated(mesh: DeviceMesh, op: str, attrs: Mapping[str, Any], operands: Sequence[DTensor]) -> Placed | str:
    """The placement of the result, or that DTensor moves operands first, or that it does not take them."""
    node = Node("result", op, (), make_attrs(**attrs))
    try:
        with torch.no_grad(), ExplicitRedistributionContext(strict=True):
            result = apply(node, list(operands))
    except (RuntimeError, NotImplementedError, ValueError, AssertionError, IndexError, TypeError) as error:
        return REDISTRIBUTES if "Implicit redistribution" in str(error) else f"{REFUSES}: {error}"
    if not isinstance(result, DTensor):
        return f"{REFUSES}: the result is no DTensor"
    return result.placements[0]
