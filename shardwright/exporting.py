"""The weights of a compiled model as safetensors files, as other libraries read them, or in the model itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.waits import waiting
from shardwright.pcg.arguments import FLAG, NUMBER, PATH, checked
from shardwright.pcg.errors import CheckpointError, MachineError
from shardwright.planned import require_plan
from shardwright.ranks import from_all_ranks, on_all_ranks
from shardwright.whole import first_names, whole_model

MAX_FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.partial)?")


class _File(NamedTuple):
    """Tensors that go into one file, of one pipeline stage, with the bytes of all of them."""

    names: tuple[str, ...]
    num_bytes: int


@overload
def export(
    parallel: ParallelModule, folder: str | os.PathLike[str], *, max_file_bytes: int = MAX_FILE_BYTES
) -> dict[str, str]: ...


@overload
def export(parallel: ParallelModule, *, everywhere: bool = False) -> nn.Module | None: ...


@checked(CheckpointError, folder=PATH, max_file_bytes=NUMBER, everywhere=FLAG)
def export(
    parallel: ParallelModule, folder: str | os.PathLike[str] | None = None, *, max_file_bytes: int = MAX_FILE_BYTES,
    everywhere: bool = False,
) -> dict[str, str] | nn.Module | None:  # fmt: skip
    """Write the weights and buffers as whole tensors, under the model's own names, or return the model with them.

    Every rank calls it. Without a folder it returns a copy of the model that was compiled, of its own class, with the
    weights and buffers that `parallel` has: on rank 0, or on every rank. Tied tensors are tied, tensors lie on the
    devices of the model's own, in the dtypes that `parallel` has, and what else the model holds, such as its mode, is
    copied as it is. `save_pretrained` and `generate` of transformers work on it.

    The folder gets `model.safetensors`, or several files and their index `model.safetensors.index.json`, as
    `from_pretrained` of transformers, `compile(weights=folder)` and other tools read them; the configuration is the
    model's own business (`model.config.save_pretrained(folder)`). Of a tied tensor it has the first name of
    `state_dict()` alone. A tensor is gathered when its turn comes, so that a rank holds one file's tensors at most.

    Args:
        parallel: the compiled model, with a plan.
        folder: files of these names are replaced, once all are written. None: the model is returned.
        max_file_bytes: the most bytes of tensors in a file, unless one tensor has more.
        everywhere: without a folder: whether every rank gets a model, and not rank 0 alone.

    Returns:
        The file of each tensor, by name; without a folder the model, or None on other ranks than 0.

    Raises:
        CheckpointError: the model has no plan yet or complex128 numbers, or a file cannot be written; then an earlier
            export is as it was, and files that end in `.partial` may be left. Without a folder: the whole model does
            not fit, it is gone or cannot be copied.
    """
    require_plan(parallel, "export", CheckpointError)
    if folder is None:
        return whole_model(parallel, everywhere=everywhere)
    target, ranks = Path(folder), parallel.ranks
    with waiting("export", ranks.timeout_s), torch.no_grad():
        state = dict(first_names(parallel.state_dict(keep_vars=True).items()))
        on_all_ranks(lambda: _refuse_wide(state))
        sizes = {name: value.numel() * value.element_size() for name, value in state.items()}
        listed = from_all_ranks((ranks.stages.rank, sizes))
        order = list(_ordered(dict(reversed(listed)), max_file_bytes))
        names = [_name(number, len(order)) for number in range(len(order))]
        is_first = dist.get_rank() == next(rank for rank, (stage, _) in enumerate(listed) if stage == ranks.stages.rank)
        on_all_ranks(lambda: _make(target))
        for (stage, file), name in zip(order, names, strict=True):
            if stage == ranks.stages.rank:
                wholes = {tensor: _whole(state[tensor]) for tensor in file.names}
                failure = _written(target / f"{name}.partial", wholes) if is_first else None
            else:
                failure = None
            on_all_ranks(lambda failure=failure: _raise(failure))
        of = {tensor: name for (_, file), name in zip(order, names, strict=True) for tensor in file.names}
        total = sum(file.num_bytes for _, file in order)
        on_all_ranks(lambda: _end(target, names, of, total) if dist.get_rank() == 0 else None)
    return of


def _refuse_wide(values: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` for a dtype of torch that safetensors does not have."""
    if name := next((name for name, value in values.items() if value.dtype == torch.complex128), ""):
        raise CheckpointError(
            f"export: {name} is complex128, and safetensors has complex64 alone; build the model in torch.cfloat, or "
            "export without a folder, and torch.save the state_dict of what it returns"
        )


def _ordered(by_stage: Mapping[int, Mapping[str, int]], most: int) -> Iterator[tuple[int, _File]]:
    """Yield all files, each with the stage that writes it; the first stage that has a tensor does."""
    taken = set[str]()
    for stage in sorted(by_stage):
        sizes = {name: num_bytes for name, num_bytes in by_stage[stage].items() if name not in taken}
        taken |= sizes.keys()
        yield from ((stage, file) for file in _files(sizes, most))


def _files(sizes: Mapping[str, int], most: int) -> list[_File]:
    files, names, size = list[_File](), list[str](), 0
    for name, num_bytes in sizes.items():
        if names and size + num_bytes > most:
            files.append(_File(tuple(names), size))
            names, size = [], 0
        names.append(name)
        size += num_bytes
    return [*files, _File(tuple(names), size)] if names else files


def _name(number: int, many: int) -> str:
    return "model.safetensors" if many == 1 else f"model-{number + 1:05d}-of-{many:05d}.safetensors"


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().contiguous()


def _make(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"{target}: cannot export here: {why}; choose another folder") from error
    if find_spec("safetensors") is None:
        raise MachineError("export: to write safetensors, pip install safetensors")


def _written(file: Path, wholes: dict[str, Tensor]) -> str | None:
    """Write a file; return why that failed, if it did."""
    from safetensors.torch import save_file

    try:
        save_file(wholes, file, metadata={"format": "pt"})
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        return f"{file.parent}: cannot write {file.name}: {error}"
    return None


def _raise(failure: str | None) -> None:
    if failure is not None:
        raise CheckpointError(failure)


def _end(target: Path, names: Sequence[str], of: dict[str, str], total: int) -> None:
    """Give the files their names, write the index, and delete files of an earlier export in other numbers."""
    current = {*names, *(f"{name}.partial" for name in names)}
    try:
        for name in names:
            (target / f"{name}.partial").rename(target / name)
        if len(names) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(of.items()))}
            (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        else:
            (target / INDEX).unlink(missing_ok=True)
        for old in target.iterdir():
            if _OURS.fullmatch(old.name) and old.name not in current:
                old.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot export here: {error.strerror or error}; choose another folder"
        ) from error
