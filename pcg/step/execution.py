"""How a step is run: everything that the layouts of a plan do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from shardwright.pcg import checks
from shardwright.pcg.dtypes import dtype_named
from shardwright.pcg.step import precisions
from shardwright.pcg.step.precisions import DTYPES, Precision, PrecisionMode
from shardwright.pcg.step.recompute import RECOMPUTES, Again, GivenByBlock, Recompute, RecomputeByBlock, canonical, fits
from shardwright.pcg.types import is_float

ReduceDtype = Literal["float32", "bfloat16", "float16"]
Schedule = Literal["gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble"]
Optimizer = Literal["adam", "sgd"]

REDUCE_DTYPES: tuple[ReduceDtype, ...] = ("float32", "bfloat16", "float16")
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble")
OPTIMIZERS: tuple[Optimizer, ...] = ("adam", "sgd")


@dataclass(frozen=True, slots=True)
class Execution:
    """A run of a plan: what its layouts and its mesh do not say.

    A plan has a precision, a dtype that gradients are sent in, and a recomputation; its microbatches are its mesh's
    axis of time. Programs do all of these. The other fields are for costing alone (`shardwright timeline`), and their
    defaults are what programs do.

    Attributes:
        precision: None: the graph's own dtypes. "fp32", "bf16" and "fp16": every float in that dtype, optimizer
            included. "tf32": as "fp32", with matrix multiplications and convolutions in tf32 (not attention).
            "amp_bf16", "amp_fp16", "bf16_params" and "fp16_params": weights used, activations and their gradients in
            16 bits; master weights, gradients and optimizer states in fp32. "fp8": as "amp_bf16", with matrix
            multiplications in fp8. A graph in which anything is in 16 bits, its parameters or what it casts, keeps its
            own dtypes for values (only optimizer states, rates and the scaling of the loss change), so a precision of
            other values is refused there. A mapping says it by module (`pcg.step.precisions`), which a capture has made
            into casts: then values have the graph's own dtypes. It is stored as pairs.
        compiled: whether chains of pointwise operators are fused (torch.compile).
        recompute: "selective": attention is run again in backward; "full": every block is, from its input. Under both,
            what is gathered of an activation is gathered again, not kept. A mapping says it by block of the model: from
            a pattern that `fits` the block's name ("model.layers.*", "model.layers.0-7") to one of the three, or to a
            list of the places in it whose values are made again ("mlp", "mlp.act_fn:silu"). A pattern may also fit a
            module inside of blocks ("model.layers.*.mlp"). The first that fits decides, "none" where none does; ""
            stands for what lies in no block. It is stored as pairs.
        offload: kept activations wait for backward in the host's memory.
        num_microbatches: the graph's batch is one microbatch; a step accumulates the gradients of this many.
        num_stages: how many pipeline stages the model's blocks are spread over; the mesh is that of one stage.
        stage_sizes: of stages of unlike sizes, how many devices each has along the first axis of devices of its mesh,
            which is the plan's mesh otherwise (`pcg.step.meshes`); (): all are as the plan's mesh.
        chunks_per_stage: virtual stages of each stage; more than one with schedule "interleaved" only.
        schedule: the order of microbatches on a stage; see `shardwright.pcg.step.schedules`.
        split: how many sections of the model (blocks, and what comes before and after them; `pcg.step.sections`) each
            virtual stage has, in order; (): whoever costs it balances them.
        recompute_by_stage: what each stage makes again, in place of `recompute`; (): that. A plan says it by block.
        optimizer: "adam": two moments per parameter; "sgd": none.
        shard_optimizer: ZeRO-1: optimizer states are sharded over the axes that gradients are summed over.
        overlap: whether collectives of parameters and gradients run beside compute.
        per_microbatch: the modules whose statistics over the batch (batch norm's, those of balancing losses) are taken
            of each microbatch by itself: names or patterns of `fnmatch`, each with all that is inside; "*": everywhere.
        late_gathers: whether backward gathers a block's weights only when it is through with the block before it, not
            beside that: BACKWARD_POST, not BACKWARD_PRE, as FSDP's documentation has them.
        reduce_dtype: what gradients of parameters are sent in, to be summed over devices. What microbatches add up, and
            what a sum gives, is in the dtype of the parameters in any case. None: gradients are sent in that too.
    """

    precision: PrecisionMode | None = None
    compiled: bool = False
    recompute: Recompute | RecomputeByBlock | GivenByBlock = "none"
    offload: bool = False
    num_microbatches: int = 1
    num_stages: int = 1
    stage_sizes: tuple[int, ...] = ()
    chunks_per_stage: int = 1
    schedule: Schedule = "1f1b"
    split: tuple[int, ...] = ()
    recompute_by_stage: tuple[Recompute, ...] = ()
    optimizer: Optimizer = "adam"
    shard_optimizer: bool = False
    overlap: bool = True
    late_gathers: bool = False
    per_microbatch: tuple[str, ...] = ()
    reduce_dtype: ReduceDtype | None = None

    def __post_init__(self) -> None:
        owner = "Execution"
        object.__setattr__(self, "precision", precisions.canonical(self.precision, owner))
        if self.reduce_dtype is not None:
            named = dtype_named(self.reduce_dtype, owner, "reduce_dtype", REDUCE_DTYPES)
            object.__setattr__(self, "reduce_dtype", named)
        object.__setattr__(self, "recompute", canonical(self.recompute, owner))
        object.__setattr__(self, "per_microbatch", _patterns(self.per_microbatch, owner))
        checks.choice(self.schedule, owner, "schedule", SCHEDULES)
        checks.choice(self.optimizer, owner, "optimizer", OPTIMIZERS)
        for field in ("compiled", "offload", "shard_optimizer", "overlap", "late_gathers"):
            if not isinstance(value := getattr(self, field), bool):
                raise checks.FieldError(owner, field, f"expected True or False, got {value!r}; give one of them")
        checks.positive_int(self.num_microbatches, owner, "num_microbatches", "how many microbatches make a step")
        checks.positive_int(self.num_stages, owner, "num_stages", "over how many stages the blocks are spread")
        checks.positive_int(self.chunks_per_stage, owner, "chunks_per_stage", "how many virtual stages a stage has")
        object.__setattr__(self, "stage_sizes", self._checked_sizes())
        object.__setattr__(self, "split", self._checked_split())
        object.__setattr__(self, "recompute_by_stage", self._checked_modes())
        self._check_schedule()

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.chunks_per_stage

    @property
    def share_of_largest(self) -> float:
        """What part of a model the largest stage has, where all devices have equal ones."""
        return max(self.stage_sizes) / sum(self.stage_sizes) if self.stage_sizes else 1 / self.num_stages

    def _checked_sizes(self) -> tuple[int, ...]:
        sizes, owner, name = self.stage_sizes, "Execution", "stage_sizes"
        if not isinstance(sizes, Sequence) or isinstance(sizes, str) or (sizes and len(sizes) != self.num_stages):
            problem = f"expected a number of devices for each of the {self.num_stages} stages, got {sizes!r}"
            raise checks.FieldError(owner, name, f"{problem}; give one for each")
        return tuple(checks.positive_int(n, owner, name, "devices along the first axis of a stage") for n in sizes)

    def _checked_split(self) -> tuple[int, ...]:
        split, many = self.split, self.num_virtual_stages
        if not isinstance(split, Sequence) or (split and len(split) != many):
            wanted = f"a number of sections for each of the {many} virtual stages"
            raise checks.FieldError("Execution", "split", f"expected {wanted}, got {split!r}; give one for each")
        return tuple(checks.positive_int(n, "Execution", "split", "sections of a virtual stage") for n in split)

    def _checked_modes(self) -> tuple[Recompute, ...]:
        modes, owner, name = self.recompute_by_stage, "Execution", "recompute_by_stage"
        if not isinstance(modes, Sequence) or isinstance(modes, str) or (modes and len(modes) != self.num_stages):
            problem = f"expected one of {', '.join(RECOMPUTES)} for each of the {self.num_stages} stages, got {modes!r}"
            raise checks.FieldError(owner, name, f"{problem}; give one for each")
        return tuple(checks.choice(mode, owner, name, RECOMPUTES) for mode in modes)  # type: ignore[return-value]

    def _check_schedule(self) -> None:
        owner, chunks = "Execution", self.chunks_per_stage
        if (self.schedule == "interleaved") != (chunks > 1):
            wanted = "at least 2 with schedule 'interleaved'" if chunks == 1 else f"1 with schedule {self.schedule!r}"
            problem = f"expected {wanted}, got {chunks}; change the one or the other"
            raise checks.FieldError(owner, "chunks_per_stage", problem)
        many, stages = self.num_microbatches, self.num_stages
        if self.schedule == "interleaved" and many > stages and many % stages:
            problem = (
                f"expected a multiple of the {stages} stages, or fewer than them, got {many}; interleaving needs it"
            )
            raise checks.FieldError(owner, "num_microbatches", problem)

    def to_json(self) -> dict[str, object]:
        """What differs from the defaults; precisions by module and what is made again by block as objects."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        if isinstance(self.precision, tuple):
            own["precision"] = dict(self.precision)
        if isinstance(self.recompute, tuple):
            own["recompute"] = {k: list(again) if isinstance(again, tuple) else again for k, again in self.recompute}
        for name in ("per_microbatch", "split", "stage_sizes", "recompute_by_stage"):
            own[name] = list(own[name])
        return {name: x for name, x in own.items() if x not in (getattr(DEFAULT, name), [])}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Execution:
        """Read what `to_json` gave. Raises `ValueError` for a field or a value that there is none of."""
        unknown = data.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"execution: field {min(unknown)!r} is not known")
        return cls(**data)

    @property
    def recomputes(self) -> RecomputeByBlock:
        """What is made again, by pattern; one that holds for all as `*`."""
        return (("*", self.recompute),) if isinstance(self.recompute, str) else tuple(self.recompute)  # type: ignore[return-value]

    def recompute_of(self, block: str, modules: Sequence[str] = ()) -> tuple[str, Again]:
        """What decides about a block of the model ("": what lies in none) or modules in it: the pattern, and its word.

        ("", "none") where no pattern does.
        """
        names = (block, *modules)
        return next((pair for pair in self.recomputes if any(fits(name, pair[0]) for name in names)), ("", "none"))

    def is_per_microbatch(self, module: str) -> bool:
        """Whether the statistics of a module are those of each microbatch."""
        parts = module.split(".")
        owners = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return any(fnmatchcase(owner, pattern) for pattern in self.per_microbatch for owner in owners)

    @property
    def base(self) -> Precision | None:
        """The precision of all modules that have none of their own; None: the model's own."""
        return precisions.base_of(self.precision)

    @property
    def whole(self) -> Precision | None:
        """The precision of the whole model; None where that is the graph's own, or one by module."""
        return self.precision if isinstance(self.precision, str) else None

    def compute_dtype(self, dtype: str) -> str:
        """What a value of this dtype in the graph is computed and kept in as an activation."""
        return DTYPES[self.whole].compute if self.whole and is_float(dtype) else dtype

    def state_dtype(self, dtype: str) -> str:
        """What the optimizer's master weights, gradients and moments of a parameter of this dtype are kept in."""
        return DTYPES[self.whole].state if self.whole and is_float(dtype) else dtype

    def reduced_dtype(self, dtype: str) -> str:
        """What gradients that are accumulated in this dtype are sent in, to be summed over devices."""
        return self.reduce_dtype if self.reduce_dtype and is_float(dtype) else dtype

    @property
    def rates(self) -> Mapping[str, str]:
        """Kinds of work on floats that run at the rate of another precision, "tf32" or "fp8", if the device has it."""
        return DTYPES[self.whole].rates if self.whole else {}

    @property
    def is_scaled(self) -> bool:
        """Whether a loss scaler passes over all gradients before the update."""
        return self.base is not None and DTYPES[self.base].is_scaled


def _patterns(names: object, owner: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        wanted = "names of modules, or patterns of them"
        raise checks.FieldError(owner, "per_microbatch", f"expected {wanted}, in a list, got {names!r}")
    return tuple(checks.text(name, owner, "per_microbatch", "a module's name, or a pattern of them") for name in names)


DEFAULT = Execution()
"""The graph's own dtypes, everything kept for backward: what the search begins with."""


def draws_whole(kind: str) -> bool:
    """Whether ranks on devices of this kind draw the masks of whole tensors, as one process does.

    So masks are those of one process without `seed_exactly`, for time that does not shrink with the number of ranks,
    and for memory that the whole mask takes. Elsewhere a rank draws its own part alone.
    """
    return kind == "cpu"
