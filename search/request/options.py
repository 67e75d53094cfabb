"""The options of a search: the words in which a caller gives them, and the value that a search keeps to.

A new option is a field of both classes. `tests/search/request/test_options.py` compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, Unpack

from shardwright.pcg import checks
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.pipelining import SCHEDULES, ScheduleName
from shardwright.pcg.step.recompute import FIELDS
from shardwright.search.request.asked import OffloadMode, PinsLike, RecomputeMode, Stages, parse, texts
from shardwright.search.request.encodings import Allowed, EncodingsLike, allowed, shown

MeshLike = Mesh | Mapping[str, int]
Roles = str | Sequence[str] | Mapping[str, str]


class SearchWords(TypedDict, total=False):
    """The options of a search as a caller says them, by name. None says nothing."""

    mesh: MeshLike | None
    roles: Roles | None
    microbatches: int | None
    recompute: RecomputeMode | None
    offload: OffloadMode | None
    pieces: int | None
    encodings: EncodingsLike | None
    pins: PinsLike | None
    stages: Stages | None
    schedule: ScheduleName | None
    time_limit_s: float | None


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options that a search keeps to; `None` and no pins: nothing is asked. A plan file records all but the time.

    Attributes:
        mesh: the one to search, with the axis of time where it was given.
        roles: of the mesh's axes of devices.
        microbatches: their number in a step.
        recompute: what backward makes again.
        offload: what waits for backward in the host's memory.
        pieces: the number of pieces in which moves run beside products; 1: whole.
        encodings: what gathers of weights and sums of gradients may send; None: values as they are.
        pins: the texts of layouts and bounds.
        stages: the number of pipeline stages; the mesh is that of one stage. Or the number of devices of each stage;
            the mesh is that of the largest. None: there are no stages.
        schedule: the order of the stages' microbatches; None: the best.
        time_limit_s: the seconds that the search may take; None: any. Yielded as no part of a request, nor recorded.
    """

    mesh: Mesh | None = None
    roles: tuple[str, ...] | None = None
    microbatches: int | None = None
    recompute: RecomputeMode | None = None
    offload: OffloadMode | None = None
    pieces: int | None = None
    encodings: Allowed | None = None
    pins: tuple[str, ...] = ()
    stages: Stages | None = None
    schedule: ScheduleName | None = None
    time_limit_s: float | None = None

    @classmethod
    def of(cls, **words: Unpack[SearchWords]) -> SearchOptions:
        """Return the options that these words ask for. Raises a `ShardwrightError` for what cannot be asked."""
        mesh = mesh_of(words.get("mesh"))
        roles = role_list(mesh, words.get("roles"))
        given = {**words, "mesh": mesh, "roles": None if roles is None else tuple(roles)}
        return cls(**{**given, "pins": texts(words.get("pins"))})  # pyright: ignore[reportArgumentType]

    @property
    def words(self) -> SearchWords:
        """The words that ask for these options."""
        return SearchWords(**{field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def _by_block(self) -> list[tuple[str, RecomputeMode | OffloadMode]]:
        """The options that are said by block, as far as they are given."""
        given = ((field.name, getattr(self, field.name)) for field in FIELDS)
        return [(name, value) for name, value in given if value is not None]

    def __post_init__(self) -> None:
        for name, given in self._by_block:
            object.__setattr__(self, name, getattr(DEFAULT.having(**{name: given}), name))
        if self.pieces is not None:
            Execution(pieces=self.pieces)
        if self.encodings is not None:
            object.__setattr__(self, "encodings", allowed(self.encodings))
        if isinstance(self.stages, Sequence) and not isinstance(self.stages, str):
            stages = tuple(checks.positive_int(n, "", "stages", "how many devices each stage has") for n in self.stages)
            if len(stages) < 2:
                raise PlanError(
                    f"stages={list(stages)}: expected the devices of each of several stages; give two or more"
                )
            object.__setattr__(self, "stages", stages)
        elif self.stages not in (None, "auto"):
            checks.positive_int(self.stages, "", "stages", "how many pipeline stages there are, or 'auto'")
        if self.stages == "auto" and self.mesh is not None:
            raise PlanError("stages='auto' with a mesh, which is that of one stage: say how many stages have it")
        if self.time_limit_s is not None:
            checks.positive(self.time_limit_s, "", "time_limit_s", "seconds")
        if self.schedule is not None:
            checks.choice(self.schedule, "", "schedule", SCHEDULES)
            if self.stages in (None, 1):
                raise PlanError(f"schedule={self.schedule!r} without stages=: it is that of pipeline stages; give both")

    def __iter__(self) -> Iterator[tuple[str, SearchOptions]]:
        """Yield each part of the request, in words, with the request that is left without it."""
        if self.mesh is not None:
            yield f"mesh {_axes(self.mesh)}", replace(self, mesh=None, roles=None)
        if self.roles is not None:
            yield f"roles {','.join(self.roles)}", replace(self, roles=None)
        if self.microbatches is not None:
            yield f"microbatches {self.microbatches}", replace(self, microbatches=None)
        for name, given in self._by_block:
            yield f"{name} {_said(given)}", replace(self, **{name: None})
        if self.pieces is not None:
            yield f"pieces {self.pieces}", replace(self, pieces=None)
        if self.encodings is not None:
            yield f"encodings {shown(self.encodings)}", replace(self, encodings=None)
        if self.stages is not None:
            stages_text = ",".join(map(str, self.stages)) if isinstance(self.stages, tuple) else self.stages
            yield f"stages {stages_text}", replace(self, stages=None, schedule=None)
        if self.schedule is not None:
            yield f"schedule {self.schedule}", replace(self, schedule=None)
        for pin in self.pins:
            yield pin, replace(self, pins=tuple(other for other in self.pins if other != pin))

    def __str__(self) -> str:
        return "; ".join(words for words, _ in self)

    def to_json(self) -> dict[str, Any]:
        """Return what was asked for, and nothing else."""
        mesh = None if self.mesh is None else dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        stages = list(self.stages) if isinstance(self.stages, tuple) else self.stages
        by_block = {name: DEFAULT.having(**{name: value}).to_json().get(name, "none") for name, value in self._by_block}
        by_name = {"mesh": mesh, "roles": self.roles and list(self.roles), "microbatches": self.microbatches,
                 **by_block, "pieces": self.pieces,
                 "encodings": self.encodings and {what: list(names) for what, names in self.encodings},
                 "pins": list(self.pins) or None,
                 "stages": stages, "schedule": self.schedule}  # fmt: skip
        return {name: value for name, value in by_name.items() if value is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SearchOptions:
        """Read what `to_json` gave. Raises a `ShardwrightError` for what cannot be asked."""
        mesh, roles = data.get("mesh"), data.get("roles")
        pins = tuple(data.get("pins", ()))
        for pin in pins:
            parse(pin)
        return cls(
            None if mesh is None else Mesh.of(**mesh),
            None if roles is None else tuple(roles),
            data.get("microbatches"),
            data.get("recompute"),
            data.get("offload"),
            data.get("pieces"),
            data.get("encodings"),
            pins,
            tuple(stages) if isinstance(stages := data.get("stages"), list) else stages,
            data.get("schedule"),
        )


NOTHING = SearchOptions()


def mesh_of(mesh: MeshLike | None) -> Mesh | None:
    """Return the mesh of a mapping from axes to sizes. Raises `PlanError` for anything else."""
    if isinstance(mesh, Mesh) or mesh is None:
        return mesh
    if not isinstance(mesh, Mapping) or not all(isinstance(name, str) for name in mesh):
        raise PlanError(
            f"mesh={mesh!r}: expected the size of each axis by its name; give e.g. mesh={{'dp': 2, 'tp': 4}}"
        )
    return Mesh(tuple(mesh), tuple(mesh.values()))


def role_list(mesh: Mesh | None, roles: Roles | None) -> Sequence[str] | None:
    """Return a role per axis of devices, in mesh order. Raises `PlanError` where there is no such axis."""
    if roles is None:
        return None
    if isinstance(roles, str):
        roles = roles.replace(" ", "").split(",")
    if mesh is None:
        raise PlanError(f"roles={roles!r} without a mesh; say which axes they are for, e.g. mesh={{'dp': 2, 'tp': 4}}")
    if isinstance(roles, Mapping):
        unknown = [axis for axis in roles if axis not in mesh.names]
        if unknown:
            raise PlanError(f"roles: axis {unknown[0]!r} is not in the mesh {mesh}; choose among {list(mesh.names)}")
        return [roles.get(axis, "free") for axis in mesh.names if axis != TIME]
    return list(roles)


def _axes(mesh: Mesh) -> str:
    return ",".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))


def _said(mode: RecomputeMode | OffloadMode) -> str:
    if isinstance(mode, str):
        return mode
    pairs = mode.items() if isinstance(mode, Mapping) else mode
    return ",".join(f"{name}={kind if isinstance(kind, str) else '+'.join(kind)}" for name, kind in pairs)
