"""A lowered plan on real ranks against the single process: the loss, every gradient and every buffer.

Both run from the same weights, batch and seed, in train mode with dropout on, in fp32 or, where a program has to be
told from one that is nearly right, in fp64. The errors are

    loss      |l − l_ref| / |l_ref|                           of the first step; `losses`: of the further ones
    gradient  ‖g − g_ref‖₂ / max(‖g_ref‖₂, 1e-5 · ‖G_ref‖₂)   per parameter; G_ref is the gradient of all parameters
    whole     ‖G − G_ref‖₂ / ‖G_ref‖₂                         of the first step, as `gradient`
    buffer    ‖b − b_ref‖₂ / max(‖b_ref‖₂, 1e-5)              per buffer, after the first step
    weight    ‖w − w_ref‖₂ / max(‖w_ref‖₂, 1e-5)              per parameter, after as many steps of AdamW as are asked
    drift     ‖W − W_ref‖₂ / ‖W_ref − W_0‖₂                   of all parameters together, W_0 are those of the start

and the largest of any rank counts. So a gradient is compared relative to its own norm, unless that is below 1e-5 of the
whole gradient's: the bias of attention's keys, whose gradient is zero but for rounding, since softmax does not see it.

After several steps, rounding has grown: deep batch norms and rectifiers on few examples make of one unit in the last
place of the weights one percent of what ten steps change. So in fp32, later losses and the drift may also be twice as
far off as those of one process whose weights are rounded otherwise: the farthest of three. So may the same buffer, like
a running mean of what is normalized, which is rounding alone. Under "amp_bf16" the
reference is the single process in fp32, and all may be twice as far from it as `torch.autocast` on one process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from examples.zoo import ZOO
from shardwright.lowering.module import ParallelModule, lower
from shardwright.lowering.random.exact import seed_exactly
from shardwright.lowering.ranks.launch import TIMEOUT_S, run_ranks
from shardwright.pcg.capture.capture import Captured, capture, find_loss
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.precisions import Precision

Kind = Literal["fp32", "fp64", "amp_bf16"]
"""In what a model is trained and compared."""
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
BUFFER_TOLERANCE = 1e-5
DOUBLE_TOLERANCE = 1e-9
"""Of everything, in fp64."""
SMALL = 1e-5
"""A gradient below this share of the whole gradient's norm is compared relative to that share."""
ROUNDED = 2.0
"""Errors of rounding may be so many times those of one process."""
ROUNDED_LOSS = 2**-9
"""What rounding one number to bf16 changes: less is no error of a loss."""
NUM_ROUNDED, LAST_PLACE = 3, {False: 2**-23, True: 2**-10}
"""How often the weights of one process are rounded otherwise, and by how much: in fp32; and for autocast, by half of
what rounding to bf16 may change, as products of split weights are. That sends some tokens to other experts."""
MODEL_SEED, STEP_SEED = 0, 1


@dataclass(frozen=True)
class Step:
    """The results of one training step: loss, gradients, the buffers after it and the state of the generator.

    `weights` are those after several steps, where these are asked for, `moved` is how far all of them have come, and
    `losses` are those of the further steps.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    random_state: Tensor
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    moved: float = 0.0
    losses: tuple[float, ...] = ()

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients together."""
        return _norm(self.gradients.values())


@dataclass(frozen=True)
class Prepared:
    """A model of the zoo, captured, with its step in a single process."""

    name: str
    model: nn.Module
    batch: dict[str, Any]
    captured: Captured
    reference: Step
    kind: Kind = "fp32"
    num_steps: int = 0
    rounding: Errors | None = None
    """How far one process is from the reference: under `torch.autocast`, or with its weights rounded otherwise."""
    seed: int | None = None
    """Of `seed_exactly`; None: masks are those of torch's generator."""

    @property
    def precision(self) -> Precision | None:
        return "amp_bf16" if self.kind == "amp_bf16" else None

    def accepts(self, errors: Errors) -> bool:
        """True if the errors of a run are those of rounding in this kind of numbers."""
        if self.kind == "fp64":
            return errors.within_double
        if self.kind == "amp_bf16":
            assert self.rounding is not None
            return errors.within_rounding(self.rounding)
        if self.rounding is None:
            return errors.within_tolerance
        return errors.but_for_rounded(self.rounding).within_tolerance and errors.within_growth(self.rounding)


