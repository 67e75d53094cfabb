"""The texts of pins, read and written.

NAME=LAYOUT          lm_head.weight=S(0)    model.layers.*.mlp=tp:sharded    *.bias=whole
ROLE<=DEGREE         tensor<=8    zero>=4    data=2    no context            (on any mesh)
residual<=DEGREE     no residual                     (of what lies between parts of a network)
AXIS<=DEGREE         y<=8                                                    (of the meshes that are searched)
memory<=BYTES        memory<=40GB
stages<=NUMBER       no stages      stages>=2        (of pipelines that the search chooses from)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.pcg.errors import PlanError
from shardwright.pcg.layout import Layout
from shardwright.pcg.step.recompute import (
    GivenByBlock,
    Offload,
    OffloadByBlock,
    OffloadGiven,
    Recompute,
    RecomputeByBlock,
)
from shardwright.pcg.step.recompute import fits as name_fits

RecomputeMode = Recompute | RecomputeByBlock | GivenByBlock
OffloadMode = Offload | OffloadByBlock | OffloadGiven
PinsLike = str | Sequence[str] | Mapping[str, str | int | Mapping[str, str]]
"""Pins as texts, or by name: `{"lm_head.weight": {"tp": "S(0)"}, "tensor": "<=8"}`."""
Kept = Literal["whole", "sharded", "gathered"]
"""The ways to keep a parameter along an axis, as reports say: whole, sharded as it is used, or gathered for use."""
Stages = int | Literal["auto"] | Sequence[int]
"""The number of pipeline stages, or the devices of each stage; "auto": as many stages as are best."""
MEMORY, RESIDUAL, STAGES = "memory", "residual", "stages"

_KEPT: Mapping[str, Kept] = {
    "whole": "whole", "replicated": "whole", "R": "whole", "sharded": "sharded", "gathered": "gathered",
}  # fmt: skip
_ENTRY = re.compile(r"(?:([A-Za-z_]\w*):)?(" + "|".join(_KEPT) + r"|S\(\d{1,3}(?:,\d{1,6})?\))(?:,|$)")
_BOUND = re.compile(r"([A-Za-z_]\w*)(<=|>=|=)(\d{1,15}(?:\.\d{1,6})?)([kMGT]?B)?")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FORMS = (
    "give NAME=LAYOUT, the layout being whole, sharded, gathered or S(dim), with axis: before it for one axis of the "
    "mesh; ROLE<=DEGREE, >= or =; no ROLE; or memory<=40GB"
)


@dataclass(frozen=True, slots=True)
class LayoutPin:
    """A pin of the layout of parameters along one axis of devices, or, where `axis` is "", along any.

    Without an axis, "whole" means on all axes, "sharded" on at least one, and "gathered" that nothing uses a slice.
    `shard`: the slices that are asked for; None: any.
    """

    text: str
    pattern: str
    axis: str
    kept: Kept
    shard: Layout | None = None

    def names(self, target: str) -> bool:
        """Return whether the pin names a parameter, or a module that the parameter lies in."""
        return name_fits(target, self.pattern) or name_fits(target, f"{self.pattern}.*")

    def takes(self, layout: Layout) -> bool:
        """Return whether slices of this layout are what is asked for; `S(0)` stands for slices of any blocks too."""
        pinned = self.shard
        return layout.is_shard and (
            pinned is None or layout == pinned or (pinned.blocks == 1 and layout.dim == pinned.dim)
        )

    def contradicts(self, other: LayoutPin) -> bool:
        """Return whether no layout of one parameter can keep to both pins."""
        if self.axis and other.axis and self.axis != other.axis:
            return False
        if self.kept != other.kept:
            return self.axis == other.axis or any(a._excludes(b) for a, b in ((self, other), (other, self)))
        same_axis = bool(self.axis) and self.axis == other.axis
        if not same_axis or self.shard is None or other.shard is None:
            return False
        return not (self.takes(other.shard) or other.takes(self.shard))

    def _excludes(self, other: LayoutPin) -> bool:
        """Return whether this pin, of all axes, leaves no axis to the other pin, which is of another kind."""
        return not self.axis and (self.kept == "whole" or (self.kept == "gathered" and other.kept == "sharded"))


@dataclass(frozen=True, slots=True)
class Bound:
    """Bounds, `low` to `high` (None: any), for a role's degree, an axis's size, a number of stages, or bytes."""

    text: str
    what: str
    low: int
    high: int | None


def texts(pins: PinsLike | None) -> tuple[str, ...]:
    """Return pins as texts, each once."""
    if pins is None or isinstance(pins, str):
        return (pins,) if pins else ()
    if not isinstance(pins, Mapping):
        return tuple(dict.fromkeys(pins))
    return tuple(f"{name}{_value(value)}" for name, value in pins.items())


def _value(value: str | int | Mapping[str, str]) -> str:
    if isinstance(value, Mapping):
        return "=" + ",".join(f"{axis}:{layout}" for axis, layout in value.items())
    return value if isinstance(value, str) and value.startswith(("<=", ">=", "=")) else f"={value}"


def parse(text: str) -> list[LayoutPin | Bound]:
    """Return the pins that a text states. Raises a `PlanError` that lists the forms."""
    short = text.replace(" ", "")
    if short == f"no{MEMORY}":
        raise PlanError(f"pin {text!r}: memory is a limit, such as memory<=40GB")
    if text.split()[:1] == ["no"]:
        return [Bound(text, short.removeprefix("no"), 1, 1)]
    if bound := _BOUND.fullmatch(short):
        return [_bound(text, *bound.groups())]
    pattern, _, layouts = short.partition("=")
    entries = list(_ENTRY.finditer(layouts))
    if not pattern or not entries or "".join(entry[0] for entry in entries) != layouts or layouts.endswith(","):
        raise PlanError(f"pin {text!r} is not understood: {_FORMS}")
    return [_layout(text, pattern, axis or "", word) for axis, word in (entry.groups() for entry in entries)]


def _layout(text: str, pattern: str, axis: str, word: str) -> LayoutPin:
    if word in _KEPT:
        return LayoutPin(text, pattern, axis, _KEPT[word])
    return LayoutPin(text, pattern, axis, "sharded", Layout.parse(word))


def _bound(text: str, what: str, relation: str, number: str, unit: str | None) -> Bound:
    if (what == MEMORY) != (unit is not None):
        kind = "stages" if what == STAGES else "devices"
        wanted = "memory is in B, kB, MB, GB or TB" if what == MEMORY else f"{what} is a number of {kind}"
        raise PlanError(f"pin {text!r}: {wanted}, such as {'memory<=40GB' if what == MEMORY else f'{what}<=8'}")
    if what == MEMORY and relation != "<=":
        raise PlanError(f"pin {text!r}: memory is a limit, such as memory<=40GB")
    if what == RESIDUAL and relation != "<=":
        raise PlanError(f"pin {text!r}: {what} is a limit, such as {what}<=2 or no {what}")
    value = float(number) * _UNITS[unit or "B"]
    if value < 1 or (unit is None and not number.isdecimal()):
        raise PlanError(f"pin {text!r}: expected a number of {'bytes' if unit else 'devices'} from 1 on")
    return Bound(text, what, 1 if relation == "<=" else int(value), None if relation == ">=" else int(value))
