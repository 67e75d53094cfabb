"""The numeric check of a plan: one step of the lowered program on local ranks against the single-process model.

loss      |l − l_ref| / |l_ref|
gradient  ‖g − g_ref‖₂ / max(‖g_ref‖₂, 1e-5 · ‖G_ref‖₂), per parameter; G_ref is the gradient of all parameters together
buffer    ‖b − b_ref‖₂ / max(‖b_ref‖₂, 1e-5), per buffer, after the step

So a gradient is compared relative to its own norm, unless that is nearly nothing beside the others: the bias of
attention's keys has a gradient that is zero but for rounding. Norms are taken in fp64; the worst rank counts.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shardwright.api import refuse_unreal
from shardwright.cli.models import Loaded
from shardwright.lowering.module import lower
from shardwright.lowering.random.exact import seed_exactly
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime.precision import check_device
from shardwright.pcg.capture.capture import Captured, bind_arguments, capture, find_loss
from shardwright.pcg.capture.modules import in_own_precision
from shardwright.pcg.errors import PlanError
from shardwright.pcg.foreign import calls
from shardwright.pcg.precision import low_dtype
from shardwright.pcg.step.late import check_backward
from shardwright.planning import prove
from shardwright.reports.report import Paragraph, Report
from shardwright.search.plan import Plan
from shardwright.verifier.choices import Certified

SMALL = 1e-5
"""A gradient below this share of the whole gradient's norm is compared relative to that share."""
STEP_SEED = 1
NORMS = (
    "|l − l_ref| / |l_ref| for the loss and ‖g − g_ref‖₂ / max(‖g_ref‖₂, 1e-5·‖G_ref‖₂) for a gradient, "
    "where G_ref is the gradient of all parameters together"
)


@dataclass(frozen=True)
class TrainingStep:
    """The results of a training step: the loss, the gradients, and the buffers after it, as whole tensors."""

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Errors:
    """The distances of a step from the reference: of the loss, and of each gradient and buffer by name."""

    loss: float
    reference_loss: float
    loss_error: float
    gradients: Mapping[str, float]
    buffers: Mapping[str, float]
    same_random_state: bool


@dataclass(frozen=True)
class NumericCheck(Report):
    """The errors of `what`, with their tolerances; buffers have the tolerance of gradients."""

    what: str
    errors: Errors
    loss_tolerance: float
    gradient_tolerance: float

    @property
    def passed(self) -> bool:
        """True if everything is within the tolerances."""
        others = [*self.errors.gradients.values(), *self.errors.buffers.values()]
        return (
            self.errors.loss_error <= self.loss_tolerance
            and all(e <= self.gradient_tolerance for e in others)
            and self.errors.same_random_state
        )

    def paragraphs(self) -> list[Paragraph]:
        errors, same = self.errors, self.errors.same_random_state
        everything = {**{f"grad of {n}": e for n, e in errors.gradients.items()}, **errors.buffers}
        worst = sorted(everything.items(), key=lambda item: -item[1])
        shown = [item for item in worst if item[1] > self.gradient_tolerance][:20] or worst[:5]
        rows = [
            _row("loss", errors.loss_error, self.loss_tolerance),
            *(_row(name, error, self.gradient_tolerance) for name, error in shown),
            ("random generator", "equal" if same else "differs", "equal", _mark(same)),
        ]
        title = f"{'PASSED' if self.passed else 'FAILED'}: {self.what}, {len(errors.gradients)} gradients, "
        line = f"loss {errors.loss:.7g}, single process {errors.reference_loss:.7g}; errors are {NORMS}"
        columns = ("worst of all ranks", ">error", ">at most", "")
        return [Paragraph(f"{title}{len(errors.buffers)} buffers", [line], columns, rows)]

    def data(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "loss": self.errors.loss,
            "reference_loss": self.errors.reference_loss,
            "loss_error": self.errors.loss_error,
            "gradient_errors": dict(self.errors.gradients),
            "buffer_errors": dict(self.errors.buffers),
            "same_random_state": self.errors.same_random_state,
            "norms": NORMS,
        }


def _row(name: str, error: float, tolerance: float) -> tuple[str, ...]:
    return name, f"{error:.1e}", f"{tolerance:.0e}", _mark(error <= tolerance)


def _mark(good: bool) -> str:
    return "ok" if good else "OFF"


