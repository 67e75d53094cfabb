"""Causal attention in our ring beside torch's own, on two gloo ranks in one run, over loopback and over a slow link.

`torch.distributed.tensor.experimental.context_parallel` takes a CPU's attention for an operator that it has no strategy
for. That is tried first, and printed. Its ring is a function of a kernel, though: here that is the CPU's, the one that
our ring calls, too. Torch's ring rotates keys by all-gather or by all-to-all, and balances them by a zigzag order. Both
are compared with attention in one process. Run it with `python -m bench.context_parallel`; it prints a table of
docs/ring.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

from bench.rounds import quartiles, ratio, slowest_rank
from bench.throttled import as_nodes, enter, may_have_namespaces
from shardwright.lowering.private import AutogradContext
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime.attention import sdpa

TOKENS, HEADS, WIDTH, RANKS = 8192, 4, 64, 2
RATES = (0.0, 10e6)
"""Bytes per second of the link, each way; 0: ranks reach each other by loopback."""
CHECKED = 512
"""The tokens of the attention that is compared with one process."""
ROTATIONS = {"allgather": "all-gather", "alltoall": "all-to-all"}
"""How torch's ring rotates keys, and the words for it; the first is its default."""
OURS = "ours"
MOST_APART = 1e-4
_RING = import_module("torch.distributed.tensor.experimental._context_parallel._attention")

# pyright: reportIncompatibleMethodOverride=false


def refusal() -> str:
    """Return what torch's context manager says of attention on a CPU; "" if it runs. All ranks must call this."""
    mesh = init_device_mesh("cpu", (RANKS,))
    operands = [torch.randn(1, HEADS, CHECKED, WIDTH) for _ in range(3)]
    try:
        with context_parallel(mesh, buffers=operands, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(operands)):
            q, k, v = operands
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return ""


# ---- torch's ring, by the CPU's kernel ----


def _forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)


def _backward(
    *, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, grad_out: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale)


