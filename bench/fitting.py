"""Predicted steps of published runs, as the product predicts them, and with constants fitted to a tenth of a table.

What is fitted, for each GPU type on its own, are four rates that depend on kernels, clocks and libraries:

matmul       share of the peak that large matrix multiplications reach over a whole run (power and clocks, real data)
attention    share of the peak that the runs' attention kernels reach, the mean of forward and backward
memory       share of the datasheet's bandwidth that everything else reaches (eager kernels, one by one)
beside       speed of compute while collectives run, over its speed alone

Half a dozen rows per GPU type do not fix four rates that trade off against each other, so each is drawn towards what is
known without these tables (`Constants.known`): what one large product reaches, and for attention what is published of
the kernels of 2023, which these runs used. Everything else is the product's: which kernels run and what they move,
communication, overlap, recomputation. The product ships what offset 0 gives for `matmul` and `memory`;
attention kernels are others today, and of `beside` so few rows say little.

Nothing is fitted to runs that the product does not say fit (`bench.predictions`): what an allocator does in the last
tenth of a device's memory is not modelled, and a rate would have to stand in for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import log

import numpy as np
from scipy.optimize import least_squares

from bench.judging import Predicted
from bench.published_plans import Planned
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.device import Device
from shardwright.cost.clusters.presets import GPUS
from shardwright.cost.timeline.clock import SHARING, Sharing
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import Timeline, simulate

_NOISE = 0.03
"""What one row is off by without any fault of the constants; residuals beyond it count linearly, as bad runs do."""
_WIDTHS = {"matmul": 0.1, "attention": 0.25, "memory": 0.15, "beside": 0.3}
"""How far, in logarithms, each rate is expected to lie from what is known of it."""
ATTENTION_2023 = {"a100-80": 0.325, "a100-40": 0.325, "h100": 0.325 * (335 / 230) * (312 / 989)}
"""Share of the peak that the first FlashAttention reached: 25 to 40 % on A100 (Dao, "FlashAttention-2" (2023),
abstract). On H100 the second one, run unchanged, made up to 335 TFLOP/s instead of 230 (section 4.1); the first is
taken to gain as much. llm-foundry ran the first, or its port to Triton (scripts/train/benchmarking/sweep.py)."""
KNOWN_MATMUL = {"a100-80": 0.87, "a100-40": 0.87, "h100": 0.80}
"""Of the best of many sizes, one product at a time (stas00/ml-engineering, maximum achievable FLOPS)."""
_MEMORY = 0.85
"""Assumed."""
_BACKWARD = 5 / 6
"""Speed of attention's backward over that of its forward, as the product has it of an A100."""
_LEAST, _MOST = (0.3, 0.03, 0.25, 0.1), (1.0, 0.8, 1.1, 1.0)
_STEP, _EVALUATIONS = 0.03, 8


@dataclass(frozen=True, slots=True)
class Constants:
    """Rates of one GPU type."""

    matmul: float
    attention: float
    memory: float
    beside: float

    @classmethod
    def known(cls, gpu: str) -> Constants:
        """Return the constants that are known without the table."""
        return cls(KNOWN_MATMUL[gpu], ATTENTION_2023[gpu], _MEMORY, SHARING["cuda"].compute)

    @classmethod
    def dated(cls, gpu: str, device: Device) -> Constants:
        """The product's own, with the attention of 2023."""
        share = device.memory_bytes_per_s / (GPUS[device.name].memory_tb_per_s * 1e12)
        return cls(device.matmul_efficiency, ATTENTION_2023[gpu], share, SHARING["cuda"].compute)

    def of(self, cluster: Cluster) -> Cluster:
        """The cluster with these rates in place of the product's."""
        forward = 2 * self.attention / (1 + _BACKWARD)
        changed = replace(
            cluster.device,
            matmul_efficiency=self.matmul,
            attention_efficiency=forward,
            attention_backward_efficiency=forward * _BACKWARD,
            memory_bytes_per_s=GPUS[cluster.device.name].memory_tb_per_s * 1e12 * self.memory,
        )
        return replace(cluster, device=changed)

    @property
    def sharing(self) -> dict[str, Sharing]:
        return {**SHARING, "cuda": Sharing(self.beside, SHARING["cuda"].communication)}


def timeline(planned: Planned, constants: Constants | None = None) -> Timeline:
    """The timeline of a run: with the product's own constants, or with these."""
    cluster = constants.of(planned.cluster) if constants else planned.cluster
    found = program(planned.graph, cluster, planned.execution, planned.repeats)
    return simulate(found, constants.sharing) if constants else simulate(found)  # type: ignore[arg-type]


def fit(plans: Sequence[Planned]) -> Constants:
    """Least squares of the logarithms of predicted over published step times, and of the constants over what is known.

    From one fixed start, so that it is the same every time.
    """
    published = np.log([p.run.step_s for p in plans])
    known = np.clip(astuple(Constants.known(plans[0].run.gpu)), _LEAST, _MOST)
    width = np.array([_WIDTHS[name] for name in Constants.__dataclass_fields__])

    def residuals(values: np.ndarray) -> np.ndarray:
        constants = Constants(*map(float, values))
        steps = [log(timeline(p, constants).step_s) for p in plans] - published
        return np.concatenate([steps, _NOISE * np.log(values / known) / width])

    found = least_squares(
        residuals, known, bounds=(_LEAST, _MOST), loss="soft_l1", f_scale=_NOISE, diff_step=_STEP, x_scale=known,
        max_nfev=_EVALUATIONS,
    )  # fmt: skip
    return Constants(*(round(float(x), 4) for x in found.x))


def fit_each(plans: Iterable[Planned], names: frozenset[str]) -> dict[str, Constants]:
    """Constants of every GPU type, from those of its runs that are in `names`."""
    by_gpu: dict[str, list[Planned]] = {}
    for p in plans:
        by_gpu.setdefault(p.run.gpu, [])
        if p.run.name in names:
            by_gpu[p.run.gpu].append(p)
    missing = [gpu for gpu, mine in by_gpu.items() if not mine]
    if missing:
        raise ValueError(f"fit_each: no row of {missing[0]} is fitted; choose another offset")
    return {gpu: fit(mine) for gpu, mine in by_gpu.items()}


def predicted(
    plans: Iterable[Planned], constants: Mapping[str, Constants] | None = None, names: frozenset[str] = frozenset()
) -> list[Predicted]:
    """Every run with its predicted step; `names` are those that the constants were fitted to."""
    found: list[Predicted] = []
    for p in plans:
        run = timeline(p, constants[p.run.gpu] if constants else None)
        memory = run.fullest.memory.total_bytes / p.cluster.device.memory_bytes
        found.append(Predicted(p.run, run.step_s, p.run.name in names, memory))
    return found
