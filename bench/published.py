"""Published training runs, as typed rows: what was run, and the step time that its throughput means.

Three tables, copied with their sources (bench/data/README.md):

    llm-foundry       MPT models under FSDP on A100 and H100, each configuration once
    earlier           runs of the same benchmarks before that table was made: other microbatches, with and without
                      recomputation, older torch; many configurations several times
    Megatron-Bridge   tensor, pipeline, context and expert parallel runs; most configurations appear in several releases

What appears several times is grouped: one `Run` per distinct configuration, the median of its throughputs. Rows that
are left out come back with the reason.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

DATA = Path(__file__).parent / "data"
LLM_FOUNDRY = DATA / "training_runs_llm_foundry.csv"
EARLIER = DATA / "training_runs_llm_foundry_earlier.csv"
MEGATRON_BRIDGE = DATA / "training_runs_megatron_bridge.csv"

_LARGE_SCALE = "Large Scale"
"""Of llm-foundry's runs only these asked for BACKWARD_PRE (scripts/train/benchmarking/sweep.py); Composer's default is
BACKWARD_POST. Its modes DEFAULT and PURE are not told apart: gradients are summed in bf16 in both, until Composer
0.16.4, which is younger than these runs."""
Precision = Literal["amp_bf16", "bf16", "fp8"]
_FOUNDRY_PRECISIONS: dict[str, Precision] = {"amp_bf16": "amp_bf16", "bf16": "bf16", "amp_fp8": "fp8"}
_FP8 = ("", "FP8", "FP8-CS")
"""What stands for 8-bit matrix multiplications with one scale per tensor; a blank cell is not bf16 (see `_bridge`)."""
_DENSE = {"LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": "llama3-405b"}


class PublishedError(ValueError):
    """A table of published runs that cannot be read; says file, line, column, expected against got."""


@dataclass(frozen=True, slots=True)
class Run:
    """One published configuration.

    Attributes:
        gpu: "h100", "a100-80" or "a100-40".
        microbatch: sequences that one data-parallel rank runs at a time.
        num_microbatches: how many of them make a step, per data-parallel rank.
        sharding: "FULL_SHARD" (ZeRO-3), "SHARD_GRAD_OP" (ZeRO-2) or "OPTIMIZER" (ZeRO-1).
        late_gathers: as `Execution`'s.
        tensor, context, stages: how many ways tensor, context and pipeline parallelism divide.
        chunks: virtual stages of each stage.
        tokens_per_s: of the whole cluster; the median where there are several `published`.
        published: every throughput in tokens per second and GPU that the table gives for this configuration.
    """

    table: str
    model: str
    gpu: str
    num_gpus: int
    seq: int
    microbatch: int
    num_microbatches: int
    precision: Precision
    recompute: bool
    sharding: str
    published: tuple[float, ...]
    tensor: int = 1
    context: int = 1
    stages: int = 1
    chunks: int = 1
    late_gathers: bool = False

    @property
    def name(self) -> str:
        """Unique in its table; the order of names decides which rows are fitted."""
        parts = [self.gpu, self.model, f"seq{self.seq:06d}", f"gpus{self.num_gpus:05d}"]
        parts += [f"micro{self.microbatch:03d}x{self.num_microbatches:03d}", self.precision]
        parts += ["recompute"] * self.recompute
        ways = (("tp", self.tensor), ("pp", self.stages), ("cp", self.context), ("vp", self.chunks))
        return "/".join([*parts, *(f"{label}{n}" for label, n in ways if n > 1)])

    @property
    def data(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.num_gpus // (self.tensor * self.context * self.stages)

    @property
    def tokens_per_step(self) -> int:
        return self.data * self.microbatch * self.num_microbatches * self.seq

    @property
    def tokens_per_s(self) -> float:
        return median(self.published) * self.num_gpus

    @property
    def step_s(self) -> float:
        return self.tokens_per_step / self.tokens_per_s

    @property
    def spread(self) -> float:
        """Return the range of this configuration's published throughputs, relative to their median."""
        return (max(self.published) - min(self.published)) / median(self.published)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row of a table that is not predicted, and why."""

    table: str
    line: int
    model: str
    system: str
    reason: str


# ---- llm-foundry ----


def llm_foundry(path: Path = LLM_FOUNDRY) -> list[Run]:
    """Every row, by name."""
    runs = [_foundry(row) for row in _rows(path)]
    return _by_name(runs, path)


def num_parameters(path: Path = LLM_FOUNDRY) -> dict[tuple[str, int], int]:
    """The parameters that the llm-foundry table gives for each model and sequence length."""
    return {(row["model"], row.integer("seq")): row.integer("params") for row in _rows(path)}


def _foundry(row: Row) -> Run:
    gpus, gpu = row.integer("gpus"), row["gpu"]
    known = {"h100_80gb": "h100", "a100_80gb": "a100-80", "a100_40gb": "a100-40"}
    run = Run(
        "llm-foundry",
        row["model"],
        row.choice("gpu", known) and known[gpu],
        gpus,
        row.integer("seq"),
        row.integer("mbs"),
        row.integer("grad_accum"),
        _FOUNDRY_PRECISIONS[row.choice("precision", _FOUNDRY_PRECISIONS)],
        row.choice("act_ckpt", ("True", "False")) == "True",
        row.choice("sharding", ("FULL_SHARD", "SHARD_GRAD_OP")),
        (row.integer("tok_s") / gpus,),  # samples_s and tok_s_gpu are rounded further
        late_gathers=_LARGE_SCALE not in row["section"],
    )
    if run.tokens_per_step != row.integer("gbs_tokens"):
        raise row.error("gbs_tokens", f"{run.tokens_per_step}, as gpus, mbs, grad_accum and seq give")
    return run


def earlier(path: Path = EARLIER) -> tuple[list[Run], list[LeftOut]]:
    """The distinct configurations that were run before llm-foundry's table was made, by name, and what is left out."""
    return _grouped(path, "earlier", "gpu", _unusable, _foundry)


