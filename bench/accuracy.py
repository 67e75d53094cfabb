"""A lowered plan on real ranks against the single process: the loss, every gradient and every buffer.

Both run one step in fp32 from the same weights, batch and seed, in train mode with dropout on. The errors are

    loss      |l − l_ref| / |l_ref|
    gradient  ‖g − g_ref‖₂ / max(‖g_ref‖₂, 1e-5 · ‖G_ref‖₂)   per parameter; G_ref is the gradient of all parameters
    buffer    ‖b − b_ref‖₂ / max(‖b_ref‖₂, 1e-5)              per buffer, after the step

and the largest of any rank counts. So a gradient is compared relative to its own norm, unless that is below 1e-5 of the
whole gradient's: the bias of attention's keys, whose gradient is zero but for rounding, since softmax does not see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples.zoo import ZOO
from shardwright.lowering.launch import run_ranks
from shardwright.lowering.module import lower
from shardwright.pcg.capture import Captured, capture, find_loss
from shardwright.pcg.graph import Graph

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
BUFFER_TOLERANCE = 1e-5
SMALL = 1e-5
"""A gradient below this share of the whole gradient's norm is compared relative to that share."""
MODEL_SEED, STEP_SEED = 0, 1


@dataclass(frozen=True)
class Step:
    """What one training step gives: the loss, the gradients, the buffers after it and the state of the generator."""

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    random_state: Tensor

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


@dataclass(frozen=True)
class Errors:
    """How far a step is from the single process's; `*_name` says where it is farthest."""

    loss: float
    gradient: float
    gradient_name: str
    buffer: float
    buffer_name: str
    same_random_state: bool

    @property
    def within_tolerance(self) -> bool:
        return (
            self.loss <= LOSS_TOLERANCE
            and self.gradient <= GRADIENT_TOLERANCE
            and self.buffer <= BUFFER_TOLERANCE
            and self.same_random_state
        )


@lru_cache(maxsize=16)
def prepare(name: str) -> Prepared:
    """A model of the zoo with its reference. The step runs in a fork, so that this process can fork again."""
    torch.set_num_threads(1)
    torch.manual_seed(MODEL_SEED)
    model, batch = ZOO[name]()
    captured = capture(model, batch)
    (reference,) = run_ranks(_single_step, 1, args=(model, batch))
    return Prepared(name, model, batch, captured, reference)


def _single_step(model: nn.Module, batch: Mapping[str, Tensor]) -> Step:
    torch.manual_seed(STEP_SEED)
    loss = find_loss(model(**batch))
    assert loss is not None
    loss.backward()
    return _taken(model, loss)


def _taken(model: nn.Module, loss: Tensor) -> Step:
    """The step that a model has taken, with whole tensors."""
    gradients = {n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    buffers = {n: _whole(b) for n, b in model.named_buffers()}
    return Step(loss.item(), gradients, buffers, torch.get_rng_state())


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def measure(prepared: Prepared, graph: Graph, timeout_s: float = 120.0) -> Errors:
    """Run one step of a parallel graph on real gloo ranks and compare. Raises `DistributedError` where a rank fails."""
    by_rank = run_ranks(_parallel_errors, graph.mesh.num_devices, timeout_s, args=(prepared, graph))
    gradient, gradient_name = max((e.gradient, e.gradient_name) for e in by_rank)
    buffer, buffer_name = max((e.buffer, e.buffer_name) for e in by_rank)
    same = all(e.same_random_state for e in by_rank)
    return Errors(max(e.loss for e in by_rank), gradient, gradient_name, buffer, buffer_name, same)


def _parallel_errors(prepared: Prepared, graph: Graph) -> Errors:
    captured = prepared.captured
    parallel = lower(graph, prepared.model, constants=captured.constants, options=captured.options)
    torch.manual_seed(STEP_SEED)
    loss = parallel.forward_backward(**prepared.batch)
    return compare(_taken(parallel, loss), prepared.reference)


def compare(step: Step, reference: Step) -> Errors:
    """The errors of a step. A gradient or buffer that only one of the two has is an infinite error; so is a NaN."""
    gradients = _distances(step.gradients, reference.gradients, SMALL * reference.gradient_norm)
    buffers = _distances(step.buffers, reference.buffers, SMALL)
    gradient, gradient_name = max(gradients, default=(0.0, ""))
    buffer, buffer_name = max(buffers, default=(0.0, ""))
    loss = _not_nan(abs(step.loss - reference.loss) / abs(reference.loss))
    same = torch.equal(step.random_state, reference.random_state)
    return Errors(loss, gradient, gradient_name, buffer, buffer_name, same)


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