@dataclass(frozen=True)
class Errors:
    """The distances of a step from the single process's; `*_name` says where it is farthest."""

    loss: float
    gradient: float
    gradient_name: str
    buffer: float
    buffer_name: str
    same_random_state: bool
    weight: float = 0.0
    weight_name: str = ""
    whole: float = 0.0
    drift: float = 0.0
    losses: float = 0.0

    @property
    def within_double(self) -> bool:
        """True if only fp64's rounding differs.

        AdamW moves weights whose gradient is only rounding by as little; so all weights together may be near instead.
        """
        largest = max(self.loss, self.losses, self.gradient, self.buffer, min(self.weight, self.drift))
        return largest <= DOUBLE_TOLERANCE and self.same_random_state

    @property
    def within_tolerance(self) -> bool:
        return (
            self.loss <= LOSS_TOLERANCE
            and self.gradient <= GRADIENT_TOLERANCE
            and self.buffer <= BUFFER_TOLERANCE
            and self.same_random_state
        )

    def but_for_rounded(self, rounding: Errors) -> Errors:
        """Return them without that of the worst buffer, if rounding the weights otherwise changes it as much."""
        is_rounding = self.buffer_name == rounding.buffer_name and self.buffer <= ROUNDED * rounding.buffer
        return replace(self, buffer=0.0) if is_rounding else self

    def within_growth(self, rounding: Errors) -> bool:
        """True if later steps are not much farther off than rounding the weights otherwise brings them."""
        return self.losses <= max(LOSS_TOLERANCE, ROUNDED * rounding.losses) and (
            self.drift <= max(GRADIENT_TOLERANCE, ROUNDED * rounding.drift)
        )

    def within_rounding(self, autocast: Errors) -> bool:
        """True if nothing is much farther from exact than what autocast gives on one process."""
        return (
            self.loss <= max(ROUNDED * autocast.loss, ROUNDED_LOSS)
            and self.losses <= max(ROUNDED * autocast.losses, ROUNDED_LOSS)
            and self.whole <= ROUNDED * autocast.whole
            and self.drift <= ROUNDED * autocast.drift
            and self.same_random_state
        )

    @classmethod
    def worst(cls, errors: Sequence[Errors]) -> Errors:
        """The largest of several, each with its name."""
        gradient, gradient_name = max((e.gradient, e.gradient_name) for e in errors)
        buffer, buffer_name = max((e.buffer, e.buffer_name) for e in errors)
        weight, weight_name = max((e.weight, e.weight_name) for e in errors)
        loss, *further = (max(getattr(e, name) for e in errors) for name in ("loss", "whole", "drift", "losses"))
        same = all(e.same_random_state for e in errors)
        return cls(loss, gradient, gradient_name, buffer, buffer_name, same, weight, weight_name, *further)


class _NothingNarrower(TorchFunctionMode):
    """Computes in fp64 what a model casts to fp32 by itself, as norms and the loss in transformers do."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is Tensor.float:
            func = Tensor.double
        wide, named = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, dict(kwargs or {})))
        return func(*wide, **named)


@lru_cache(maxsize=16)
def prepare(name: str, *, kind: Kind = "fp32", trained: float = 1.0, num_steps: int = 0, times: int = 1) -> Prepared:
    """A model of the zoo with its reference. Steps run in a fork, so that this process can fork again.

    Args:
        name: of the zoo.
        kind: in what it is trained.
        trained: the share of parameters that is trained; the others are frozen, as under LoRA.
        num_steps: how many steps of AdamW are taken, for their weights.
        times: the batch is that of so many of the zoo's.
    """
    torch.set_num_threads(1)
    torch.manual_seed(MODEL_SEED)
    model, batch = ZOO[name]()
    if times > 1:
        batches = [batch, *(ZOO[name]()[1] for _ in range(times - 1))]
        batch = {key: torch.cat([b[key] for b in batches]) for key in batch}
    if kind == "fp64":
        model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    draw = random.Random(MODEL_SEED)
    for parameter in model.parameters():
        parameter.requires_grad_(draw.random() < trained)
    return prepared(name, model, batch, kind, num_steps)


def prepared(
    name: str,
    model: nn.Module,
    batch: dict[str, Any],
    kind: Kind,
    num_steps: int = 0,
    *,
    find: bool = False,
    in_turn: int = 1,
) -> Prepared:
    """Any model with its reference.

    Args:
        name: what it is called.
        model: it.
        batch: by argument.
        kind: in what it is trained.
        num_steps: of AdamW.
        find: parts that cannot be captured run as they are.
        in_turn: the reference takes so many microbatches one after the other, each with its own batch statistics.
    """
    precision: Precision | None = "amp_bf16" if kind == "amp_bf16" else None
    with _widened(kind):
        own = ("*",) if in_turn > 1 else ()
        captured = capture(model, batch, precision=precision, num_microbatches=in_turn, per_microbatch=own, find=find)
        (reference,) = run_ranks(_single_steps, 1, args=(model, batch, num_steps, False, 0, in_turn))
    rounding = None
    if kind == "amp_bf16" or (kind == "fp32" and num_steps):
        seeds = range(kind != "amp_bf16", 1 + NUM_ROUNDED if num_steps else 1)
        each = [(model, batch, num_steps, kind == "amp_bf16", seed, in_turn) for seed in seeds]
        runs = [run_ranks(_single_steps, 1, args=args)[0] for args in each]
        rounding = Errors.worst([compare(run, reference) for run in runs])
    return Prepared(name, model, batch, captured, reference, kind, num_steps, rounding)


def exactly(found: Prepared, seed: int) -> Prepared:
    """The same with masks of `seed_exactly`, as pipeline stages cannot draw those of torch's generator."""
    with _widened(found.kind), seed_exactly(seed):
        (reference,) = run_ranks(_single_steps, 1, args=(found.model, found.batch, found.num_steps))
    return replace(found, reference=reference, seed=seed)


