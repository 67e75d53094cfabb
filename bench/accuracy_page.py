"""docs/accuracy.md: tables and charts of predicted against published runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import TYPE_CHECKING

from bench import collectives
from bench.charts import Series, scatter, strips
from bench.judging import Errors, Order, Predicted, by_group, errors, order
from bench.published import Run
from shardwright.cost.timeline.memory import SAFE_SHARE

if TYPE_CHECKING:
    from bench.predictions import Fitted, Results

TEMPLATE = Path(__file__).with_suffix(".md")
"""The page's prose, with {{names}} in place of its tables."""
GPUS = ("h100", "a100-80", "a100-40")
SIZES = ("125m", "350m", "760m", "1b", "3b", "7b", "13b", "30b", "70b")
NUM_WORST = 12
AIM, AIM_NINETIETH, AIM_ORDER = 0.06, 0.13, 0.9
REASONS = (
    ("a100-40/1b/seq002048/gpus00032", "a bad run: 22 % slower than the same model on 16 and on 64 GPUs"),
    ("a100-40/70b/seq002048/gpus00064", "36 % MFU against 49 % on 128 GPUs; 70B barely fits, memory is full"),
    ("a100-40/13b", "44 % MFU on 8 GPUs at every sequence length, 53 % on 16 and more; memory is full"),
    ("a100-80/760m/seq000512", "45 % MFU against 57 % at 2048; faster on the 40 GB cards, with half the microbatch"),
    ("a100-80/760m/seq001024", "48 % MFU against 57 % at 2048; faster on the 40 GB cards, with half the microbatch"),
    ("h100/760m/seq002048/gpus00008", "8 % slower than on 16 GPUs, and than the rows of 1024 and 4096 tokens"),
    ("a100-80/30b/seq008192", "39 % MFU against 51 % at 4096, both with microbatch 1; memory is full"),
    ("h100/30b/seq008192", "30 % MFU against 36 % at 4096, both with microbatch 1; memory is full"),
)
"""The start of a run's name, and why it is far off."""
UNKNOWN = "not known"
FULL = ((0.5, "up to 50 %"), (0.7, "to 70 %"), (SAFE_SHARE, "to 90 %"), (0.95, "to 95 %"))
MORE = "more"
FULLNESS = (*(name for _, name in FULL), MORE)
"""Of a device's memory, by what is predicted at the peak."""