def measure(plan: Plan, loaded: Loaded, certified: Certified, timeout_s: float) -> Errors:
    """Run one step both ways, each in processes of their own.

    Raises `DistributedError` where a rank fails or hangs, `PlanError` where the model has no values or no backward.
    """
    refuse_unreal(loaded.model)
    check_backward(plan.graph)
    check_device(plan.execution.base, "cpu")
    batch = bind_arguments(loaded.model, loaded.args, loaded.kwargs)
    captured = capture(
        loaded.model, batch, precision=plan.precision, num_microbatches=plan.mesh.num_microbatches,
        per_microbatch=plan.execution.per_microbatch, known=calls(plan.graph),
    )  # fmt: skip
    prove(plan, captured.graph, certified)
    if plan.execution.per_microbatch and any(node.is_random for node in plan.graph.nodes):
        raise PlanError(
            "--numeric: the plan has statistics of each microbatch by itself, but draws dropout for the whole batch, "
            "which no single process does; compare the model with its dropout at 0"
        )
    # torch's autograd threads do not survive a fork, so this process runs no backward itself
    ((reference, state),) = run_ranks(_single, 1, timeout_s, args=(loaded.model, batch, plan))
    arguments = (plan, loaded.model, captured, batch, reference, state)
    return _worst_of(run_ranks(_parallel, plan.cluster.num_devices, timeout_s, args=arguments), reference)


@contextmanager
def _seeded(plan: Plan) -> Generator[None]:
    """Make both ways draw the same in a step. For pipeline stages, each draw is seeded by its number."""
    torch.manual_seed(STEP_SEED)
    with seed_exactly(STEP_SEED) if plan.execution.schedule.num_stages > 1 else nullcontext():
        yield


def _single(model: nn.Module, batch: Mapping[str, Any], plan: Plan) -> tuple[TrainingStep, Tensor]:
    """Run the reference: the model itself, with its modules, under autocast where the plan has it.

    Where the plan has statistics of each microbatch by itself, the model runs one microbatch after the other.
    """
    low, total = low_dtype(plan.execution.base, "autocast"), torch.zeros(())
    many = plan.mesh.num_microbatches if plan.execution.per_microbatch else 1
    with in_own_precision(model, plan.precision, "cpu", in_backward=True), _seeded(plan):
        for number in range(many):
            with torch.autocast("cpu", getattr(torch, low), enabled=True) if low else nullcontext():
                loss = find_loss(model(**tree_map_only(Tensor, lambda x, n=number: x.chunk(many)[n], batch)))
            assert loss is not None
            (loss / many).backward()
            total = total + loss.detach() / many
    return _taken(model, total), torch.get_rng_state()


def _parallel(plan: Plan, model: nn.Module, captured: Captured, batch: Mapping[str, Any], reference: TrainingStep,
              state: Tensor) -> Errors:  # fmt: skip
    parallel = lower(
        plan.graph, model, constants=captured.constants, options=captured.options, precision=plan.execution.base,
        execution=plan.execution,
    )  # fmt: skip
    with _seeded(plan):
        loss = parallel.forward_backward(**batch)
    expected = replace(
        reference, gradients=_held(reference.gradients, parallel), buffers=_held(reference.buffers, parallel)
    )
    return compare(_taken(parallel, loss), expected, torch.equal(torch.get_rng_state(), state))


def _held(values: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the values that this pipeline stage has."""
    names = {name for named in (model.named_parameters, model.named_buffers) for name, _ in named()}
    return {name: value for name, value in values.items() if name in names}


def _taken(model: nn.Module, loss: Tensor) -> TrainingStep:
    gradients = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return TrainingStep(loss.item(), gradients, {name: _whole(b) for name, b in model.named_buffers()})


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def compare(step: TrainingStep, reference: TrainingStep, same_random_state: bool) -> Errors:
    """Return the errors of a step. A value that only one side has, or a NaN, is infinitely far off."""
    whole = math.sqrt(sum(float(g.double().norm()) ** 2 for g in reference.gradients.values()))
    return Errors(
        step.loss,
        reference.loss,
        _number(abs(step.loss - reference.loss) / abs(reference.loss)) if step.loss != reference.loss else 0.0,
        _distances(step.gradients, reference.gradients, SMALL * whole),
        _distances(step.buffers, reference.buffers, SMALL),
        same_random_state,
    )


def _distances(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float) -> dict[str, float]:
    distances: dict[str, float] = {}
    for name in {**expected, **actual}:
        if name not in actual or name not in expected or actual[name].shape != expected[name].shape:
            distances[name] = math.inf
            continue
        x, y = actual[name].double(), expected[name].double()
        difference = float((x - y).norm())
        distances[name] = _number(difference / max(float(y.norm()), floor)) if difference else 0.0
    return distances


def _number(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _worst_of(ranks: list[Errors], reference: TrainingStep) -> Errors:
    return Errors(
        ranks[0].loss,
        ranks[0].reference_loss,
        max(r.loss_error for r in ranks),
        _worst([r.gradients for r in ranks], reference.gradients),
        _worst([r.buffers for r in ranks], reference.buffers),
        all(r.same_random_state for r in ranks),
    )


def _worst(ranks: Sequence[Mapping[str, float]], expected: Iterable[str]) -> dict[str, float]:
    """Return the worst error by name, over the ranks that have it; infinity if no rank has it."""
    names = dict.fromkeys(chain(expected, *ranks))
    return {
        name: max((distances[name] for distances in ranks if name in distances), default=math.inf) for name in names
    }
