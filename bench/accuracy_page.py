"""docs/accuracy.md: tables and charts of predicted against published runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import TYPE_CHECKING

from bench import collectives
from bench.charts import Series, scatter, strips
from bench.judging import Errors, Order, Predicted, by_group, errors, misordered, order, said_to_fit
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
_EARLIER = "an earlier run, the same but for precision and software, reached"
REASONS = (
    ("a100-40/1b/seq002048/gpus00032", "a bad run: 22 % slower than the same model on 16 and on 64 GPUs"),
    ("a100-40/70b/seq002048/gpus00064", "36 % MFU against 49 % on 128 GPUs"),
    ("a100-40/13b/seq000512/gpus00008", f"44 % MFU; {_EARLIER} 52 %"),
    ("a100-40/13b/seq001024/gpus00008", f"44 % MFU; {_EARLIER} 52 %"),
    ("a100-40/13b/seq002048/gpus00008", f"44 % MFU; {_EARLIER} 51 %"),
    ("a100-80/760m/seq000512", "45 % MFU against 57 % at 2048; faster on the 40 GB cards, with half the microbatch"),
    ("a100-80/760m/seq001024", "48 % MFU against 57 % at 2048; faster on the 40 GB cards, with half the microbatch"),
    (
        "h100/760m/seq002048/gpus00008",
        "8 % slower than on 16 GPUs, and than the mean of the rows of 1024 and 4096 tokens",
    ),
    ("a100-80/30b/seq008192", "39 % MFU against 51 % at 4096, in an earlier run too; memory full, perhaps"),
    ("h100/30b/seq008192", "30 % MFU against 36 % at 4096, 28 % in earlier runs; memory full, perhaps"),
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
        "date": date.today().isoformat(),
        "own": _own(results),
        "summary": _summary(results, main),
        "main": str(main),
        "fitted": _range(sum(row.fitted for row in f.rows) for f in results.fitted),
        "offsets": _offsets(results),
        "verdict": _verdict(results),
        "constants": _constants(results, _of_offset(results, main)),
        "by_model": _groups("model", unfitted, lambda run: run.model, SIZES),
        "by_gpus": _groups("GPUs", unfitted, lambda run: run.num_gpus),
        "by_seq": _groups("sequence", unfitted, lambda run: run.seq),
        "by_configuration": _groups("configuration", unfitted, _configuration),
        "by_memory": _groups("predicted memory", unfitted, _fullness(unfitted), FULLNESS),
        "worst": _worst(unfitted),
        "floor": _floor(unfitted),
        "fp8": _runs(results.fp8),
        "wrong": _wrong_pairs(unfitted),
        "earlier": _earlier(results),
        "earlier_worst": _worst(results.earlier, reasons=False),
        "bridge": _runs(results.bridge),
        "left_out": _left_out(results),
        "collectives": collectives.section(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: tables[match[1]].rstrip(), TEMPLATE.read_text())


def _own(results: Results) -> str:
    """Say how far off the product's own constants are."""
    judged = [row for row in results.plain if not row.fitted]
    sizes = sorted(round(100 * e.median) for e in _by_gpu(judged).values())
    bridge = errors(results.bridge)
    return (
        f"beside llm-foundry's runs, predictions are {sizes[0]} to {sizes[-1]} % too {_pace(errors(judged))} at the "
        f"median, beside Megatron-Bridge's {100 * bridge.median:.0f} % too {_pace(bridge)}"
    )


def _pace(e: Errors) -> str:
    return "fast" if e.bias < 0 else "slow"


