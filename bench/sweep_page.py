"""The page of the sweep: a line for each model on so many ranks, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench.accuracy import DOUBLE_TOLERANCE, GRADIENT_TOLERANCE, LOSS_TOLERANCE, ROUNDED
from examples.zoo import ZOO

if TYPE_CHECKING:
    from bench.sweep import Outcome

MEMORY = 0.1
"""How far a prediction of memory may be off."""
APART = 0.05
"""Plans whose measured memory differs by less than this are not ranked."""
LONGEST = 220
NUM_RANKS = (2, 4, 8)

INTRODUCTION = """\
# Plans that people train with, on 2, 4 and 8 ranks

Models of `examples/zoo.py` in many ways on real gloo processes, against a single process: lifetimes of gathered
parameters, microbatches, what is made again, one axis and two, searched plans under tight memory, and, for models of
which there is little else, random ones (`bench/ways.py`). Each plan is another one, and proven to denote the captured
graph. Batches are {times} times the zoo's, in train mode with dropout on, and each plan takes {steps} steps of AdamW.
Written by `make sweep` on {date} with torch {torch}: {run} plans have run, {equal} were equal; {refused} were refused.
`make sweep` runs {plans} of each model on so many ranks, and goes on where it was ended. {missing}

| numbers | what is compared | tolerance |
|---|---|---|
| fp64 | losses of all steps; gradients of the first and weights after the last, by parameter | {double:g} |
| fp32 | loss of the first step; its gradients, by parameter | {loss:g}; {gradient:g} |
| fp32 | later losses; all weights after the last, relative to how far they have come | the same, or {rounded:g} times \
what one unit in the last place of the weights makes of one process |
| bf16 | losses, gradients, weights as before: how far they are from those of fp32 | {rounded:g} times as far as \
`torch.autocast` on one process, of these weights or of weights rounded otherwise in their tenth bit |

The state of the random generator after a step is compared bit by bit. What a model computes in fp32 by itself is
computed in fp64 where the rest is.

