from __future__ import annotations

import atexit
import gc
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwright.lowering.ranks import launch
from shardwright.lowering.ranks.groups import columns
from shardwright.lowering.ranks.launch import connect, join, leave, run_ranks
from shardwright.pcg.errors import DistributedError, PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.ranks import world_size


def test_ranks_search_no_garbage_in_what_they_were_forked_with() -> None:
    own = ["made before"]

    def is_searched() -> bool:
        return any(one is own for one in gc.get_objects())

    assert is_searched()
    assert run_ranks(is_searched, 2) == [False, False]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("gpus", [(1, 1), (0, 1), (1, 0)])
def test_ranks_that_compute_on_unlike_devices_are_an_error_on_all(gpus: tuple[int, int]) -> None:
    """Two ranks on a machine with one GPU, which are not told how many they are; and machines of which one has none."""

    def rank(port: int) -> str:
        number = dist.get_rank()
        dist.destroy_process_group()
        torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: gpus[number])
        local = number if gpus == (1, 1) else 0
        values = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": local, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({name: str(value) for name, value in values.items()})
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        with pytest.raises(DistributedError) as error:
            join(20)
        return str(error.value)

    found = run_ranks(rank, 2, 30, args=(_free_port(),))
    assert sorted("this one too" in text for text in found) == [False, True]
    for text in found:
        assert text.startswith("1 of 2 ranks have a GPU to compute on (this one ")
        assert text.endswith("or set CUDA_VISIBLE_DEVICES= (to nothing) on every rank to compute on CPUs")


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_ranks_of_other_launchers_join(launcher: str) -> None:
    """Each process trained alone, once."""

    def rank(port: int) -> tuple[int, int, float, str]:
        number = str(dist.get_rank())
        dist.destroy_process_group()
        mpi = {"RANK": number, "SIZE": "2", "LOCAL_RANK": number, "LOCAL_SIZE": "2"}
        slurm = {"PROCID": number, "STEP_NUM_TASKS": "2", "LOCALID": number, "STEP_NODELIST": "localhost"}
        names = {"mpirun": ("OMPI_COMM_WORLD_", mpi), "srun": ("SLURM_", slurm)}
        prefix, values = names[launcher]
        os.environ.update({f"{prefix}{name}": value for name, value in values.items()}, MASTER_PORT=str(port))
        assert world_size() == 2
        join(20)
        total = torch.tensor(2.0 ** dist.get_rank())
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), float(total), os.environ["LOCAL_RANK"]

    assert run_ranks(rank, 2, 30, args=(_free_port(),)) == [(0, 2, 3.0, "0"), (1, 2, 3.0, "1")]


def test_results_come_in_rank_order() -> None:
    def rank(base: int) -> int:
        total = torch.tensor(base + dist.get_rank())
        dist.all_reduce(total)
        return int(total) * 10 + dist.get_rank()

    assert run_ranks(rank, 3, 30, args=(5,)) == [180, 181, 182]


def test_large_results_do_not_block() -> None:
    assert [len(x) for x in run_ranks(lambda: bytes(1 << 22), 2, 30)] == [1 << 22] * 2


def test_ranks_run_a_backward_after_a_capture_and_a_backward_here() -> None:
    """Under CUDA builds of torch, `pytest_sessionstart` in tests/conftest.py makes it so."""

    def gradient() -> float:
        x = torch.ones((), requires_grad=True)
        (2 * x).backward()
        assert x.grad is not None
        return float(x.grad)

    with FakeTensorMode():
        pass
    assert [gradient(), *run_ranks(gradient, 2, 30)] == [2.0, 2.0, 2.0]


def test_a_failing_rank_ends_all_with_its_traceback() -> None:
    def rank() -> None:
        if dist.get_rank() == 1:
            raise ValueError("the answer is wrong")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(DistributedError, match=r"(?s)rank 1 of 2 failed.*the answer is wrong.*ranks \[0\] were still"):
        run_ranks(rank, 2, 30)
    assert time.monotonic() - start < 10


def test_a_message_for_people_comes_once_and_without_a_traceback() -> None:
    def rank() -> None:
        raise PlanError("plan for another model; make one for this")

    with pytest.raises(DistributedError) as error:
        run_ranks(rank, 2, 30)
    assert str(error.value) == "ranks [0, 1] of 2 failed:\nplan for another model; make one for this"


