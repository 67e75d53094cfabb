"""Python state that forward changes: carried as buffers, let be where it is a cache, else refused."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from tests.each import each

BATCH = {"x": torch.ones(2, 4)}


class Stateful(nn.Module):
    """Has state of every kind, and does with it what `change` does; what that returns scales the result."""

    calls = 0

    def __init__(self, change: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.inner, self.child, self.change = nn.Linear(4, 3), nn.Module(), change
        self.step, self.longest, self.ready, self.last = 0, 0, False, None
        vars(self.child)["step"], self.settings = 0, SimpleNamespace(step=0)
        self.start = torch.ones(())
        self.history, self.cache, self.seen = list[object](), dict[str, object](), set[int]()
        self.pair, self.queue = (torch.zeros(()), torch.zeros(())), deque([torch.zeros(3), torch.ones(3)], 2)
        self.tensors = {"b": [torch.ones(3), torch.full((3,), 5.0)]}
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        scale = self.change(self, y)
        return (y * (1.0 if scale is None else scale)).sum()


def counted(m: Any, y: Tensor) -> float:
    m.step += 1
    return float(m.step)


def counted_in_child(m: Any, y: Tensor) -> None:
    m.child.step += 1


def counted_in_class(m: Any, y: Tensor) -> None:
    type(m).calls += 1


def counted_in_object(m: Any, y: Tensor) -> None:
    m.settings.step += 1


def first_step(m: Any, y: Tensor) -> float:
    scale = 1.0 if m.ready else 2.0
    m.ready = True
    return scale


def read_later(m: Any, y: Tensor) -> Tensor:
    scale, m.last = m.start if m.last is None else m.last, y.detach().mean()
    return scale


def read_before(m: Any, y: Tensor) -> Tensor:
    scale, m.start = m.start, y.detach().mean()
    return scale


def turned(m: Any, y: Tensor) -> float:
    m.step += 1
    return 1.0 if m.step % 2 else 2.0


def made_of_the_batch(m: Any, y: Tensor) -> Tensor:
    if m.last is None:
        m.last = y.detach().mean()
    return m.last


def begun_otherwise(m: Any, y: Tensor) -> Tensor:
    scale = torch.zeros(()) if m.last is None else m.last + 1
    m.last = y.detach().mean()
    return scale


def grown(m: Any, y: Tensor) -> Tensor:
    m.last = torch.zeros(1, 1) if m.last is None else torch.cat([m.last, y.detach().mean().reshape(1, 1)])
    return m.last.sum()


@each(
    "change, said",
    [
        (counted, r"^model \(test_state\.py:\d+\): forward changes 'step'.*keep what steps change in a buffer"),
        (counted_in_class, "forward changes 'Stateful.calls'"),
        (turned, "forward changes 'step'"),
        (first_step, "forward changes 'ready', and capture keeps only what forward computes: every step would be the"),
        (lambda m, y: m.history.append(1), r"forward changes 'history\[1\]'"),
        (lambda m, y: m.seen.add(len(m.seen)), r"forward changes 'seen\[1\]'"),
        (lambda m, y: m.history.append(y), r"forward changes 'history\[1\]'"),
        (lambda m, y: (m.history.append(y), m.start)[1], r"forward changes 'history\[1\]'"),
        (made_of_the_batch, "forward changes 'last'"),
        (begun_otherwise, "forward changes 'last'"),
        (grown, r"'last' float32\[2, 1\] on cpu, expected float32\[1, 1\]"),
    ],
)
def test_state_that_steps_change_is_refused(change: Callable[[Any, Tensor], object], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Stateful(change), BATCH)


def made_once(m: Any, y: Tensor) -> Tensor:
    if "positions" not in m.cache:
        m.cache["positions"] = torch.arange(3.0) * 2
    return m.cache["positions"]


def memory(m: Any, y: Tensor) -> Tensor:
    memory = torch.full_like(y, 2) if m.last is None else m.last
    m.last = (memory * 0.5 + y).detach()
    return memory


def counted_and_read(m: Any, y: Tensor) -> float:
    m.step += 1
    return 1 - 0.9**m.step


def pair(m: Any, y: Tensor) -> Tensor:
    m.pair = (m.pair[0] * 0.9 + y.detach().sum(), m.pair[1] + 1)
    return m.pair[0] / m.pair[1]


def in_lists(m: Any, y: Tensor) -> Tensor:
    m.tensors["b"][0], m.tensors["b"][1] = m.tensors["b"][1], m.tensors["b"][0] + y.detach().mean(0)
    return m.tensors["b"][0]


def queue(m: Any, y: Tensor) -> Tensor:
    m.queue.append(y.detach().mean(0))
    return m.queue[0]


def beside_a_cache(m: Any, y: Tensor) -> Tensor:
    return made_once(m, y) + memory(m, y)


@each(
    "change, carried",
    [
        (counted_in_child, {"child.step": 0}),
        (counted_in_object, {"settings.step": 0}),
        (counted_and_read, {"step": 0}),
        (read_later, {"last": 1}),
        (read_before, {"start": 1}),
        (memory, {"last": 2}),
        (beside_a_cache, {"last": 2}),
        (pair, {"pair[0]": 0, "pair[1]": 0}),
        (in_lists, {"tensors['b'][0]": 1, "tensors['b'][1]": 5}),
        (queue, {"queue[1]": 1}),
        (lambda m, y: m.start.add_(y.mean().detach()), {"start": 1}),
        (lambda m, y: m.tensors["b"][1].copy_(y.mean(0).detach()), {"tensors['b'][1]": 5}),
    ],
)
def test_what_steps_change_is_carried(change: Callable[[Any, Tensor], object], carried: dict[str, float]) -> None:
    model = Stateful(change)
    found = capture(model, BATCH)
    assert dict(found.graph.outputs).keys() == {"loss", *carried}
    assert {path: found.constants[path].flatten()[0].item() for path in carried} == carried
    assert (model.last, model.step, model.settings.step, len(model.queue)) == (None, 0, 0, 2)


def test_the_line_is_that_of_the_assignment() -> None:
    line = counted.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"^model \(test_state\.py:{line}\): "):
        capture(Stateful(counted), BATCH)


def longest(m: Any, y: Tensor) -> float:
    m.longest = max(m.longest, y.shape[0])
    return float(m.longest)


def cached(m: Any, y: Tensor) -> object:
    return m.cache.setdefault("scale", 3.0)


def averaged(m: Any, y: Tensor) -> None:
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)


def passed_on(m: Any, y: Tensor) -> Tensor:
    m.last = y.detach().sum()
    scale, m.last = m.last, None
    return scale


def kept(m: Any, y: Tensor) -> None:
    m.last, m.history = y, [y]
    m.cache["last"] = y


@each(
    "change", [longest, cached, averaged, passed_on, kept, made_once, lambda m, y: m.settings.__dict__.update(step=0)]
)
def test_caches_and_buffers_are_captured_and_the_model_stays_as_it_was(change: Callable[[Any, Tensor], object]) -> None:
    model = Stateful(change)
    assert capture(model, BATCH).graph.outputs
    assert (model.longest, model.cache, model.last, model.history) == (0, {}, None, [])


def test_recurrent_layers_and_pruned_weights_are_no_state() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(4, 3), prune.l1_unstructured(nn.Linear(3, 2), "weight", amount=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0]).sum()

    assert capture(Recurrent(), {"x": torch.ones(2, 5, 4)}).graph.outputs


total, LOG = 0, {"steps": [0]}


def counted_in_a_global(m: Any, y: Tensor) -> None:
    global total  # noqa: PLW0603
    total += 1


def logged(m: Any, y: Tensor) -> None:
    LOG["steps"].append(1)


def by_a_helper(m: Any, y: Tensor) -> None:
    logged(m, y)


def counted_in_a_default(m: Any, y: Tensor, counts: list[int] = [0]) -> None:  # noqa: B006
    counts[0] += 1


def counter() -> Callable[[Any, Tensor], object]:
    calls = 0

    def counted(m: Any, y: Tensor) -> None:
        nonlocal calls
        calls += 1

    return counted


@each(
    "change, said",
    [
        (counted_in_a_global, r"forward changes 'tests\.pcg\.capture\.test_state\.total'"),
        (logged, r"forward changes \"tests\.pcg\.capture\.test_state\.LOG\['steps'\]\[2\]\""),
        (by_a_helper, r"forward changes \"tests\.pcg\.capture\.test_state\.LOG\['steps'\]\[2\]\""),
        (counted_in_a_default, r"forward changes 'counted_in_a_default\.0\[0\]'"),
        (counter(), r"forward changes 'counter\.<locals>\.counted\.calls'"),
    ],
)
def test_what_lies_outside_of_the_model_is_refused_and_put_back(
    change: Callable[[Any, Tensor], object], said: str
) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Stateful(change), BATCH)
    assert (total, LOG) == (0, {"steps": [0]})


SCALES = dict[int, Tensor]()


def with_caches(m: Any, y: Tensor) -> Tensor:
    logging.getLogger("model").debug("a forward")
    if 3 not in SCALES:
        SCALES[3] = torch.arange(3.0)
    return SCALES[3]


def test_caches_outside_of_the_model_are_let_be() -> None:
    assert capture(Stateful(with_caches), BATCH).graph.outputs
    assert not SCALES


# ---- what functions and libraries keep for a model ----


TABLES: dict[int, Tensor] = {}


def in_globals(size: int) -> Tensor:
    if size not in TABLES:
        TABLES[size] = torch.arange(float(size)).cos()
    return TABLES[size]


@cache
def remembered(size: int) -> Tensor:
    return torch.arange(float(size)).cos()


class Keeping:
    @cached_property
    def table(self) -> Tensor:
        return torch.arange(4.0).cos()

    @lru_cache(2)  # noqa: B019
    def of(self, size: int) -> Tensor:
        return torch.arange(float(size)).cos()


KEEPING = Keeping()
KEPT: dict[str, Callable[[], Tensor]] = {
    "a dictionary": lambda: in_globals(4),
    "a function": lambda: remembered(4),
    "a property": lambda: KEEPING.table,
    "a method": lambda: KEEPING.of(4),
}


class Layer(nn.Module):
    def __init__(self, kept: Callable[[], Tensor]) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(4, 4), kept

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.kept()


class Layered(nn.Module):
    def __init__(self, layers: int, kept: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kept) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@each("kept", KEPT)
@each("layers", [1, 8])
def test_what_is_kept_outside_of_the_model_is_never_without_data(kept: str, layers: int) -> None:
    """A table that the first forward makes: it is part of the program, and later forwards have a real one."""
    model, constants = Layered(layers, KEPT[kept]), list[int]()
    for _ in range(2):
        captured = capture(model, BATCH)
        constants.append(len(captured.constants))
        assert sum(node.op == "cos" for node in captured.graph.nodes) == 1 - len(captured.constants)
        assert type(model(**BATCH)) is Tensor
    assert constants[-1] == 1
