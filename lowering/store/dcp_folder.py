"""Folders of torch.distributed.checkpoint by others: which of their tensors is which of a model and its optimizer.

P NAME                     values of the model; P is "", "model.", "app.model." or another
Q state.NAME.KEY           states of the optimizer; Q is "optimizer.", "optim.", "app.optim." or another
Q param_groups.NAME.KEY    options of a parameter's group: `flatten_optimizer_state_dict=True`, as in torchtitan
Q param_groups.N.KEY       options of a group, with its parameters under "params": `get_state_dict`
lr_scheduler.KEY           as in torchtitan, whose train_state and dataloader are left out
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from shardwright.lowering.store.files import Kind, read_part
from shardwright.pcg.errors import CheckpointError

if TYPE_CHECKING:
    from shardwright.lowering.store.shards import Checkpoint

_GROUPS, _SCHEDULER = "param_groups.", "lr_scheduler."
_BESIDE = (_SCHEDULER, "dataloader.", "train_state.")


def prefix_of(stored: Iterable[str], names: Collection[str]) -> str:
    """Return what stands before a model's names in a folder: before most of them, and "model." or "" if several do.

    Raises `CheckpointError` where several fit, as an average of the weights beside them may.
    """
    parts = ((name, name.split(".")) for name in stored)
    ends = ((name, ".".join(own[n:])) for name, own in parts for n in range(len(own)))
    counts = Counter(name.removesuffix(end) for name, end in ends if end in names)
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())] or [""]
    chosen = [prefix for prefix in best if re.fullmatch(r"(.*\.)?model\.|", prefix)] or best
    if len(chosen) > 1:
        shown = " or ".join(f"{prefix}*" for prefix in chosen)
        raise CheckpointError(f"it is not clear whether {shown} is the model; save one of them, or one as `model`")
    return chosen[0]


def of_model(kinds: Mapping[str, Kind], prefix: str, others: Iterable[str]) -> dict[str, Kind]:
    """Return the tensors of a model, by their names in the folder. `others`: names of values that are no tensors."""
    beside = (*_BESIDE, *_optimizers([*kinds, *others]))
    return {name: kind for name, kind in kinds.items() if name.startswith(prefix) and not name.startswith(beside)}


def _optimizers(stored: Iterable[str]) -> list[str]:
    """Return what stands before the names of each optimizer."""
    matches = (re.fullmatch(rf"(.*?\.){_GROUPS}.*", name) for name in stored)
    return list(dict.fromkeys(match[1] for match in matches if match))


@dataclass(frozen=True)
class Other:
    """A folder that another program has written, as far as `names` are its model's.

    Attributes:
        names: the name in the folder of each of its tensors, and of states that are no tensors: `model.NAME`,
            `optimizer.state.NAME.KEY`.
        kinds: what each is; None for values that are no tensors.
        groups: the options of each parameter's group.
        scheduler: the state of a learning rate scheduler, where it is wanted.
        step: the number of steps taken: that of the folder's name, or the optimizer's own count, or 0.
    """

    names: Mapping[str, str]
    kinds: Mapping[str, Kind | None]
    groups: Mapping[str, Mapping[str, Any]]
    scheduler: Mapping[str, Any]
    step: int

    @classmethod
    def read(cls, stored: Checkpoint, names: Collection[str], *, optimizer: bool, scheduler: bool) -> Other:
        """Read what describes a folder. Raises `CheckpointError` if it has no optimizer, and one is wanted."""
        prefix = prefix_of(stored.kinds, names)
        names_there = {
            f"model.{name.removeprefix(prefix)}": name for name in of_model(stored.kinds, prefix, stored.others)
        }
        own, groups = "", dict[str, dict[str, Any]]()
        if optimizer:
            own = _optimizer(stored, names)
            names_there |= {f"optimizer.{name.removeprefix(own)}": name for name in _all(stored, f"{own}state.")}
            groups = _groups(stored, own + _GROUPS)
        rates = _all(stored, _SCHEDULER) if scheduler else ()
        kinds = {name: stored.kinds.get(there) for name, there in names_there.items()}
        step = _step(stored, names_there.values())
        return cls(
            names_there, kinds, groups, {name.removeprefix(_SCHEDULER): _value(stored, name) for name in rates}, step
        )


def _optimizer(stored: Checkpoint, names: Collection[str]) -> str:
    """Return what stands before the names of the optimizer."""
    prefixes = _optimizers([*stored.kinds, *stored.others])
    if len(prefixes) != 1:
        what = f"several optimizers ({', '.join(prefixes)})" if prefixes else "no optimizer (…param_groups.…)"
        raise CheckpointError(f"it has {what}; load it without")
    for name in _all(stored, f"{prefixes[0]}state."):
        parameter = name.removeprefix(f"{prefixes[0]}state.").rpartition(".")[0]
        if parameter.isdecimal() and parameter not in names:
            raise CheckpointError(
                f"its optimizer has parameters by numbers, and no names ({name}); save what "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives, or load it without"
            )
    return prefixes[0]


def _groups(stored: Checkpoint, prefix: str) -> dict[str, dict[str, Any]]:
    """Return the options of each parameter's group."""
    by_key = dict[str, dict[str, Any]]()
    for name in _all(stored, prefix):
        who, _, key = name.removeprefix(prefix).rpartition(".")
        by_key.setdefault(who, {})[key] = _value(stored, name)
    options_of = dict[str, dict[str, Any]]()
    for who, options in by_key.items():
        options_of |= dict.fromkeys(cast("list[str]", options.pop("params", [who])), options)
    return options_of


def _step(stored: Checkpoint, names: Iterable[str]) -> int:
    if match := re.fullmatch(r"step[-_]?(\d+)", stored.folder.name):
        return int(match[1])
    counts = (float(cast("float", _value(stored, name))) for name in names if name.endswith(".step"))
    return int(max(counts, default=0))


def _all(stored: Checkpoint, prefix: str) -> Iterator[str]:
    return (name for name in (*stored.kinds, *sorted(stored.others)) if name.startswith(prefix))


def _value(stored: Checkpoint, name: str) -> object:
    return read_part(stored, name, []) if name in stored.kinds else stored.value(name)