def test_a_silent_death_is_reported() -> None:
    with pytest.raises(DistributedError, match="rank 0 of 2 failed:\nthe process died without a word"):
        run_ranks(lambda: os._exit(3) if dist.get_rank() == 0 else time.sleep(60), 2, 30)


def test_a_hang_ends_at_the_timeout() -> None:
    with pytest.raises(DistributedError, match=r"ranks \[0, 1\] of 2 did not end within 1.5 s"):
        run_ranks(lambda: time.sleep(60), 2, 1.5)


def test_the_mesh_must_have_as_many_ranks_as_run() -> None:
    with pytest.raises(
        DistributedError, match=r"the plan is for 4 ranks \[dp=2, tp=2\], but 2 are running; start it with"
    ):
        run_ranks(lambda: connect(Mesh.of(dp=2, tp=2)), 2, 30)


def test_axes_coordinates_and_merged_axes() -> None:
    def rank() -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...], float]:
        ranks = connect(Mesh.of(a=2, b=1, c=2), 30)
        merged = ranks.merged(("a", "c"))
        total = torch.tensor(2.0 ** dist.get_rank())
        dist.all_reduce(total, group=merged.group)
        assert ranks.merged(("a", "c")) is merged
        return (
            tuple(a.rank for a in ranks.axes),
            tuple(a.size for a in ranks.axes),
            ranks.device_mesh.mesh_dim_names or (),
            float(total),
        )

    found = run_ranks(rank, 4, 30)
    assert [x[0] for x in found] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert {x[1:] for x in found} == {((2, 1, 2), ("a", "b", "c"), 15.0)}


def test_groups_that_were_left_have_no_threads() -> None:
    """A thread of gloo that still releases a tensor when Python ends would abort the process."""

    def rank() -> list[list[str]]:
        ranks = connect(Mesh.of(a=2, b=2), 30)
        for axis in (*ranks.axes, ranks.merged(("a", "b"))):
            dist.all_reduce(torch.ones(1), group=axis.group)
        DTensor.from_local(torch.ones(1), ranks.device_mesh, [Partial(), Replicate()]).full_tensor()
        before = _threads()
        leave()
        return [before, _threads()]

    for before, after in run_ranks(rank, 4, 30):
        assert before.count("pt_gloo_runloop") == 8
        assert "pt_gloo_runloop" not in after


def test_groups_of_others_are_left_as_python_ends() -> None:
    """Frameworks make the process group before `compile` does, and do not destroy it."""

    def rank() -> list[str]:
        handlers = list[Callable[[], object]]()
        launch._leave_at_exit.cache_clear()
        atexit.register = handlers.append
        join(30)
        join(30)
        for handler in handlers:
            handler()
        return [handler.__name__ for handler in handlers] + _threads()

    for names in run_ranks(rank, 2, 30):
        assert names.count("leave") == 1
        assert "pt_gloo_runloop" not in names


def _threads() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def test_modules_share_their_groups() -> None:
    """A group for each layout of ranks and timeout, however often they are asked for, and none that was destroyed."""

    def rank(store: str) -> list[bool]:
        mesh, number = Mesh.of(a=2, b=2), dist.get_rank()
        first, again, longer = (connect(mesh, timeout_s) for timeout_s in (30, 30, 40))
        groups = [axis.group for ranks in (first, again, longer) for axis in (*ranks.axes, ranks.merged(("a", "b")))]
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=store, rank=number, world_size=4)
        anew = connect(mesh, 30).axes[0].group
        total = torch.ones(1)
        dist.all_reduce(total, group=anew)
        return [groups[:3] == groups[3:6], len(set(groups)) == 6, anew not in groups, total.item() == 2]

    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(rank, 4, 60, args=(f"file://{folder}/store",)) == [[True] * 4] * 4


def test_groups_of_other_ranks_are_made_once() -> None:
    """Also on ranks that are in none of them, so that all agree on which are new."""

    def rank() -> list[bool]:
        ranks = connect([Mesh()] * 3, 10)
        asked = [(0, 2), (0, 2), (1, 2), (0, 2)]
        return [ranks.group(columns(ranks.meshes, stages), "test") is not None for stages in asked]

    assert run_ranks(rank, 3, 30) == [[True, True, False, True], [False, False, True, False], [True] * 4]