def _summary(results: Results, main: int) -> str:
    """Median errors of all that is compared."""
    of_2023 = "own, but attention of 2023"
    judged = [[row for row in f.rows if not row.fitted] for f in results.fitted]
    own, dated = ([row for row in rows if not row.fitted] for rows in (results.plain, results.dated))
    fits = [sorted(_by_gpu(rows)[gpu].median for rows in judged) for gpu in GPUS]
    tables = sorted(collectives.medians())
    lines = [
        ["llm-foundry, bf16", "own", _medians(own), str(len(own))],
        ["the same runs", of_2023, _medians(dated), str(len(dated))],
        ["the same runs", "fitted, all offsets",
         ", ".join(f"{gpu} {_span(found)}" for gpu, found in zip(GPUS, fits, strict=True)), _range(map(len, judged))],
        ["llm-foundry, 8-bit", of_2023, _percent(errors(results.fp8).median), str(len(results.fp8))],
        ["llm-foundry, earlier runs", f"fitted, offset {main}", _percent(errors(results.earlier).median),
         str(len(results.earlier))],
        ["Megatron-Bridge", "own", _percent(errors(results.bridge).median), str(len(results.bridge))],
        ["collectives of NCCL", "NCCL's", f"{_span(tables)}, by table", str(collectives.num_rows())],
    ]  # fmt: skip
    return _table(["what", "constants", "median error", "rows"], lines, left=3)


def _medians(rows: Sequence[Predicted]) -> str:
    return ", ".join(f"{gpu} {_percent(e.median)}" for gpu, e in _by_gpu(rows).items())


def _span(values: Sequence[float]) -> str:
    """Return the least and the largest of sorted values, in words."""
    return f"{100 * values[0]:.1f} to {_percent(values[-1])}"


def _by_gpu(rows: Sequence[Predicted]) -> dict[str, Errors]:
    return {gpu: errors(row for row in rows if row.run.gpu == gpu) for gpu in GPUS}


def _verdict(results: Results) -> str:
    """Say which of the aims are met, counted over offsets."""
    met: list[str] = []
    for gpu in GPUS:
        found = [errors(r for r in f.rows if r.run.gpu == gpu and not r.fitted) for f in results.fitted]
        good = sum(e.median <= AIM and e.ninetieth <= AIM_NINETIETH for e in found)
        met.append(f"on {gpu} with {good} of {len(found)} offsets")
    orders = [order([r for r in f.rows if not r.fitted]) for f in results.fitted]
    fitting = [order([r for r in said_to_fit(f.rows) if not r.fitted]) for f in results.fitted]
    right = sum(o.share >= AIM_ORDER for o in orders)
    safe = sum(o.share >= AIM_ORDER for o in fitting)
    return (
        f"The errors are that small {', '.join(met)}.\nThe order is that good with {right} of {len(orders)}: the share "
        f"of pairs is {_spread(orders)}.\nOf pairs of runs that the product says fit, with at most "
        f"{SAFE_SHARE * 100:.0f} % of the memory in use, it is that good with {safe} of {len(fitting)}: "
        f"{_spread(fitting)}."
    )


def _spread(orders: Sequence[Order]) -> str:
    shares = sorted(o.share for o in orders)
    return f"between {_percent(shares[0])} and {_percent(shares[-1])}, {_percent(median(shares))} in the middle"


def _fullness(rows: Sequence[Predicted]) -> Callable[[Run], str]:
    """Return a function that says how full the device of a run is predicted to be."""
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


def _cells(rows: Iterable[Predicted]) -> list[str]:
    e = errors(rows)
    return [str(e.count), _percent(e.median), _percent(e.ninetieth), _percent(e.worst), _signed(e.bias)]


def _range(counts: Iterable[int]) -> str:
    least, *_, most = sorted(counts)
    return f"{least}" if least == most else f"{least} or {most}" if most == least + 1 else f"{least} to {most}"


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
    for name, rows_of in (("known", results.known), ("2023", results.dated), ("own", results.plain)):
        predicted = [r for r in rows_of if not r.fitted]
        found, line = order(predicted), [name]
        for gpu in GPUS:
            line += [_pair(errors(r for r in predicted if r.run.gpu == gpu)), ""]
        rows.append([*line, f"{found.right} of {found.pairs}"])
    head = ["offset", *(cell for gpu in GPUS for cell in (gpu, "MFU")), "order"]
    return _table(head, rows)


def _constants(results: Results, main: Fitted) -> str:
    """The fitted rates, by GPU type, at the main offset and over all."""
    rows: list[list[str]] = []
    for gpu in GPUS:
        found = [asdict(f.constants[gpu]) for f in results.fitted]
        known, own = asdict(results.known_constants[gpu]), asdict(main.constants[gpu])
        for name in known:
            values = sorted(c[name] for c in found)
            cells = (known[name], own[name], median(values), values[0], values[-1])
            rows.append([gpu, name, *(f"{v:.2f}" for v in cells)])
    return _table(["GPU", "rate", "known", f"offset {main.offset}", "median", "least", "most"], rows, left=2)


