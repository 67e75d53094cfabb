"""The private APIs of torch that lowering uses, except those that change torch's DTensor tools (`private_dtensors`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import Variable
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.optim._muon import _adjust_lr as rate_of_muon
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_map, tree_map_only, tree_unflatten

# pyright: reportPrivateUsage=false, reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

__all__ = [
    "DTensor", "FakeStore", "FakeTensor", "FakeTensorMode", "FileStore", "HashStore", "IncompatibleKeys",
    "OpOverload", "PrefixStore", "StorageWeakRef", "Store", "TorchDispatchMode", "newton_schulz", "rate_of_muon",
    "tree_flatten", "tree_iter", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten",
    "unset_fake_temporarily",
]  # fmt: skip

FAKE = "fake"  # the backend of process groups whose other ranks do not exist
AutogradContext = Any  # torch gives its type no public name


@contextmanager
def no_process_group(refusal: Exception) -> Generator[None]:
    """Show code no process group, as if it ran in one process; raise `refusal` for a collective all the same."""

    def refuse(*args: object) -> bool:
        if args != (None,):
            raise refusal
        return False

    group = distributed_c10d.GroupMember.WORLD
    doors = distributed_c10d._get_default_group, distributed_c10d._rank_not_in_group
    distributed_c10d.GroupMember.WORLD = None
    distributed_c10d._get_default_group = distributed_c10d._rank_not_in_group = refuse
    try:
        yield
    finally:
        distributed_c10d.GroupMember.WORLD = group
        distributed_c10d._get_default_group, distributed_c10d._rank_not_in_group = doors


def strided_shard(dim: int, blocks: int) -> Placement:
    """Return DTensor's placement for a dimension of `blocks` blocks, of each of which a rank holds its slice."""
    return _StridedShard(dim, split_factor=blocks)


def is_strided(placement: Placement) -> bool:
    """Return whether `strided_shard` made a placement."""
    return isinstance(placement, _StridedShard)


def num_blocks(placement: Placement) -> int:
    """Return the number of blocks into which a sharding placement divides what earlier axes leave."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def shard_dim(placement: Placement) -> int | None:
    """Return the dimension that a placement shards, in blocks or not, or None."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def make_spec(mesh: DeviceMesh, placements: tuple[Placement, ...], like: Tensor) -> DTensorSpec:
    """Return the metadata of a DTensor with the logical shape, strides and dtype of `like` (also on device meta)."""
    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta, use_strided_shard_as_shard_order=False)


