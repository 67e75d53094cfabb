"""The start of ranks: the launcher's process group, a group with a timeout for each mesh axis, forked local ranks."""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from shardwright.lowering import private, private_dtensors
from shardwright.lowering.ranks import rollcall
from shardwright.lowering.ranks.groups import columns, grids_of, lines, my_group
from shardwright.lowering.ranks.movement import Axis, MeshAxis, Time
from shardwright.lowering.ranks.picked import ByGroup
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.ranks.waits import TIMEOUT_S, meet, start_up
from shardwright.pcg.errors import DistributedError, ShardwrightError
from shardwright.pcg.launcher import as_torchrun, device_index, find_launch
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.stages import STAGES
from shardwright.pcg.step.meshes import first_ranks, in_words, stage_of


def join(timeout_s: float = TIMEOUT_S) -> None:
    """Initialise the process group of the launcher's processes, or one of a single rank, unless there is one.

    Launchers other than torchrun get its variables set, as torch and other libraries read them (`pcg.launcher`).
    """
    _leave_at_exit()
    if not dist.is_initialized():
        _initialise(timeout_s)
    rollcall.listen()


@cache
def _leave_at_exit() -> None:
    """Have `leave` called as Python ends, whoever made the process group: it would abort the process there."""
    atexit.register(leave)


def _initialise(timeout_s: float) -> None:
    launch, timeout = find_launch(), timedelta(seconds=timeout_s)
    if launch is None or (launch.world == 1 and launch.launcher != "torchrun"):
        dist.init_process_group("gloo", store=private.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if launch.launcher != "torchrun":
        os.environ.update(as_torchrun(launch))
    index = device_index(launch, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    with start_up(timeout_s):
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        check_alike(private.PrefixStore("shardwright", store), rank, world, has_gpu=index is not None)
        if index is not None:
            torch.cuda.set_device(index)
        dist.init_process_group(
            "gloo" if index is None else "nccl",
            store=private.PrefixStore("default_pg", store),
            rank=rank,
            world_size=world,
            timeout=timeout,
        )


def check_alike(store: private.Store, rank: int, world: int, *, has_gpu: bool) -> None:
    """Raise a `DistributedError` on all ranks if some have a GPU to compute on and others have none.

    A rank alone may not notice: launchers may not say how many ranks share a machine, and machines may differ.
    """
    store.add("gpus", int(has_gpu))
    if store.add("ranks", 1) == world:
        store.set("all", str(store.add("gpus", 0)))
    num_gpus = int(store.get("all"))
    if not 0 < num_gpus < world:
        return
    if rank and store.add("read", 1) == world - 1:
        store.set("read by all", "")
    if not rank:  # rank 0's process holds the store, so it must not end before the others have read it
        store.get("read by all")
    raise DistributedError(
        f"{num_gpus} of {world} ranks have a GPU to compute on ({'this one too' if has_gpu else 'this one has none'}), "
        "and all or none must; start as many ranks on each machine as it has GPUs, or set CUDA_VISIBLE_DEVICES= (to "
        "nothing) on every rank to compute on CPUs"
    )


_CONNECTED: WeakSet[Ranks] = WeakSet()


def leave() -> None:
    """Destroy all process groups and end their threads; no module of this process can run any more.

    A thread of gloo releases the tensors of a collective a little after all ranks have its result. If Python ends
    before, the process is aborted. A group's threads end when torch and all meshes of ours have released the group.
    """
    rollcall.leave()
    if dist.is_initialized():
        dist.destroy_process_group()
    for ranks in list(_CONNECTED):
        ranks.forget_groups()


def connect(mesh: Mesh | Sequence[Mesh], timeout_s: float = TIMEOUT_S, schedules: Sequence[ByGroup] = ()) -> Ranks:
    """Make a process group with this timeout for each mesh axis. Every rank must call this with the same arguments.

    `mesh`: the only mesh, or the meshes of all pipeline stages; the first stage has the first ranks. `schedules`: as
    `Ranks.run_by` takes them. Groups are shared
    with other modules of this process; a group in which a collective failed stays broken for all of them.
    Raises `DistributedError` if the number of running ranks is not that of all stages' meshes.
    """
    join(timeout_s)
    meshes = (mesh,) if isinstance(mesh, Mesh) else tuple(mesh)
    world, wanted = dist.get_world_size(), first_ranks(meshes)[-1]
    if world != wanted:
        raise DistributedError(
            f"the plan is for {wanted} ranks {in_words(meshes)}, but {world} are running; start it with "
            f"`torchrun --nproc-per-node {wanted}`, or plan for a cluster of {world} ranks"
        )
    device = private.default_device()
    meet("the groups of a mesh", timeout_s)  # torch itself would look for a missing rank every ten seconds only
    with private.unset_fake_temporarily():
        axes, stages, device_mesh = _axes(meshes, device, timeout_s)
    ranks = Ranks(meshes, axes, device_mesh, device, timeout_s, stages, dist.get_backend() == private.FAKE)
    _CONNECTED.add(ranks)
    ranks.run_by(schedules)
    return ranks


def _axes(
    meshes: tuple[Mesh, ...], device: torch.device, timeout_s: float
) -> tuple[tuple[MeshAxis, ...], Axis, DeviceMesh]:
    stage = stage_of(meshes, dist.get_rank())
    grid, mesh, many = torch.from_numpy(grids_of(meshes)[stage]), meshes[stage], len(meshes)
    groups = [group for dim in range(grid.dim()) if (group := my_group(lines(meshes, [dim]), timeout_s))]
    device_mesh = DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=mesh.names or ("all",))
    private_dtensors.claim(device_mesh)
    axes = tuple(
        Time(name, size) if name == TIME else Axis(name, size, dist.get_rank(group), group if size > 1 else None)
        for name, size, group in zip(mesh.names, mesh.sizes, groups, strict=False)
    )
    column = my_group(columns(meshes, range(many)), timeout_s) if many > 1 else None
    if column is not None:
        private_dtensors.tell_overflows_beside(device_mesh, column)
    return axes, Axis(STAGES, many, stage, column), device_mesh


# ---- forked local ranks ----


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    timeout_s: float = 60.0,
    *,
    args: Sequence[Any] = (),
    grace_s: float = 0.0,
) -> list[Any]:
    """Run `fn(*args)` on forked ranks joined by gloo, one thread each; return the (pickled) results in rank order.

    Never hangs: the first rank that fails, or `timeout_s`, ends all, and the `DistributedError` has the failing ranks'
    tracebacks. With `grace_s`, the other ranks have that long to end by themselves after the first failure.
    A rank can run no backward if this process has autograd threads. The first backward of a process starts them if
    it finds a GPU; after any `torch.export`, CUDA builds of torch find one even if there is none. So run no backward in
    this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(fn, args, rank, num_ranks, Path(folder) / "store", timeout_s) for rank in range(num_ranks)]
        try:
            return _collect(ranks, timeout_s, grace_s)
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    """A forked rank, and the pipe that delivers its outcome."""

    def __init__(self, number: int, pid: int, pipe: Connection) -> None:
        self.number, self.pid, self.pipe = number, pid, pipe
        self.done = False

    def outcome(self) -> tuple[bool, Any]:
        """Return (True, result) or (False, traceback), once the pipe is readable."""
        self.done = True
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            return False, "the process died without a word (killed, or os._exit)"

    def end(self) -> None:
        """Kill the process if it still runs, and reap it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


