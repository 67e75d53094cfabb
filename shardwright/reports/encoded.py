"""The parameters whose weights or gradients are sent encoded, and how far what arrives may be off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.pcg.encodings import BLOCK
from shardwright.pcg.types import ITEM_BYTES
from shardwright.reports.facts import PlanFacts
from shardwright.reports.report import Paragraph
from shardwright.reports.units import plural


@dataclass(frozen=True, slots=True)
class SentEncoded:
    """A parameter's weights or gradients (`what`) that are sent encoded.

    bound   the largest error, as a share of the largest magnitude in the tensor; of a gradient: of the magnitudes of
            all that is sent of it, added up over ranks and microbatches
    """

    parameter: str
    what: str
    encoding: str
    bound: float


def sent_encoded(facts: PlanFacts) -> tuple[SentEncoded, ...]:
    """Return what a plan sends encoded, in the order of the model."""
    return tuple(_sent(facts))


def _sent(facts: PlanFacts) -> Iterator[SentEncoded]:
    for leaf, p in facts.parameters.items():
        name = str(facts.graph.by_name[leaf].attr("target"))
        if p.gathered_as is not None and p.gathered_bound:
            yield SentEncoded(name, "weights", p.gathered_as.name, p.gathered_bound)
        if p.grad and p.summed_as is not None and p.summed_bound:
            yield SentEncoded(name, "gradients", p.summed_as.name, p.summed_bound)


def encoded_line(facts: PlanFacts) -> str:
    """Return in words what is no longer exact; "" if all is."""
    kinds = Counter((one.what, one.encoding) for one in sent_encoded(facts))
    phrases = [f"{_VERBS[what]} of {plural(count, 'parameter')} as {name}" for (what, name), count in kinds.items()]
    return f"{' and '.join(phrases)}; the graph is proven, what is sent so has the bounds below" if phrases else ""


_VERBS = {"weights": "gathers of weights", "gradients": "sums of gradients"}


def encoded(facts: PlanFacts) -> Iterator[Paragraph]:
    """Yield the bounds, by encoding."""
    kinds = Counter((one.what, one.encoding, one.bound) for one in sent_encoded(facts))
    if not kinds:
        return
    rows = [(what, name, str(count), f"{bound:.2%}") for (what, name, bound), count in kinds.items()]
    lines = [
        "the graph is proven exact up to these encodings",
        f"a value is off by at most this share of the largest magnitude among the {BLOCK} values of its block",
    ]
    if any(what == "gradients" for what, *_ in kinds):
        lines.append("of a gradient: of the largest magnitudes of what each rank and microbatch sends, added up")
        lines += [f"casting gradients to {dtype} and adding them up in it comes on top" for dtype in _narrow(facts)]
    notes = ["a block with a NaN arrives as NaN; infinities stay", "`--format json` has the bound of each parameter"]
    yield Paragraph("What is sent encoded", lines, ("what", "as", ">parameters", ">off by at most"), rows, notes)


def _narrow(facts: PlanFacts) -> list[str]:
    """Return the dtypes of 16 bits in which encoded gradients are added up."""
    encoded_ones = (p for p in facts.parameters.values() if p.grad and p.summed_bound)
    return sorted({p.reduced_dtype for p in encoded_ones if ITEM_BYTES[p.reduced_dtype] < ITEM_BYTES["float32"]})
