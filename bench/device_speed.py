"""Whole steps of a model on one GPU: as its authors wrote it, and as a lowered program, eager and under torch.compile.

As `bench.device_steps` measures them: autocast to bf16, AdamW (`fused=True`), many steps one after the other in each
round, by CUDA events. Each of the four is measured by itself, one after the other in one process. Memory is the most
that torch's allocator had handed out at once.

    torchrun --nproc-per-node 1 -m bench.device_speed gpt2-medium      with a GPU
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw
from bench.device_models import MODELS
from bench.device_steps import NO_GPU, Setup, free
from bench.zoo_times import NUM_WARMUP
from shardwright.cost.calibration.measure import Clock
from shardwright.pcg.capture.capture import find_loss

Backward = Callable[[], object]
"""A forward and its backward."""
ROUNDS = 10


def original(name: str, setup: Setup, *, compiled: bool) -> tuple[nn.Module, Backward]:
    model, batch = setup.build(name)
    call = torch.compile(model) if compiled else model

    def backward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = find_loss(call(**batch))
        assert loss is not None
        loss.backward()
        return loss

    return model, backward


def lowered(name: str, setup: Setup, *, compiled: bool) -> tuple[nn.Module, Backward]:
    model, batch = setup.build(name)
    parallel = sw.compile(
        model, kwargs=batch, precision="amp_bf16", microbatches=1, recompute="none", check_inputs="never"
    )
    if compiled:
        parallel.compile()
    return parallel, lambda: parallel.forward_backward(**batch)


def measured(module: nn.Module, backward: Backward) -> str:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(NUM_WARMUP):
        step()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    clock = Clock("cuda", torch.get_num_threads())
    seconds = sorted(clock.kernel_s(step) for _ in range(ROUNDS))
    spread = f"{seconds[0] * 1e3:.1f}–{seconds[-1] * 1e3:.1f}"
    return f"{median(seconds) * 1e3:.1f} ms ({spread}), {torch.cuda.max_memory_allocated() / 1e9:.2f} GB"


def main(names: list[str]) -> None:
    if not torch.cuda.is_available():
        sys.exit(NO_GPU.split(", or try")[0])
    setup = Setup("cuda", None, ROUNDS, small=False)
    for name in names or list(MODELS):
        for title, make in {"as written": original, "lowered": lowered}.items():
            for compiled in (False, True):
                torch.manual_seed(0)
                with torch.device("cuda"):
                    told = measured(*make(name, setup, compiled=compiled))
                print(f"{name}, {title}{', compiled' if compiled else ''}: {told}", flush=True)
                free()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
