"""Checkpoints of a whole run: `save` and `load`.

    parallel, optimizer, others ──▶ torch.distributed.checkpoint, under the model's own names ─┐
    scheduler, sampler, scaler, generators ──▶ one small file ─────────────────────────────────┴▶ step-00001000/

What one plan saves, any other loads: another number of ranks, stages, ZeRO, blocks.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random.states import States, check_states, set_states, states_of
from shardwright.lowering.ranks.waits import waiting
from shardwright.lowering.store import moments
from shardwright.lowering.store.checkpoint_folder import (
    ABOUT,
    METADATA,
    CheckpointFolder,
    Writer,
    check_files,
    read_about,
)
from shardwright.lowering.store.checkpoint_folder import RANKS as RANKS_FILE
from shardwright.lowering.store.chunks import OneTiling
from shardwright.lowering.store.dcp_folder import Other
from shardwright.lowering.store.files import Kind
from shardwright.lowering.store.shards import Checkpoint
from shardwright.lowering.store.slice_reader import SliceReader
from shardwright.lowering.store.staging import HostStager
from shardwright.lowering.store.weights import SHOWN
from shardwright.pcg.arguments import FLAG, NUMBER, PATH, Argument, checked
from shardwright.pcg.errors import CheckpointError, ShardwrightError
from shardwright.planned import require_plan
from shardwright.ranks import from_all_ranks, from_rank_0, made_by_all_ranks, on_all_ranks

_FAILURES = (Exception, CheckpointException)  # which is no Exception
_Kinds = Mapping[str, Kind | None]
_Opened = tuple[Mapping[str, Any], Mapping[str, Any], _Kinds, Mapping[str, str]]
"""What a checkpoint says of itself, small values, tensors, and the names in the folder that differ from ours."""
_NOTHING = dict.fromkeys(("scheduler", "sampler", "scaler", "random"))
_FOLDERS = dict[Path, "_Run"]()
_GROUPS = dict[dist.ProcessGroup, dist.ProcessGroup]()
"""The group of all ranks for saving, by torch's own. Savings beside steps must not share one with them."""


_OTHERS = Argument((Mapping,), "values by name")