def _groups(
    title: str, rows: Sequence[Predicted], key: Callable[[Run], object], names: Sequence[object] | None = None
) -> str:
    """Errors by what `key` says of a run."""
    groups = by_group(rows, key)
    wanted = [n for n in names if n in groups] if names is not None else sorted(groups)  # type: ignore[type-var]
    lines = [[str(name), *_cells(groups[name])] for name in wanted]
    return _table([title, "rows", "median", "90th", "worst", "bias"], lines)


def _configuration(run: Run) -> str:
    recompute = "recomputation" if run.recompute else "none recomputed"
    return f"{run.precision}, {run.sharding}, {recompute}"


def _earlier(results: Results) -> str:
    """Errors of runs before the table, by GPU type and by how many sequences they run at a time."""
    rows, table = results.earlier, {row.run.name: row.run.tokens_per_s for row in results.plain}
    few = [("up to 2 sequences", lambda n: n <= 2), ("3 to 8", lambda n: 2 < n <= 8), ("more", lambda n: n > 8)]
    lines = [[f"{gpu}, microbatch {name}", *_cells(mine)] for gpu in GPUS for name, within in few
             if (mine := [r for r in rows if r.run.gpu == gpu and within(r.run.microbatch)])]  # fmt: skip
    lines += [["all", *_cells(rows)], ["all, weights gathered early", *_cells(results.soon)]]
    lines.append(["in the table too", *_cells(r for r in rows if r.run.name in table)])
    faster = median(table[r.run.name] / r.run.tokens_per_s - 1 for r in rows if r.run.name in table)
    repeated = sorted(row.run.spread for row in rows if len(row.run.published) > 1)
    alike = [order([r for r in rows if r.run.recompute is recompute]) for recompute in (False, True)]
    found, soon = order(rows), order(results.soon)
    text = (
        f"Of pairs that differ by more than 5 %, {found.right} of {found.pairs} are predicted in order ({soon.right}, "
        f"were weights gathered early). Of those that both recompute or both do not, {sum(o.right for o in alike)} of "
        f"{sum(o.pairs for o in alike)} are. {len(repeated)} of these {len(rows)} configurations were run more than "
        f"once, some under two versions of torch. Their throughputs lie {_percent(median(repeated))} apart at the "
        f"median, {_percent(repeated[-1])} at most. Those in the table too are {_percent(faster)} faster there, at the "
        "median: a part of the bias."
    )
    head = ["runs", "rows", "median", "90th", "worst", "bias"]
    return _table(head, lines) + "\n" + fill(text, 118) + "\n"


def _wrong_pairs(rows: Sequence[Predicted]) -> str:
    """A few runs, chosen greedily, one of which is in every pair that is in the wrong order."""
    pairs, named = misordered(rows), list[str]()
    while pairs:
        (name, count), *_ = Counter(row.run.name for pair in pairs for row in pair).most_common(1)
        pairs = [pair for pair in pairs if all(row.run.name != name for row in pair)]
        named.append(f"`{name}` ({count})")
    what = f"all have one of these runs: {', '.join(named)}" if named else "are none"
    return fill(f"With the offset whose rows are shown below, the pairs in the wrong order {what}.", 118)


def _worst(rows: Sequence[Predicted], *, reasons: bool = True) -> str:
    worst = sorted(rows, key=lambda row: -abs(row.error))[:NUM_WORST]
    lines = [[f"`{row.run.name}`", *[_reason(row.run)] * reasons, _signed(row.error)] for row in worst]
    return _table(["run", *["reason"] * reasons, "error"], lines, left=1 + reasons)


def _reason(run: Run) -> str:
    return next((reason for prefix, reason in REASONS if run.name.startswith(prefix)), UNKNOWN)


def _floor(rows: Sequence[Predicted]) -> str:
    """Show how much errors of neighbouring rows differ, which no smooth model of such runs can explain."""
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
        f"Of the {before.pairs} pairs, {before.right} are in order. Were every run predicted again with what its "
        f"neighbours' published times say of its error, {after.right} would be."
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
