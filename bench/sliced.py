"""The cost of ZeRO-1 with one microbatch on gloo: the fewest messages and copies, by hand, beside DDP and ours.

`ZeroRedundancyOptimizer` gives whole parameters to ranks, DeepSpeed cuts one flat buffer wherever that falls; so both
send few large messages, from where the values lie. Where every parameter is cut, as a DTensor under its own name has
to be, its slices do not lie together in what is gathered: a message for each, or a copy. The contenders by hand do
that and nothing else: all gathers, forward, backward, all exchanges of gradients, AdamW. Its parameters are plain
tensors, and in the last contender DTensors, which torch's optimizers unwrap one by one.

    python -m bench.sliced [--rounds 30] [--batch 8]    prints CPU time of whole steps, both ranks' mean

CPU time, because two ranks share two cores with gloo's threads: what is sent costs what it takes to copy it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.accumulation import OURS, ddp
from bench.gpt import Size, build, make_batch
from bench.rounds import quartiles
from bench.speed import check_agreement
from bench.trainers import Trainer, adamw, eager, lowered, my_part, serial_graph
from shardwright.lowering import private
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.buckets import PLACED_BYTES

NUM_RANKS = 2
NUM_WARMUP = 3
OUR_NAME, DDP_NAME = "zero-1, 1", "DDP, ZeroRedundancyOptimizer, 1"


class Stored(Protocol):
    """Storage of weights between steps. `own`: the parameters that this rank's optimizer updates."""

    own: list[nn.Parameter]

    def gather(self) -> None:
        """Gather the weights into the model's parameters."""
        ...

    def scatter(self) -> None:
        """Send the model's gradients to those of `own`, summed over the ranks."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Return the whole gradients by name."""
        ...