class Stateful(Protocol):
    """An object with a state that does not depend on the rank: a learning rate scheduler, a sampler, a loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


@dataclass
class Saving:
    """A checkpoint that is being saved.

    Attributes:
        step: its step.
        is_told: whether `wait` has said how it ended.
    """

    step: int
    _written: Future[object] = field(repr=False)
    _timeout_s: float = field(repr=False)
    is_told: bool = field(default=False, repr=False)
    _failure: Exception | None = field(default=None, repr=False)

    def wait(self) -> None:
        """Wait until the checkpoint is whole, on all ranks. Every rank calls it.

        Raises `CheckpointError` on every rank if it could not be written; earlier checkpoints are as they were.
        """
        if not self.is_told:
            self.is_told = True
            try:
                with waiting("save", self._timeout_s):
                    on_all_ranks(self._result)
            except ShardwrightError as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure

    def tell_if_lost(self) -> None:
        """Say on stderr that the checkpoint could not be written, if nobody waited for it."""
        try:
            if not self.is_told:
                self._result()
        except CheckpointError as error:
            sys.stderr.write(f"{error}; wait for it before the process group ends\n")

    def _result(self) -> None:
        try:
            self._written.result(self._timeout_s)
        except TimeoutError:
            raise CheckpointError(f"save: step {self.step} is not written after {self._timeout_s:g} s") from None
        except _FAILURES as error:
            raise CheckpointError(f"save: step {self.step} could not be written: {_reason(error)}") from error


class _Run:
    """A folder that this process saves to, and the save under way."""

    def __init__(self, path: Path) -> None:
        self.folder, self.stager = CheckpointFolder(path), HostStager()
        self.last: Saving | None = None


@checked(CheckpointError, folder=PATH, others=_OTHERS, step=NUMBER, keep=NUMBER, wait=FLAG)
def save(
    folder: str | os.PathLike[str],
    parallel: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    sampler: Stateful | None = None,
    *,
    step: int,
    others: Mapping[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = True,
) -> Saving:
    """Save a run between two steps, so that `load` continues it under any plan. Every rank calls it.

    The folder gets `step-…`, a folder of `torch.distributed.checkpoint` with weights (`model.NAME`) and the optimizer's
    states under the model's own names, sizes and checksums of all files, and the states of generators: torch's, CUDA's,
    NumPy's, Python's, that of `seed_exactly`. A save that is cut off, or fails, leaves earlier checkpoints as they are.

    Args:
        folder: the run's folder, which all ranks see. Only one run at a time can save there.
        parallel: the compiled model; its `scaler`'s state is saved too.
        optimizer: of its parameters; None where a pipeline stage has none.
        scheduler: an object with `state_dict` and `load_state_dict`, saved as rank 0 has it; what it gives must be
            tensors, numbers, texts, and lists and dictionaries of these.
        sampler: likewise: the place in the data.
        step: the number of steps taken, which names the checkpoint.
        others: further tensors, DTensors and plain values by name, such as an average of the weights.
        keep: the number of checkpoints that stay; None: all.
        wait: whether to return when the checkpoint is whole. If False, tensors are copied to the host, and written
            beside further steps; `Saving.wait` waits, and the next `save` does.

    Returns:
        The checkpoint, to wait for.

    Raises:
        CheckpointError: the folder cannot be written, another run saves there, or the step is there already; an earlier
            save failed.
    """
    _check_arguments("save", parallel, optimizer, scheduler, sampler)
    run, timeout_s = _run_of(folder), parallel.ranks.timeout_s
    if run.last is not None and not run.last.is_told:
        run.last.wait()
    if keep is not None and keep < 1:
        raise CheckpointError(f"save: keep={keep}; keep at least 1, or None for all")
    with waiting("save", timeout_s):
        partial = Path(from_rank_0(lambda: str(run.folder.begin(step)), "the folder of a checkpoint"))
        states = dict[str, Any]()

        def of_rank() -> tuple[str | None, moments.Groups, States]:
            flat, groups = moments.flat(parallel, optimizer)
            states.update(flat)
            return None if optimizer is None else type(optimizer).__name__, groups, states_of(parallel.stream)

        kinds, groups, random = zip(*made_by_all_ranks(of_rank), strict=True)
        state = _parts(parallel, states, others, keep_vars=not wait)
        small = {
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "sampler": None if sampler is None else sampler.state_dict(),
            "scaler": None if parallel.scaler is None else parallel.scaler.state_dict(),
            "groups": {name: options for by_name in groups for name, options in by_name.items()},
        }
        small = copy.deepcopy(small) | {"random": _distinct(random)}  # it is written later, beside further steps
        about = {
            "step": step,
            "ranks": dist.get_world_size(),
            "optimizer": next((kind for kind in kinds if kind is not None), None),
            "torch": torch.__version__,
        }
        group = _saving_group(timeout_s)
    written = _write(state, Writer(partial, small, about), group, None if wait else run.stager)
    run.last = saving = Saving(step, _then(written, lambda: _end(run.folder, partial, keep)), timeout_s)
    if wait:
        saving.wait()
    return saving


@checked(CheckpointError, folder=PATH, others=_OTHERS, step=NUMBER)
def load(
    folder: str | os.PathLike[str],
    parallel: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    sampler: Stateful | None = None,
    *,
    others: dict[str, Any] | None = None,
    step: int | None = None,
) -> int | None:
    """Load what `save` has saved, in place, before the first step or between two. Every rank calls it.

    All is checked before anything is loaded: files by size and checksum, names, shapes and dtypes. On as many ranks as
    have saved, every generator continues where it was. On others those of further ranks stay as they are; masks of
    dropout continue all the same.

    Folders of `torch.distributed.checkpoint` that plain FSDP2 or torchtitan has written are loaded too: the model under
    one prefix, an optimizer under names of parameters, torchtitan's scheduler. They have no checksums and generators.

    Args:
        folder: the run's folder, with a folder for each step; or that of one checkpoint.
        parallel: the compiled model, under any plan; its gradients are dropped.
        optimizer: of the same class and over the same parameters as that which was saved.
        scheduler: gets what `scheduler` had, as do the `scaler` of `parallel` and the `sampler`.
        sampler: see `scheduler`.
        others: tensors are overwritten in place, other values replaced.
        step: the step to load; None: the last.

    Returns:
        The step, or None if the folder has no checkpoint and `step` is None.

    Raises:
        CheckpointError: there is no such step, a file is damaged or missing, or the checkpoint is of another model
            (with the first ten differences) or optimizer.
    """
    _check_arguments("load", parallel, optimizer, scheduler, sampler)
    with waiting("load", parallel.ranks.timeout_s):
        where = from_rank_0(lambda: _found(Path(folder), step), "the choice of a checkpoint")
        if where is None:
            return None
        names, given = _all_names(parallel.state_dict()), any(from_all_ranks(optimizer is not None))
        checked = on_all_ranks(lambda: _checked(where) if _is_ours(where) else None)
        about, small, saved, there = on_all_ranks(
            lambda: _own(where, checked) if checked else _other(where, names, given, scheduler is not None)
        )
        on_all_ranks(lambda: moments.check_parameters(parallel, optimizer))
        on_all_ranks(lambda: _check_given(where, small, about, optimizer, scheduler, sampler, others))
        with moments.room_for(parallel, optimizer, _named(saved, "optimizer.")) as room:
            state, taken = _parts(parallel, room, others), _all_names(room)
            on_all_ranks(lambda: _check_model(where, state, names, taken if small["groups"] else None, saved))
            on_all_ranks(lambda: _check_groups(where, parallel, optimizer, small["groups"]))
        on_all_ranks(lambda: _read(where, state, there))
        parallel.load_state_dict(state["model"])
        if optimizer is not None:
            moments.put(parallel, optimizer, state.get("optimizer", {}), small["groups"])
        if others is not None:
            others.update(state.get("others", {}))
        for name, target in (("scheduler", scheduler), ("sampler", sampler), ("scaler", parallel.scaler)):
            if target is not None and small[name] is not None:
                target.load_state_dict(small[name])
        if small["random"] is not None:
            _draw_on(small["random"], parallel)
    return about["step"]


# ---- saving ----


@atexit.register
def _tell_lost() -> None:
    for run in _FOLDERS.values():
        if run.last is not None:
            run.last.tell_if_lost()


def _run_of(folder: str | os.PathLike[str]) -> _Run:
    path = Path(folder).absolute()
    return _FOLDERS.setdefault(path, _Run(path))


def _parts(
    parallel: ParallelModule, moments: Mapping[str, Any], others: Mapping[str, Any] | None, *, keep_vars: bool = False
) -> dict[str, Any]:
    """Return what `torch.distributed.checkpoint` saves and loads; it takes no empty dictionaries.

    `keep_vars`: for what copies the tensors at once, parameters themselves, whose detaching costs time.
    """
    parts = {
        "model": parallel.state_dict(keep_vars=keep_vars),
        "optimizer": dict(moments),
        "others": dict(others or {}),
    }
    return {name: part for name, part in parts.items() if part}


def _distinct(states: Sequence[States]) -> dict[str, Any]:
    """Return the distinct ones of all ranks' states, and the number of each rank's."""
    distinct, numbers = list[States](), list[int]()
    for state in states:
        number = next((n for n, other in enumerate(distinct) if moments.equal(other, state)), len(distinct))
        distinct += [state] if number == len(distinct) else []
        numbers.append(number)
    return {"all": [dict(state) for state in distinct], "of": numbers}


def _saving_group(timeout_s: float) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    if world not in _GROUPS:
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        _GROUPS[world] = cast("dist.ProcessGroup", made)
    return _GROUPS[world]


def _write(
    state: dict[str, Any], writer: Writer, group: dist.ProcessGroup, stager: AsyncStager | None
) -> Future[object]:
    """Write a checkpoint, now, or what the stager copies beside further steps."""
    words: dict[str, Any] = {"storage_writer": writer, "process_group": group, "planner": OneTiling()}
    if stager is not None:
        return cast("Future[object]", state_dict_saver.async_save(state, async_stager=stager, **words))
    done: Future[object] = Future()
    try:
        done.set_result(state_dict_saver.save(state, **words))
    except _FAILURES as error:  # raised by `Saving.wait`, on all ranks
        done.set_exception(error)
    return done


def _then(first: Future[object], do: Callable[[], object]) -> Future[object]:
    """Return the outcome of what is done once a future has its result."""
    future: Future[object] = Future()

    def called(done: Future[object]) -> None:
        try:
            done.result()
            future.set_result(do())
        except BaseException as error:  # noqa: BLE001 - raised by `Saving.wait`
            future.set_exception(error)

    first.add_done_callback(called)
    return future


def _end(folder: CheckpointFolder, partial: Path, keep: int | None) -> None:
    if dist.get_rank() == 0:
        folder.end(partial, keep)


def _reason(error: BaseException) -> str:
    """Return the first cause that a checkpoint's error names, in one line."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, Mapping) and failures:
        rank, (cause, _) = min(cast("Mapping[int, Any]", failures).items())
        return f"rank {rank}: {_reason(cause)}"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _check_arguments(
    what: str, parallel: ParallelModule, optimizer: object, scheduler: object, sampler: object
) -> None:
    """Raise `CheckpointError` for anything else than a compiled model, its optimizer, and objects with a state."""
    require_plan(parallel, what, CheckpointError)
    needs = ("optimizer", optimizer, "param_groups"), ("scheduler", scheduler, "state_dict"), (
        "sampler", sampler, "state_dict")  # fmt: skip
    for name, given, attribute in needs:
        if given is not None and (isinstance(given, type) or not hasattr(given, attribute)):
            got = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
            raise CheckpointError(f"{what}: expected an object with {attribute} as {name}, got {got}")


