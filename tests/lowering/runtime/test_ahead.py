"""Batches that are copied to the device beside the step before, over a link that is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.lowering.runtime.ahead import ahead
from shardwright.lowering.runtime.host import Wait

CPU = torch.device("cpu")


class Late:
    """A link whose copies are made when they are waited for, and a list of what happened."""

    def __init__(self) -> None:
        self.events = list[str]()

    def copy(self, target: Tensor, source: Tensor) -> Wait:
        target.fill_(-1)
        self.events.append(f"launch {int(source.flatten()[0])}")

        def wait() -> None:
            self.events.append(f"wait {int(source.flatten()[0])}")
            target.copy_(source)

        return wait

    def finish(self) -> None:
        self.events.append("finish")


def numbered(many: int) -> Iterator[dict[str, Any]]:
    for n in range(many):
        yield {"x": torch.full((2, 3), n), "nest": [torch.tensor(n), "text"], "n": n}


def test_one_batch_is_ahead() -> None:
    link = Late()
    for n, batch in enumerate(ahead(({"x": item["x"]} for item in numbered(3)), link, CPU)):
        link.events.append(f"step {n}")
        assert batch["x"].eq(n).all()
    assert link.events == [
        "launch 0", "launch 1", "wait 0", "step 0", "launch 2", "wait 1", "step 1", "wait 2", "step 2",
    ]  # fmt: skip


def test_nests_and_plain_values() -> None:
    for n, batch in enumerate(ahead(numbered(3), Late(), CPU)):
        assert (int(batch["nest"][0]), batch["nest"][1], batch["n"]) == (n, "text", n)
    assert list(ahead(numbered(0), Late(), CPU)) == []


def test_what_lies_elsewhere_stays() -> None:
    sparse, meta = torch.eye(2).to_sparse(), torch.empty(2, device="meta")
    link = Late()
    ((x, y),) = ahead([(sparse, meta)], link, CPU)
    assert x is sparse
    assert y is meta
    assert link.events == []


def test_an_error_in_reading_comes_in_its_turn() -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield from numbered(2)
        raise OSError("the disk is gone")

    found, link = list[int](), Late()

    def take_all() -> None:
        found.extend(batch["n"] for batch in ahead(failing(), link, CPU))

    with pytest.raises(OSError, match="the disk is gone"):
        take_all()
    assert found == [0, 1]


def test_memory_is_not_let_go_before_its_copy_has_ended() -> None:
    link = Late()
    batches = ahead(({"x": item["x"]} for item in numbered(5)), link, CPU)
    next(batches)
    assert link.events[-1] == "wait 0"
    batches.close()
    assert link.events == ["launch 0", "launch 1", "wait 0", "wait 1"]
