"""The tables of published runs: every row read or left out with a reason, the split, and bad files."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from bench.decoders import DECODERS
from bench.published import (
    EARLIER,
    LLM_FOUNDRY,
    MEGATRON_BRIDGE,
    PublishedError,
    Run,
    earlier,
    fitted,
    llm_foundry,
    megatron_bridge,
    num_parameters,
)
from tests.each import each

FOUNDRY = llm_foundry()
BRIDGE, LEFT_OUT = megatron_bridge()
BEFORE, UNUSABLE = earlier()


def num_rows(path: Path) -> int:
    return len(path.read_text().splitlines()) - 1


def changed(tmp_path: Path, source: Path, line: int, before: str, after: str) -> Path:
    """A copy of a table with one change in one line."""
    lines = source.read_text().splitlines(keepends=True)
    assert before in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(before, after, 1)
    path = tmp_path / source.name
    path.write_text("".join(lines))
    return path


def test_no_row_is_lost() -> None:
    assert len(FOUNDRY) == num_rows(LLM_FOUNDRY)
    assert sum(len(run.published) for run in BRIDGE) + len(LEFT_OUT) == num_rows(MEGATRON_BRIDGE)
    assert sum(len(run.published) for run in BEFORE) + len(UNUSABLE) == num_rows(EARLIER)
    assert all(row.reason for row in [*LEFT_OUT, *UNUSABLE])


@each("run", [*FOUNDRY, *BEFORE, *BRIDGE], ids=lambda run: run.name)
def test_a_run_fits_its_gpus_and_its_model(run: Run) -> None:
    assert run.data * run.tensor * run.context * run.stages == run.num_gpus
    assert run.model.split(" ")[0] in DECODERS
    assert run.step_s == pytest.approx(run.tokens_per_step / run.tokens_per_s)
    assert min(run.published) <= median(run.published) <= max(run.published)


@each(("model", "seq"), list(num_parameters()), ids=str)
def test_decoders_have_the_parameters_of_the_table(model: str, seq: int) -> None:
    assert DECODERS[model].num_parameters(seq) == num_parameters()[model, seq]


@pytest.mark.parametrize(("model", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85)])
def test_llama_has_the_parameters_of_its_card(model: str, billions: float) -> None:
    assert DECODERS[model].num_parameters(8192) / 1e9 == pytest.approx(billions, abs=0.005)


def test_releases_of_one_configuration_are_one_run() -> None:
    names = [run.name for run in BRIDGE]
    assert len(set(names)) == len(names) == 6
    (repeated,) = (run for run in BRIDGE if run.model == "llama3-70b" and run.num_microbatches == 128)
    assert repeated.published == (1621, 1633, 1639, 1664)
    assert repeated.tokens_per_s == 1636 * 64
    assert repeated.spread == pytest.approx(43 / 1636)


def test_what_tells_earlier_runs_apart() -> None:
    """With and without recomputation are two configurations; what no GPU can do is left out."""
    both = [run for run in BEFORE if run.name.startswith("a100-80/3b/seq002048/gpus00008/micro008x008/amp_bf16")]
    assert sorted(run.recompute for run in both) == [False, True]
    assert {row.reason for row in UNUSABLE} == {"more FLOP per second than the GPU's peak", "activations offloaded"}
    assert not {run.name for run in FOUNDRY if run.late_gathers} & {r.name for r in FOUNDRY if r.num_gpus == 512}


@each("offset", range(10))
def test_a_tenth_is_fitted_and_every_row_once(offset: int) -> None:
    chosen = fitted(FOUNDRY, offset)
    assert len(chosen) <= -(-len(FOUNDRY) // 10)
    assert chosen == fitted(list(reversed(FOUNDRY)), offset)  # by name, not by place
    others = [fitted(FOUNDRY, other) for other in range(10) if other != offset]
    assert not any(chosen & other for other in others)


def test_an_offset_beyond_the_split() -> None:
    with pytest.raises(ValueError, match=r"fitted: offset 10 does not lie in 0 … 9; choose one that does"):
        fitted(FOUNDRY, 10)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (",251,515636,", ",251,fast,", "line 2, tok_s: expected a number, got 'fast'; mend it"),
        (",251,515636,", ",251,-5,", "line 2, tok_s: expected a number above zero, got '-5'; mend it"),
        (",512,h100", ",512.5,h100", "line 2, gpus: expected a whole number, got '512.5'; mend it"),
        ("h100_80gb", "h200", "line 2, gpu: expected one of h100_80gb, a100_80gb, a100_40gb, got 'h200'; mend it"),
        ("amp_bf16", "int4", "line 2, precision: expected one of amp_bf16, bf16, amp_fp8, got 'int4'; mend it"),
        (
            ",8,1,4096,",
            ",8,2,4096,",
            "gbs_tokens: expected 16777216, as gpus, mbs, grad_accum and seq give, got",
        ),
        ("FULL_SHARD", "NO_SHARD", "line 2, sharding: expected one of FULL_SHARD, SHARD_GRAD_OP, got 'NO_SHARD'"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = changed(tmp_path, LLM_FOUNDRY, 2, before, after)
    with pytest.raises(PublishedError, match=r"^training_runs_llm_foundry.csv, line 2") as caught:
        llm_foundry(path)
    assert message in str(caught.value)


def test_a_batch_that_ranks_do_not_divide(tmp_path: Path) -> None:
    lines = MEGATRON_BRIDGE.read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "DGX-H100,LLAMA3_70B,64,FP8,256" in text)
    path = changed(tmp_path, MEGATRON_BRIDGE, line, "FP8,256,", "FP8,255,")
    with pytest.raises(PublishedError, match=rf"line {line}, gbs: expected a multiple of 2, the sequences of one"):
        megatron_bridge(path)


def test_a_cut_row_and_a_missing_file(tmp_path: Path) -> None:
    path = changed(tmp_path, LLM_FOUNDRY, 2, ",False,64862437376", "")
    path.write_text(path.read_text().replace(",FULL_SHARD,True", "", 1))
    with pytest.raises(PublishedError, match=r"line 2, .*: expected (one of True, False|a cell)"):
        llm_foundry(path)
    with pytest.raises(PublishedError, match=r"cannot read the table: No such file or directory; restore it"):
        llm_foundry(tmp_path / "none.csv")


def test_two_rows_of_one_name(tmp_path: Path) -> None:
    lines = LLM_FOUNDRY.read_text().splitlines(keepends=True)
    path = tmp_path / "twice.csv"
    path.write_text("".join([*lines, lines[1]]))
    with pytest.raises(PublishedError, match=r"two rows are named h100/70b/seq002048/gpus00512/micro008x001/amp_bf16"):
        llm_foundry(path)
