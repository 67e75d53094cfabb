"""The demo's training loop, once as it is and once under a plan: what it takes to train a model with Shardwright.

    python examples/demo_train.py                                                     a single process
    torchrun --nproc-per-node 2 examples/demo_train.py --plan demo-output/plan.json   two ranks

Every step is told on stdout as a line of JSON, by rank 0. Seeds are set so that both runs draw the same weights,
batches and dropout masks: their losses are equal but for rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from demo_model import batches, model
from torch import Tensor, nn

import shardwright as sw

SEED = 0


def single(net: nn.Module) -> tuple[nn.Module, Callable[..., Tensor]]:
    """The model as it is: forward, then backward."""

    def forward_backward(**batch: Tensor) -> Tensor:
        loss = net(**batch).loss
        loss.backward()
        return loss.detach()

    return net, forward_backward


def parallel(net: nn.Module, plan: Path, program: Path | None) -> tuple[nn.Module, Callable[..., Tensor]]:
    """This rank's part of the model under a plan. This is all that changes."""
    module = sw.compile(net, kwargs=next(batches(1)), plan=plan, timeout_s=120)
    if program is not None and dist.get_rank() == 0:
        module.program.write(program)
    return module, module.forward_backward


def train(num_steps: int, plan: Path | None, program: Path | None) -> None:
    """AdamW for `num_steps` steps."""
    torch.manual_seed(SEED)
    net = model()
    module, forward_backward = parallel(net, plan, program) if plan else single(net)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.manual_seed(SEED)
    for step, batch in enumerate(batches(num_steps), 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = forward_backward(**batch)
        optimizer.step()
        tell(step, loss.item(), time.perf_counter() - start)


def tell(step: int, loss: float, step_s: float) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"step": step, "loss": loss, "step_s": step_s}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plan", type=Path, help="train under this plan, started by torchrun")
    parser.add_argument("--program", type=Path, help="write rank 0's program here")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    train(options.steps, options.plan, options.program)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
