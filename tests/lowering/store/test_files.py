"""A rank's part of a stored tensor is that which it would take of the whole; nothing else is read."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.movement import Axis, Time
from shardwright.lowering.store import files
from shardwright.lowering.store.files import read_part
from shardwright.lowering.store.opening import open_files
from shardwright.lowering.store.spans import boxes, spans
from shardwright.lowering.store.storage import Slices, part_of
from tests.each import each

SHAPE = (24, 24)


def cuts() -> list[Slices]:
    """Up to three slices, blocked or not, along one dimension or both."""
    one = [(Axis("a", 2, rank), dim, blocks) for rank, dim, blocks in product((0, 1), (0, 1), (1, 3))]
    two = [(Axis("b", 2, rank), dim, blocks) for rank, dim, blocks in product((0, 1), (0, 1), (1, 2))]
    whole = (Time("mb", 1), 0, 1)
    three = (Axis("c", 3, 2), 0, 1)
    return [[], *([x] for x in one), *([whole, x, y] for x, y in product(one, two)), *([x, three] for x in one)]


def whole() -> Tensor:
    return torch.arange(24.0 * 24).view(SHAPE)


@each("cut", cuts())
def test_boxes_make_the_part(cut: Slices) -> None:
    expected = part_of(whole(), cut)
    along = spans(SHAPE, cut)
    found = torch.full([sum(stop - start for start, stop in own) for own in along], -1.0)
    for there, here in boxes(along):
        found[here] = whole()[there]
    assert torch.equal(found, expected)
    assert all(start < stop for own in along for start, stop in own)


def test_spans_that_follow_each_other_are_one() -> None:
    """So that a file is read in as few pieces as there are."""
    half, quarter = (Axis("a", 2, 0), 0, 2), (Axis("b", 2, 1), 0, 1)
    assert spans((24, 12), [half]) == [[(0, 6), (12, 18)], [(0, 12)]]
    assert spans((24, 12), [half, quarter]) == [[(12, 18)], [(0, 12)]]


def write(folder: Path) -> None:
    """As two ranks save it."""
    state = {"x": whole(), "number": torch.tensor(3.0), "none": torch.zeros(0, 4), "half": whole().bfloat16()}
    mesh = init_device_mesh("cpu", (2,))
    spread = {name: distribute_tensor(x, mesh, [Shard(1)]) if x.shape == SHAPE else x for name, x in state.items()}
    save(spread, checkpoint_id=folder / "dcp")
    save_file(state, folder / "x.safetensors")
    torch.save(state, folder / "x.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    run_ranks(write, 2, 60, args=(made,))
    return made


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "dcp"])
@pytest.mark.parametrize("most", [0, 1 << 20], ids=["opened often", "opened once"])
def test_parts_of_each_format(name: str, most: int, folder: Path) -> None:
    with mock.patch.object(files, "MAPPED_BYTES", most):
        opened = open_files(folder / name)
        assert opened.kinds["half"] == (SHAPE, torch.bfloat16)
        for cut in cuts()[::5]:
            part = read_part(opened, "x", cut)
            assert torch.equal(part, part_of(whole(), cut))
            assert part.untyped_storage().nbytes() == part.nbytes
        assert read_part(opened, "number", []).item() == 3
        assert read_part(opened, "none", []).shape == (0, 4)
        assert torch.equal(read_part(opened, "half", []), whole().bfloat16())


def mapped_bytes() -> int:
    """The bytes of files that this process has touched in its memory."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssFile"))
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts pages as Linux does")
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_bytes_of_others_are_not_read(name: str, tmp_path: Path) -> None:
    state, path = {"x": torch.ones(64, 1 << 16)}, tmp_path / name
    save_file(state, path) if name.endswith("safetensors") else torch.save(state, path)

    def touched(size: int) -> int:
        opened, before = open_files(path), mapped_bytes()
        part = read_part(opened, "x", [(Axis("a", size, size - 1), 0, 1)])
        assert part.nbytes == state["x"].nbytes // size
        return mapped_bytes() - before

    touched(1)  # what reads is loaded first
    assert touched(1) > 0.9 * state["x"].nbytes
    assert touched(8) < 0.3 * state["x"].nbytes  # the system maps a little around what is read


def test_a_checkpoint_that_lacks_a_part_is_told(folder: Path) -> None:
    opened = open_files(folder / "dcp")
    stored = opened.stored["x"]  # pyright: ignore[reportAttributeAccessIssue]
    del stored.chunks[1]
    assert read_part(opened, "x", [(Axis("a", 2, 0), 1, 1)]).shape == (24, 12)
    with pytest.raises(files.PlanError, match=r"^x: the checkpoint has 288 of 576 elements that are needed here$"):
        read_part(opened, "x", [])