# ---- loading ----


def _draw_on(random: Mapping[str, Any], parallel: ParallelModule) -> None:
    """Set the generators of this rank to the states that it had, or to rank 0's where it did not save."""
    rank = dist.get_rank()
    is_own = rank < len(random["of"]) or len(random["all"]) == 1
    number = random["of"][rank] if rank < len(random["of"]) else 0
    set_states(random["all"][number], parallel.stream, is_own=is_own)


def _found(path: Path, step: int | None) -> Path | None:
    """Return the folder of a checkpoint, or None if there is none and none was named."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: expected the folder of a run's checkpoints, got a file")
    steps = CheckpointFolder(path).all()
    if step is None and (path / METADATA).is_file():
        return path
    if step is None:
        return steps[max(steps)] if steps else None
    if step not in steps:
        shown = ", ".join(map(str, sorted(steps)[-SHOWN:])) or "none"
        raise CheckpointError(f"{path}: there is no checkpoint of step {step}; there are {shown}")
    return steps[step]


def _is_ours(where: Path) -> bool:
    """Return whether `save` has written a checkpoint, perhaps a damaged one."""
    return not (where / METADATA).is_file() or (where / ABOUT).exists() or (where / RANKS_FILE).exists()


def _own(where: Path, about: Mapping[str, Any]) -> _Opened:
    return about, _small(where), _kinds(where), {}


def _other(where: Path, names: set[str], optimizer: bool, scheduler: bool) -> _Opened:
    """Return of a folder by another program what `_own` does."""
    with _told(where):
        other = Other.read(Checkpoint(where), names, optimizer=optimizer, scheduler=scheduler)
    small = {"scheduler": other.scheduler or None, "groups": other.groups}
    return {"step": other.step, "optimizer": None}, {**_NOTHING, **small}, other.kinds, other.names


@contextmanager
def _told(where: Path) -> Generator[None]:
    """Raise what reading a checkpoint meets as a `CheckpointError` that names it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be read: {_reason(error)}; load another step") from error


