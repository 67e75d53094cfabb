"""What `bench/dropout.py` measures and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import dropout


def test_a_rank_holds_what_its_name_says() -> None:
    held = {name: 1 if shard is None else shard.take(torch.empty(dropout.SHAPE, device="meta")).numel()
            for name, shard in dropout.shards().items()}  # fmt: skip
    whole = torch.empty(dropout.SHAPE, device="meta").numel()
    assert held.pop("all of it") == 1
    assert held
    assert set(held.values()) == {whole // dropout.NUM_RANKS}


def test_the_section_replaces_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\ntext\n\n{dropout.HEADING}\n\nobsolete\n")
    monkeypatch.setattr(dropout, "PAGE", page)
    times = {"global": 2.0, "own": 0.5, "bernoulli_": 0.1, "philox": 0.2}
    for _ in range(2):
        dropout.write(dropout.section({"a part": times}, {"data": {"global": 2.0, "own": 0.5}}, 5))
    text = page.read_text()
    assert text.startswith("# Page\n\ntext\n\n## ")
    assert text.count("| a part | 2000.0 ms | 500.0 ms | 4.0 | 100.0 ms | 200.0 ms |") == 1
    assert text.count("| data | 2000 ms | 500 ms | 0.25 |") == 1
    assert "obsolete" not in text


def test_contenders_take_turns() -> None:
    order = list[str]()
    found = dropout.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3  # the first round is not counted
    assert set(found) == {"a", "b"}
