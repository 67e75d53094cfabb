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
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random.states import check_states, set_states, states_of
from shardwright.lowering.ranks.waits import start_up
from shardwright.lowering.store.checkpoint_folder import RANKS as RANKS_FILE
from shardwright.lowering.store.checkpoint_folder import CheckpointFolder, Writer, check_files, read_about
from shardwright.pcg.errors import CheckpointError, ShardwrightError
from shardwright.ranks import from_rank_0, on_all_ranks

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # each stage has a list of its own parameters
_FAILURES = (Exception, CheckpointException)  # which is no Exception
_SHOWN = 10
_Kinds = Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]
_FOLDERS = dict[Path, "_Run"]()
_GROUPS = dict[dist.ProcessGroup, dist.ProcessGroup]()
"""The group of all ranks for saving, by torch's own. Savings beside steps must not share one with them."""


class Stateful(Protocol):
    """An object with a state that does not depend on the rank: a learning rate scheduler, a sampler, a loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


@dataclass
class Saving:
    """A checkpoint that is being saved.

    Attributes:
        step: its step.
    """

    step: int
    _written: Future[object] = field(repr=False)
    _timeout_s: float = field(repr=False)
    _is_waited_for: bool = field(default=False, repr=False)
    _failure: Exception | None = field(default=None, repr=False)

    def wait(self) -> None:
        """Wait until the checkpoint is whole, on all ranks. Every rank calls it.

        Raises `CheckpointError` on every rank if it could not be written; earlier checkpoints are as they were.
        """
        if not self._is_waited_for:
            self._is_waited_for = True
            try:
                with start_up(self._timeout_s):
                    on_all_ranks(self._result)
            except ShardwrightError as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure

    @property
    def is_told(self) -> bool:
        """Whether `wait` has said how it ended."""
        return self._is_waited_for

    def tell_if_lost(self) -> None:
        """Say on stderr that the checkpoint could not be written, if nobody waited for it."""
        try:
            if not self._is_waited_for:
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
        self.folder, self.stager = CheckpointFolder(path), _HostStager()
        self.last: Saving | None = None


class _HostStager(BlockingAsyncStager):
    """It copies tensors of the host into the copies of the save before; torch's own makes new ones, twice.

    Nothing is staged before the save before is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies = dict[str, Tensor]()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state with copies of its tensors."""
        leaves = tree_leaves(state_dict)
        if any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves):
            return super().stage(state_dict)
        with torch.no_grad():
            return self._copied("", state_dict)

    def _copied(self, key: str, value: Any) -> Any:  # noqa: ANN401
        match value:
            case dict():
                return {name: self._copied(f"{key}.{name}", own) for name, own in value.items()}
            case list() | tuple():
                copies = [self._copied(f"{key}.{number}", own) for number, own in enumerate(value)]
                return copies if isinstance(value, list) else tuple(copies)
            case Tensor():
                return self._copy(key, value)
            case _:
                return copy.deepcopy(value)

    def _copy(self, key: str, leaf: Tensor) -> Tensor:
        known = self._copies.get(key)
        if known is None or _kind_of(known) != _kind_of(leaf):
            known = self._copies[key] = leaf.detach().clone()
        else:
            _local(known).copy_(_local(leaf))
        return known


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
    _planned(parallel, "save")
    run, timeout_s = _run_of(folder), parallel.ranks.timeout_s
    if run.last is not None and not run.last.is_told:
        run.last.wait()
    if keep is not None and keep < 1:
        raise CheckpointError(f"save: keep={keep}; keep at least 1, or None for all")
    with start_up(timeout_s):
        partial = Path(from_rank_0(lambda: str(run.folder.begin(step)), "the folder of a checkpoint"))
        moments, groups = on_all_ranks(lambda: _flat(parallel, optimizer))
        kinds = _gathered((None if optimizer is None else type(optimizer).__name__, groups))
        state = _parts(parallel, moments, others)
        small = {
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "sampler": None if sampler is None else sampler.state_dict(),
            "scaler": None if parallel.scaler is None else parallel.scaler.state_dict(),
            "groups": {name: options for _, own in kinds for name, options in own.items()},
            "random": _by_rank(states_of(parallel.stream)),
        }
        small = copy.deepcopy(small)  # it is written later, beside further steps
        about = {
            "step": step,
            "ranks": dist.get_world_size(),
            "optimizer": next((kind for kind, _ in kinds if kind is not None), None),
            "torch": torch.__version__,
        }
        group = _saving_group(timeout_s)
    written = _write(state, Writer(partial, small, about), group, None if wait else run.stager)
    run.last = saving = Saving(step, _then(written, lambda: _end(run.folder, partial, keep)), timeout_s)
    if wait:
        saving.wait()
    return saving


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

    Args:
        folder: the run's folder.
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
    _planned(parallel, "load")
    with start_up(parallel.ranks.timeout_s):
        where = from_rank_0(lambda: _found(Path(folder), step), "the choice of a checkpoint")
        if where is None:
            return None
        about = on_all_ranks(lambda: _checked(where))
        small = on_all_ranks(lambda: _small(where))
        on_all_ranks(lambda: _check_given(where, small, about, optimizer, scheduler, sampler))
        saved = on_all_ranks(lambda: _kinds(where))
        with _probed(parallel, optimizer, saved) as template:
            state = _parts(parallel, template, others)
            names, taken = _all_names(state.get("model", {})), _all_names(template)
            on_all_ranks(lambda: _check_model(where, state, names, taken if about["optimizer"] else None, saved))
            on_all_ranks(lambda: _check_groups(where, parallel, optimizer, small["groups"]))
        on_all_ranks(lambda: _read(where, state))
        parallel.load_state_dict(state["model"])
        if optimizer is not None:
            _set_moments(parallel, optimizer, state.get("optimizer", {}), small["groups"])
        if others is not None:
            others.update(state.get("others", {}))
        for name, target in (("scheduler", scheduler), ("sampler", sampler), ("scaler", parallel.scaler)):
            if target is not None and small[name] is not None:
                target.load_state_dict(small[name])
        states, rank = small["random"], dist.get_rank()
        is_own = rank < len(states["of"]) or len(states["all"]) == 1
        number = states["of"][rank] if rank < len(states["of"]) else 0
        set_states(states["all"][number], parallel.stream, own=is_own)
    return about["step"]


# ---- saving ----


def _planned(parallel: ParallelModule, what: str) -> None:
    """Raise `CheckpointError` for what has no layouts yet."""
    if not isinstance(parallel, ParallelModule):
        raise CheckpointError(
            f"{what}: expected a model that shardwright.compile gave, got a {type(parallel).__name__}"
        )
    if not hasattr(parallel, "ranks"):
        raise CheckpointError(
            f"{what}: the model was compiled without a batch, and has no plan before its first call; give compile the "
            "batch, as kwargs=batch"
        )


@atexit.register
def _tell_lost() -> None:
    for run in _FOLDERS.values():
        if run.last is not None:
            run.last.tell_if_lost()


def _run_of(folder: str | os.PathLike[str]) -> _Run:
    path = Path(folder).absolute()
    return _FOLDERS.setdefault(path, _Run(path))


def _names(parallel: ParallelModule) -> dict[int, str]:
    """Return the first name of each parameter, by its id."""
    return {id(p): name for name, p in reversed(list(parallel.named_parameters(remove_duplicate=False)))}


def _flat(
    parallel: ParallelModule, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return an optimizer's states (`state.NAME.KEY`), and the options of each parameter's group, by name.

    Raises `CheckpointError` for a parameter that is not the model's, and for states that are lists of tensors.
    """
    states, options, names = dict[str, Any](), dict[str, dict[str, Any]](), _names(parallel)
    for group in [] if optimizer is None else optimizer.param_groups:
        shared = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            if (name := names.get(id(parameter))) is None:
                raise CheckpointError("the optimizer has a parameter that is none of the compiled model's")
            options[name] = shared
            for key, value in optimizer.state.get(parameter, {}).items() if optimizer else ():
                if isinstance(value, (list, dict, tuple)):
                    what = f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}"
                    raise CheckpointError(f"{what}; save its state_dict() apart")
                states[f"state.{name}.{key}"] = value
    return states, options