def page(results: Results, main: int) -> str:
    """The page as Markdown; `main` is the offset whose rows are shown one by one."""
    unfitted = [row for row in _of_offset(results, main).rows if not row.fitted]
    tables = {
        "main": str(main),
        "offsets": _offsets(results),
        "verdict": _verdict(results),
        "constants": _constants(results),
        "by_model": _groups("model", unfitted, lambda run: run.model, SIZES),
        "by_gpus": _groups("GPUs", unfitted, lambda run: run.num_gpus),
        "by_seq": _groups("sequence", unfitted, lambda run: run.seq),
        "by_configuration": _groups("configuration", unfitted, _configuration),
        "by_memory": _groups("predicted memory", unfitted, _fullness(unfitted), FULLNESS),
        "worst": _worst(unfitted),
        "floor": _floor(unfitted),
        "fp8": _runs(results.fp8),
        "bridge": _runs(results.bridge),
        "left_out": _left_out(results),
        "collectives": collectives.section(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: tables[match[1]].rstrip(), TEMPLATE.read_text())


def _verdict(results: Results) -> str:
    """Which of the aims are met, counted over offsets."""
    met: list[str] = []
    for gpu in GPUS:
        found = [errors(r for r in f.rows if r.run.gpu == gpu and not r.fitted) for f in results.fitted]
        good = sum(e.median <= AIM and e.ninetieth <= AIM_NINETIETH for e in found)
        met.append(f"on {gpu} with {good} of {len(found)} offsets")
    orders = [order([r for r in f.rows if not r.fitted]) for f in results.fitted]
    plain = [order([r for r in f.rows if not r.fitted and _reason(r.run) == UNKNOWN]) for f in results.fitted]
    fitting = [order([r for r in f.rows if not r.fitted and r.memory <= SAFE_SHARE]) for f in results.fitted]
    right = sum(o.share >= AIM_ORDER for o in orders)
    safe = sum(o.share >= AIM_ORDER for o in fitting)
    return (
        f"The errors are that small {', '.join(met)}.\nThe order is that good with {right} of {len(orders)}: the share "
        f"of pairs is {_spread(orders)}.\nOf pairs of runs that the product says fit, with at most {SAFE_SHARE:.0%} of "
        f"the memory in use, it is that good with {safe} of {len(fitting)}: {_spread(fitting)}.\n"
        f"Without the rows for which a reason is given below it is {_spread(plain)}."
    )


def _spread(orders: Sequence[Order]) -> str:
    shares = sorted(o.share for o in orders)
    return f"between {shares[0]:.0%} and {shares[-1]:.0%}, {median(shares):.0%} in the middle"


def _fullness(rows: Sequence[Predicted]) -> Callable[[Run], str]:
    """How full the device of a run is predicted to be."""
    shares = {row.run.name: row.memory for row in rows}
    return lambda run: next((name for most, name in FULL if shares[run.name] <= most), MORE)


def charts(results: Results, main: int) -> dict[str, str]:
    """The charts by file name."""
    rows = [row for row in _of_offset(results, main).rows if not row.fitted]
    by_gpu = [(gpu, [r for r in rows if r.run.gpu == gpu]) for gpu in GPUS]
    speeds = [Series(g, [(median(r.run.published), r.tokens_per_s_gpu) for r in mine]) for g, mine in by_gpu]
    spread = [Series(g, [(SIZES.index(r.run.model), 100 * r.error) for r in mine]) for g, mine in by_gpu]
    bridge = Series("Megatron-Bridge", [(median(r.run.published), r.tokens_per_s_gpu) for r in results.bridge])
    runs = scatter(
        "Tokens per second and GPU, rows not fitted", "published", "predicted (grey: ± 13 %)", [*speeds, bridge], 0.13
    )
    sizes = strips("Error of the step time by model size, rows not fitted", "predicted / published", SIZES, spread, 40)
    return {"accuracy-runs.svg": runs, "accuracy-sizes.svg": sizes}


# ---- tables ----


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """The first `left` columns are text, the others numbers."""
    rule = ["---"] * left + ["--:"] * (len(head) - left)
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _pair(e: Errors) -> str:
    return f"{100 * e.median:.1f} / {100 * e.ninetieth:.1f}"


def _of_offset(results: Results, offset: int) -> Fitted:
    return next(f for f in results.fitted if f.offset == offset)


def _offsets(results: Results) -> str:
    """Every offset: errors of the rows not fitted, by GPU type, beside those of the constant MFU."""
    rows: list[list[str]] = []
    for f in results.fitted:
        line = [str(f.offset)]
        both = [[r for r in predicted if not r.fitted] for predicted in (f.rows, f.constant_mfu)]
        line += [_pair(errors(r for r in mine if r.run.gpu == gpu)) for gpu in GPUS for mine in both]
        found = order(both[0])
        rows.append([*line, f"{found.right} of {found.pairs}"])
    for name, predicted in (("2023", results.known), ("own", results.plain)):
        found, line = order(predicted), [name]
        for gpu in GPUS:
            line += [_pair(errors(r for r in predicted if r.run.gpu == gpu)), ""]
        rows.append([*line, f"{found.right} of {found.pairs}"])
    head = ["offset", *(cell for gpu in GPUS for cell in (gpu, "MFU")), "order"]
    return _table(head, rows)


def _constants(results: Results) -> str:
    """The fitted rates, by GPU type, over all offsets."""
    rows: list[list[str]] = []
    for gpu in GPUS:
        found = [asdict(f.constants[gpu]) for f in results.fitted]
        known = asdict(results.known_constants[gpu])
        for name in known:
            values = sorted(c[name] for c in found)
            cells = (known[name], median(values), values[0], values[-1])
            rows.append([gpu, name, *(f"{v:.2f}" for v in cells)])
    return _table(["GPU", "rate", "known", "median", "least", "most"], rows, left=2)


def _groups(
    title: str, rows: Sequence[Predicted], key: Callable[[Run], object], names: Sequence[object] | None = None
) -> str:
    """Errors by what `key` says of a run."""
    groups = by_group(rows, key)
    wanted = [n for n in names if n in groups] if names is not None else sorted(groups)  # type: ignore[type-var]
    lines: list[list[str]] = []
    for name in wanted:
        e = errors(groups[name])
        cells = (_percent(e.median), _percent(e.ninetieth), _percent(e.worst), _signed(e.bias))
        lines.append([str(name), str(e.count), *cells])
    return _table([title, "rows", "median", "90th", "worst", "bias"], lines)


def _configuration(run: Run) -> str:
    recompute = "recomputation" if run.recompute else "none recomputed"
    return f"{run.precision}, {run.sharding}, {recompute}"


def _worst(rows: Sequence[Predicted]) -> str:
    worst = sorted(rows, key=lambda row: -abs(row.error))[:NUM_WORST]
    lines = [[f"`{row.run.name}`", _reason(row.run), _signed(row.error)] for row in worst]
    return _table(["run", "reason", "error"], lines, left=2)


def _reason(run: Run) -> str:
    return next((reason for prefix, reason in REASONS if run.name.startswith(prefix)), UNKNOWN)


def _floor(rows: Sequence[Predicted]) -> str:
    """How far errors of neighbouring rows lie apart: what no smooth model of such runs can explain."""
    lines, mended = list[list[str]](), list[Predicted]()
    for gpu in GPUS:
        gaps: list[float] = []
        for group in by_group([r for r in rows if r.run.gpu == gpu], _line_of_runs).values():
            ordered = sorted(group, key=lambda r: (r.run.seq, r.run.num_gpus))
            for a, b, c in zip(ordered, ordered[1:], ordered[2:], strict=False):
                gaps.append(abs(b.error - (a.error + c.error) / 2))
            for i, row in enumerate(ordered):
                near = [r.error for r in (*ordered[max(i - 1, 0) : i], *ordered[i + 1 : i + 2])]
                mended.append(replace(row, step_s=row.step_s / (1 + mean(near))) if near else row)
        gaps.sort()
        if gaps:
            ninetieth = gaps[int(0.9 * (len(gaps) - 1))]
            lines.append([gpu, str(len(gaps)), _percent(median(gaps)), _percent(ninetieth)])
    before, after = order(rows), order(mended)
    text = (
        "Of the order the same can be said. Every run predicted again, with what its neighbours' published times say "
        f"of its error: {after.right} of {after.pairs} pairs are in order, {before.right} without."
    )
    return _table(["GPU", "rows", "median", "90th"], lines) + "\n" + fill(text, 118) + "\n"


def _line_of_runs(run: Run) -> tuple[str, bool]:
    return run.model, run.recompute


def _runs(rows: Sequence[Predicted]) -> str:
    """Runs one by one, and their errors together."""
    e = errors(rows)
    lines = [
        [
            f"`{r.run.name}`", str(len(r.run.published)), _percent(r.run.spread), f"{r.run.step_s:.2f}",
            f"{r.step_s:.2f}", _signed(r.error),
        ]
        for r in rows
    ]  # fmt: skip
    head = ["run", "releases", "spread", "published s", "predicted s", "error"]
    summary = f"Of these {e.count} configurations: median error **{_percent(e.median)}**, bias {_signed(e.bias)}.\n"
    return _table(head, lines) + "\n" + summary


def _left_out(results: Results) -> str:
    counts = Counter(row.reason for row in results.left_out)
    models: dict[str, Counter[str]] = {}
    for row in results.left_out:
        models.setdefault(row.reason, Counter())[row.model.split(" (")[0]] += 1
    lines = [
        [reason, ", ".join(f"{model} ({n})" for model, n in models[reason].most_common()), str(count)]
        for reason, count in counts.most_common()
    ]
    return _table(["why", "models (rows)", "rows"], lines, left=2)
