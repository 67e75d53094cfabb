"""`save` and `load`: a run goes on where it was, under its own plan bit for bit, and under any other."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.store.checkpoint_folder import Writer
from shardwright.pcg.errors import CheckpointError, DistributedError
from tests.each import some
from tests.shardwright.test_programs import batch_of, model_of

PLANS: dict[str, dict[str, Any]] = {
    "zero": {"mesh": {"x": 2}, "roles": "zero"},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
    "stages": {"stages": 2, "microbatches": 2},
}
STEPS, BATCH = 3, batch_of(8, 6)


class Run(NamedTuple):
    """All that a training script holds."""

    parallel: Any
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    sampler: Sampler
    average: dict[str, Any]

    def step(self) -> float:
        place = next(self.sampler)
        loss = float(self.parallel.forward_backward(**{name: x.roll(place) for name, x in BATCH.items()}))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        with torch.no_grad():
            for name, parameter in self.parallel.named_parameters():
                self.average[name].lerp_(parameter, 0.5)
        return loss

    def state(self) -> list[Any]:
        whole = {name: _whole(p) for name, p in self.parallel.named_parameters()}
        draws = [torch.rand(2), torch.from_numpy(np.random.rand(2)), random.random()]
        average = {name: _whole(value) for name, value in self.average.items()}
        return [whole, average, self.scheduler.get_last_lr(), self.sampler.place, draws]


class Sampler(Iterator[int]):
    def __init__(self) -> None:
        self.place = 0

    def __next__(self) -> int:
        self.place = (self.place + 1) % 5
        return self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.place = state_dict["place"]


def _whole(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def run_of(name: str, *, seed: int = 0, num_ranks: int = 2, norm: bool = False) -> Run:
    model = model_of(norm=norm)
    if seed:
        for p in model.parameters():
            nn.init.normal_(p)
    words: dict[str, Any] = {"timeout_s": 60, "check_capture": "never", **(PLANS[name] if num_ranks > 1 else {})}
    parallel = sw.compile(model, sw.Cluster.local(num_ranks), kwargs=BATCH, **words)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    average = {name: p.detach().clone() for name, p in parallel.named_parameters()}
    for seeds in (torch.manual_seed, np.random.seed, random.seed):
        seeds(seed)
    return Run(parallel, optimizer, scheduler, Sampler(), average)


def saved(folder: Path, run: Run, **options: Any) -> sw.Saving:
    return sw.save(folder, *run[:4], others={"average": run.average, "name": "mine"}, **options)


def loaded(folder: Path, run: Run, **options: Any) -> int | None:
    others: dict[str, Any] = {"average": run.average, "name": ""}
    step = sw.load(folder, *run[:4], others=others, **options)
    assert step is None or others["name"] == "mine"
    return step


@contextmanager
def folders() -> Generator[Path]:
    """A folder that all ranks know."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    yield Path(made[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(made[0])


def joined(body: Callable[[Path], Any]) -> Any:
    """What `body` gives on each of two ranks, with a folder for both."""

    def on_rank() -> Any:
        with folders() as folder:
            return body(folder)

    return run_ranks(on_rank, 2, 120)


@pytest.mark.parametrize(("name", "wait"), some([("zero", False), ("stages", True), ("tensor", False)], 1))
def test_a_run_goes_on_bit_for_bit(name: str, wait: bool) -> None:
    def body(folder: Path) -> None:
        first = run_of(name)
        for _ in range(STEPS):
            first.step()
        saving = saved(folder, first, step=STEPS, wait=wait)
        expected = [first.step() for _ in range(STEPS)]
        saving.wait()
        after = first.state()
        other = run_of(name, seed=5)
        assert loaded(folder, other) == STEPS
        assert [other.step() for _ in range(STEPS)] == expected
        torch.testing.assert_close(other.state(), after, rtol=0, atol=0)

    joined(body)


