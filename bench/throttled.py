"""A cluster of two levels on one machine: eight gloo ranks in two network namespaces, with one slow link between them.

The link is a pair of virtual devices that the kernel's traffic shaping (`tc`, a token bucket) keeps to a rate; ranks of
a namespace reach each other by loopback. Namespaces are a user's own (`unshare`), so nothing here needs to be root; the
table is left out where the kernel does not allow them. `make bench-collectives` has it on its page.

    python -m bench.throttled
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.api import compile as compiled
from shardwright.api import plan
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.shapes import of_cluster
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.scheduled import time_s
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.scheduled import ScheduledCollective
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.search.collectives.candidates import for_planner
from shardwright.search.picked import by_library
from shardwright.search.plan import Plan

NODES, PER_NODE = 2, 4
RANKS = NODES * PER_NODE
BYTES_PER_S = 6.25e6
"""The rate of the link between the two nodes, each way."""
NUM_BYTES = 4 << 20
REPEATS, TIMEOUT_S = 3, 120.0
BUILDERS = ("hierarchical", "ring", "mesh", "direct", "bruck")
_NET_NAMESPACE = 0x40000000  # CLONE_NEWNET of sched.h


def cluster() -> Cluster:
    """The cluster as the planner sees it: a node's ranks share its link."""
    host = Level("host", PER_NODE, 1e9, 50e-6, "host")
    network = Level("network", NODES, BYTES_PER_S, 50e-6, "network", "switch", float(PER_NODE))
    return Cluster("two throttled nodes", Cluster.local(2).device, (host, network), "gloo", "as tc is told")


def chosen() -> Schedule:
    """The schedule that the planner picks for an all-reduce of all ranks."""
    own = for_planner(cluster().with_schedules("synthesized"))
    found = Communication(own, (RANKS,)).picks("all_reduce", 0).at(NUM_BYTES)
    assert found is not None, "a schedule beats the ring where the network is no ring"
    return found


class Net(nn.Module):
    """Two linears, whose gradients are as many bytes as the collectives above."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 512, bias=False), nn.Linear(512, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


BATCH = {"x": torch.ones(RANKS, 1024)}


def plans() -> tuple[Plan, Plan]:
    """The data-parallel plan by gloo's collectives, and the one that may pick schedules."""
    found = [
        plan(net(), own, kwargs=BATCH, mesh={"dp": RANKS}, roles=["data"])
        for own in (cluster(), cluster().with_schedules("synthesized"))
    ]
    return found[0], found[1]


# ---- the two nodes


def as_nodes(bytes_per_s: float = BYTES_PER_S) -> subprocess.Popen[bytes]:
    """Make the two nodes: this process is in the first. Return a process that is in the second.

    `bytes_per_s`: the rate of the link between them, each way.
    """
    other = subprocess.Popen(["unshare", "-n", "sleep", "600"])
    here = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{other.pid}/ns/net").readlink() == here:
        time.sleep(0.01)
    rate = f"{round(8 * bytes_per_s)}bit"
    inside = ["nsenter", "-t", str(other.pid), "-n"]
    _run(["ip", "link", "add", "node", "type", "veth", "peer", "name", "node", "netns", str(other.pid)])
    for number, prefix in enumerate(([], inside), start=1):
        _run([*prefix, "ip", "link", "set", "lo", "up"])
        _run([*prefix, "ip", "addr", "add", f"10.9.0.{number}/24", "dev", "node"])
        _run([*prefix, "ip", "link", "set", "node", "up"])
        shaping = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "1s"]
        _run([*prefix, "tc", "qdisc", "add", "dev", "node", *shaping])
    return other


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def enter(rank: int, other: int, per_node: int = PER_NODE) -> None:
    """Put this rank on its node: groups that it makes from now on reach other ranks as nodes do."""
    os.environ["GLOO_SOCKET_IFNAME"] = "node"
    if rank >= per_node:
        with Path(f"/proc/{other}/ns/net").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NET_NAMESPACE):
                raise OSError(ctypes.get_errno(), "setns")


# ---- what is measured


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of gloo's all-reduce, of schedules by name, and of a training step by gloo and by schedules."""

    gloo_s: float
    schedules_s: dict[str, float]
    steps_s: tuple[float, float]


