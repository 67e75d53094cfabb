"""The assumptions of a prediction about a step beyond what programs do; nothing but pricing reads them."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.pcg import checks
from shardwright.pcg.step.optimizers import Optimizer, optimizer_named


@dataclass(frozen=True, slots=True)
class Assumed:
    """Settings that are only priced; the defaults are what programs do. Plan files list them as fields of an execution.

    Attributes:
        compiled: whether chains of pointwise operators are fused (torch.compile).
        num_microbatches: the graph's batch is one microbatch; a step accumulates the gradients of this many.
        optimizer: whose states are kept: a row of `OPTIMIZERS`.
        shard_optimizer: ZeRO-1: optimizer states are sharded over the axes that gradients are summed over.
        overlap: whether collectives of parameters and gradients run beside compute.
        late_gathers: whether backward gathers a block's weights only when it is through with the block before it, not
            at the same time: BACKWARD_POST in place of BACKWARD_PRE, in the words of FSDP's documentation.
    """

    compiled: bool = False
    num_microbatches: int = 1
    optimizer: Optimizer = "adam"
    shard_optimizer: bool = False
    overlap: bool = True
    late_gathers: bool = False

    def __post_init__(self) -> None:
        owner = "Execution"
        object.__setattr__(self, "optimizer", optimizer_named(self.optimizer, owner, "optimizer"))
        for field in ("compiled", "shard_optimizer", "overlap", "late_gathers"):
            if not isinstance(value := getattr(self, field), bool):
                raise checks.FieldError(owner, field, f"expected True or False, got {value!r}; give one of them")
        checks.positive_int(self.num_microbatches, owner, "num_microbatches", "how many microbatches make a step")


AS_IT_RUNS = Assumed()
"""The assumptions that hold for programs as they run."""