class Flat:
    """All in one buffer, which ranks cut in equal parts; parameters and gradients are views of it."""

    def __init__(self, model: nn.Module) -> None:
        self.named, ranks = dict(model.named_parameters()), dist.get_world_size()
        self.sizes = [p.numel() for p in self.named.values()]
        self.sizes.append(-sum(self.sizes) % ranks)
        self.whole, self.gradient, self.received = (torch.zeros(sum(self.sizes)) for _ in range(3))
        for parameter, view in zip(self.named.values(), self._views(self.whole), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.own = [nn.Parameter(self.whole.chunk(ranks)[dist.get_rank()])]

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split(self.sizes)[:-1]
        return [part.view(p.shape) for part, p in zip(parts, self.named.values(), strict=True)]

    def gather(self) -> None:
        dist.all_gather_single(self.whole, self.own[0].data)

    def scatter(self) -> None:
        private.copy_all(self._views(self.gradient), _taken(self.named.values()))
        dist.all_to_all_single(self.received, self.gradient)
        self.own[0].grad = torch.add(*self.received.chunk(NUM_RANKS))

    def gradients(self) -> dict[str, Tensor]:
        whole = torch.empty_like(self.whole)
        dist.all_gather_single(whole, _gradient(self.own[0]))
        return dict(zip(self.named, self._views(whole), strict=True))


class Sliced:
    """Every parameter in slices: large ones with a message each, the small ones of a block packed."""

    def __init__(self, model: nn.Module) -> None:
        self.named, self.ranks = dict(model.named_parameters()), dist.get_world_size()
        parts = {p: p.detach().view(self.ranks, -1)[dist.get_rank()] for p in self.named.values()}
        blocks = dict[str, list[nn.Parameter]]()
        for name, parameter in self.named.items():
            blocks.setdefault(".".join(name.split(".")[:2]) if name.startswith("blocks") else "", []).append(parameter)
        is_large = {p: part.numel() * part.itemsize >= PLACED_BYTES for p, part in parts.items()}
        self.mine = {p: nn.Parameter(part.clone()) for p, part in parts.items() if is_large[p]}
        self.received = {p: torch.empty(self.ranks, part.numel()) for p, part in parts.items() if is_large[p]}
        self.packs = [_Pack([p for p in own if not is_large[p]], parts) for own in blocks.values()]
        for pack in self.packs:
            self.mine |= zip(pack.members, pack.mine, strict=True)
        self.own = list(self.mine.values())

    def gather(self) -> None:
        works = [_start(dist.all_gather_single, p.data, self.mine[p].data) for p in self.received]
        works += [_start(dist.all_gather_single, pack.received, pack.flat) for pack in self.packs]
        _wait(works)
        for pack in self.packs:
            private.copy_all([p.data.view(self.ranks, -1) for p in pack.members], pack.arrivals)

    def scatter(self) -> None:
        gradients = dict(zip(self.received, _taken(self.received), strict=True))
        works = [_start(dist.all_to_all_single, out, gradients[p]) for p, out in self.received.items()]
        for pack in self.packs:
            private.copy_all(pack.departures, [g.view(self.ranks, -1) for g in _taken(pack.members)])
            works.append(_start(dist.all_to_all_single, pack.received, pack.sent))
        _wait(works)
        for parameter, out in self.received.items():
            self.mine[parameter].grad = torch.add(*out)
        for pack in self.packs:
            for mine, part in zip(pack.mine, torch.add(*pack.received).split(pack.sizes), strict=True):
                mine.grad = part

    def gradients(self) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, parameter in self.named.items():
            found[name] = torch.empty(parameter.shape)
            dist.all_gather_single(found[name].view(-1), _gradient(self.mine[parameter]))
        return found


class Named(Sliced):
    """The same, where the optimizer has every parameter as a DTensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        mesh = init_device_mesh("cpu", (self.ranks,))
        self.outside = {
            p: nn.Parameter(DTensor.from_local(mine.data, mesh, [Shard(0)])) for p, mine in self.mine.items()
        }
        self.own = list(self.outside.values())

    def scatter(self) -> None:
        super().scatter()
        for parameter, mine in self.mine.items():
            outside = self.outside[parameter]
            outside.grad = private.wrap(_gradient(mine), private.spec_of(outside))


class _Pack:
    """Small parameters of one block: this rank's slices lie in `flat`, all ranks' arrive in `received`."""

    def __init__(self, members: Sequence[nn.Parameter], parts: Mapping[nn.Parameter, Tensor]) -> None:
        self.members, self.sizes = members, [parts[p].numel() for p in members]
        self.flat = torch.cat([parts[p] for p in members])
        self.mine = [nn.Parameter(part) for part in self.flat.split(self.sizes)]
        self.sent, self.received = (torch.empty(NUM_RANKS, len(self.flat)) for _ in range(2))
        self.departures, self.arrivals = (list(x.split(self.sizes, dim=1)) for x in (self.sent, self.received))


def _start(collective: Callable[..., dist.Work | None], out: Tensor, x: Tensor) -> dist.Work:
    work = collective(out.view(-1), x.view(-1), async_op=True)
    assert work is not None
    return work


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _taken(parameters: Collection[nn.Parameter]) -> list[Tensor]:
    """Return the parameters' gradients, and take these from the parameters."""
    found = [_gradient(parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def by_hand(kind: Callable[[nn.Module], Stored], size: Size, name: str) -> Trainer:
    model, batch = build(size), my_part(make_batch(size))
    stored = kind(model)

    def forward_backward() -> Tensor:
        stored.gather()
        loss = model(**batch)
        (loss / NUM_RANKS).backward()
        stored.scatter()
        return loss

    return Trainer(name, forward_backward, adamw(stored.own), stored.gradients, mean_loss=True)


CONTENDERS: Mapping[str, Callable[[Size, str], Trainer]] = {
    DDP_NAME: lambda size, name: ddp(1, size, name, shards_states=True),
    "one flat buffer, by hand": lambda size, name: by_hand(Flat, size, name),
    "slices of every parameter, by hand": lambda size, name: by_hand(Sliced, size, name),
    "the same as DTensors, by hand": lambda size, name: by_hand(Named, size, name),
}


def race(graph: Graph, size: Size, num_rounds: int) -> dict[str, np.ndarray]:
    """One rank's part: seconds of CPU time, by contender and round, after all were seen to agree."""
    torch.set_num_threads(1)
    trainers = [make(size, name) for name, make in CONTENDERS.items()] + [lowered(size, graph, OUR_NAME)]
    reference = eager(size)
    loss, gradients = reference.whole_loss(), reference.gradients()
    for trainer in trainers:
        check_agreement(trainer, loss, gradients)
    times = {trainer.name: np.zeros(NUM_WARMUP + num_rounds) for trainer in trainers}
    for number in range(NUM_WARMUP + num_rounds):
        first = number % len(trainers)
        for trainer in (*trainers[first:], *trainers[:first]):
            dist.barrier()
            start = time.process_time()
            trainer.step()
            times[trainer.name][number] = time.process_time() - start
    return {name: own[NUM_WARMUP:] for name, own in times.items()}


def table(by_rank: Sequence[Mapping[str, np.ndarray]]) -> str:
    """Return a table in Markdown: milliseconds, and ratios to DDP with its optimizer, round by round."""
    times = {name: np.mean([own[name] for own in by_rank], axis=0) for name in by_rank[0]}
    rows = [
        f"| {name} | {quartiles(own).median * 1e3:.0f} ms | {quartiles(own / times[DDP_NAME])} |"
        for name, own in times.items()
    ]
    return "\n".join(["| ZeRO-1, one microbatch | CPU time of a step | to the first |", "|---|--:|---|", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.sliced", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=Size().batch, help="sequences of a step")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = Size(batch=options.batch)
    graph = OURS[OUR_NAME].plan(serial_graph(size))
    print(table(run_ranks(race, NUM_RANKS, 600.0, args=(graph, size, options.rounds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