@contextmanager
def _widened(kind: Kind) -> Generator[None]:
    """Compute everything in fp64 meanwhile, if the kind is "fp64": also what a model converts or torch makes."""
    if kind != "fp64":
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _NothingNarrower():
            yield
    finally:
        torch.set_default_dtype(before)


def _single_steps(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    num_steps: int,
    autocast: bool = False,
    seed: int = 0,
    in_turn: int = 1,
) -> Step:
    """`seed`: other than 0, weights are changed in their last place. `in_turn`: so many microbatches a step."""
    if seed:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + LAST_PLACE[autocast] * (2 * torch.rand(weight.shape, generator=draw) - 1))

    def backward() -> Tensor:
        total = torch.zeros(())
        for part in _parts(batch, in_turn):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = find_loss(model(**part))
            assert loss is not None
            (loss / in_turn).backward()
            total = total + loss.detach() / in_turn
        return total

    return steps(model, backward, num_steps, adamw(model) if num_steps else None)


def _parts(batch: Mapping[str, Any], many: int) -> list[dict[str, Any]]:
    """Microbatches of a batch: tensors with other rows than the first one's are of all."""
    rows = next(x.shape[0] for x in tree_leaves(batch) if isinstance(x, Tensor))

    def part(number: int, x: Tensor) -> Tensor:
        return x.chunk(many)[number] if x.shape[:1] == (rows,) else x

    return [tree_map_only(Tensor, partial(part, number), dict(batch)) for number in range(many)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW of the trained parameters, if there are any. Its eps is far above gradients of mere rounding."""
    trained = [p for p in model.parameters() if p.requires_grad] or [torch.zeros(())]
    fused = not any(p.is_complex() for p in trained)  # torch has no fused update of complex numbers
    return torch.optim.AdamW(trained, lr=1e-3, eps=1e-5, fused=fused)


def steps(
    model: nn.Module, backward: Callable[[], Tensor], num_steps: int, optimizer: torch.optim.Optimizer | None
) -> Step:
    """The first step, and the losses and weights of all."""
    torch.manual_seed(STEP_SEED)
    first = _taken(model, backward())
    if optimizer is None:
        return first
    start, losses = _weights(model), list[float]()
    for number in range(num_steps):
        optimizer.step()
        optimizer.zero_grad()
        if number < num_steps - 1:
            losses.append(backward().item())
    weights = _weights(model)
    moved = _norm(weights[name].double() - start[name].double() for name in weights)
    return replace(first, weights=weights, moved=moved, losses=tuple(losses))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(p).clone() for name, p in model.named_parameters()}


def _norm(tensors: Iterable[Tensor]) -> float:
    """Return the norm of all tensors together."""
    return sum(float(tensor.double().norm()) ** 2 for tensor in tensors) ** 0.5


def _taken(model: nn.Module, loss: Tensor) -> Step:
    """The step that a model has taken, with whole tensors."""
    gradients = {n: _whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    buffers = {n: _whole(b).clone() for n, b in model.named_buffers()}
    return Step(loss.item(), gradients, buffers, torch.get_rng_state())


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def measure(
    prepared: Prepared, graph: Graph, timeout_s: float = 120.0, execution: Execution = DEFAULT, backend: str = ""
) -> Errors:
    """Run a parallel graph on real gloo ranks and compare. Raises `DistributedError` where a rank fails.

    `backend`: of `torch.compile`, to run the program compiled.
    """
    args = (prepared, graph, execution, backend)
    return Errors.worst(run_ranks(_parallel_errors, graph.mesh.num_devices, timeout_s, args=args))


def _parallel_errors(prepared: Prepared, graph: Graph, execution: Execution, backend: str) -> Errors:
    parallel = lowered(prepared, graph, execution)
    if backend:
        parallel.compile(backend=backend)
    optimizer = adamw(parallel) if prepared.num_steps else None
    return errors_of(prepared, parallel, optimizer)


def lowered(prepared: Prepared, graph: Graph, execution: Execution, timeout_s: float = TIMEOUT_S) -> ParallelModule:
    """This rank's program of a plan."""
    known: dict[str, Any] = {"constants": prepared.captured.constants, "options": prepared.captured.options}
    return lower(graph, prepared.model, **known, precision=prepared.precision, execution=execution, timeout_s=timeout_s)


def errors_of(
    prepared: Prepared, parallel: ParallelModule, optimizer: torch.optim.Optimizer | None, *, is_staged: bool = False
) -> Errors:
    """Return the errors of the steps that this rank's program takes now."""
    masks = nullcontext() if prepared.seed is None else seed_exactly(prepared.seed)
    with _widened(prepared.kind), masks:
        taken = steps(parallel, lambda: parallel.forward_backward(**prepared.batch), prepared.num_steps, optimizer)
    views = together(taken) if is_staged else [taken]
    return Errors.worst([compare(view, prepared.reference) for view in views])


def together(taken: Step) -> list[Step]:
    """The step of each rank, with what only other ranks have beside: stages have a part of the model each."""
    every = [taken] * dist.get_world_size()
    dist.all_gather_object(every, taken)
    kinds = ("gradients", "buffers", "weights")
    whole = {kind: {name: value for step in every for name, value in getattr(step, kind).items()} for kind in kinds}
    views = [{kind: {**whole[kind], **getattr(step, kind)} for kind in kinds} for step in every]
    return [replace(step, **view) for step, view in zip(every, views, strict=True)]


def compare(step: Step, reference: Step) -> Errors:
    """The errors of a step. A gradient or buffer that only one of the two has is an infinite error; so is a NaN."""
    gradients = _distances(step.gradients, reference.gradients, SMALL * reference.gradient_norm)
    buffers = _distances(step.buffers, reference.buffers, SMALL)
    gradient, gradient_name = max(gradients, default=(0.0, ""))
    buffer, buffer_name = max(buffers, default=(0.0, ""))
    weight, weight_name = max(_distances(step.weights, reference.weights, SMALL), default=(0.0, ""))
    pairs = zip((step.loss, *step.losses), (reference.loss, *reference.losses), strict=True)
    loss, *later = (_not_nan(abs(found - expected) / abs(expected)) for found, expected in pairs)
    same = torch.equal(step.random_state, reference.random_state)
    whole = _distance(step.gradients, reference.gradients, reference.gradient_norm)
    drift = _distance(step.weights, reference.weights, reference.moved)
    further = whole, drift, max(later, default=0.0)
    return Errors(loss, gradient, gradient_name, buffer, buffer_name, same, weight, weight_name, *further)


def _distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: float) -> float:
    """‖X − Y‖₂ / scale of all together."""
    if any(name not in found or found[name].shape != y.shape for name, y in expected.items()):
        return float("inf")
    distance = _norm(found[name].double() - y.double() for name, y in expected.items())
    return _not_nan(distance / scale) if distance else 0.0


def _distances(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float) -> list[tuple[float, str]]:
    """‖x − y‖₂ / max(‖y‖₂, floor) for every name, computed in fp64."""
    distances: list[tuple[float, str]] = []
    for name in {**found, **expected}:
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            distances.append((float("inf"), name))
            continue
        x, y = found[name].double(), expected[name].double()
        difference = float((x - y).norm())
        distances.append((_not_nan(difference / max(float(y.norm()), floor)) if difference else 0.0, name))
    return distances


def _not_nan(error: float) -> float:
    return float("inf") if math.isnan(error) else error
