"""A training loop to copy: data, bf16, clipping, a schedule, evaluation, checkpoints, tokens/s and MFU, a progress bar.

    torchrun --nproc-per-node 2 examples/train.py --folder runs/gpt            until it is done, or ended
    torchrun --nproc-per-node 4 examples/train.py --folder runs/gpt            goes on, on any number of ranks
    shardwright run --nproc-per-node 2 --max-restarts 3 examples/train.py -- --folder runs/gpt
                                                                               goes on by itself after a failure

It trains a GPT-2 on the bytes of the Python standard library. SIGTERM and SIGUSR1, which a cluster sends before it
takes machines away, save and end with status 75: start me again. Put your model and data in the place of these.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from demo_model import SEQ, corpus, model
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import Dataset

import shardwright as sw

AGAIN = 75  # EX_TEMPFAIL


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of the text, one behind the other; the model shifts the labels by itself."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = self.text[number * self.length :][: self.length].long()
        return {"input_ids": ids, "labels": ids}


def data(length: int) -> tuple[Windows, Windows]:
    """The data sets to train on and to evaluate with."""
    text = corpus()
    cut = len(text) * 9 // 10
    return Windows(text[:cut], length), Windows(text[cut:], length)


def train(options: argparse.Namespace) -> int:
    """Train to the last step, or until a signal; return the exit status."""
    signals = sw.StopSignals()
    torch.manual_seed(options.seed)
    training, held_out = data(options.length)
    example = {name: torch.stack([x] * options.batch) for name, x in training[0].items()}
    cluster = sw.Cluster.load(options.cluster) if options.cluster else sw.Cluster.detect()
    net = model()
    parallel = sw.compile(net, cluster, kwargs=example, plan=options.plan, precision=options.precision)

    optimizer = torch.optim.AdamW(parallel.parameters(), lr=options.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, options.warmup, options.steps))
    loader = sw.Loader(parallel, training, seed=options.seed, num_workers=options.workers)
    run = parallel, optimizer, scheduler, loader
    step = sw.load(options.folder, *run) or 0

    tokens = options.batch * options.length
    flops = 6 * sum(p.numel() for p in net.parameters()) * tokens  # of a step: forward, and backward twice that
    peak = cluster.num_devices * cluster.device.peak_flops_per_s("bf16" if options.precision else "fp32")
    with progress(options.steps) as bar:
        while step < options.steps:
            for batch in loader:
                start = time.perf_counter()
                loss = parallel.forward_backward(**batch)
                norm = parallel.clip_grad_norm_(1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                bar.update(bar.task_ids[0], completed=step)
                value = loss.item()  # it waits for the device
                step_s = time.perf_counter() - start
                rate, mfu = tokens / step_s, flops / step_s / peak
                tell(
                    f"step {step}/{options.steps}  loss {value:.6f}  norm {norm.item():.3f}  "
                    f"lr {scheduler.get_last_lr()[0]:.2e}  {rate:,.0f} tokens/s  MFU {mfu:.1%}"
                )
                ends = step == options.steps or signals.asked(parallel)
                if ends or step % options.save_every == 0:
                    sw.save(options.folder, *run, step=step, keep=2, wait=ends)
                if step % options.evaluate_every == 0:
                    tell(f"step {step}: loss on held-out text {evaluated(parallel, held_out, options.batch):.6f}")
                if ends:
                    return 0 if step == options.steps else AGAIN
    return 0


def progress(num_steps: int) -> Progress:
    """A bar on rank 0, where there is a terminal; lines that are printed meanwhile stand above it."""
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, disable=dist.get_rank() > 0 or not sys.stdout.isatty())
    bar.add_task("steps", total=num_steps)
    return bar


def factor(step: int, warmup: int, last: int) -> float:
    """Of the learning rate: a linear rise, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, last - warmup)))


def evaluated(parallel: torch.nn.Module, held_out: Windows, batch_size: int, num_batches: int = 4) -> float:
    """The mean loss on the first batches of a data set."""
    parallel.eval()
    losses = list[float]()
    with torch.no_grad():
        for number in range(num_batches):
            rows = [held_out[number * batch_size + row] for row in range(batch_size)]
            losses.append(parallel(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).item())
    parallel.train()
    return sum(losses) / len(losses)


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the run's checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a global batch")
    parser.add_argument("--length", type=int, default=SEQ, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--precision", default=None, help='such as "amp_bf16"; by default the model\'s own')
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--workers", type=int, default=0, help="processes of each rank that read data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cluster", type=Path, help="a cluster file; by default what this process runs on")
    parser.add_argument("--plan", type=Path, help="a plan file; by default the best plan is searched")
    status = train(parser.parse_args())
    dist.destroy_process_group()
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
