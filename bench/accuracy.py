"""A lowered plan on real ranks against the single process: the loss, every gradient and every buffer.

Both run one step from the same weights, batch and seed, in train mode with dropout on, in fp32 or, where a program has
to be told from one that is nearly right, in fp64. The errors are

    loss      |l − l_ref| / |l_ref|
    gradient  ‖g − g_ref‖₂ / max(‖g_ref‖₂, 1e-5 · ‖G_ref‖₂)   per parameter; G_ref is the gradient of all parameters
    buffer    ‖b − b_ref‖₂ / max(‖b_ref‖₂, 1e-5)              per buffer, after the step
    weight    ‖w − w_ref‖₂ / max(‖w_ref‖₂, 1e-5)              per parameter, after as many steps of AdamW as are asked

and the largest of any rank counts. So a gradient is compared relative to its own norm, unless that is below 1e-5 of the
whole gradient's: the bias of attention's keys, whose gradient is zero but for rounding, since softmax does not see it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from examples.zoo import ZOO
from shardwright.lowering.launch import run_ranks
from shardwright.lowering.module import lower
from shardwright.pcg.capture import Captured, capture, find_loss
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import DEFAULT, Execution

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
BUFFER_TOLERANCE = 1e-5
DOUBLE_TOLERANCE = 1e-9
"""Of everything, in fp64."""
SMALL = 1e-5
"""A gradient below this share of the whole gradient's norm is compared relative to that share."""
MODEL_SEED, STEP_SEED = 0, 1


@dataclass(frozen=True)
class Step:
    """What one training step gives: the loss, the gradients, the buffers after it and the state of the generator.

    `weights` are those after several steps, where these are asked for.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    random_state: Tensor
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients together."""
        return sum(float(g.double().norm()) ** 2 for g in self.gradients.values()) ** 0.5


@dataclass(frozen=True)
class Prepared:
    """A model of the zoo, captured, with its step in a single process."""

    name: str
    model: nn.Module
    batch: dict[str, Tensor]
    captured: Captured
    reference: Step
    num_steps: int = 0

    @property
    def is_double(self) -> bool:
        return any(p.dtype == torch.float64 for p in self.model.parameters())


@dataclass(frozen=True)
class Errors:
    """How far a step is from the single process's; `*_name` says where it is farthest."""

    loss: float
    gradient: float
    gradient_name: str
    buffer: float
    buffer_name: str
    same_random_state: bool
    weight: float = 0.0
    weight_name: str = ""

    @property
    def within_double(self) -> bool:
        """Whether only fp64's rounding differs."""
        largest = max(self.loss, self.gradient, self.buffer, self.weight)
        return largest <= DOUBLE_TOLERANCE and self.same_random_state

    @property
    def within_tolerance(self) -> bool:
        return (
            self.loss <= LOSS_TOLERANCE
            and self.gradient <= GRADIENT_TOLERANCE
            and self.buffer <= BUFFER_TOLERANCE
            and self.same_random_state
        )


class _NothingNarrower(TorchFunctionMode):
    """What a model computes in fp32 by itself, as norms and the loss in transformers, is computed in fp64."""

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
def prepare(name: str, *, double: bool = False, trained: float = 1.0, num_steps: int = 0) -> Prepared:
    """A model of the zoo with its reference. The step runs in a fork, so that this process can fork again.

    Args:
        name: of the zoo.
        double: in fp64, all of it.
        trained: the share of parameters that is trained; the others are frozen, as under LoRA.
        num_steps: how many steps of AdamW are taken, for their weights.
    """
    torch.set_num_threads(1)
    torch.manual_seed(MODEL_SEED)
    model, batch = ZOO[name]()
    if double:
        model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    draw = random.Random(MODEL_SEED)
    for parameter in model.parameters():
        parameter.requires_grad_(draw.random() < trained)
    with _NothingNarrower() if double else nullcontext():
        captured = capture(model, batch)
        (reference,) = run_ranks(_single_steps, 1, args=(model, batch, num_steps))
    return Prepared(name, model, batch, captured, reference, num_steps)


def _single_steps(model: nn.Module, batch: Mapping[str, Tensor], num_steps: int) -> Step:
    def backward() -> Tensor:
        loss = find_loss(model(**batch))
        assert loss is not None
        loss.backward()
        return loss

    return _steps(model, backward, num_steps)


def _steps(model: nn.Module, backward: Callable[[], Tensor], num_steps: int) -> Step:
    """The first step, and the weights after all."""
    torch.manual_seed(STEP_SEED)
    first = _taken(model, backward())
    if not num_steps:
        return first
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-5)  # an eps far above gradients that are only rounding
    for number in range(num_steps):
        optimizer.step()
        optimizer.zero_grad()
        if number < num_steps - 1:
            backward()
    return replace(first, weights={n: _whole(p).clone() for n, p in model.named_parameters()})


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
    by_rank = run_ranks(_parallel_errors, graph.mesh.num_devices, timeout_s, args=args)
    gradient, gradient_name = max((e.gradient, e.gradient_name) for e in by_rank)
    buffer, buffer_name = max((e.buffer, e.buffer_name) for e in by_rank)
    weight, weight_name = max((e.weight, e.weight_name) for e in by_rank)
    same, loss = all(e.same_random_state for e in by_rank), max(e.loss for e in by_rank)
    return Errors(loss, gradient, gradient_name, buffer, buffer_name, same, weight, weight_name)


def _parallel_errors(prepared: Prepared, graph: Graph, execution: Execution, backend: str) -> Errors:
    captured = prepared.captured
    parallel = lower(graph, prepared.model, constants=captured.constants, options=captured.options, execution=execution)
    if backend:
        parallel.compile(backend=backend)
    step = _steps(parallel, lambda: parallel.forward_backward(**prepared.batch), prepared.num_steps)
    return compare(step, prepared.reference)


def compare(step: Step, reference: Step) -> Errors:
    """The errors of a step. A gradient or buffer that only one of the two has is an infinite error; so is a NaN."""
    gradients = _distances(step.gradients, reference.gradients, SMALL * reference.gradient_norm)
    buffers = _distances(step.buffers, reference.buffers, SMALL)
    gradient, gradient_name = max(gradients, default=(0.0, ""))
    buffer, buffer_name = max(buffers, default=(0.0, ""))
    weight, weight_name = max(_distances(step.weights, reference.weights, SMALL), default=(0.0, ""))
    loss = _not_nan(abs(step.loss - reference.loss) / abs(reference.loss))
    same = torch.equal(step.random_state, reference.random_state)
    return Errors(loss, gradient, gradient_name, buffer, buffer_name, same, weight, weight_name)


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
