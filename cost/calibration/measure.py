"""The program of one rank of a calibration: `python -m shardwright.cost.calibration.measure rank folder`.

All ranks measure at once, as they run at once in training. Each takes the same number of samples of everything, so that
collectives pair up; the slowest rank's time of each sample counts.

Every point is visited in several passes. A processor that shares its core with other work of its host can be half as
fast for seconds, which is longer than a visit: points measured in one go would not even agree with each other. Each
pass has its own order. In a fixed order, neighbours would share their slow seconds, and the parts of one sum, such as
all operators' dispatch, would be slow together. `Point.of` makes one time of a point's samples.

The folder holds `workload.pickle` and `visits.jsonl`. Visits in that file are not made again; rank 0 adds a line after
each new one. Rank 0 prints one line of progress per pass.
"""

from __future__ import annotations

import json
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cached_property, partial
from importlib import import_module
from itertools import pairwise
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.cost.calibration.probes import common_probes, dispatch_probes, kernel_probes, pace_probes
from shardwright.cost.calibration.samples import Probe
from shardwright.cost.calibration.workload import CHAINS, VISITS, WORKLOAD, Visit, Workload, read_visits
from shardwright.cost.clusters.cluster import COLLECTIVES

if TYPE_CHECKING:
    from torch import Tensor

    _Ready = tuple[Callable[..., Tensor], list[Tensor]]
    """An operator and its operands."""

_DISPATCHED = 64  # operators in one sample of dispatch
_PACED = 8  # operators in one sample of their pace
_BACK_TO_BACK = 10  # kernels of one sample on a GPU, so that the first one's launch does not count
_PATIENCE = 8  # times as long for a point in which ranks wait: its times have a long tail
_OPENERS = ("tanh", "amax", "floor")  # dispatched first, they warm the code that all operators share
_LEAST, _MOST = 2, 10  # samples in one visit
_READINGS = 1001  # of a clock, to measure what one reading takes


class Clock:
    """Seconds that a call takes, less the time that reading the clock takes.

    Where a rank works with one thread, other processes' turns on its processor do not count. Reading a thread's clock
    takes a microsecond, a tenth of an operator's time.
    """

    def __init__(self, device: str, num_threads: int) -> None:
        self.on_gpu = device == "cuda"
        self.own_s = time.thread_time if num_threads == 1 and not self.on_gpu else time.perf_counter
        self._reading_s = {now: reading_s(now) for now in (self.own_s, time.perf_counter)}

    def kernel_s(self, call: Callable[[], object]) -> float:
        """Return the seconds that the device works on the call; on a GPU by events around several calls in a row."""
        if not self.on_gpu:
            return self._seconds(call, self.own_s)
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_BACK_TO_BACK):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _BACK_TO_BACK

    def dispatch_s(self, call: Callable[[], object]) -> float:
        """Return the seconds that the host works until the call returns; a GPU is idle at the start."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
        return self._seconds(call, self.own_s)

    def together_s(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call in which ranks wait for each other, so that all time counts."""
        return self.kernel_s(call) if self.on_gpu else self._seconds(call, time.perf_counter)

    def _seconds(self, call: Callable[[], object], now: Callable[[], float]) -> float:
        start = now()
        call()
        return max(0.0, now() - start - self._reading_s[now])


def reading_s(now: Callable[[], float]) -> float:
    """Return the seconds from one reading of a clock to the next."""
    return statistics.median(after - before for before, after in pairwise([now() for _ in range(_READINGS)]))


class _Task(NamedTuple):
    """A point to measure.

    `make` is called at each visit and returns the call to time. `clock`, a method of `Clock`, times it. `calls`: how
    many operators the call runs. `waits`: processes wait for one another in it.
    """

    key: str
    make: Callable[[], Callable[[], object]]
    clock: Callable[[Clock, Callable[[], object]], float] = Clock.kernel_s
    calls: int = 1
    waits: bool = False