def _checked(where: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself, once this rank has checked its share of the files."""
    about = read_about(where)
    check_files(where, about["files"], sorted(about["files"])[dist.get_rank() :: dist.get_world_size()])
    return about


def _small(where: Path) -> dict[str, Any]:
    with _told(where / RANKS_FILE):
        return torch.load(where / RANKS_FILE, weights_only=True, map_location="cpu")


def _check_given(
    where: Path, small: Mapping[str, Any], about: Mapping[str, Any], optimizer: torch.optim.Optimizer | None,
    scheduler: Stateful | None, sampler: Stateful | None, others: object,
) -> None:  # fmt: skip
    for name, given in (("scheduler", scheduler), ("sampler", sampler)):
        if given is not None and small[name] is None:
            raise CheckpointError(f"{where}: it was saved without a {name}; load it without, or save with one")
    was, kind = about["optimizer"], type(optimizer).__name__
    if optimizer is not None and was not in (None, kind):
        raise CheckpointError(f"{where}: it was saved with {was}, and this run has {kind}; use that, or load without")
    if small["random"] is not None:
        check_states(small["random"]["all"][0])
    elif others is not None:
        raise CheckpointError(f"{where}: only what shardwright.save has saved is loaded into others=")


def _kinds(where: Path) -> _Kinds:
    """Return what a checkpoint has by name, and None for values that are no tensors."""
    with _told(where):
        stored = Checkpoint(where)
    return {**stored.kinds, **dict.fromkeys(stored.others)}


def _named(saved: _Kinds, part: str) -> list[str]:
    """Return the names of one part of a checkpoint, such as "model."."""
    return [name.removeprefix(part) for name in saved if name.startswith(part)]


def _all_names(state: Mapping[str, Any]) -> set[str]:
    """Return the names of all ranks: a pipeline stage has its own alone."""
    return {name for names in from_all_ranks(list(state)) for name in names}


def _check_model(
    where: Path, state: Mapping[str, Any], names: set[str], states: set[str] | None, saved: _Kinds
) -> None:
    """Raise `CheckpointError` with the first differences between what is saved and what would be loaded.

    `names`, `states`: of the model and the optimizer, on all ranks; no states are compared where none are wanted.
    """
    differences = list(_differences(state, saved))
    if states:
        left = (name for name in _named(saved, "optimizer.") if name not in states)
        differences += [f"optimizer {name}: only in the checkpoint" for name in left]
    differences += [f"{name}: only in the checkpoint" for name in _named(saved, "model.") if name not in names]
    if differences:
        more = f", and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise CheckpointError(f"{where}: it is of another model or optimizer: {'; '.join(differences[:SHOWN])}{more}")


def _check_groups(
    where: Path, parallel: ParallelModule, optimizer: torch.optim.Optimizer | None, saved: moments.Groups
) -> None:
    with _told(where):
        moments.check_groups(parallel, optimizer, saved)


def _differences(state: Mapping[str, Any], saved: _Kinds) -> Iterator[str]:
    for part, shown in (("model", ""), ("optimizer", "optimizer ")):
        for name, value in state.get(part, {}).items():
            kind = Kind.of(value) if isinstance(value, Tensor) else None
            if (key := f"{part}.{name}") not in saved:
                yield f"{shown}{name}: not in the checkpoint"
            elif saved[key] != kind:
                yield f"{shown}{name}: {saved[key] or 'no tensor'} in the checkpoint, {kind or 'no tensor'} here"


def _read(where: Path, state: dict[str, dict[str, Any]], there: Mapping[str, str]) -> None:
    """Read values in place. `there`: the names in the folder, where they are not `PART.NAME`."""
    flat = {
        there.get(f"{part}.{name}", f"{part}.{name}"): value for part in state for name, value in state[part].items()
    }
    try:
        state_dict_loader.load(flat, storage_reader=SliceReader(where))
    except _FAILURES as error:
        raise CheckpointError(f"{where}: cannot be loaded: {_reason(error)}") from error
    for part, values in state.items():
        values.update({name: flat[there.get(f"{part}.{name}", f"{part}.{name}")] for name in values})