class _TorchRing(Function):
    @staticmethod
    def forward(ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring, scale = _RING._templated_ring_attention, q.shape[-1] ** -0.5
        out, log_sum, *_ = ring(dist.group.WORLD, 2, _forward, q, k, v, is_causal=True, scale=scale)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        ring, scale = _RING._templated_ring_attention_backward, q.shape[-1] ** -0.5
        found = ring(dist.group.WORLD, 2, _backward, grad, "grad_out", q, k, v, out, log_sum, True, scale=scale)
        return tuple(found[:3])


# ---- contenders ----


class Contender:
    """A ring by its name: how a rank's positions lie, and attention to all keys."""

    def __init__(self, name: str) -> None:
        self.name, self.axis = name, Axis("cp", RANKS, dist.get_rank(), dist.group.WORLD)

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's positions of a whole sequence: every second one, or the first and the last quarter."""
        if self.name == OURS:
            return x[:, :, self.axis.rank :: RANKS].contiguous()
        quarters = x.chunk(2 * RANKS, 2)
        return torch.cat([quarters[self.axis.rank], quarters[-1 - self.axis.rank]], 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.name == OURS:
            return sdpa(True, None, self.axis.rank, q, k, v, ring=self.axis, step=RANKS)
        _RING.set_rotate_method(self.name)
        found = _TorchRing.apply(q, k, v)
        assert isinstance(found, Tensor)
        return found

    def results(self, whole: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
        """Return the result and the gradients of q, k and v, of this rank's positions."""
        operands = [self.part(x).requires_grad_() for x in whole]
        y = self.attend(*operands)
        y.backward(self.part(grad))
        return [y.detach(), *(x.grad for x in operands if x.grad is not None)]


def _operands(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, tokens, WIDTH, generator=generator) for _ in range(4)]


def check(contender: Contender) -> None:
    """Raise an `AssertionError` unless the ring gives what one process does."""
    *whole, grad = _operands(CHECKED)
    q, k, v = (x.clone().requires_grad_() for x in whole)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y.backward(grad)
    expected = (y.detach(), *(x.grad for x in (q, k, v) if x.grad is not None))
    for own, one in zip(contender.results(whole, grad), expected, strict=True):
        torch.testing.assert_close(own, contender.part(one), rtol=0.0, atol=MOST_APART)


def race(other: int, num_rounds: int) -> tuple[str, dict[str, Any]]:
    """Return what torch says of its context manager, and seconds and CPU time of each contender by round."""
    torch.set_num_threads(1)
    if other:
        enter(dist.get_rank(), other, per_node=1)
    told, contenders = refusal(), [Contender(name) for name in (OURS, *ROTATIONS)]
    for contender in contenders:
        check(contender)
    *whole, grad = _operands(TOKENS)
    times: dict[str, Any] = {contender.name: [] for contender in contenders}
    for number in range(num_rounds + 1):
        for contender in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
            operands, own = [contender.part(x).requires_grad_() for x in whole], contender.part(grad)
            times[contender.name].append(_timed(lambda: contender.attend(*operands).backward(own)))  # noqa: B023
    return told, {name: torch.tensor(own[1:]).numpy() for name, own in times.items()}


def _timed(run: Callable[[], object]) -> tuple[float, float, float]:
    """Return seconds twice, as `bench.rounds` has them of forward and backward and of a step, and CPU time."""
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    run()
    seconds = time.perf_counter() - start
    return seconds, seconds, time.process_time() - start_cpu


def causal_half() -> list[float]:
    """Return the CPU time of a causal tile of a rank's tokens, to half of that without a mask: forward, backward."""
    q, k, v, grad = _operands(TOKENS // RANKS)
    seconds = list[list[float]]()
    for is_causal in (True, False):
        out, log_sum, *_ = _forward(q, k, v, is_causal=is_causal, scale=0.1)
        back = {"query": q, "key": k, "value": v, "out": out, "logsumexp": log_sum, "grad_out": grad, "scale": 0.1}
        runs = (
            partial(_forward, q, k, v, is_causal=is_causal, scale=0.1),
            partial(_backward, **back, is_causal=is_causal),
        )
        seconds.append([min(_cpu_s(run) for _ in range(5)) for run in runs])
    return [2 * causal / whole for causal, whole in zip(*seconds, strict=True)]


def _cpu_s(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def rows(rate: float, num_rounds: int) -> list[str]:
    """Measure over one link, and return the rows of the table."""
    other = as_nodes(rate) if rate else None
    try:
        by_rank = run_ranks(race, RANKS, 1800.0, args=(other.pid if other else 0, num_rounds))
    finally:
        if other is not None:
            other.kill()
    (told, _), times = by_rank[0], slowest_rank([own for _, own in by_rank])
    link, ours = f"{rate / 1e6:.0f} MB/s" if rate else "loopback", times[OURS]
    found = [f"| {link} | `context_parallel` | {'does not run: ' + told if told else 'runs'} | | |"]
    for name, words in ROTATIONS.items():
        theirs = quartiles(times[name][:, 0]).median
        found.append(
            f"| {link} | its ring, {words} | {theirs * 1e3:.0f} ms | {ratio(ours, times[name])} | "
            f"{ratio(ours, times[name], 2).median:.2f} |"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--inside", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        print(json.dumps(rows(options.inside, options.rounds)))
        return 0
    print(f"torch {torch.__version__}\n")
    print("| link | torch's | seconds | our ring ÷ | CPU time ÷ |\n|---|---|--:|--:|--:|")
    for rate in RATES if may_have_namespaces() else RATES[:1]:
        words = [sys.executable, "-m", "bench.context_parallel", "--inside", str(rate), "--rounds", str(options.rounds)]
        started = ["unshare", "-Urn", "--kill-child", *words] if rate else words
        done = subprocess.run(started, check=True, stdout=subprocess.PIPE, text=True, timeout=1800.0)
        print("\n".join(json.loads(done.stdout.splitlines()[-1])), flush=True)
    torch.set_num_threads(1)
    forward, backward = causal_half()
    print(f"\nCPU time of a causal tile to half of one without a mask: forward {forward:.2f}, backward {backward:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
