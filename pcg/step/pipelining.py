"""The stages of a plan, and the order of microbatches on each; one stage is the ordinary case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.pcg import checks
from shardwright.pcg.step.recompute import RECOMPUTES, Recompute

ScheduleName = Literal["gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Stages and the order of microbatches in them. Plan files have it among the fields of an execution.

    Attributes:
        name: the order of microbatches on a stage; see `shardwright.pcg.step.schedules`.
        num_stages: how many pipeline stages the model's blocks are spread over; the mesh is that of one stage.
        stage_sizes: of stages of unlike sizes, how many devices each has along the first axis of devices of its mesh,
            which is the plan's mesh otherwise (`pcg.step.meshes`); (): all are as the plan's mesh.
        chunks_per_stage: virtual stages of each stage; more than one with "interleaved" only.
        split: how many sections of the model (blocks, and what comes before and after them; `pcg.step.sections`) each
            virtual stage has, in order; (): whoever costs it balances them.
        recompute_by_stage: the recomputation of each stage, in place of the execution's; (): the execution's. A plan
            has it by block.
    """

    name: ScheduleName = "1f1b"
    num_stages: int = 1
    stage_sizes: tuple[int, ...] = ()
    chunks_per_stage: int = 1
    split: tuple[int, ...] = ()
    recompute_by_stage: tuple[Recompute, ...] = ()

    def __post_init__(self) -> None:
        owner = "Execution"
        checks.choice(self.name, owner, "schedule", SCHEDULES)
        checks.positive_int(self.num_stages, owner, "num_stages", "over how many stages the blocks are spread")
        checks.positive_int(self.chunks_per_stage, owner, "chunks_per_stage", "how many virtual stages a stage has")
        object.__setattr__(self, "stage_sizes", self._checked_sizes())
        object.__setattr__(self, "split", self._checked_split())
        object.__setattr__(self, "recompute_by_stage", self._checked_modes())
        chunks = self.chunks_per_stage
        if (self.name == "interleaved") != (chunks > 1):
            wanted = "at least 2 with schedule 'interleaved'" if chunks == 1 else f"1 with schedule {self.name!r}"
            problem = f"expected {wanted}, got {chunks}; change the one or the other"
            raise checks.FieldError(owner, "chunks_per_stage", problem)

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.chunks_per_stage

    @property
    def share_of_largest(self) -> float:
        """The largest stage's share of a model whose devices have equal shares."""
        return max(self.stage_sizes) / sum(self.stage_sizes) if self.stage_sizes else 1 / self.num_stages

    def check_microbatches(self, many: int) -> None:
        """Raise a `FieldError` if this number of microbatches cannot be interleaved."""
        stages = self.num_stages
        if self.name == "interleaved" and many > stages and many % stages:
            problem = (
                f"expected a multiple of the {stages} stages, or fewer than them, got {many}; interleaving needs it"
            )
            raise checks.FieldError("Execution", "num_microbatches", problem)

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


ONE_STAGE = Schedule()