def wrap(local: Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> DTensor:
    """Return a DTensor around this rank's part, without communication and without a check.

    This skips `DTensor.__init__`, which does nothing, but passes torch's compiler and export and takes three times as
    long as the rest.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def wrap_parameter(local: Tensor, spec: DTensorSpec, *, requires_grad: bool) -> nn.Parameter:
    """Return a DTensor that is a parameter, as `nn.Parameter` would make it.

    `nn.Parameter` would detach the DTensor first, which takes milliseconds for each new shape.
    """
    wrapped = wrap(local.detach(), spec, requires_grad=requires_grad)
    wrapped._is_param = True
    assert isinstance(wrapped, nn.Parameter)
    return wrapped


def unwrap(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, which shares its storage."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def spec_of(tensor: Tensor) -> DTensorSpec:
    """Return the metadata of a DTensor: mesh, placements, logical shape."""
    assert isinstance(tensor, DTensor)
    return tensor._spec


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Launch the sum over a group, and do not wait. Its backward would be wrong, so it is for tensors without one."""
    return functional_collectives.all_reduce(x, "sum", group)


def wait(x: Tensor) -> Tensor:
    """Wait for a functional collective; other tensors are returned as they are."""
    return functional_collectives.wait_tensor(x)


Hook = Callable[[Tensor], Tensor | None]


def gradient_hooks(tensor: Tensor) -> list[Hook]:
    """Return the hooks that `register_hook` has registered."""
    hooks = tensor._backward_hooks
    return list(hooks.values()) if hooks else []


def accumulated_hooks(tensor: Tensor) -> list[Hook]:
    """Return the hooks that `register_post_accumulate_grad_hook` has registered."""
    hooks = tensor._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []


def after_backward(callback: Callable[[], None]) -> None:
    """Register a callback for the end of the running backward."""
    Variable._execution_engine.queue_callback(callback)


def default_device() -> torch.device:
    """Return the device of this process: its GPU if the process group uses NCCL, else the CPU."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_generator(device: torch.device) -> torch.Generator:
    """Return a device's default generator."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of a GPU for work that neither waits for the step nor makes the step wait."""
    return torch.cuda.Stream(device)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copy each source to its target; a missing source counts as zeros. At least one must be given."""
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if source is not None]
    torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
    for target, source in zip(targets, sources, strict=True):
        if source is None:
            target.zero_()


def add_all(sums: Sequence[Tensor | None], terms: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add to each sum its term, in place, and return the sums; if one of the two is missing, return the other."""
    pairs = [(a, b) for a, b in zip(sums, terms, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(sums, terms, strict=True)]


def norms(tensors: list[Tensor], order: float) -> Tensor:
    """Return the norm of each tensor, as one vector."""
    return torch.stack(torch._foreach_norm(tensors, order))


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply every tensor in place."""
    torch._foreach_mul_(tensors, factor)


def storage_key(tensor: Tensor) -> int:
    """Return an address that two tensors have in common if and only if they share memory; fake tensors have it, too."""
    return tensor.untyped_storage()._cdata


def memory_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the keys of a tensor's memory: for a DTensor its own, which changes with `x.data = …`, and its part's."""
    key = storage_key(tensor)
    return (key, storage_key(tensor._local_tensor)) if isinstance(tensor, DTensor) else (key,)


def record_offset(tensor: Tensor) -> int | None:
    """Return where a tensor's memory begins in the archive that `torch.load(map_location="meta")` has read it from."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def weakly(tensor: Tensor) -> StorageWeakRef:
    """Return a reference that reserves the key of a tensor's memory, but does not keep the data."""
    return StorageWeakRef(tensor.untyped_storage())


def forget_meshes() -> None:
    """Clear DTensor's cache of operators by the shape of a mesh, which refers to destroyed groups."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()  # as tensor.debug does, whose import loads torch's compilers


def forget_groups(mesh: DeviceMesh) -> None:
    """Release the groups of a mesh."""
    mesh._pg_registry.clear()


def in_backward() -> bool:
    """Return whether autograd runs a backward now."""
    return torch._C._current_graph_task_id() != -1


def group_of(argument: object) -> dist.ProcessGroup:
    """Return the process group in an argument of an operator of c10d or of the functional collectives."""
    if isinstance(argument, str):
        return dist.distributed_c10d._resolve_process_group(argument)
    return dist.ProcessGroup.unbox(argument)


# ---- kernels of torch's own operators ----

Kernel = Callable[..., Any]


class Kernels:
    """Replacements of some kernels of torch's operators on plain tensors, in all threads, until `restore`.

    `replacements`: by operator and device; each is called with the original kernel and the operator's arguments.
    """

    def __init__(self, replacements: Mapping[tuple[str, str], Kernel]) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns where a kernel is replaced
            for (name, device), kernel in replacements.items():
                original = torch.library.get_kernel(f"aten::{name}", device)
                self._library.impl(name, _replaced(original.call_boxed, kernel), device, with_keyset=True)

    def restore(self) -> None:
        """Restore torch's own kernels."""
        self._library._destroy()


def _replaced(original: Kernel, kernel: Kernel) -> Kernel:
    return lambda keys, *args, **kwargs: kernel(partial(original, keys), *args, **kwargs)


def argument_names(operator: str) -> list[str]:
    """Return the names of the arguments of one of torch's operators."""
    return [argument.name for argument in getattr(torch.ops.aten, operator).default._schema.arguments]


def world_store() -> Store:
    """Return the store of the group of all ranks, through which they find each other."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def world_timeout(timeout_s: float) -> Generator[None]:
    """Give collectives of the group of all ranks this timeout for a while. In a dry run, do nothing."""
    group = dist.group.WORLD
    if group is None or dist.get_backend() == FAKE:
        yield
        return
    before = {b: b.options._timeout for b in {group._get_backend(device) for device in group._device_types}}
    for backend in before:
        backend._set_default_timeout(timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        for backend, timeout in before.items() if dist.group.WORLD is group else ():
            backend._set_default_timeout(timeout)
