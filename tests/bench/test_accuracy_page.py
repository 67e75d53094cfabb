"""docs/accuracy.md: every table is in it, reasons fit rows that there are."""

from __future__ import annotations

import re

import pytest

from bench import accuracy_page
from bench.accuracy_page import GPUS, REASONS, SIZES, TEMPLATE, charts, page
from bench.decoders import DECODERS
from bench.fitting import Constants
from bench.judging import Predicted, constant_mfu
from bench.predictions import Fitted, Results
from bench.published import fitted, llm_foundry, megatron_bridge

RATES = Constants(0.7, 0.6, 0.9, 0.8)


@pytest.fixture(scope="module")
def results() -> Results:
    """Every run predicted three per cent too slow, but for one, which is twice as fast as published."""
    runs = llm_foundry()
    bf16 = [run for run in runs if run.precision != "fp8"]
    bridge, left_out = megatron_bridge()
    odd = "a100-40/1b/seq002048/gpus00032"

    def rows(offset: int) -> list[Predicted]:
        names = fitted(bf16, offset)
        return [Predicted(r, r.step_s * (0.5 if r.name.startswith(odd) else 1.03), r.name in names) for r in bf16]

    def flat(offset: int) -> list[Predicted]:
        return constant_mfu(bf16, fitted(bf16, offset), lambda run: DECODERS[run.model])

    by_offset = [Fitted(o, dict.fromkeys(GPUS, RATES), rows(o), flat(o)) for o in (0, 1)]
    fp8 = [Predicted(run, run.step_s) for run in runs if run.precision == "fp8"]
    known: dict[str, Constants] = {str(gpu): RATES for gpu in GPUS}
    return Results(rows(0), rows(1), known, by_offset, fp8, [Predicted(r, r.step_s * 1.1) for r in bridge], left_out)


def test_every_table_is_filled(results: Results) -> None:
    text = page(results, main=0)
    assert "{{" not in text
    assert len(re.findall(r"\{\{\w+\}\}", TEMPLATE.read_text())) == 14
    assert "| 0 | 3.0 / 3.0 |" in text
    assert "on a100-40 with 2 of 2 offsets" in text
    assert "a bad run: 22 % slower than the same model on 16 and on 64 GPUs | -50.0 %" in text
    assert "median error **10.0 %**, bias +10.0 %" in text
    assert all(f"| {size} |" in text for size in SIZES)
    assert "DeepSeekV3" in text


def test_charts_have_every_row(results: Results) -> None:
    runs, sizes = charts(results, main=0).values()
    unfitted = sum(not row.fitted for row in results.fitted[0].rows)
    assert runs.count("<circle") == unfitted + len(results.bridge) + 4  # and the legend
    assert sizes.count("<circle") == unfitted + 3


@pytest.mark.parametrize("prefix", [prefix for prefix, _ in REASONS])
def test_reasons_are_about_rows_of_the_table(prefix: str) -> None:
    assert any(run.name.startswith(prefix) for run in llm_foundry())


def test_the_worst_rows_without_a_reason_say_so(results: Results) -> None:
    assert accuracy_page.UNKNOWN in page(results, main=0)
