"""The files that a model's values come from, and which of their tensors is which of the model's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import cast

import torch
from torch import Tensor, nn

from shardwright.lowering.store.dcp_folder import of_model, prefix_of
from shardwright.lowering.store.files import Kind, TensorFiles, read_part
from shardwright.lowering.store.opening import open_files
from shardwright.lowering.store.storage import Slices
from shardwright.pcg.arguments import FLAG, PATH, Argument
from shardwright.pcg.capture.importing import names_by_first
from shardwright.pcg.errors import CheckpointError, PlanError

SHOWN = 10
_NAMES = Argument((Mapping, cast("type", Callable), NoneType), "names by name, or a function of a name")
_KINDS = {"path": PATH, "names": _NAMES, "strict": FLAG, "cast": FLAG}


@dataclass(frozen=True)
class WeightFiles:
    """Files with the values of a model, for `shardwright.compile(weights=...)`. Each rank reads its own part of them.

    Args:
        path: a safetensors file; a folder with one, or with several and their index (`model.safetensors.index.json`);
            a folder of torch.distributed.checkpoint; or what `torch.save` has written, also several files with an
            index. Dictionaries inside of dictionaries have names such as `model.layers.0.weight`.
        names: the name in the files of each of the model's parameters and buffers, as a function or as a dictionary,
            in which others keep their names: `names=lambda name: "model." + name`. In folders of
            torch.distributed.checkpoint, what stands before all names is found.
        strict: every parameter and buffer of `state_dict()` must be in the files, and every tensor in the files must
            be one of these. Where `names` puts one prefix before all names, tensors without it are left out. If False,
            missing ones get the values that the model's constructor gives them, and others are left out.
        cast: convert tensors of another dtype to that of the model.
    """

    path: str | os.PathLike[str]
    names: Mapping[str, str] | Callable[[str], str] | None = None
    strict: bool = True
    cast: bool = False

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            kind.check(f"WeightFiles({name}=...)", getattr(self, name), PlanError)

    def name_of(self, name: str) -> str:
        """Return the name in the files for a name of the model."""
        if self.names is None:
            return name
        return self.names.get(name, name) if isinstance(self.names, Mapping) else self.names(name)


def _prefix(given: WeightFiles, stored: Iterable[str], names: set[str]) -> str:
    try:
        return prefix_of(stored, names)
    except CheckpointError as error:
        raise PlanError(f"{given.path}: {error}, or say which: WeightFiles(path, names=...)") from None


class Stored:
    """The tensors of a model that are in files. `names`: their names there, by each one's first name in the model."""

    def __init__(self, given: WeightFiles, model: nn.Module) -> None:
        """Raise `PlanError` where the files are not of this model, with the first differences."""
        self.files: TensorFiles = open_files(Path(given.path))
        values = {**dict(model.named_parameters(remove_duplicate=False)),
                  **dict(model.named_buffers(remove_duplicate=False))}  # fmt: skip
        saved = {name for name in model.state_dict(keep_vars=True) if name in values}
        self._given, self._kinds = given, self.files.kinds
        if self.files.others is not None:  # with an optimizer, perhaps, and under names such as model.NAME
            prefix = "" if given.names is not None else _prefix(given, self.files.kinds, saved)
            self._kinds = of_model(self.files.kinds, prefix, self.files.others)
            self._given = replace(given, names=prefix.__add__) if prefix else given
        self.copies = {first: self._stored(own, saved) for first, own in names_by_first(values).items()}
        self.names = {first: stored[0] for first, stored in self.copies.items() if stored}
        self._like = {name: values[name] for name in self.names}
        self._check(saved, values)

    def _stored(self, names: tuple[str, ...], saved: set[str]) -> list[str]:
        mapped = (self._given.name_of(name) for name in names if name in saved)
        return [name for name in dict.fromkeys(mapped) if name in self._kinds]

    def part(self, name: str, slices: Slices) -> Tensor:
        """Return a rank's part of a tensor. Raises `PlanError` where names that the model ties have other values."""
        part, *others = (read_part(self.files, stored, slices) for stored in self.copies[name])
        for stored, other in zip(self.copies[name][1:], others, strict=True):
            if not torch.equal(part, other):
                raise PlanError(
                    f"{self._given.path}: {self.names[name]} and {stored} have different values, and the model has one "
                    f"tensor for both ({name}); untie them in the model, or name one of them in `names`"
                )
        return part.to(self._like[name].dtype)

    # ---- whether files and model fit ----

    def _check(self, saved: set[str], values: Mapping[str, Tensor]) -> None:
        differences = [*self._kinds_that_differ()]
        if self._given.strict:
            differences += [*self._missing(saved, values), *self._unexpected(values)]
        if differences:
            more = f"\n  and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
            lines = "".join(f"\n  {line}" for line in differences[:SHOWN])
            raise PlanError(f"{self._given.path} is not of this model:{lines}{more}\n{self._remedy(saved)}")

    def _kinds_that_differ(self) -> Iterator[str]:
        for name, like in self._like.items():
            own, kind = self._kinds[self.names[name]], Kind.of(like)
            if own.shape != kind.shape or (own.dtype != kind.dtype and not self._given.cast):
                yield f"{name}: the files have {own}, the model {kind}"

    def _missing(self, saved: set[str], values: Mapping[str, Tensor]) -> Iterator[str]:
        for first, names in names_by_first(values).items():
            own = [name for name in names if name in saved]
            if own and first not in self.names:
                yield f"{self._given.name_of(own[0])} is missing in the files"

    def _unexpected(self, values: Mapping[str, Tensor]) -> Iterator[str]:
        known = {self._given.name_of(name) for name in values}
        prefixes = {self._given.name_of(name).removesuffix(name) for name in values}
        prefix = prefixes.pop() if len(prefixes) == 1 else ""
        for name in self._kinds:
            if name not in known and name.startswith(prefix):
                yield f"{name} is in the files, and not in the model"

    def _remedy(self, saved: set[str]) -> str:
        """Return what may help: a prefix under which the files have the names, or the options."""
        for name in saved:
            for stored in self._kinds:
                if stored.endswith(f".{name}") and self._given.names is None:
                    return (
                        f"if {stored} is {name}: WeightFiles(path, names=lambda name: {stored[: -len(name)]!r} + name)"
                    )
                if name.endswith(f".{stored}") and self._given.names is None:
                    cut = len(name) - len(stored)
                    return f"if {stored} is {name}: WeightFiles(path, names=lambda name: name[{cut}:])"
        return (
            "give files of this model, or say how names differ (names=), that dtypes may (cast=True), or that the "
            "model's constructor makes what is missing (strict=False): shardwright.WeightFiles"
        )