def measure(schedules: list[Schedule], steps: tuple[Plan, Plan], other: int) -> Measured:
    """Measure on forked ranks; each repeat takes as long as its slowest rank."""

    def body() -> Measured:
        enter(dist.get_rank(), other)
        group = dist.new_group(list(range(RANKS)))
        assert isinstance(group, dist.ProcessGroup)
        x, size = torch.ones(NUM_BYTES // 4), NUM_BYTES // 4
        runs = {one.name: ScheduledCollective(one, group, timeout_s=TIMEOUT_S) for one in schedules}
        modules = [compiled(net(), plan=own, kwargs=BATCH, check_capture="never") for own in steps]
        named: dict[str, Callable[[], object]] = {
            "": lambda: dist.all_reduce(x.clone(), group=group),
            **{name: partial(own.run, x, size) for name, own in runs.items()},
            **{f"step {i}": partial(own.forward_backward, **BATCH) for i, own in enumerate(modules)},
        }
        seconds = {name: list[float]() for name in named}
        for _ in range(REPEATS):
            for name, do in named.items():
                seconds[name].append(_slowest_s(do))
        found = {name: median(own) for name, own in seconds.items()}
        return Measured(found[""], {name: found[name] for name in runs}, (found["step 0"], found["step 1"]))

    return run_ranks(body, RANKS, 600)[0]


def _slowest_s(do: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    do()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def main() -> None:
    """Print the result as JSON; this process is the first node."""
    picked = chosen()
    topology = of_cluster(cluster())
    schedules = [build(name, "all_reduce", (NODES, PER_NODE)) for name in BUILDERS]
    own = list({one.name: one for one in (*schedules, picked)}.values())
    predicted = {one.name: time_s(one, topology, "gloo", NUM_BYTES) for one in own}
    both, other = plans(), as_nodes()
    try:
        found = measure(own, both, other.pid)
    finally:
        other.kill()
    gloo_s = Communication(cluster(), (RANKS,)).time_s("all_reduce", 0, NUM_BYTES)
    predicted_steps = [by_library(both[1]), both[1].prediction.step_s]
    print(json.dumps({"picked": picked.name, "predicted": predicted, "measured": found.schedules_s,
                      "gloo": [gloo_s, found.gloo_s],
                      "steps": list(zip(predicted_steps, found.steps_s, strict=True))}))  # fmt: skip


def rows() -> Iterator[str]:
    """Yield the rows of the page's table: name, predicted and measured milliseconds, and the ratio to gloo's own."""
    found = in_namespaces()
    if found is None:
        yield "| (this kernel allows no namespaces, or has no `tc`) | | | |"
        return
    gloo_s = found["gloo"][1]

    def row(name: str, both: Sequence[float], against_s: float) -> str:
        predicted_s, measured_s = both
        return f"| {name} | {predicted_s * 1e3:.0f} | {measured_s * 1e3:.0f} | {measured_s / against_s:.2f} |"

    yield row("gloo's own all-reduce", found["gloo"], gloo_s)
    for name in sorted(found["predicted"], key=found["predicted"].__getitem__):
        mark = ", picked" if name == found["picked"] else ""
        yield row(name + mark, (found["predicted"][name], found["measured"][name]), gloo_s)
    by_gloo, by_schedules = found["steps"]
    yield row("a training step by gloo's", by_gloo, by_gloo[1])
    yield row("a training step by schedules", by_schedules, by_gloo[1])
    ordered = [sorted(found[key], key=found[key].__getitem__) for key in ("predicted", "measured")]
    assert ordered[0] == ordered[1], f"predicted order {ordered[0]}, measured {ordered[1]}"
    assert found["measured"][found["picked"]] <= 0.8 * gloo_s, found


def may_have_namespaces() -> bool:
    """Return whether this machine allows namespaces and has the tools for them."""
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip", "tc"))
    return tools and not subprocess.run(["unshare", "-Urn", "true"], capture_output=True, check=False).returncode


def in_namespaces() -> dict[str, Any] | None:
    """Run this file in namespaces of its own, and return what it found; None where that is not allowed."""
    if not may_have_namespaces():
        return None
    command = ["unshare", "-Urn", "--kill-child", sys.executable, "-m", "bench.throttled"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
