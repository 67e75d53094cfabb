"""Optimizer states that lie on the host between updates: equal to the bit, in lots, in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime import host_states
from shardwright.lowering.runtime.host import ThreadLink
from shardwright.pcg.errors import MachineError, ShardwrightError
from tests.search.graphs import cluster

MAKERS: dict[str, Callable[[Iterable[Any]], optim.Optimizer]] = {
    **{name: getattr(optim, name) for name in host_states.BY_PARAMETER},
    "AdamW, amsgrad, fused": partial(optim.AdamW, amsgrad=True, fused=True),
    "Adam, one by one": partial(optim.Adam, foreach=False),
    "SGD with momentum": partial(optim.SGD, momentum=0.9, nesterov=True),
    "RMSprop, centered": partial(optim.RMSprop, centered=True, momentum=0.5),
}
BATCH = {"x": torch.arange(32.0).view(4, 8) / 32}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3 + i, 4)) for i in range(5)] + [nn.Parameter(torch.randn(3))]


def take_steps(parameters: list[nn.Parameter], optimizer: optim.Optimizer, number: int = 4) -> None:
    """Take steps with random gradients. The third parameter has none in the second step."""
    for step in range(number):
        torch.manual_seed(10 + step)
        for i, p in enumerate(parameters):
            p.grad = None if (i, step) == (2, 1) else torch.randn_like(p)
        optimizer.step()


def all_of(parameters: list[nn.Parameter], optimizer: optim.Optimizer) -> list[Any]:
    return [(p.detach(), dict(optimizer.state[p])) for p in parameters]


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture
def small_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "AT_ONCE_BYTES", 150)


@pytest.mark.usefixtures("small_lots")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_steps_are_equal_to_the_bit(make: Callable[..., optim.Optimizer]) -> None:
    there, here = weights(), weights()
    groups = [{"params": there[:2]}, {"params": there[2:], "lr": 0.2}]
    first = sw.on_host(make(groups, lr=0.1))
    second = make([{"params": here[:2]}, {"params": here[2:], "lr": 0.2}], lr=0.1)
    take_steps(there, first)
    take_steps(here, second)
    assert_same(all_of(there, first), all_of(here, second))
    assert [len(group["params"]) for group in first.param_groups] == [2, 4]


def test_two_lots_are_on_the_device_at_a_time(small_lots: None, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.zeros(4, 8)) for _ in range(5)]  # 128 bytes each: a lot
    optimizer = sw.on_host(optim.AdamW(parameters))
    take_steps(parameters, optimizer, 1)
    places = {x.data_ptr() for state in optimizer.state.values() for x in state.values() if x.numel() > 1}
    notes = list[int]()

    def copy(link: ThreadLink, target: Tensor, source: Tensor) -> Callable[[], None]:
        notes.append(-source.nbytes if target.data_ptr() in places else source.nbytes)
        return original(link, target, source)

    original = ThreadLink.copy
    monkeypatch.setattr(ThreadLink, "copy", copy)
    take_steps(parameters, optimizer, 1)
    there = torch.tensor(notes).cumsum(0)
    assert sum(notes) == 0
    assert notes.count(128) == 10  # two states of each parameter
    assert there.max() == 2 * 256
    assert {x.data_ptr() for state in optimizer.state.values() for x in state.values() if x.numel() > 1} == places


@pytest.mark.usefixtures("small_lots")
def test_hooks_closures_schedulers_and_scalers_see_one_step() -> None:
    results = list[Any]()
    for wrapped in (True, False):
        parameters, calls = weights(), list[str]()
        optimizer = optim.AdamW(parameters, lr=0.1)
        optimizer = sw.on_host(optimizer) if wrapped else optimizer
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        scheduler, scaler = optim.lr_scheduler.LinearLR(optimizer), torch.amp.GradScaler("cpu")

        def closure(optimizer: optim.Optimizer = optimizer, parameters: list[nn.Parameter] = parameters) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([p.square().sum() for p in parameters]).sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure)]
        scheduler.step()
        optimizer.zero_grad()
        scaler.scale(torch.stack([p.square().sum() for p in parameters]).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append((losses, scheduler.get_last_lr(), all_of(parameters, optimizer)))
        assert calls == ["before", "after"] * 2
    assert_same(*results)


@pytest.mark.usefixtures("small_lots")
def test_states_that_were_there_before_or_are_loaded_come_to_the_host() -> None:
    parameters, others = weights(), weights()
    plain, other = optim.AdamW(parameters), optim.AdamW(others)
    take_steps(parameters, plain)
    take_steps(others, other)
    sw.on_host(plain)
    take_steps(parameters, plain, 2)
    take_steps(others, other, 2)
    assert_same(all_of(parameters, plain), all_of(others, other))
    fresh = sw.on_host(optim.AdamW(others))
    fresh.load_state_dict(deepcopy(plain.state_dict()))
    take_steps(parameters, plain, 1)
    take_steps(others, fresh, 1)
    assert_same(all_of(parameters, plain), all_of(others, fresh))


def ranks_train(folder: str) -> None:
    plan = sw.plan(Net(), cluster(2), kwargs=BATCH, roles=["zero"], mesh={"dp": 2})
    results = list[Any]()
    host_states.AT_ONCE_BYTES = 150
    for saves_on_host, loads_on_host in ((False, False), (True, False), (False, True), (True, True)):
        parallel = sw.compile(Net(), kwargs=BATCH, plan=plan, check_capture="never")
        where = f"{folder}/{saves_on_host}{loads_on_host}"
        for on_host, is_first in ((saves_on_host, True), (loads_on_host, False)):
            optimizer = optim.AdamW(parallel.parameters(), lr=0.1)
            optimizer = sw.on_host(optimizer) if on_host else optimizer
            if not is_first:
                sw.load(where, parallel, optimizer)
            for _ in range(2):
                optimizer.zero_grad()
                parallel.forward_backward(**BATCH)
                optimizer.step()
            if is_first:
                sw.save(where, parallel, optimizer, step=2)
        results.append([p.full_tensor() for p in parallel.parameters() if isinstance(p, DTensor)])
    for other in results[1:]:
        assert_same(results[0], other)


def test_checkpoints_go_between_host_and_device(tmp_path: Path) -> None:
    run_ranks(ranks_train, 2, 120, args=(str(tmp_path),))


def test_a_copy_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = weights()
    optimizer = sw.on_host(optim.AdamW(parameters), timeout_s=0.05)
    monkeypatch.setattr(ThreadLink, "bytes_per_s", 100.0)
    with pytest.raises(MachineError, match=r"longer than 0\.05 s"):
        take_steps(parameters, optimizer, 1)


class Own(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


REFUSED: dict[str, Callable[[Any], object]] = {
    "LBFGS may look at several": lambda p: sw.on_host(optim.LBFGS(p)),
    "Muon may look at several": lambda p: sw.on_host(optim.Muon(p[:2])),
    "Own may look at several": lambda p: sw.on_host(Own(p)),
    r"AdamW\(differentiable=True\) has a gradient": lambda p: sw.on_host(optim.AdamW(p, differentiable=True)),
    "are on the host already": lambda p: sw.on_host(sw.on_host(optim.SGD(p))),
    "expected an optimizer of torch": sw.on_host,
    r"on_host\(timeout_s": lambda p: sw.on_host(optim.SGD(p), timeout_s="soon"),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_does_not_take_is_refused(message: str) -> None:
    with pytest.raises(ShardwrightError, match=message):
        REFUSED[message](weights())
