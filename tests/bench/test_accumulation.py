"""The benchmark of microbatches at a toy size: contenders agree, and the section comes out. Times are not judged."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench import accumulation
from bench.accumulation import OURS, PAIRS, THEIRS, accumulated, peak, planned, race, section, verdict
from bench.gpt import Size
from bench.rounds import slowest_rank
from bench.speed import num_parameters
from shardwright.lowering.ranks.launch import run_ranks
from tests.each import in_whole_grids

TINY = Size(batch=8, seq=8, vocab=32, hidden=16, heads=2, layers=1)


@in_whole_grids
def test_every_contender_trains_the_same_model() -> None:
    """`race` compares each contender's loss and gradients with the single process's first."""
    graphs = planned(TINY)
    assert {graph.mesh.num_microbatches for graph in graphs.values()} == {1, 4}
    times = slowest_rank(run_ranks(race, 2, 120.0, args=(graphs, TINY, 1)))
    assert times.keys() == {*OURS, *THEIRS} == {name for pair in PAIRS for name in (pair.ours, pair.theirs)}
    assert all((samples[:, 1] >= samples[:, 0]).all() for samples in times.values())
    found = run_ranks(peak, 2, 120.0, args=(graphs, TINY, "DDP, `no_sync`, 4"))[0]
    assert found > 4 * 4 * num_parameters(TINY)  # parameters, two states of AdamW, buckets; and activations


def test_microbatches_are_parts_of_the_batch() -> None:
    seen = list[Tensor]()

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x.mean()

    lasts = list[bool]()

    def around(last: bool) -> nullcontext[None]:
        lasts.append(last)
        return nullcontext()

    x = torch.arange(8.0, requires_grad=True)
    loss = accumulated(Mean(), {"x": x}, 4, around)()
    assert loss == x.mean()
    assert lasts == [False, False, False, True]
    assert torch.equal(torch.cat(seen), x)
    torch.testing.assert_close(x.grad, torch.full((8,), 1 / 8))


def test_the_section_replaces_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\ntext\n\n{accumulation.HEADING}\n\nobsolete\n")
    monkeypatch.setattr(accumulation, "PAGE", page)
    times = {name: np.full((2, 3), 1.0 if name in OURS else 0.5) for name in (*OURS, *THEIRS)}
    for _ in range(2):
        accumulation.write(section(TINY, 2, times, dict.fromkeys(times, 3_000_000)))
    text = page.read_text()
    assert text.startswith("# Page\n\ntext\n\n## ")
    line = "| 4 | zero-3 | FSDP2 | 2.00 (2.00–2.00) | **missed** | 2.00 (2.00–2.00) | 1000 ms | 500 ms | 3 MB | 3 MB |"
    assert text.count(line) == 1
    assert text.count("**missed**") == len(PAIRS)
    assert "obsolete" not in text
    assert [verdict(median) for median in (1.0, 1.05, 1.06)] == ["met", "accepted", "**missed**"]