def _unusable(row: Row) -> str:
    if row.number("mfu_pct") > 100:
        return "more FLOP per second than the GPU's peak"
    return "activations offloaded" if row["act_offload"] == "True" else ""


# ---- Megatron-Bridge ----


def megatron_bridge(path: Path = MEGATRON_BRIDGE) -> tuple[list[Run], list[LeftOut]]:
    """The distinct dense Llama pre-training configurations on H100, by name, and what is left out."""
    return _grouped(path, "Megatron-Bridge", "system", _reason, _bridge)


def _reason(row: Row) -> str:
    """Say why a row is not predicted; empty where it is."""
    if row["model"] not in _DENSE:
        return "mixture of experts or state-space layers: no model of grouped matmuls and routed all-to-alls"
    if row["system"] != "DGX-H100":
        return "Blackwell: no published kernel rates for its fp8 and fp4 formats to start from"
    if row["kind"] == "LoRA Performance":
        return "LoRA: most weights take no gradient"
    return "" if row["precision"] in _FP8 else f"precision {row['precision']}"


def _bridge(row: Row) -> Run:
    """A blank precision is 8-bit: those H100 Llama runs do more FLOP per second than bf16 matmuls reach."""
    gpus, microbatch, gbs = row.integer("gpus"), row.integer("mbs"), row.integer("gbs")
    tensor, stages, context = (row.integer(key) for key in ("tp", "pp", "cp"))
    chunks = 1 if row["vp"] == "n/a" else row.integer("vp")
    data = gpus // (tensor * stages * context)
    if gbs % (data * microbatch):
        raise row.error("gbs", f"a multiple of {data * microbatch}, the sequences of one microbatch on all ranks")
    model, fsdp = _DENSE[row["model"]], row["fsdp"] not in ("", "0")
    return Run(
        "Megatron-Bridge",
        model + (" (fine-tuning)" if row["kind"] == "SFT Performance" else ""),
        "h100",
        gpus,
        row.integer("seq"),
        microbatch,
        gbs // (data * microbatch),
        "fp8",
        False,
        "FULL_SHARD" if fsdp else "OPTIMIZER",
        (row.number("tok_s_gpu"),),
        tensor,
        context,
        stages,
        chunks,
    )


# ---- the split ----


def fitted(runs: Sequence[Run], offset: int, every: int = 10) -> frozenset[str]:
    """The names of the rows that constants may be fitted to: every tenth by name, from the `offset`-th on."""
    if not 0 <= offset < every:
        raise ValueError(f"fitted: offset {offset} does not lie in 0 … {every - 1}; choose one that does")
    return frozenset(name for i, name in enumerate(sorted(run.name for run in runs)) if i % every == offset)


# ---- reading ----


def _grouped(
    path: Path, table: str, system: str, reason: Callable[[Row], str], run: Callable[[Row], Run]
) -> tuple[list[Run], list[LeftOut]]:
    """One run for all rows of a configuration, by name. `reason`: why a row is left out; empty where it is not."""
    found, left_out = defaultdict[Run, list[Run]](list), list[LeftOut]()
    for row in _rows(path):
        if why := reason(row):
            left_out.append(LeftOut(table, row.line, row["model"], row[system], why))
        else:
            one = replace(run(row), table=table)
            found[replace(one, published=())].append(one)
    runs = [replace(r, published=tuple(sorted(p for one in g for p in one.published))) for r, g in found.items()]
    return _by_name(runs, path), left_out


class Row(Mapping[str, str]):
    """A row of a csv file that knows where it stands."""

    def __init__(self, path: Path, line: int, cells: Mapping[str, str]) -> None:
        self.path, self.line, self.cells = path, line, cells

    def __getitem__(self, column: str) -> str:
        if self.cells.get(column) is None:
            raise self.error(column, "a cell")
        return self.cells[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def error(self, column: str, expected: str) -> PublishedError:
        got = self.cells.get(column)
        shown = "nothing" if got is None else repr(got)
        where = f"{self.path.name}, line {self.line}, {column}"
        return PublishedError(f"{where}: expected {expected}, got {shown}; mend it")

    def integer(self, column: str) -> int:
        value = self.number(column)
        if value != int(value):
            raise self.error(column, "a whole number")
        return int(value)

    def number(self, column: str) -> float:
        """A positive number, without footnote marks; of `a (b)`, two configurations in one cell, the first."""
        text = self[column].split("(")[0].split("[^")[0].replace(",", "").strip()
        try:
            value = float(text)
        except ValueError:
            raise self.error(column, "a number") from None
        if not 0 < value < float("inf"):
            raise self.error(column, "a number above zero")
        return value

    def choice(self, column: str, choices: Iterable[str]) -> str:
        if self[column] not in choices:
            raise self.error(column, f"one of {', '.join(choices)}")
        return self[column]


def _rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            for cells in reader:
                yield Row(path, reader.line_num, cells)
    except OSError as error:
        raise PublishedError(f"{path}: cannot read the table: {error.strerror or error}; restore it") from error


def _by_name(runs: Sequence[Run], path: Path) -> list[Run]:
    """Sorted; two rows of one name would be told apart by chance."""
    ordered = sorted(runs, key=lambda run: run.name)
    for a, b in pairwise(ordered):
        if a.name == b.name:
            raise PublishedError(f"{path.name}: two rows are named {a.name}; say in the name what tells them apart")
    return ordered
