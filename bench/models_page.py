"""The page of `bench.models`: counts, a line for each model, and why models are refused or operators not split."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path

from bench.accuracy import DOUBLE_TOLERANCE, GRADIENT_TOLERANCE
from bench.model_rows import Row
from bench.model_store import Judged
from bench.plans import Case

PINNED = ("../constraints.txt", "models-constraints.txt")
NOTE = 180
MOST = 40
INTRODUCTION = """\
# Models of other people's packages

Models of `bench/model_table.py`, made from small configurations without downloads, each on gloo ranks against a single
process: two steps of AdamW in training mode with dropout on. A model without a loss has that of a regression.
Written by `make models` on {date} (two cores, no GPU); it goes on where it was ended, and this page tells what has run
so far. A cell that has run is not run again by itself, so some outcomes are those of earlier code.
Versions: {versions}.

*Equal*: the first loss, every gradient and buffer, and all weights after the last step, relative to how far they came,
within {double:g} in fp64. Models that one process cannot train in fp64 are compared in fp32, each gradient within
{single:g}; later losses, weights and the worst buffer may be as far off as in one process whose weights are rounded
otherwise. The state of the random generator has to be the same bit by bit.

The ways are data, tensor and ZeRO parallel on two ranks, the search's own plan where links cost nothing ("fast links"),
two microbatches of data parallel, and two pipeline stages with two microbatches, or with one batch where that cannot be
cut exactly. Where statistics need the whole batch, and the model draws nothing, microbatches also run with
`per_microbatch=`, against one process that takes them in turn. Each fifth model also runs on four ranks. A number is
the share of predicted compute that is split; ✓ means equal where there is no such share.
"""

REFUSED = """\
By way and reason. A message also says what to do: with `per_microbatch=`, batch norm takes the statistics of each
microbatch by itself, which makes it another step; with `foreign={name: "batch"}`, a part runs along the batch.
"""


def page(found: Sequence[Judged], rows: Sequence[Row], cases: Sequence[Case]) -> str:
    """The whole page as Markdown."""
    packages = list(dict.fromkeys(row.package for row in rows))
    head = INTRODUCTION.format(
        date=date.today().isoformat(), double=DOUBLE_TOLERANCE, single=GRADIENT_TOLERANCE,
        versions=", ".join(_versions(["torch", *packages])),
    )  # fmt: skip
    names = [case.name for case in cases]
    parts = [head, *_counts(found, rows, names), *_refused(found), *_unsplit(found), *_foreign(found), *_wrong(found)]
    return "\n".join([*parts, *_models(found, rows, names)]) + "\n"


def _versions(packages: Iterable[str]) -> Iterator[str]:
    """The versions that `make models` installs, so that a page can be written where few of them are."""
    here = Path(__file__).parent
    lines = [line for path in PINNED for line in (here / path).read_text(encoding="utf-8").splitlines()]
    found = filter(None, (re.match(r"([\w.-]+)==([\w.+]+)", line) for line in lines))
    pins = {_plain(match[1]): match[2] for match in found}
    yield from (f"{package} {pins.get(_plain(package), '')}".strip() for package in packages)


def _plain(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _counts(found: Sequence[Judged], rows: Sequence[Row], ways: Sequence[str]) -> Iterator[str]:
    tried = {o.model for o in found}
    ran = {o.model for o in found if o.has_run and o.error is not None}
    bad = {o.model for o in found if o.is_bad}
    yield f"Of {len(rows)} models in the table, {len(tried)} were tried: {len(ran)} run in at least one way, and"
    yield f"{len(ran - bad)} of these are equal in every way in which they run.\n"
    yield "| way | tried | equal | refused | not in time | differ | failed | split, median |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for way in ways:
        own = [o for o in found if o.way == way]
        counts = Counter(o.verdict for o in own)
        shares = sorted(s for o in own if (s := _split(o)) is not None)
        middle = f"{shares[len(shares) // 2]:.0%}" if shares else ""
        numbers = [counts[v] for v in ("equal", "refused", "slow", "differs", "failed")]
        yield f"| {way} | {len(own)} | " + " | ".join(map(str, numbers)) + f" | {middle} |"


def _split(o: Judged) -> float | None:
    return o.split if o.verdict == "equal" else None


def _refused(found: Sequence[Judged]) -> Iterator[str]:
    groups: dict[str, set[str]] = defaultdict(set)
    for o in found:
        if o.verdict in ("refused", "slow"):
            groups[f"{o.way}: {_short(o.note)}"].add(o.model)
    yield "\n## Refused\n"
    yield REFUSED
    yield from (f"* {what} ({_named(models)})" for what, models in _largest(groups))


def _short(note: str) -> str:
    """Return a note without place and remedy, so that models with the same problem are counted together."""
    first = note.strip().splitlines()[0] if note.strip() else "no word"
    said = first.split("): ", 1)[-1] if " at model" in first else first
    return _marked(said.split("; ")[0][:NOTE])


def _marked(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _largest(groups: dict[str, set[str]]) -> list[tuple[str, set[str]]]:
    return sorted(groups.items(), key=lambda pair: -len(pair[1]))[:MOST]


def _named(models: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(models))


def _unsplit(found: Sequence[Judged]) -> Iterator[str]:
    """Yield a table of the operators that run whole by way, and the reason that the plans report."""
    models: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    shares: dict[tuple[str, str, str], float] = defaultdict(float)
    for o in found:
        for op, reason, _, share in o.unsplit:
            if o.verdict == "equal" and o.way in ("data", "fast links"):
                models[o.way, op, reason].add(o.model)
                shares[o.way, op, reason] += share
    yield "\n## Operators that run whole\n"
    yield "| way | operator | why | models | compute of a model, mean |"
    yield "|---|---|---|--:|--:|"
    for key in sorted(models, key=lambda key: -shares[key])[:MOST]:
        way, op, reason = key
        yield f"| {way} | `{op}` | {reason} | {len(models[key])} | {shares[key] / len(models[key]):.1%} |"


def _foreign(found: Sequence[Judged]) -> Iterator[str]:
    parts: dict[str, set[str]] = defaultdict(set)
    for o in found:
        for name, why, share in o.foreign if o.way == "data" else ():
            parts[f"`{o.model}`, `{name}`, {share:.0%} of the step: {_short(why)}"].add(o.model)
    yield "\n## Parts that run as they are\n"
    yield from [f"* {what}" for what, _ in _largest(parts)] or ["None."]


def _wrong(found: Sequence[Judged]) -> Iterator[str]:
    bad = [o for o in found if o.is_bad]
    yield "\n## Differs or failed\n"
    yield from [f"* `{o.model}`, {o.way}, {o.kind}: {_marked(o.note)}" for o in bad] or ["None."]


def _models(found: Sequence[Judged], rows: Sequence[Row], ways: Sequence[str]) -> Iterator[str]:
    by_key = {(o.model, o.way): o for o in found}
    yield "\n## Model by model\n"
    yield "| package | model | numbers | largest error | " + " | ".join(ways) + " |"
    yield "|---|---|---|--:|" + "--:|" * len(ways)
    for row in rows:
        own = [by_key.get((row.name, way)) for way in ways]
        if (kind := next((o.kind for o in own if o and o.error is not None), "")) or any(own):
            worst = max((o.error for o in own if o and o.error is not None), default=None)
            error = "" if worst is None else f"{worst:.0e}"
            yield f"| {row.package} | {row.name} | {kind} | {error} | " + " | ".join(map(_cell, own)) + " |"


def _cell(o: Judged | None) -> str:
    if o is None:
        return ""
    split = _split(o)
    return f"{split:.0%}" if split is not None else "✓" if o.verdict == "equal" else o.verdict