def _fork(
    fn: Callable[..., Any], args: Sequence[Any], rank: int, num_ranks: int, store: Path, timeout_s: float
) -> _Rank:
    receive, send = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        send.close()
        return _Rank(rank, pid, receive)
    receive.close()
    gc.freeze()  # the parent's objects are not searched for garbage, which would copy their pages
    try:
        send.send_bytes(_run_child(fn, args, rank, num_ranks, store, timeout_s))
        send.close()
    finally:
        os._exit(0)  # without the parent's exit handlers


def _run_child(
    fn: Callable[..., Any], args: Sequence[Any], rank: int, num_ranks: int, store: Path, timeout_s: float
) -> bytes:
    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")  # ranks may leave while others still connect
    try:
        dist.init_process_group(
            "gloo",
            store=private.FileStore(str(store), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        result = pickle.dumps((True, fn(*args)))
        leave()
    except ShardwrightError as error:  # a message for people; a traceback would bury it
        return pickle.dumps((False, str(error)))
    except BaseException:  # noqa: BLE001 - the parent raises it
        return pickle.dumps((False, traceback.format_exc()))
    return result


def _collect(ranks: list[_Rank], timeout_s: float, grace_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) + len(failures) < len(ranks):
        pipes = {rank.pipe: rank for rank in ranks if not rank.done}
        ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes[pipe]  # pyright: ignore[reportArgumentType]
            good, value = rank.outcome()
            (results if good else failures)[rank.number] = value
        if failures:
            deadline = min(deadline, time.monotonic() + max(grace_s, 0.05))
    if len(results) < len(ranks):
        raise DistributedError(_explain(len(ranks), results, failures, timeout_s))
    return [results[number] for number in range(len(ranks))]


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {list(numbers)}"


def _explain(num_ranks: int, results: dict[int, Any], failures: dict[int, str], timeout_s: float) -> str:
    silent = [n for n in range(num_ranks) if n not in results and n not in failures]
    alike = {text: [n for n in sorted(failures) if failures[n] == text] for _, text in sorted(failures.items())}
    lines = [f"{_ranks(numbers)} of {num_ranks} failed:\n{text}" for text, numbers in alike.items()]
    if silent and failures:
        lines.append(f"ranks {silent} were still running and have been ended")
    elif silent:
        lines.append(f"ranks {silent} of {num_ranks} did not end within {timeout_s:g} s and have been ended")
    return "\n".join(lines)
