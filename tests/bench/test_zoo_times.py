"""The benchmark of local predictions: what it counts as memory, and what its page says. Times are not judged here."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import zoo_times
from bench.zoo_times import Row, Subject, live_storages, most_allocated, page, peak_bytes, section
from shardwright.cost.calibration.workload import Visit, Workload


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
    assert peak_bytes(Allocating(1000), 2) == 1000 + 4 * (2**18 + 2**19)


class ReleasingElsewhere(Allocating):
    """The first step leaves it to a thread, as gloo may, to let go of a tensor; the profiler does not see that."""

    first = True

    def step(self) -> None:
        held = [torch.empty(2**16)]
        if self.first:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
        self.first = False
        held.clear()
        super().step()


def test_what_another_thread_releases_is_not_a_peak() -> None:
    least = 1000 + 4 * (2**18 + 2**19)
    assert peak_bytes(ReleasingElsewhere(1000), 1) == least + 4 * 2**16
    assert peak_bytes(ReleasingElsewhere(1000), 2) == least


def test_an_address_that_is_handed_out_again_was_free() -> None:
    assert most_allocated([(1, 10), (2, 5), (1, -10), (1, 8)]) == 15
    assert most_allocated([(1, 10), (1, 8), (2, 4)]) == 12
    assert most_allocated([(3, -10), (1, 8), (2, 4)]) == 2


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
    subject = Subject(model, plan, ranks, nothing, nothing, predicted_s * 2, 90)
    return Row(subject, predicted_s, 0.05, measured_s, 0.03, measured_s / 2, 100)


def test_errors_are_of_what_was_predicted() -> None:
    one = row("mlp", 1.2e-3, 1e-3)
    assert one.time_error == pytest.approx(0.2)
    assert one.cpu_error == pytest.approx(1.4)
    assert one.memory_error == pytest.approx(-0.1)
    assert one.subject.name == "mlp, searched"


def test_the_page_has_medians_and_the_worst_first() -> None:
    rows = [row("mlp", 1.1e-3, 1e-3), row("gpt", 0.5e-3, 1e-3, "data")]
    text = section(rows, 1)
    assert "Median error, searched plans: 10.0% of a step's time (120.0% of CPU time; 120.0% as calib" in text
    assert "rated before), 10.0% of memory." in text
    assert "Median error, all: 30.0%" in text
    assert text.index("| gpt | data |") < text.index("| mlp | searched |")
    assert "| 1.10 ms | 5% | 1.00 ms | 3% | +10% | +120% | 0.50 ms | +120% |" in text
    whole = page([*rows, row("mlp", 1.0, 1.0, ranks=2)], ["measured", "measured too"], 6, 9.4)
    assert "## 1 rank\n" in whole
    assert "## 2 ranks\n" in whole
    assert "9 processes" in whole.replace("\n", " ")
    assert "searched with: measured too." in whole


def test_steps_are_predicted_by_the_passes_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four turns of two steps that count: of each step the slowest rank, of each point all visits."""
    first = [[(2.0, 0.5), (1.0, 0.5)], [(3.0, 0.5), (2.0, 0.7)]] * 2
    second = [[(1.0, 0.5), (2.0, 0.5)], [(2.0, 0.7), (3.0, 0.5)]] * 2
    measured = [
        ({"mlp, data": first}, {"mlp, data": 12}),
        ({"mlp, data": second}, {"mlp, data": 13}),
    ]

    def run(_: object, num_ranks: int, __: float, *, args: tuple[Any, Workload, Path]) -> Any:
        workload, visits = args[1:]
        assert (num_ranks, workload.num_ranks, workload.num_passes) == (2, 2, 4)
        assert workload.seconds_per_point / 4 == pytest.approx(0.03 / 6)  # a pass is one of `shardwright calibrate`
        lines = [Visit("key", [seconds] * 4)._asdict() for seconds in (1.0, 3.0, 1.0, 3.0)]
        visits.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return measured

    monkeypatch.setattr(zoo_times, "run_ranks", run)
    monkeypatch.setattr(zoo_times, "measured_cluster", lambda points, workload: points["key"].seconds)
    monkeypatch.setattr(Subject, "predicted_s", lambda self, cluster: cluster)
    found = zoo_times.rows([row("mlp", 0.0, 1.0, "data", 2).subject], 4)[0]
    predicted, measured_s, cpu_s = (8 * 1.0 + 7 * 3.0) / 15, (4 * 2.0 + 4 * 3.0) / 8, (4 * 0.5 + 4 * 0.7) / 8
    assert (found.predicted_s, found.predicted_noise) == (pytest.approx(predicted), pytest.approx(2 / 3))
    assert (found.measured_s, found.measured_noise) == (pytest.approx(measured_s), pytest.approx(1 / 3))
    assert found.cpu_s == pytest.approx(cpu_s)
    assert found.measured_bytes == 13


def test_one_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zoo_times.main(["--passes", "1"])
    assert "argument --passes: expected at least 2, got 1; noise is how far odd and even" in capsys.readouterr().err


def test_no_calibration_before(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zoo_times.main(["--before", "0"])
    assert "argument --before: expected at least 1, got 0; plans need a calibration" in capsys.readouterr().err