class Rank:
    """The work of one rank between `init_process_group` and the last barrier."""

    def __init__(self, rank: int, workload: Workload, visits: Path) -> None:
        self.rank, self.workload, self.path = rank, workload, visits
        self.clock = Clock(workload.device, workload.num_threads)
        self.overheads: Any = import_module(workload.overheads)

    def measure(self) -> None:
        """Make every visit that is not known yet."""
        import torch.distributed as dist

        known = {key: len(visits) for key, visits in read_visits(self.path).items()}
        dist.barrier()  # rank 0 writes from here on
        for number in range(self.workload.num_passes):
            for _ in self.visits(number, known):
                pass

    def visits(self, number: int, known: Mapping[str, int] = MappingProxyType({})) -> Iterator[None]:
        """Make the visits of one pass, one by one, except `known` ones (a number per point); for all ranks alike."""
        groups = random.Random(number).sample(self._all_tasks, len(self._all_tasks))
        tasks = [task for group in groups for task in group if number >= known.get(task.key, 0)]
        if tasks and self.rank == 0:
            sys.stdout.write(f"pass {number + 1} of {self.workload.num_passes}\n")
            sys.stdout.flush()
        # One file for the pass: if it were opened for each line, the kernel's work on it would disturb the next visits.
        with self.path.open("a", encoding="utf-8", buffering=1) if self.rank == 0 else nullcontext() as file:
            for task in tasks:
                visit = self._visit(task)
                if file:
                    file.write(json.dumps(visit._asdict()) + "\n")
                yield

    @cached_property
    def _all_tasks(self) -> list[list[_Task]]:
        """The groups of tasks. Making them creates process groups, so every rank makes them once, in one order."""
        return list(self._tasks())

    def _tasks(self) -> Iterator[list[_Task]]:
        """Yield groups of tasks; times that are compared share a group, so that they are measured at the same pace."""
        workload, of_many = self.workload, (Clock.dispatch_s, _DISPATCHED)

        def cold(*task: Any) -> list[_Task]:
            return [] if self.clock.on_gpu else [_Task(*task)]  # a GPU is busy meanwhile, so the delay is hidden

        for probe in dispatch_probes(workload.dtypes[0], workload.device):
            yield [
                _Task(f"forward {probe.op}", lambda p=probe: self._forwards(p), *of_many),
                _Task(f"backward {probe.op}", lambda p=probe: self._backwards(p), *of_many),
                _Task(f"first {probe.op}", lambda p=probe: self._kernel(p), self._first_s),
                *cold(f"cold {probe.op}", lambda p=probe: self._kernel(p), partial(self._cold_s, probe.op)),
            ]
        count = len(common_probes(workload.dtypes[0]))
        yield [
            _Task("backward", self._gradients, *of_many),
            _Task("common backward", self._common_backwards, Clock.dispatch_s, count),
            *cold("cold common backward", self._common_backwards, self._cold_backward_s, count),
        ]
        # They are small, and slow to make.
        yield [_Task(f"chain {length}", lambda n=length: self._chains[n], Clock.dispatch_s) for length in CHAINS]
        yield [
            _Task(key, lambda two=two: self.overheads.products(_DISPATCHED, in_two=two), *of_many)
            for key, two in (("backward in one", False), ("backward in two", True))
            if not self.clock.on_gpu
        ]
        for dtype in workload.dtypes:
            for probe in kernel_probes(workload.sizes, dtype):
                makes = {probe.key: lambda p=probe: self._kernel(p)}
                for key, operands in probe.gradients.items():
                    makes[key] = lambda p=probe, o=operands: self._kernel_backward(p, o)
                yield [_Task(key, make) for key, make in makes.items()]
        for probe in pace_probes(workload.sizes, workload.dtypes[0]):
            tasks = [_Task(f"pace {probe.op}", lambda p=probe: self._forwards(p, _PACED), calls=_PACED)]
            if probe.passes().backward:
                back = _Task(f"pace {probe.op} backward", lambda p=probe: self._backwards(p, _PACED), calls=_PACED)
                tasks.append(back)
            yield tasks
        waits = not self.clock.on_gpu
        timed = self._joined_s if waits else Clock.together_s
        for size in workload.group_sizes:
            group = self._group(size)
            for num_bytes in workload.collective_bytes:
                for name in COLLECTIVES:
                    make = partial(self.overheads.collective, name, group, num_bytes, workload.device)
                    yield [_Task(f"{name} {size} {num_bytes}", make, timed, waits=waits)]

    # ---------------------------------------------------------------------------------------------------- timed calls

    def _forwards(self, probe: Probe, number: int = _DISPATCHED) -> Callable[[], object]:
        function, operands = probe.function(self.overheads.runtime), probe.operands(self.workload.device)
        return lambda: [function(*operands) for _ in range(number)]

    def _backwards(self, probe: Probe, number: int = _DISPATCHED) -> Callable[[], object]:
        """Return a call that computes the gradients of `number` operators with separate operands in one pass."""
        function = probe.function(self.overheads.runtime)
        every = [probe.operands(self.workload.device) for _ in range(number)]
        results = [function(*operands) for operands in every]
        if not results[0].requires_grad:
            return lambda: None
        return _gradients(results, [x for operands in every for x in operands if x.requires_grad])

    def _first_s(self, clock: Clock, call: Callable[[], object]) -> float:
        """Return the dispatch seconds of an operator after others, as in a model: it has not warmed the caches."""
        self._work()
        return clock.dispatch_s(call)

    def _cold_s(self, op: str, clock: Clock, call: Callable[[], object]) -> float:
        """Return the dispatch seconds of `op` for the first time in a step.

        Other operators, a backward and an update come before it. Two other operators run first, because the first of
        all pays for code that all share; that cost would count with each operator.
        """
        self._work()
        self._work_backward()
        self._chains[CHAINS[-1]]()
        _run([ready for opener, ready in self._openers.items() if opener != op][:2])
        return clock.dispatch_s(call)

    def _cold_backward_s(self, clock: Clock, call: Callable[[], object]) -> float:
        """Return the dispatch seconds of gradients for the first time in a step."""
        self._chains[CHAINS[-1]]()
        self._work()
        return clock.dispatch_s(call)

    def _joined_s(self, clock: Clock, call: Callable[[], object]) -> float:
        """Return the seconds of a collective after operators, as in a model: ranks reach it at different moments."""
        self._work()
        return clock.together_s(call)

    def _work(self) -> None:
        _run(self._common)

    def _common_backwards(self) -> Callable[[], object]:
        """Return a call that computes the gradients of common operators, one after the other."""
        leaves = [x for _, operands in self._common for x in operands if x.requires_grad]
        return _gradients([function(*operands) for function, operands in self._common], leaves)

    @cached_property
    def _common(self) -> list[_Ready]:
        return self._ready(common_probes(self.workload.dtypes[0]))

    def _ready(self, probes: Iterable[Probe]) -> list[_Ready]:
        runtime, device = self.overheads.runtime, self.workload.device
        return [(probe.function(runtime), probe.operands(device)) for probe in probes]

    @cached_property
    def _work_backward(self) -> Callable[[], object]:
        return self._common_backwards()

    @cached_property
    def _openers(self) -> dict[str, _Ready]:
        probes = {probe.op: probe for probe in dispatch_probes(self.workload.dtypes[0])}
        return dict(zip(_OPENERS, self._ready(probes[op] for op in _OPENERS), strict=True))

    @cached_property
    def _chains(self) -> dict[int, Callable[[], object]]:
        """Steps of the chains by number of parameters; every rank makes them at the same time."""
        return {length: self.overheads.chain_step(length, self.workload.num_ranks) for length in CHAINS}

    def _gradients(self) -> Callable[[], object]:
        """Return the same call without operators: it takes only autograd's own time per root."""
        import torch

        leaves = [torch.ones(4, device=self.workload.device, requires_grad=True) for _ in range(_DISPATCHED)]
        return _gradients(leaves, leaves)

    def _kernel(self, probe: Probe) -> Callable[[], object]:
        function, operands = probe.function(self.overheads.runtime), probe.operands(self.workload.device)
        return lambda: function(*operands)

    def _kernel_backward(self, probe: Probe, trained: slice) -> Callable[[], object]:
        operands = probe.operands(self.workload.device)
        return _gradients([probe.function(self.overheads.runtime)(*operands)], operands[trained])

    def _group(self, size: int) -> Any:  # noqa: ANN401  a c10d process group
        """Return this rank's group of `size` neighbours."""
        import torch.distributed as dist

        starts = range(0, self.workload.num_ranks, size)
        groups = [dist.new_group(list(range(start, start + size))) for start in starts]
        return groups[self.rank // size]

    # ----------------------------------------------------------------------------------------------------------- times

    def _visit(self, task: _Task) -> Visit:
        """Warm up by two calls, then take as many samples as the visit's time allows."""
        call = task.make()
        call()
        (once,) = self._slowest([task.clock(self.clock, call)])
        allowed_s = self.workload.seconds_per_point / self.workload.num_passes * (_PATIENCE if task.waits else 1)
        samples = min(_MOST, max(_LEAST, ceil(allowed_s / max(once, 1e-6))))
        seconds = self._slowest([task.clock(self.clock, call) for _ in range(samples)])
        return Visit(task.key, [s / task.calls for s in seconds])

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the largest time of all ranks, sample by sample; over gloo, since the numbers are the host's."""
        import torch
        import torch.distributed as dist

        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()


def _run(operators: Iterable[_Ready]) -> None:
    for function, operands in operators:
        function(*operands)


def _gradients(results: Sequence[Tensor], operands: Sequence[Tensor]) -> Callable[[], object]:
    """Return a call that runs autograd from `results` to `operands` and can be repeated."""
    import torch

    seeds = [torch.ones_like(result) for result in results]
    return lambda: torch.autograd.grad(results, operands, seeds, retain_graph=True)


def main(arguments: list[str]) -> None:
    """Run one rank; `arguments` are its rank and the folder."""
    rank, folder = int(arguments[0]), Path(arguments[1])
    workload: Workload = pickle.loads((folder / WORKLOAD).read_bytes())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(workload.num_threads)
    measuring = Rank(rank, workload, folder / VISITS)  # an import error shows before ranks meet
    backend = "gloo"
    if workload.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=workload.timeout_s)
    world, place = workload.num_ranks, f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=world, timeout=timeout)
    try:
        measuring.measure()
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
