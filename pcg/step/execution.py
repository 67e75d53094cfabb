"""The way a step is run: everything that the layouts of a plan do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from shardwright.pcg import checks
from shardwright.pcg import encodings as encoded
from shardwright.pcg.dtypes import dtype_named
from shardwright.pcg.encodings import ENCODINGS, Carried, Encoding, Encodings
from shardwright.pcg.step import precisions
from shardwright.pcg.step.assumed import AS_IT_RUNS, Assumed
from shardwright.pcg.step.pipelining import ONE_STAGE, Schedule
from shardwright.pcg.step.precisions import DTYPES, Precision, PrecisionMode
from shardwright.pcg.step.recompute import (
    FIELDS,
    RECOMPUTE,
    BlockKind,
    Field,
    GivenByBlock,
    Kind,
    KindByBlock,
    Offload,
    OffloadByBlock,
    OffloadGiven,
    Recompute,
    RecomputeByBlock,
    canonical,
    fits,
)
from shardwright.pcg.types import is_float

ReduceDtype = Literal["float32", "bfloat16", "float16"]
REDUCE_DTYPES: tuple[ReduceDtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Execution:
    """The settings of a run that a plan's layouts and mesh do not say.

    Its own fields are about what programs do, `schedule` about their stages and order, `assumed` about what is priced
    alone (`shardwright timeline`). A plan's microbatches are its mesh's axis of time. Plan files have all fields side
    by side, as `of` and `having` take them.

    Attributes:
        precision: None: the graph's own dtypes. "fp32", "bf16" and "fp16": every float in that dtype, optimizer
            included. "tf32": as "fp32", with matrix multiplications and convolutions in tf32 (not attention).
            "amp_bf16", "amp_fp16", "bf16_params" and "fp16_params": weights used, activations and their gradients in
            16 bits; master weights, gradients and optimizer states in fp32. "fp8": as "amp_bf16", with matrix
            multiplications in fp8. A graph in which anything is in 16 bits, its parameters or what it casts, keeps its
            own dtypes for values (only optimizer states, rates and the scaling of the loss change), so a precision of
            other values is refused there. A mapping says it by module (`pcg.step.precisions`), which a capture has made
            into casts: then values have the graph's own dtypes. It is stored as pairs.
        recompute: "selective": attention is run again in backward; "full": every block is, from its input. Under both,
            what is gathered of an activation is gathered again, not kept. A mapping says it by block of the model: from
            a pattern that `fits` the block's name ("model.layers.*", "model.layers.0-7") to one of the three, or to a
            list of the places in it whose values are made again ("mlp", "mlp.act_fn:silu"). A pattern may also fit a
            module inside of blocks ("model.layers.*.mlp"). The first that fits decides, "none" where none does; ""
            stands for what lies in no block. It is stored as pairs.
        offload: "full": values that wait for backward wait in the host's memory. A mapping says it by block, as that of
            `recompute` does: "full", "none", or a list of places. What is made again does not wait, so it stays out.
        per_microbatch: the modules whose statistics over the batch (batch norm's, those of balancing losses) are taken
            of each microbatch by itself: names or patterns of `fnmatch`, each with all that is inside; "*": everywhere.
        reduce_dtype: what gradients of parameters are sent in, to be summed over devices. What microbatches add up, and
            what a sum gives, is in the dtype of the parameters in any case. None: gradients are sent in that too.
        pieces: the number of pieces in which a move of activations runs beside the products that read or make its value
            (`pcg.step.pairs`), wherever that divides them; 1: every move runs whole.
        encodings: what gathers of weights and sums of gradients send in place of values of float32, float64 or 16 bits
            (`pcg.encodings`); all else is sent as it is. A mapping, stored as pairs.
    """

    precision: PrecisionMode | None = None
    recompute: Recompute | RecomputeByBlock | GivenByBlock = "none"
    offload: Offload | OffloadByBlock | OffloadGiven = "none"
    per_microbatch: tuple[str, ...] = ()
    reduce_dtype: ReduceDtype | None = None
    pieces: int = 1
    encodings: Encodings = ()
    schedule: Schedule = ONE_STAGE
    assumed: Assumed = AS_IT_RUNS

    def __post_init__(self) -> None:
        owner = "Execution"
        object.__setattr__(self, "precision", precisions.canonical(self.precision, owner))
        if self.reduce_dtype is not None:
            named = dtype_named(self.reduce_dtype, owner, "reduce_dtype", REDUCE_DTYPES)
            object.__setattr__(self, "reduce_dtype", named)
        pieces = checks.positive_int(self.pieces, owner, "pieces", "in how many pieces moves run")
        object.__setattr__(self, "pieces", pieces)
        object.__setattr__(self, "encodings", encoded.canonical(self.encodings, owner))
        for field in FIELDS:
            object.__setattr__(self, field.name, canonical(getattr(self, field.name), owner, field))
        object.__setattr__(self, "per_microbatch", _patterns(self.per_microbatch, owner))
        self.schedule.check_microbatches(self.assumed.num_microbatches)

    def scheduled(self, **changes: Any) -> Execution:
        """Return the execution with other fields of its schedule."""
        return replace(self, schedule=replace(self.schedule, **changes))

    def assuming(self, **changes: Any) -> Execution:
        """Return the execution with other fields of its assumptions."""
        return replace(self, assumed=replace(self.assumed, **changes))

    @classmethod
    def of(cls, precision: PrecisionMode | None = None, **fields: Any) -> Execution:
        """Return an execution with these fields, named as in plan files."""
        return cls(precision).having(**fields)

    def having(self, **changes: Any) -> Execution:
        """Return the execution with other fields, named as in plan files: side by side with those of its parts."""
        parts = {
            part: {key: changes.pop(name) for name, key in keys.items() if name in changes} for part, keys in _PARTS
        }
        return replace(
            self, **changes, **{part: replace(getattr(self, part), **items) for part, items in parts.items()}
        )

    def by_field(self) -> dict[str, Any]:
        """Return all fields by name, as in plan files."""
        plain = {name: getattr(self, name) for name in _OWN}
        return plain | {name: getattr(getattr(self, part), key) for part, keys in _PARTS for name, key in keys.items()}

    def to_json(self) -> dict[str, object]:
        """Return the fields that differ from the defaults; mappings by module or block are objects."""
        values, plain = self.by_field(), DEFAULT.by_field()
        if isinstance(self.precision, tuple):
            values["precision"] = dict(self.precision)
        for name in (field.name for field in FIELDS):
            if isinstance(pairs := values[name], tuple):
                values[name] = {pattern: list(kind) if isinstance(kind, tuple) else kind for pattern, kind in pairs}
        values["encodings"] = dict(self.encodings) or []
        values = {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}
        return {name: x for name, x in values.items() if x not in (plain[name], [])}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Execution:
        """Read what `to_json` returned. Raises `ValueError` for an unknown field or value."""
        unknown = data.keys() - DEFAULT.by_field().keys()
        if unknown:
            raise ValueError(f"execution: field {min(unknown)!r} is not known")
        return cls.of(**data)

    def kind_of_all(self, field: Field) -> Kind | None:
        """Return a field's kind for the whole model; None if it says something by block."""
        value: Kind | KindByBlock = getattr(self, field.name)
        return value if isinstance(value, str) else None

    def by_pattern(self, field: Field = RECOMPUTE) -> KindByBlock:
        """Return a field's kinds and lists by pattern; a kind for the whole model has the pattern `*`."""
        value: Kind | KindByBlock = getattr(self, field.name)
        return (("*", value),) if isinstance(value, str) else value

    def asks(self, field: Field) -> bool:
        """Return whether a field asks for anything, in any block."""
        return any(kind != "none" for _, kind in self.by_pattern(field))

    def kind_of(self, block: str, modules: Sequence[str] = (), field: Field = RECOMPUTE) -> tuple[str, BlockKind]:
        """Return the pattern and the kind or list that decide about a block ("": operators in none) or modules in it.

        They are ("", "none") if no pattern fits.
        """
        names = (block, *modules)
        pairs = self.by_pattern(field)
        return next((pair for pair in pairs if any(fits(name, pair[0]) for name in names)), ("", "none"))

    def is_per_microbatch(self, module: str) -> bool:
        """Return whether the statistics of a module are taken of each microbatch."""
        parts = module.split(".")
        owners = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return any(fnmatchcase(owner, pattern) for pattern in self.per_microbatch for owner in owners)

    @property
    def base(self) -> Precision | None:
        """The precision of all modules that have none of their own; None: the model's own."""
        return precisions.base_of(self.precision)

    @property
    def whole(self) -> Precision | None:
        """The precision of the whole model; None if it is the graph's own, or one by module."""
        return self.precision if isinstance(self.precision, str) else None

    def compute_dtype(self, dtype: str) -> str:
        """Return the dtype in which an activation of this dtype in the graph is computed and kept."""
        return DTYPES[self.whole].compute if self.whole and is_float(dtype) else dtype

    def state_dtype(self, dtype: str) -> str:
        """Return the dtype of master weights, gradients and moments, for a parameter of this dtype."""
        return DTYPES[self.whole].state if self.whole and is_float(dtype) else dtype

    def reduced_dtype(self, dtype: str) -> str:
        """Return the dtype in which gradients that are accumulated in this one are sent, to be summed."""
        return self.reduce_dtype if self.reduce_dtype and is_float(dtype) else dtype

    def encoding(self, what: Carried, dtype: str) -> Encoding | None:
        """Return the encoding in which weights or gradients of this dtype are sent; None: they are sent as they are."""
        name = dict(self.encodings).get(what)
        return ENCODINGS[name] if name is not None and is_float(dtype) else None

    @property
    def rates(self) -> Mapping[str, str]:
        """The kinds of work on floats that run at the rate of "tf32" or "fp8", if the device has it."""
        return DTYPES[self.whole].rates if self.whole else {}

    @property
    def is_scaled(self) -> bool:
        """Return whether a loss scaler passes over all gradients before the update."""
        return self.base is not None and DTYPES[self.base].is_scaled


def _patterns(names: object, owner: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        wanted = "names of modules, or patterns of them"
        raise checks.FieldError(owner, "per_microbatch", f"expected {wanted}, in a list, got {names!r}")
    return tuple(checks.text(name, owner, "per_microbatch", "a module's name, or a pattern of them") for name in names)


_OWN = ("precision", "recompute", "offload", "per_microbatch", "reduce_dtype", "pieces", "encodings")
_PARTS = (
    ("schedule", {"schedule" if f.name == "name" else f.name: f.name for f in fields(Schedule)}),
    ("assumed", {f.name: f.name for f in fields(Assumed)}),
)
"""The parts of an execution, with the names of their fields in plan files."""
DEFAULT = Execution()
"""The execution that the search begins with: the graph's own dtypes, everything kept for backward."""


def draws_whole(kind: str) -> bool:
    """Return whether ranks on devices of this kind draw the masks of whole tensors, as a single process does.

    Masks are then those of one process even without `seed_exactly`. This costs time that does not shrink with the
    number of ranks, and memory for the whole mask. On other devices a rank draws its own part alone.
    """
    return kind == "cpu"
