"""Whole steps of a model on one device: as its authors wrote it, and as a lowered program, each eager and compiled.

They are measured as `bench.device_steps` measures them, one after the other in one process.

    torchrun --nproc-per-node 1 -m bench.device_speed --models gpt2-medium    with a GPU
    torchrun --nproc-per-node 1 -m bench.device_speed --device cpu            tries the command on small models
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

import shardwright as sw
from bench.device_models import MODELS
from bench.device_steps import MODES, NO_GPU, PRECISIONS, Setup, Stepper, free, measure


class LoweredStepper(Stepper):
    """The program of a model on the device, ready to take steps."""

    def __init__(self, name: str, setup: Setup, *, compiled: bool) -> None:
        super().__init__(name, setup, compiled=False)
        self.parallel = sw.compile(
            self.model, kwargs=self.batch, precision=setup.precision, microbatches=1, recompute="none",
            check_inputs="never",
        )  # fmt: skip
        self.model = self.call = self.parallel  # the memory of the model's own weights is given back
        self.optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=1e-4, fused=True)
        if compiled:
            self.parallel.compile()

    def step(self) -> None:
        self.parallel.forward_backward(**self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the median of a step, its range, and the most memory that was allocated."""
    parser = argparse.ArgumentParser(prog="python -m bench.device_speed", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--device", choices=list(PRECISIONS), default="cuda", help="default: cuda")
    parser.add_argument("--rounds", type=int, default=10, help="default: 10")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error(NO_GPU)
    if not on_gpu:
        torch.set_num_threads(1)
    setup = Setup(options.device, None, options.rounds, small=not on_gpu)
    for name in options.models:
        for title, ready in {"as written": Stepper, "lowered": LoweredStepper}.items():
            for mode, compiled in MODES.items():
                seconds, allocated, _ = measure(name, setup, compiled=compiled, ready=ready)
                spread = f"{min(seconds) * 1e3:.1f}–{max(seconds) * 1e3:.1f}"
                told = f"{median(seconds) * 1e3:.1f} ms ({spread}), {allocated / 1e9:.2f} GB"
                print(f"{MODELS[name].title}, {title}, {mode}: {told}", flush=True)
                free()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
