"""The contenders of the speed benchmark: one training step each, of the same GPT, in several hands.

Every one has the same weights and sees the same global batch. `gradients` gives whole ones, to show that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from bench.gpt import Size, build, make_batch
from bench.megatron import MegatronGPT, sharded_dims
from shardwright.lowering.module import lower
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.precisions import Precision


@dataclass(frozen=True)
class Trainer:
    """One contender. `forward_backward` gives the loss (of this rank's samples, for hand-written data parallelism)."""

    name: str
    forward_backward: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    gradients: Callable[[], dict[str, Tensor]]
    mean_loss: bool = False

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def whole_loss(self) -> Tensor:
        """The loss of the global batch; leaves gradients behind."""
        loss = self.forward_backward().detach().clone()
        if self.mean_loss:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss


def plain_backward(model: nn.Module, batch: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """Forward and backward of a module that returns its loss."""

    def forward_backward() -> Tensor:
        loss = model(**batch)
        loss.backward()
        return loss

    return forward_backward


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused AdamW, DTensors and plain tensors in groups of their own (fused kernels refuse a mixture)."""
    groups = [[p for p in parameters if isinstance(p, DTensor) == is_dtensor] for is_dtensor in (False, True)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-4, fused=True)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name, DTensors gathered."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()}


def my_part(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's samples."""
    return {k: v.chunk(dist.get_world_size())[dist.get_rank()] for k, v in batch.items()}


# ---- by hand ----


def eager(size: Size) -> Trainer:
    """The module itself, in one process."""
    model = build(size)
    step = plain_backward(model, make_batch(size))
    return Trainer("eager", step, adamw(list(model.parameters())), lambda: whole_gradients(model))


def ddp(size: Size) -> Trainer:
    """DistributedDataParallel as PyTorch's tuning guide has it."""
    model = build(size)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    step = plain_backward(wrapped, my_part(make_batch(size)))
    return Trainer("tuned DDP", step, adamw(list(model.parameters())), lambda: whole_gradients(model), mean_loss=True)


def fsdp(size: Size) -> Trainer:
    """FSDP2: `fully_shard` on every block and on the whole."""
    model = build(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = plain_backward(model, my_part(make_batch(size)))
    return Trainer("fully_shard", step, adamw(list(model.parameters())), lambda: whole_gradients(model), mean_loss=True)


def dtensor_parallel(size: Size) -> Trainer:
    """PyTorch's tensor parallelism: `parallelize_module` with the Megatron plan."""
    model = build(size)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    gathered = ColwiseParallel(output_layouts=Replicate())
    outside: dict[str, ParallelStyle] = {"tok": gathered, "pos": gathered, "head": gathered}
    first, last = ("attn.q", "attn.k", "attn.v", "mlp.up"), ("attn.proj", "mlp.down")
    inside: dict[str, ParallelStyle] = {n: ColwiseParallel() if n in first else RowwiseParallel() for n in first + last}
    parallelize_module(model, mesh, outside)
    for block in model.blocks:
        parallelize_module(block, mesh, inside)
        block.attn.num_heads //= ranks  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
    step = plain_backward(model, make_batch(size))
    return Trainer("parallelize_module", step, adamw(list(model.parameters())), lambda: whole_gradients(model))


def megatron(size: Size) -> Trainer:
    """Tensor parallelism with hand-written autograd functions."""
    model = MegatronGPT(build(size))
    step = plain_backward(model, make_batch(size))

    def gradients() -> dict[str, Tensor]:
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: _gathered(name, grad) for name, grad in found.items()}

    return Trainer("hand-written Megatron", step, adamw(list(model.parameters())), gradients)


def _gathered(name: str, grad: Tensor) -> Tensor:
    dim = sharded_dims().get(".".join(name.split(".")[-2:]))
    if dim is None:
        return grad.clone()
    pieces = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, grad.contiguous())
    return torch.cat(pieces, dim)


# ---- ours ----


def lowered(size: Size, graph: Graph, name: str, execution: Execution = DEFAULT) -> Trainer:
    """A lowered plan of the same model."""
    model = build(size)
    parallel = lower(graph, model, precision=execution.base, execution=execution)
    batch = make_batch(size)
    step = lambda: parallel.forward_backward(**batch)  # noqa: E731
    return Trainer(name, step, adamw(list(parallel.parameters())), lambda: whole_gradients(parallel))


def serial_graph(size: Size, precision: Precision | None = None) -> Graph:
    """The captured GPT."""
    return capture(build(size), make_batch(size), precision=precision).graph
