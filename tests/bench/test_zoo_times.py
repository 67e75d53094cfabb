"""The benchmark of local predictions: what it counts as memory, and what its page says. Times are not judged here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import zoo_times
from bench.zoo_times import Row, Subject, live_storages, page, peak_bytes, section


class Allocating:
    """A step that holds two tensors at once, then a third one."""

    def __init__(self, resident: int) -> None:
        self.resident = resident

    def step(self) -> None:
        first, second = torch.empty(2**18), torch.empty(2**19)
        del first
        third = torch.empty(2**17)
        del second, third

    def resident_bytes(self) -> int:
        return self.resident


def test_the_peak_is_what_is_allocated_at_the_worst_moment() -> None:
    assert peak_bytes(Allocating(1000)) == 1000 + 4 * (2**18 + 2**19)


def test_storages_are_counted_once_however_many_tensors_share_them() -> None:
    before = live_storages()
    whole = torch.empty(2**10)
    parameter = torch.nn.Parameter(torch.empty(2**8))
    views = [whole[:4], whole.view(2, -1), parameter.detach()]
    own = {address: size for address, size in live_storages().items() if address not in before}
    assert own == {whole.data_ptr(): 4 * 2**10, parameter.data_ptr(): 4 * 2**8}
    del whole, parameter, views
    assert not live_storages().keys() & own.keys()


def row(model: str, predicted_s: float, measured_s: float, plan: str = "searched", ranks: int = 1) -> Row:
    nothing: Any = None
    subject = Subject(model, plan, ranks, nothing, nothing, 90)
    return Row(subject, predicted_s, 0.05, measured_s, measured_s / 2, 100, 0.03)


def test_errors_are_of_what_was_predicted() -> None:
    one = row("mlp", 1.2e-3, 1e-3)
    assert one.time_error == pytest.approx(0.2)
    assert one.cpu_error == pytest.approx(1.4)
    assert one.memory_error == pytest.approx(-0.1)
    assert one.subject.name == "mlp, searched"


def test_the_page_has_medians_and_the_worst_first() -> None:
    rows = [row("mlp", 1.1e-3, 1e-3), row("gpt", 0.5e-3, 1e-3, "data")]
    text = section(rows, 1)
    assert "Median error, searched plans: 10.0% of a step's time (120.0% of CPU time), 10.0% of memory." in text
    assert "Median error, all: 30.0%" in text
    assert text.index("| gpt | data |") < text.index("| mlp | searched |")
    assert "| 1.10 ms | 5% | 1.00 ms | 3% | +10% | 0.50 ms | +120% |" in text
    whole = page([*rows, row("mlp", 1.0, 1.0, ranks=2)], ["measured", "measured too"], 6, 9.4)
    assert "## 1 rank\n" in whole
    assert "## 2 ranks\n" in whole
    assert "9 processes" in whole.replace("\n", " ")
    assert "searched with: measured too." in whole


def test_a_row_is_the_mean_of_blocks_between_calibrations(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters: Any = iter([2.0, 4.0, 8.0])
    fast, slow = [(1.0, 0.5)] * 4 + [(9.0, 0.5)], [(5.0, 0.5)] * 5
    blocks = iter([[({"mlp, data": fast}, {"mlp, data": 10}), ({"mlp, data": fast}, {"mlp, data": 11})],
                   [({"mlp, data": fast}, {"mlp, data": 30}), ({"mlp, data": slow}, {"mlp, data": 31})]])  # fmt: skip
    monkeypatch.setattr(zoo_times, "calibrated", lambda num_ranks: next(clusters))
    monkeypatch.setattr(zoo_times, "run_ranks", lambda *_, **__: next(blocks))
    monkeypatch.setattr(Subject, "predicted_s", lambda self, cluster: cluster)
    found = zoo_times.rows([row("mlp", 0.0, 1.0, "data", 2).subject], 2)[0]
    assert found.predicted_s == (3.0 + 6.0) / 2
    assert found.drift == 3.0
    assert (found.measured_s, found.cpu_s) == ((1.0 + 5.0) / 2, 0.5)
    assert found.measured_bytes == 11


def test_no_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zoo_times.main(["--blocks", "0"])
    assert "argument --blocks: expected a positive integer, got 0" in capsys.readouterr().err