*Memory* is the peak of a step, with parameters and optimizer states, on rank 0, measured by `bench.allocations`; the
error is of what the timeline predicts. Of models with convolutions it is not measured in fp64, for which torch unfolds
their inputs on a CPU, and every second plan is in fp32. *Rank*: Spearman's correlation of predicted with measured
memory over all plans in one kind of numbers: fp64, or fp32 where there are convolutions. *Wrong pairs*: of all pairs of
these whose measured memory differs by more than {apart:.0%}, those that are predicted the other way round.
"""
HEAD = """\
| model | ranks | plans | fp64: loss | gradient | weights | fp32: loss | gradient | weights | bf16: to autocast | \
memory, median | worst | above 10 % | rank | wrong pairs | |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|
"""


def page(outcomes: Sequence[Outcome], num_plans: int, num_steps: int, times: int) -> str:
    """The whole page as Markdown."""
    ran = [o for o in outcomes if o.has_run]
    head = INTRODUCTION.format(
        plans=num_plans,
        times=times,
        steps=num_steps,
        date=date.today().isoformat(),
        torch=torch.__version__,
        run=len(ran),
        equal=sum(o.verdict == "equal" for o in ran),
        missing=_missing(ran, num_plans),
        refused=sum(o.verdict == "refused" for o in outcomes),
        double=DOUBLE_TOLERANCE,
        loss=LOSS_TOLERANCE,
        gradient=GRADIENT_TOLERANCE,
        rounded=ROUNDED,
        apart=APART,
    )
    by_cell: dict[tuple[str, int], list[Outcome]] = {}
    for o in sorted(outcomes, key=lambda o: (list(ZOO).index(o.model), o.num_ranks)):
        by_cell.setdefault((o.model, o.num_ranks), []).append(o)
    rows = "\n".join(_row(found) for found in by_cell.values())
    return "\n".join([head, HEAD + rows, *_findings(outcomes), *_memory(outcomes), *_refusals(outcomes)])


def _missing(ran: Sequence[Outcome], num_plans: int) -> str:
    """Say what has not run yet, by numbers of ranks."""
    counts, lines = Counter((o.model, o.num_ranks) for o in ran), list[str]()
    for num_ranks in NUM_RANKS:
        fewer = {model: counts[model, num_ranks] for model in ZOO if counts[model, num_ranks] < num_plans}
        if fewer:
            lines.append(f"{num_ranks} ranks: " + ", ".join(f"{model} {many}" for model, many in fewer.items()))
    return f"So far fewer have run on {'; on '.join(lines)}." if lines else "All have run."


def _row(outcomes: Sequence[Outcome]) -> str:
    ran = [o for o in outcomes if o.has_run]
    bad = sum(o.verdict != "equal" for o in ran)
    parts = [outcomes[0].model, outcomes[0].num_ranks, len(ran)]
    for kind, weight in (("fp64", "weight"), ("fp32", "drift")):
        found = [o.errors for o in ran if o.kind == kind and o.errors]
        figures = (("loss", "losses"), ("gradient",), (weight,))
        parts += [f"{max(e[n] for e in found for n in names):.0e}" if found else "" for names in figures]
    times = [times_autocast(o) for o in ran if o.kind == "amp_bf16" and o.errors]
    parts.append(f"{max(times):.2f}" if times else "")
    return "| " + " | ".join(map(str, [*parts, *_of_memory(ran), f"**{bad} wrong**" if bad else ""])) + " |"


def _of_memory(ran: Sequence[Outcome]) -> Iterator[str]:
    measured = [o for o in ran if o.measured_bytes]
    if not measured:
        yield from [""] * 5
        return
    errors = [abs(o.memory_error) for o in measured]
    yield f"{np.median(errors):.1%}"
    yield f"{max(errors):.1%}"
    yield str(sum(e > MEMORY for e in errors))
    kinds = Counter(o.kind for o in measured)
    ranked = [o for o in measured if o.kind == max(kinds, key=lambda kind: kinds[kind])]
    yield f"{spearman(ranked):.3f}" if len(ranked) > 2 else ""
    yield "{} of {}".format(*wrong_pairs(ranked))


def times_autocast(outcome: Outcome) -> float:
    """Return a bf16 run's distance from exact gradients and weights, as a multiple of autocast's on one process."""
    assert outcome.errors is not None
    assert outcome.rounding is not None
    return max(outcome.errors[name] / outcome.rounding[name] for name in ("whole", "drift"))


def spearman(outcomes: Sequence[Outcome]) -> float:
    """The rank correlation of predicted with measured memory; equal values share the mean of their ranks."""

    def ranks(values: Sequence[int]) -> np.ndarray:
        array = np.array(values)
        return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])

    pair = ranks([o.predicted_bytes for o in outcomes]), ranks([o.measured_bytes for o in outcomes])
    return float(np.corrcoef(*pair)[0, 1]) if all(r.std() for r in pair) else 1.0


def wrong_pairs(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Pairs of plans that are predicted the other way round, of all whose measured memory differs."""
    ordered = (sorted(pair, key=lambda o: o.measured_bytes) for pair in combinations(outcomes, 2))
    apart = [(low, high) for low, high in ordered if high.measured_bytes > low.measured_bytes * (1 + APART)]
    return sum(low.predicted_bytes > high.predicted_bytes for low, high in apart), len(apart)


def _findings(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a section on faults, and on plans that were not found in time."""
    yield "\n## What is wrong\n"
    bad = [o for o in outcomes if o.verdict in ("differs", "failed", "slow")]
    for o in bad:
        text = _short(o.note) or f"{o.errors}"
        yield f"* {o.model}, {o.num_ranks} ranks, {o.way} {o.mesh}: {o.verdict}: {text}"
    if not bad:
        yield "Nothing."


def _memory(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "\n## Memory that is more than 10 % off\n"
    off = [o for o in outcomes if o.measured_bytes and abs(o.memory_error) > MEMORY]
    for o in sorted(off, key=lambda o: -abs(o.memory_error)):
        sizes = f"predicted {o.predicted_bytes / 1e6:.2f} MB, measured {o.measured_bytes / 1e6:.2f} MB"
        yield f"* {o.model}, {o.num_ranks} ranks, {o.way}: {o.memory_error:+.1%}, {sizes}"
    if any(o.kind == "amp_bf16" for o in off):
        yield "\nNot predicted is what oneDNN packs of the operands of a 16-bit product on a CPU: 28 kB and more."
    if not off:
        yield "None."


def _refusals(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "\n## What is refused\n"
    reasons = Counter((o.model, _short(o.note)) for o in outcomes if o.verdict == "refused")
    for (model, note), many in reasons.items():
        yield f"* {model}, {many} ways: {note}"
    if not reasons:
        yield "Nothing."
    yield ""


def _short(note: str) -> str:
    text = " ".join(note.split()).replace("|", "\\|")
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
