"""The benchmark of pipeline stages at a toy size: contenders agree, and the section comes out. Times are not judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import pipelines
from bench.gpt import Size
from bench.pipelines import THEIRS, Way, bubbles, results, section
from shardwright.cost.clusters.local import default_cluster
from tests.each import in_whole_grids

TINY = Size(batch=4, seq=8, vocab=32, hidden=16, heads=2, layers=4)
WAYS = (*(Way(TINY, 2, schedule, many=4) for schedule in THEIRS), Way(TINY, 2, "1f1b", many=4, tied=True))


@in_whole_grids
def test_every_contender_trains_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`race` compares each contender's loss and gradients with the single process's first."""
    found, cluster = results(WAYS, 2), default_cluster(2)
    assert [one.way for one in found] == list(WAYS)
    for one in found:
        assert all((samples[:, 1] >= samples[:, 0]).all() for samples in (one.ours, one.theirs))
        assert all(0 < share < 1 for share in one.measured), one.way
        assert all(0 < share < 1 for share in bubbles(one, cluster)), one.way
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\ntext\n\n{pipelines.HEADING}\n\nobsolete\n")
    monkeypatch.setattr(pipelines, "PAGE", page)
    twice = replace(found[0], ours=np.full((2, 3), 1.0), theirs=np.full((2, 3), 0.5), measured=[0.25, 0.25])
    pipelines.write(section([twice, *found[1:]], cluster, 2, (0.0, 0.0)))
    text = page.read_text()
    assert text.startswith("# Page\n\ntext\n\n## ")
    assert "| 2 | 16 | gpipe | 2.00 (2.00–2.00) | 2.00 (2.00–2.00) | 2.00 (2.00–2.00) | 1000 ms | 500 ms |" in text
    assert "| 16 | 1f1b, tied head |" in text
    assert "obsolete" not in text


def test_stages_are_cut_alike_on_both_sides() -> None:
    """Blocks as `torch.distributed.pipelining` is given them; ours count the embedding and the head as well."""
    assert [list(blocks) for blocks in Way(TINY, 2, "interleaved").blocks] == [[0], [1], [2], [3]]
    assert Way(TINY, 2, "interleaved").execution.schedule.split == (2, 1, 1, 2)
    assert Way(TINY, 2, "1f1b").execution.schedule.split == (3, 3)