@contextmanager
def _probed(
    parallel: ParallelModule, optimizer: torch.optim.Optimizer | None, saved: _Kinds
) -> Generator[dict[str, Any]]:
    """Yield room for the saved states of an optimizer, which are its own then. If an error follows, all is as before.

    torch fills an optimizer by a step of length 0 without gradients. States of parameters that had none are dropped.
    """
    if optimizer is None:
        yield {}
        return
    before, gradients = dict(optimizer.state), [(p, p.grad) for p in parallel.parameters()]
    optimizer.state.clear()
    for parameter, _ in gradients:
        parameter.grad = None
    had = {name.split(".", 2)[2].rpartition(".")[0] for name in saved if name.startswith("optimizer.state.")}
    try:
        if had:
            get_optimizer_state_dict(parallel, optimizer, options=_FLAT)
        for parameter, name in ((p, _names(parallel).get(id(p))) for p in list(optimizer.state)):
            if name not in had:
                del optimizer.state[parameter]
        yield _flat(parallel, optimizer)[0]
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        raise


def _set_moments(
    parallel: ParallelModule, optimizer: torch.optim.Optimizer, states: Mapping[str, Any], groups: Mapping[str, Any]
) -> None:
    """Give an optimizer what was read: options of groups, and states that are no tensors, not read in place."""
    names = _names(parallel)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            group.update(groups.get(name, {}))
            own = optimizer.state.get(parameter, {})
            own.update({key: states[f"state.{name}.{key}"] for key in own})


