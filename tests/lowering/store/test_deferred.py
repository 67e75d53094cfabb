"""The memory of a rank that makes or reads its parts: these, and one whole parameter beside them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

import shardwright as sw
from bench.start import MOST, resident_bytes
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.store.deferred import DeferredValues
from tests.each import some

WIDTH, RANKS = 2048, 4
SLACK = 4 << 20
FORMS = ("drawn", "x.safetensors", "x.pt", "dcp")


ROWS = [256, 1024, 304, 2048, 128, 512, 1536, 768] * 12
"""The rows of each layer: one does not fit where the one before it was."""
TOTAL, LARGEST = 2 * WIDTH * sum(ROWS), 4 * WIDTH * max(ROWS)
"""Bytes of the model, and of the largest parameter, as it is drawn."""


def built() -> nn.Module:
    with sw.fake():
        model = nn.Sequential(*(nn.Linear(WIDTH, rows, bias=False) for rows in ROWS))
        for module in model:
            nn.init.normal_(module.get_parameter("weight"))
        return model.to(torch.bfloat16)


def write(folder: Path) -> None:
    state = {f"{i}.weight": torch.zeros(rows, WIDTH, dtype=torch.bfloat16) for i, rows in enumerate(ROWS)}
    save_file(state, folder / "x.safetensors")
    torch.save(state, folder / "x.pt")
    save(state, checkpoint_id=folder / "dcp")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    run_ranks(write, 1, 60, args=(folder,))
    return folder


def peak_bytes(form: str, files: Path, dim: int) -> int:
    """The most that a rank takes on while it gets its parts, which are slices of this dimension."""
    model = built()
    source = DeferredValues(model, None if form == "drawn" else sw.WeightFiles(files / form))
    cut = [(Axis("x", RANKS, RANKS - 1), dim, 1)]
    warm = dict(source.parts({"0.weight": cut}, torch.device("cpu")))
    del warm
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before, _ = resident_bytes()
    parts = dict(source.parts(dict.fromkeys(dict(model.named_parameters()), cut), torch.device("cpu")))
    assert sum(part.nbytes for part in parts.values()) == TOTAL // RANKS
    return resident_bytes()[1] - before


@pytest.mark.parametrize(("form", "dim"), some(sorted(product(FORMS, [0, 1])), 2))
def test_peak_memory(form: str, dim: int, files: Path) -> None:
    (found,) = run_ranks(peak_bytes, 1, 120, args=(form, files, dim))
    assert found <= MOST * TOTAL / RANKS + LARGEST + SLACK