def test_what_one_plan_saves_any_other_loads() -> None:
    """Also a single process, which loads what two ranks have saved, and the reverse."""

    def begin(folder: Path) -> list[float]:
        sw.seed_exactly(0)
        run = run_of("stages")
        losses = [run.step() for _ in range(STEPS)]
        saved(folder, run, step=STEPS)
        return losses

    def go_on(folder: Path, name: str, step: int, num_ranks: int = 2) -> list[float]:
        sw.seed_exactly(0)
        run = run_of(name, seed=3, num_ranks=num_ranks)
        assert loaded(folder, run) == step
        losses = [run.step() for _ in range(STEPS)]
        saved(folder, run, step=step + STEPS)
        return losses

    def alone(folder: Path) -> list[float]:
        sw.seed_exactly(0)
        run = run_of("stages")
        return [run.step() for _ in range(5 * STEPS)]

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found = run_ranks(begin, 2, 120, args=(folder,))[0]
        for number, (name, num_ranks) in enumerate([("zero", 2), ("stages", 1), ("tensor", 2), ("stages", 2)], 1):
            found += run_ranks(go_on, num_ranks, 120, args=(folder, name, number * STEPS, num_ranks))[0]
        expected = run_ranks(alone, 2, 120, args=(folder,))[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_what_is_damaged_or_of_another_run_is_told_before_anything_is_loaded() -> None:
    def body(folder: Path) -> None:
        run = run_of("zero")
        run.step()
        saved(folder, run, step=1)
        saved(folder, run, step=2)
        before = run.state()[:2]

        def refused(text: str, do: Callable[[], object]) -> None:
            with pytest.raises((CheckpointError, DistributedError), match=text):
                do()
            torch.testing.assert_close(run.state()[:2], before, rtol=0, atol=0)

        files = sorted(json.loads((folder / "step-00000002" / "checkpoint.json").read_text())["files"])
        assert {".metadata", "ranks.pt"} < set(files)
        for number, name in enumerate(files):
            file = folder / "step-00000002" / name
            content = file.read_bytes()
            dist.barrier()
            for damaged in (content[:-1], bytes([content[0] ^ 1]) + content[1:])[number % 2 :][:1]:
                if not dist.get_rank():
                    file.write_bytes(damaged)
                dist.barrier()
                refused(rf"{name}: damaged: expected", lambda: loaded(folder, run))
            if not dist.get_rank():
                file.unlink()
            dist.barrier()
            refused(rf"{name}: No such file", lambda: loaded(folder, run))
            if not dist.get_rank():
                file.write_bytes(content)
            dist.barrier()
        refused(r"no checkpoint of step 7; there are 1, 2", lambda: loaded(folder, run, step=7))
        (parallel, optimizer, scheduler, sampler, *_), other = run, torch.optim.SGD(run.parallel.parameters())
        refused("it was saved with AdamW, and this run has SGD", lambda: sw.load(folder, parallel, other))
        refused(r"step 2 has been saved", lambda: saved(folder, run, step=2))
        refused(r"step 2 has been saved", lambda: saved(folder, run, step=1, keep=1))
        refused(r"expected a whole number of at least 0", lambda: saved(folder, run, step=-1))
        refused("keep=0", lambda: saved(folder, run, step=3, keep=0))
        sw.save(folder, parallel, step=3)
        refused("saved without a scheduler", lambda: sw.load(folder, parallel, scheduler=scheduler))
        refused("saved without a sampler", lambda: sw.load(folder, parallel, sampler=sampler))
        assert sw.load(folder, parallel, optimizer, step=1) == 1
        assert sw.load(folder / "none", parallel) is None
        refused("there are none", lambda: sw.load(folder / "none", parallel, step=1))
        with sw.seed_exactly(0):
            refused("saved without seed_exactly", lambda: sw.load(folder, parallel))

    joined(body)


class Other(nn.Module):
    """Twelve differences from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(33, 16)
        self.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tok(ids)[..., :2]
        for layer in self.more:
            x = layer(x)
        return x.square().mean() + 0 * labels.sum()


def test_another_model_is_told_by_its_first_differences() -> None:
    def body(folder: Path) -> str:
        run = run_of("zero")
        saved(folder, run, step=1)
        words: dict[str, Any] = {"mesh": {"x": 2}, "roles": "data", "timeout_s": 60}
        other = sw.compile(Other(), sw.Cluster.local(2), kwargs=BATCH, **words)
        optimizer = torch.optim.AdamW(other.parameters())
        with pytest.raises(CheckpointError) as error:
            sw.load(folder, other, optimizer)
        assert not optimizer.state
        return str(error.value)

    for text in joined(body):
        assert "tok.weight: float64[32, 16] in the checkpoint, float32[33, 16] here" in text
        assert "more.0.weight: not in the checkpoint" in text
        assert text.count(";") == 9
        assert text.endswith("; more.4.weight: not in the checkpoint, and 17 more")


def test_a_folder_is_one_runs_and_keeps_the_last() -> None:
    def body(folder: Path) -> list[str]:
        run = run_of("zero")
        for step in range(1, 5):
            saved(folder, run, step=step, keep=2, wait=step % 2 == 0)
        if not dist.get_rank():  # as a save leaves it that was cut off
            (folder / "step-00000009.partial").mkdir()
        dist.barrier()
        other = run_of("zero", seed=1)
        assert loaded(folder, other) == 4
        saved(folder, run, step=5, keep=2)
        return sorted(path.name for path in folder.iterdir())

    for names in joined(body):
        assert names == [".lock", "step-00000004", "step-00000005"]

    def second() -> str:
        with pytest.raises((CheckpointError, DistributedError)) as error:
            saved(Path(place), run_of("zero"), step=1)
        return str(error.value)

    with tempfile.TemporaryDirectory() as place:
        taken = (Path(place) / ".lock").open("a")
        fcntl.flock(taken, fcntl.LOCK_EX)
        assert all("another run saves here" in text for text in run_ranks(second, 2, 60))
        taken.close()
    with tempfile.NamedTemporaryFile() as file:
        place = file.name
        assert all("cannot save here" in text for text in run_ranks(second, 2, 60))


def test_an_optimizer_without_states_goes_on_as_new() -> None:
    """Of some parameters, or of all: their first step is as if nothing had been saved."""

    def body(folder: Path) -> None:
        for number, steps in enumerate((0, 1)):
            run = run_of("zero")
            frozen = run.parallel.get_parameter("head.weight")
            if steps:
                frozen.requires_grad_(False)
                run.parallel.forward_backward(**BATCH)
                frozen.grad = None
                run.optimizer.step()
                run.optimizer.zero_grad()
                frozen.requires_grad_(True)
            saved(folder, run, step=number + 1)
            expected = [run.step() for _ in range(STEPS)]
            other = run_of("zero", seed=2)
            loaded(folder, other)
            assert [other.step() for _ in range(STEPS)] == expected

    joined(body)


def test_what_has_no_plan_is_refused() -> None:
    def body(folder: Path) -> None:
        parallel = sw.compile(model_of(), sw.Cluster.local(2), timeout_s=60)
        for do in (lambda: sw.save(folder, parallel, step=1), lambda: sw.load(folder, parallel)):
            with pytest.raises(CheckpointError, match="no plan before its first call"):
                do()
        with pytest.raises(CheckpointError, match=r"expected a model that shardwright\.compile gave, got a Net"):
            sw.save(folder, model_of(), step=1)  # pyright: ignore[reportArgumentType]

    joined(body)


def as_anything(value: object) -> Any:
    """Hide a type from the checker of types."""
    return value


def test_what_is_no_optimizer_scheduler_folder_or_step_is_refused() -> None:
    def body(folder: Path) -> None:
        model, batch = model_of(), BATCH
        parallel = sw.compile(model, sw.Cluster.local(2), kwargs=batch, timeout_s=60, check_capture="never")
        own = torch.optim.SGD(parallel.parameters(), 0.1)
        sw.save(folder / "run", parallel, own, step=1)
        odd, save, load = map(as_anything, (torch.optim.SGD, sw.save, sw.load))
        cases: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
            ("param_groups as optimizer, got the class SGD", (odd,), {}),
            ("state_dict as scheduler, got a str", (own, "cosine"), {}),
            ("state_dict as sampler, got a list", (own, None, [1]), {}),
            ("make it of parallel.parameters", (odd(model.parameters(), 0.1),), {}),
            (r"save\(step=...\): expected a whole number, got '2'", (own,), {"step": "2"}),
            ("step -1: expected a whole number of at least 0", (own,), {"step": -1}),
        )
        for error, words, options in cases:
            with pytest.raises((CheckpointError, DistributedError), match=error):
                save(folder / "run", parallel, *words, **{"step": 2, **options})
            if not options:
                with pytest.raises((CheckpointError, DistributedError), match=error):
                    load(folder / "run", parallel, *words)
        (folder / f"file-{dist.get_rank()}").touch()
        with pytest.raises(
            (CheckpointError, DistributedError), match="expected the folder of a run's checkpoints, got a file"
        ):
            sw.load(folder / "file-0", parallel, own)

    joined(body)


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_harms_nothing(wait: bool) -> None:
    def body(folder: Path) -> str:
        run = run_of("zero")
        saved(folder, run, step=1)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank():
                patch.setattr(Writer, "write_data", _full)
            if wait:
                with pytest.raises(CheckpointError) as error:
                    saved(folder, run, step=2)
            else:
                saving = saved(folder, run, step=2, wait=False)
                with pytest.raises(CheckpointError) as error:
                    saving.wait()
                with pytest.raises(CheckpointError, match="No space left"):
                    saving.wait()  # asked once more, it says so once more
        assert loaded(folder, run) == 1
        saved(folder, run, step=2)
        return str(error.value)

    for text in joined(body):
        assert "step 2 could not be written: rank 1: OSError: [Errno 28] No space left on device" in text


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_rank_that_is_killed_while_it_saves() -> None:
    def body(folder: Path) -> None:
        run = run_of("zero")
        saved(folder, run, step=1)
        if dist.get_rank():
            Writer.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
        saved(folder, run, step=2)

    with tempfile.TemporaryDirectory() as place:
        with pytest.raises(
            DistributedError, match=r"(?s)rank 0 of 2: a collective failed in.*rank 1 of 2 failed:\nthe process died"
        ):
            run_ranks(body, 2, 60, args=(Path(place),), grace_s=5.0)
        assert run_ranks(lambda: loaded(Path(place), run_of("zero")), 2, 60) == [1, 1]


def test_options_of_an_optimizer_without_states_go_on() -> None:
    """Plain SGD never has states; its learning rate is what a chained schedule has made of it."""

    def body(folder: Path) -> list[Any]:
        parallel, place = run_of("zero").parallel, {"at": [1]}
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        live = Live(place)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        saving = sw.save(folder, parallel, optimizer, scheduler, live, step=3, wait=False)
        place["at"][0] = 9  # what goes on meanwhile
        saving.wait()
        other = torch.optim.SGD(parallel.parameters(), lr=1.0)
        chained = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
        sw.load(folder, parallel, other, chained, live)
        other.step()
        chained.step()
        return [*chained.get_last_lr(), other.param_groups[0]["lr"], live.place["at"][0]]

    assert joined(body) == [[0.0625, 0.0625, 1]] * 2


class Live:
    """Its state is the object that it changes."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return self.place

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.place = state_dict


def test_states_are_those_that_were_saved_whatever_an_optimizer_had() -> None:
    def body(folder: Path) -> None:
        run = run_of("zero")
        parallel = run.parallel
        sw.save(folder, parallel, run.optimizer, step=1)  # as new
        run.step()
        sw.load(folder, parallel, run.optimizer)
        assert not run.optimizer.state
        run.step()
        sw.save(folder, parallel, run.optimizer, step=2)
        before = {p: dict(own) for p, own in run.optimizer.state.items()}
        more = torch.optim.AdamW(parallel.parameters(), amsgrad=True)
        with pytest.raises(CheckpointError, match=r"optimizer state\..*max_exp_avg_sq: not in the checkpoint"):
            sw.load(folder, parallel, more)
        assert not more.state
        few = torch.optim.AdamW([parallel.get_parameter("tok.weight")])
        with pytest.raises(CheckpointError, match=r"optimizer state\..*: only in the checkpoint"):
            sw.load(folder, parallel, few)
        assert {p: dict(own) for p, own in run.optimizer.state.items()} == before
        lists = torch.optim.LBFGS(parallel.parameters())
        lists.state[parallel.get_parameter("tok.weight")]["old_dirs"] = []
        with pytest.raises((CheckpointError, DistributedError), match="LBFGS keeps 'old_dirs' as a list"):
            sw.save(folder, parallel, lists, step=3)

    joined(body)


def test_stages_with_other_groups_or_no_optimizer() -> None:
    def body(folder: Path) -> list[float]:
        run = run_of("stages")
        named = dict(run.parallel.named_parameters())
        groups = [{"params": [p for n, p in named.items() if n != "tok.weight"], "lr": 0.1},
                  {"params": [p for n, p in named.items() if n == "tok.weight"], "weight_decay": 0.5}]  # fmt: skip

        def made(lr: float) -> torch.optim.Optimizer:
            return torch.optim.AdamW([{**group} for group in groups], lr=lr)

        first = made(0.01)
        run.parallel.forward_backward(**BATCH)
        first.step()
        first.zero_grad()
        sw.save(folder, run.parallel, first, step=1)
        second = made(0.7)
        assert sw.load(folder, run.parallel, second) == 1
        assert second.param_groups[0]["lr"] == 0.1
        assert not groups[1]["params"] or second.param_groups[1]["lr"] == 0.01
        half = made(0.01) if dist.get_rank() else None  # the first stage is frozen
        if half is not None:
            half.load_state_dict(first.state_dict())
        sw.save(folder, run.parallel, half, step=2)
        again = made(0.3) if dist.get_rank() else None
        assert sw.load(folder, run.parallel, again) == 2
        return [] if again is None else [float(own["step"]) for own in again.state.values()]

    none, steps = joined(body)
    assert none == []
    assert set(steps) == {1.0}