def _parts(parallel: ParallelModule, moments: Mapping[str, Any], others: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what `torch.distributed.checkpoint` saves and loads; it takes no empty dictionaries."""
    parts = {"model": parallel.state_dict(), "optimizer": dict(moments), "others": dict(others or {})}
    return {name: part for name, part in parts.items() if part}


def _by_rank(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the distinct states of all ranks, and the number of each rank's; on rank 0, who writes them."""
    distinct, numbers = list[Mapping[str, Any]](), list[int]()
    for own in _gathered(states):
        number = next((n for n, other in enumerate(distinct) if _equal(other, own)), len(distinct))
        distinct += [own] if number == len(distinct) else []
        numbers.append(number)
    return {"all": [dict(own) for own in distinct], "of": numbers}


def _equal(a: object, b: object) -> bool:
    match a, b:
        case Tensor(), Tensor():
            return torch.equal(a, b)
        case Mapping(), Mapping():
            return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
        case list(), list():
            return len(a) == len(b) and all(map(_equal, a, b))
        case _:
            return a == b


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _kind_of(value: Tensor) -> object:
    placements = value.placements if isinstance(value, DTensor) else None
    return type(value), value.shape, value.dtype, placements, _local(value).shape


def _gathered(value: Any) -> list[Any]:  # noqa: ANN401
    found: list[Any] = [value] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


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
    words: dict[str, Any] = {"storage_writer": writer, "process_group": group}
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
    found: Future[object] = Future()

    def called(done: Future[object]) -> None:
        try:
            done.result()
            found.set_result(do())
        except BaseException as error:  # noqa: BLE001 - raised by `Saving.wait`
            found.set_exception(error)

    first.add_done_callback(called)
    return found


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


# ---- loading ----


def _found(path: Path, step: int | None) -> Path | None:
    """Return the folder of a checkpoint, or None if there is none and none was named."""
    folder = CheckpointFolder(path)
    steps = folder.steps()
    if step is None:
        return folder.at(steps[-1]) if steps else None
    if step not in steps:
        shown = ", ".join(map(str, steps[-_SHOWN:])) or "none"
        raise CheckpointError(f"{path}: there is no checkpoint of step {step}; there are {shown}")
    return folder.at(step)


def _checked(where: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself, once this rank has checked its share of the files."""
    about = read_about(where)
    check_files(where, about["files"], sorted(about["files"])[dist.get_rank() :: dist.get_world_size()])
    return about


def _small(where: Path) -> dict[str, Any]:
    try:
        return torch.load(where / RANKS_FILE, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{where / RANKS_FILE}: cannot be read: {_reason(error)}; load another step") from error


def _check_given(
    where: Path, small: Mapping[str, Any], about: Mapping[str, Any], optimizer: torch.optim.Optimizer | None,
    scheduler: Stateful | None, sampler: Stateful | None,
) -> None:  # fmt: skip
    for name, given in (("scheduler", scheduler), ("sampler", sampler)):
        if given is not None and small[name] is None:
            raise CheckpointError(f"{where}: it was saved without a {name}; load it without, or save with one")
    was, own = about["optimizer"], type(optimizer).__name__
    if optimizer is not None and was not in (None, own):
        raise CheckpointError(f"{where}: it was saved with {was}, and this run has {own}; use that, or load without")
    check_states(small["random"]["all"][0])


def _kinds(where: Path) -> _Kinds:
    """Return shape and dtype of all tensors in a checkpoint by name, and None for other values."""
    try:
        saved = FileSystemReader(where).read_metadata().state_dict_metadata
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be read: {_reason(error)}; load another step") from error
    return {
        name: (tuple(own.size), own.properties.dtype) if isinstance(own, TensorStorageMetadata) else None
        for name, own in saved.items()
    }


def _all_names(state: Mapping[str, Any]) -> set[str]:
    """Return the names of all ranks: a pipeline stage has its own alone."""
    return {name for own in _gathered(list(state)) for name in own}


def _check_model(
    where: Path, state: Mapping[str, Any], names: set[str], moments: set[str] | None, saved: _Kinds
) -> None:
    """Raise `CheckpointError` with the first differences between what is saved and what would be loaded.

    `names` and `moments`: of all ranks; no moments are compared where none were saved, or are wanted.
    """
    found = list(_differences(state, saved))
    if moments:
        left = (name[10:] for name in saved if name.startswith("optimizer.state."))
        found += [f"optimizer {name}: only in the checkpoint" for name in left if name not in moments]
    found += [f"{name[6:]}: only in the checkpoint" for name in saved if _is_of_model(name) and name[6:] not in names]
    if found:
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(f"{where}: it is of another model or optimizer: {'; '.join(found[:_SHOWN])}{more}")


def _check_groups(
    where: Path, parallel: ParallelModule, optimizer: torch.optim.Optimizer | None, saved: Mapping[str, Any]
) -> None:
    """Raise `CheckpointError` if a parameter's group was not saved, or a group's parameters had different options."""
    names = _names(parallel)
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        own = [names[id(parameter)] for parameter in group["params"]]
        for name in own if saved else ():
            if name not in saved:
                raise CheckpointError(f"{where}: the optimizer that was saved did not have {name}; use the same ones")
            if not _equal(saved[name], saved[own[0]]):
                raise CheckpointError(
                    f"{where}: {own[0]} and {name} are in one group of the optimizer (number {number}), and were saved "
                    "with other options; make the same groups"
                )


def _is_of_model(name: str) -> bool:
    return name.startswith("model.")


def _differences(state: Mapping[str, Any], saved: _Kinds) -> Iterator[str]:
    for part in ("model", "optimizer"):
        for name, value in state.get(part, {}).items():
            key, shown = f"{part}.{name}", name if part == "model" else f"optimizer {name}"
            own = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            if key not in saved:
                yield f"{shown}: not in the checkpoint"
            elif saved[key] != own:
                yield f"{shown}: {_kind(saved[key])} in the checkpoint, {_kind(own)} here"


def _kind(kind: tuple[Sequence[int], torch.dtype] | None) -> str:
    return "no tensor" if kind is None else f"{str(kind[1]).removeprefix('torch.')}{list(kind[0])}"


def _read(where: Path, state: dict[str, Any]) -> None:
    try:
        state_dict_loader.load(state, checkpoint_id=where)
    except _FAILURES as error:
        raise CheckpointError(f"{where}: cannot be loaded: {_reason(error)}") from error
